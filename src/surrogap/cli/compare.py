"""`surrogap compare`: train several objectives with the same budget, and compare them.

surrogap compare
surrogap compare --recipe cifar10-resnet18-gsam --objectives vanilla sam gsam asam --seeds 5
surrogap compare --recipe cifar10-resnet18-gsam --objectives sam sam@every=5 sam-norms@rho=0.5
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Suppress, arg

from surrogap.checks import integer, number
from surrogap.cli.defaults import given_fields, recipe_config
from surrogap.cli.options import ConfigOptions, options
from surrogap.cli.terminal import print_stopped
from surrogap.errors import InvalidValueError
from surrogap.experiments.columns import column_runs
from surrogap.experiments.planned import PlannedRun
from surrogap.experiments.result_files import ResultFiles
from surrogap.training.config import Config
from surrogap.training.flags import OptionalFloat
from surrogap.training.objective_configs import (
    ASAMConfig,
    EntropySGDConfig,
    GapPenaltyConfig,
    GSAMConfig,
    MomentumSAMConfig,
)

DEFAULT_RECIPE = "fashion-mnist-gsam"
_FIGURE = "comparison.png"


@dataclass(frozen=True, kw_only=True)
class _Objectives(GSAMConfig, ASAMConfig, GapPenaltyConfig, MomentumSAMConfig, EntropySGDConfig):
    """Settings of the objectives. At least one column must use each setting that is given."""

    name: Annotated[Suppress[str], arg(name="objective")] = ""

    def _check(self) -> None:
        """Leave the checks to the columns, since the settings belong to different objectives."""


@dataclass(frozen=True)
class Compare:
    """Train several objectives with the same budget, and compare them.

    All runs start from a recipe. Each setting below applies to all columns that use it. Finished
    runs are not trained again, and interrupted runs continue. For entropy-sgd with the sgd
    optimizer, --lr is divided by gamma.
    """

    recipe: Annotated[str, arg(metavar="NAME")] = DEFAULT_RECIPE
    """The recipe that sets the defaults of all settings below. If the recipe also exists for
    a column's objective, such as cifar10-resnet18-sam for cifar10-resnet18-gsam, the column uses
    the radius of that recipe; otherwise it uses the objective's default radius."""

    objectives: tuple[str, ...] = ("vanilla", "vanilla-2x", "sam", "gsam")
    """The columns of the comparison. A column is an objective, with the suffix -2x for twice the
    epochs, -norms for perturb=norms, and its own settings as in sam@every=5,rho=0.1. Differences
    are relative to the first column."""

    seeds: int = 3
    """The number of runs per column. The first has the seed --seed, the next --seed + 1, and so
    on."""

    gap_rho: OptionalFloat = None
    """The radius at which the gap is measured after training, for all columns. By default the
    radius of the recipe."""

    config: ConfigOptions = field(default_factory=Config)


def main(arguments: Sequence[str]) -> int:
    """Compare objectives, and return the exit status.

    Raises:
        ValueError: The arguments are not valid, or the folder holds other runs.
    """
    base = recipe_config(arguments, DEFAULT_RECIPE)
    # Columns check their settings themselves.
    settings = vars(base.objective) | {"name": "", "rho_min": None}
    config = dataclasses.replace(base, objective=_Objectives(**settings))
    chosen = options(Compare, "compare", arguments, default=Compare(config=config))
    integer("seeds", chosen.seeds, at_least=1, remedy="Pass a number of runs, such as 3.")
    given = given_fields(arguments)
    out = chosen.config.output.out if "out" in given else None  # a recipe's is for its training
    folder = Path(out or f"runs/compare-{chosen.recipe}").expanduser()
    runs = _runs(chosen, given, folder)
    rho = base.objective.gap_rho if chosen.gap_rho is None else chosen.gap_rho
    number("gap_rho", rho, above=0.0, remedy="Pass a radius such as 0.1.")
    files = ResultFiles(folder, "compare", "comparison", [_FIGURE], make_folder=False)
    from surrogap.experiments import comparison, run_queue
    from surrogap.experiments.measurements import measure_gap

    stopped_by = run_queue.train_missing(runs, folder, radius=lambda _: rho, measure=measure_gap)
    if stopped_by is not None:
        return print_stopped("compare", stopped_by)
    compared = [comparison.read_compared_run(run) for run in runs]
    title = runs[0].subject
    comparison.print_comparison(compared, rho, title=title)
    configs = {run.method: run.config.to_dict() for run in runs}
    values = comparison.numbers(compared, rho) | {"configurations": configs}
    files.write(values, {_FIGURE: lambda path: comparison.draw(compared, path, title)})
    print(files.summary, flush=True)
    return 0


def _runs(chosen: Compare, given: Sequence[str], folder: Path) -> list[PlannedRun]:
    settings, first = chosen.config.flat(), chosen.config.execution.seed
    changes = {name: settings[name] for name in given if name not in ("seed", "out")}
    if len(set(chosen.objectives)) < max(len(chosen.objectives), 1):
        raise InvalidValueError(
            "objectives must be one or more different columns, got "
            f"{' '.join(chosen.objectives) or 'none'}. Pass each column once."
        )
    seeds = range(first, first + chosen.seeds)
    return list(column_runs(chosen.recipe, changes, chosen.objectives, seeds, folder))
