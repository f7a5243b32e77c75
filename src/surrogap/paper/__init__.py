"""The paper's tables, figures and theory, for `surrogap reproduce`.

Without training: `toys` (fig-gap, fig-trajectory) and `theory`. With small models of its own:
`rho_alpha`. `reproductions` lists these by name. All other tables and figures come from one study:

* `study` declares its set-ups, methods and runs; `plan` orders the runs that a ledger lacks.
* `running` trains and scores one run, `workers` several at once, `timing` times single steps.
* `ledger` keeps the finished runs; `intervals` and `summaries` average and compare them.
* `artifacts` lists the tables and figures, `drawings` and `labels` draw them, `page` writes the
  documentation page.
* `imagenet` has the paper's own runs.
"""
