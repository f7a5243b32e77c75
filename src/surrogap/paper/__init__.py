"""The paper's tables, figures and theory, for `surrogap reproduce`.

Without training: `toys` (fig-gap, fig-trajectory) and `theory`. With small models of its own:
`rho_alpha`. `reproductions` lists these by name. All other tables and figures come from one study:

* `study` and `methods` declare its set-ups, methods and runs; `tuning` chooses the settings of
  methods; `plan` orders the runs that a ledger lacks.
* `running` trains and scores one run; `measuring` times single steps and suggests radii; `workers`
  calls both, with several runs at once.
* `ledger` keeps the finished runs; `intervals` and `summaries` average and compare them.
* `artifacts` lists the tables and figures; `drawings`, `cost_figure` and `labels` draw them;
  `study_page`, `method_sections` and `tuning_sections` write the documentation page.
* `imagenet_runs` has the paper's own runs.
"""
