"""`surrogap compare`: train several objectives with one budget, and show them side by side.

surrogap compare
surrogap compare --recipe cifar10-resnet18-gsam --objectives vanilla sam gsam asam --seeds 5
surrogap compare --objectives vanilla momentum-sam sam sam@every=5 sam-norms gsam-norms@rho=0.5
"""

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Suppress, arg

from surrogap.checks import integer, number
from surrogap.cli.configured import given_fields, recipe
from surrogap.cli.options import options, peek
from surrogap.cli.results import Results
from surrogap.errors import InvalidValueError
from surrogap.experiments.methods import Planned, planned
from surrogap.training.config import Config
from surrogap.training.flags import OptionalFloat
from surrogap.training.objective_configs import (
    ASAMConfig,
    EntropySGDConfig,
    GapPenaltyConfig,
    GSAMConfig,
    MomentumSAMConfig,
)

if TYPE_CHECKING:
    from surrogap.experiments.comparison import Result

DEFAULT_RECIPE = "fashion-mnist-gsam"
FIGURE = "comparison.png"


@dataclass(frozen=True, kw_only=True)
class _Objectives(GSAMConfig, ASAMConfig, GapPenaltyConfig, MomentumSAMConfig, EntropySGDConfig):
    """Settings of the objectives. At least one column must use each that is given."""

    name: Annotated[Suppress[str], arg(name="objective")] = ""

    def _check(self) -> None:
        """Leave the checks to the columns, where each objective has its own settings."""


@dataclass(frozen=True)
class Compare:
    """Train several objectives with one budget, and show them side by side.

    All runs start from a recipe. What is set below holds for all columns that use it. Runs that are
    finished are not trained again, and one that was interrupted continues. The learning rate is the
    one for a gradient: with sgd, entropy-sgd's is divided by gamma.
    """

    recipe: str = DEFAULT_RECIPE
    """The recipe that gives the defaults of all that follows. If there is a recipe of the same name
    for another objective, that objective has its radius; others have their default radius."""

    objectives: tuple[str, ...] = ("vanilla", "vanilla-2x", "sam", "gsam")
    """The columns: an objective, with -2x behind it for twice the epochs, with -norms for
    perturb=norms, and with settings of its own as in sam@every=5,rho=0.1. Differences are against
    the first column."""

    seeds: int = 3
    """The number of runs of each, with seeds that count from --seed."""

    gap_rho: OptionalFloat = None
    """The radius at which the gap is measured at the end, for all columns. By default the recipe's
    own."""

    config: Config = field(default_factory=Config)


def main(arguments: Sequence[str]) -> int:
    """Compares as the arguments say, and returns the exit status.

    Raises:
        ValueError: The arguments do not fit, or the folder holds other runs.
    """
    base = recipe(peek(arguments, "recipe")[0] or DEFAULT_RECIPE)
    own = {name: value for name, value in vars(base.objective).items() if name != "name"}
    config = dataclasses.replace(base, objective=_Objectives(**own))
    chosen = options(Compare, "compare", arguments, default=Compare(config=config))
    integer("seeds", chosen.seeds, at_least=1, remedy="Pass the number of runs of each, as 3.")
    folder, runs = _folder(chosen), _runs(chosen, given_fields(arguments))
    rho = _gap_rho(chosen, base)
    written = Results(folder, "compare", "comparison", [FIGURE], make_folder=False)
    from surrogap.cli.runs import train_all
    from surrogap.experiments.measured import gap_of

    status = train_all(runs, folder, "compare", radius=lambda _: rho, measured=gap_of)
    if status:
        return status
    from surrogap.experiments.comparison import read_result

    _show([read_result(run) for run in runs], runs, written, rho)
    return 0


def _folder(chosen: Compare) -> Path:
    if chosen.config.output.out is not None:
        return Path(chosen.config.output.out).expanduser()
    return Path("runs") / f"compare-{chosen.recipe}"


def _runs(chosen: Compare, given: Sequence[str]) -> "list[Planned]":
    settings, first = chosen.config.flat(), chosen.config.execution.seed
    changes = {name: settings[name] for name in given if name not in ("seed", "out")}
    seeds = range(first, first + chosen.seeds)
    if len(set(chosen.objectives)) < max(len(chosen.objectives), 1):
        raise InvalidValueError(
            f"objectives must be different ones, at least one, got {' '.join(chosen.objectives)}. "
            "Pass each once."
        )
    return list(planned(chosen.recipe, changes, chosen.objectives, seeds, _folder(chosen)))


def _gap_rho(chosen: Compare, base: Config) -> float:
    rho = base.objective.gap_rho if chosen.gap_rho is None else chosen.gap_rho
    return number("gap_rho", rho, above=0.0, remedy="Pass one, such as 0.05.")


def _show(results: "list[Result]", runs: Sequence[Planned], written: Results, rho: float) -> None:
    from surrogap.experiments.comparison import differences, draw, legend, numbers, table

    config = runs[0].config
    data = "Fashion-MNIST" if config.data.name == "embedded" else Path(config.data.name).stem
    title = f"{config.model.name} on {data}"
    table(results, title).print()
    print(textwrap.fill(legend(results, rho), width=100))
    print(*differences(results), sep="\n")
    found: dict[str, Any] = numbers(results, rho)
    found["configurations"] = {run.method: run.config.to_dict() for run in runs}
    written.write(found, {FIGURE: lambda path: draw(results, path, title)})
    print(written.told, flush=True)
