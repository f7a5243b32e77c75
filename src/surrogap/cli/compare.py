"""`surrogap compare`: train several objectives alike, and show them side by side.

surrogap compare
surrogap compare --recipe cifar10-resnet18-gsam --objectives vanilla sam gsam asam --seeds 5
"""

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surrogap.cli.options import options
from surrogap.cli.results import Results
from surrogap.experiments.methods import Planned, planned
from surrogap.experiments.recipes import RECIPES
from surrogap.training.arguments import at_least, one_of
from surrogap.training.config import FIELDS, Config

if TYPE_CHECKING:
    from surrogap.experiments.comparison import Result

DEFAULT_RECIPE = "fashion-mnist-gsam"
FIGURE = "comparison.png"


@dataclass(frozen=True)
class Compare:
    """Train several objectives alike, and show them side by side.

    All runs start from a recipe. What is set below holds for all of them. Runs that are finished
    are not trained again, and one that was interrupted goes on where it was.
    """

    recipe: str = DEFAULT_RECIPE
    """The recipe that gives the defaults of all that follows. Where there is a recipe of the same
    name for another objective, that objective has its radius; others have their default radius."""

    objectives: tuple[str, ...] = ("vanilla", "vanilla-2x", "sam", "gsam")
    """What to compare: vanilla, sam, gsam, asam, gap-penalty or entropy-sgd; with -2x behind it,
    for twice the epochs. Differences are told against the first."""

    seeds: int = 3
    """How many runs of each, with seeds that count from --seed."""

    gap_rho: float | None = None
    """The radius at which the gap is measured at the end, for all alike. By default the recipe's
    own."""

    config: Config = field(default_factory=Config)


def main(arguments: Sequence[str]) -> int:
    """Compares as the arguments say, and returns the exit status.

    Raises:
        ValueError: The arguments do not fit, or the folder holds other runs.
    """
    base = _recipe(arguments)
    chosen = options(Compare, "compare", arguments, default=Compare(config=base))
    at_least("seeds", chosen.seeds, 1, remedy="Pass how many runs of each, as 3.")
    folder, runs = _folder(chosen), _runs(chosen, _given(arguments))
    rho = _gap_rho(chosen)
    written = Results(folder, "compare", "comparison", [FIGURE], make_folder=False)
    from surrogap.cli.runs import train_all
    from surrogap.experiments.measured import gap_of

    status = train_all(runs, folder, "compare", radius=lambda _: rho, measured=gap_of)
    if status:
        return status
    from surrogap.experiments.comparison import read_result

    _show([read_result(run) for run in runs], runs, written, rho)
    return 0


def _recipe(arguments: Sequence[str]) -> Config:
    """The configuration of the recipe that the arguments name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--recipe", default=DEFAULT_RECIPE)
    try:
        name = parser.parse_known_args(arguments)[0].recipe
    except argparse.ArgumentError:  # tyro will tell
        name = DEFAULT_RECIPE
    return RECIPES[one_of("recipe", name, RECIPES, remedy="surrogap recipes lists them.")]()


def _folder(chosen: Compare) -> Path:
    if chosen.config.output.out is not None:
        return Path(chosen.config.output.out).expanduser()
    return Path("runs") / f"compare-{chosen.recipe}"


def _given(arguments: Sequence[str]) -> set[str]:
    """The fields of a configuration that the arguments name.

    A value tells nothing: one that is the recipe's own need not be its siblings'.

    >>> sorted(_given(["--rho=0.3", "--batch-size", "8", "--no-tensorboard", "--seeds", "2"]))
    ['batch_size', 'rho', 'tensorboard']
    """
    words = (word[2:].partition("=")[0] for word in arguments if word.startswith("--"))
    names = {word.replace("-", "_") for word in words}
    return {field for field in FIELDS if names & {field, f"no_{field}"}}


def _runs(chosen: Compare, given: set[str]) -> "list[Planned]":
    changes = {name: value for name, value in chosen.config.flat().items() if name in given}
    if "objective" in changes:
        raise ValueError(
            f"objective must be left to --objectives, got {changes['objective']!r}. "
            f"Pass --objectives {changes['objective']}."
        )
    first = chosen.config.execution.seed
    changes = {name: value for name, value in changes.items() if name not in ("seed", "out")}
    seeds = range(first, first + chosen.seeds)
    if len(set(chosen.objectives)) < max(len(chosen.objectives), 1):
        raise ValueError(
            f"objectives must be different ones, at least one, got {' '.join(chosen.objectives)}. "
            "Pass each once."
        )
    return list(planned(chosen.recipe, changes, chosen.objectives, seeds, _folder(chosen)))


def _gap_rho(chosen: Compare) -> float:
    rho = chosen.gap_rho if chosen.gap_rho is not None else chosen.config.objective.rho
    rho = 0.05 if rho is None else rho
    if not 0 < rho < float("inf"):
        raise ValueError(f"gap_rho must be above 0 and finite, got {rho}. Pass one, as 0.05.")
    return rho


def _show(results: "list[Result]", runs: Sequence[Planned], written: Results, rho: float) -> None:
    from surrogap.experiments.comparison import differences, draw, legend, numbers, table

    config = runs[0].config
    title = f"{config.model.name} on {config.data.name}"
    table(results, title).print()
    print(textwrap.fill(legend(results, rho), width=100))
    print(*differences(results), sep="\n")
    found: dict[str, Any] = numbers(results, rho)
    found["configurations"] = {run.method: run.config.to_dict() for run in runs}
    written.write(found, {FIGURE: lambda path: draw(results, path, title)})
    print(written.told, flush=True)
