"""`surrogap find-rho`: suggest a range for rho, for a recipe or a run.

surrogap find-rho runs/a
surrogap find-rho --recipe cifar10-resnet18-gsam --rho 0.2
surrogap find-rho --recipe cifar10-resnet18-sam --perturb norms
surrogap find-rho runs/a --objective momentum-sam
surrogap find-rho --data data/images.npz --model vit_s32 --batch-size 64
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surrogap.checks import integer, number
from surrogap.cli.configured import base_config, given_fields
from surrogap.cli.options import options
from surrogap.cli.results import Results, bar, tell_cost
from surrogap.cli.subject import RunArgument
from surrogap.errors import InvalidValueError
from surrogap.experiments.tables import Table
from surrogap.training.config import Config
from surrogap.training.flags import OptionalStr

if TYPE_CHECKING:
    from surrogap.analysis import Sweep
    from surrogap.training.components import Components

FIGURE = "find-rho.png"
# What a run was trained with: another value would measure something else under its name.
_OF_THE_RUN = ("model", "image_size", "weights", "data", "optimizer")


@dataclass(frozen=True)
class FindRho:
    """Suggest a range for rho, for a recipe, a configuration or a run.

    On a few training batches it measures a step at each radius, along the objective's own ascent
    step: the perturbed loss, and how far its gradient has turned. Of a run, the newest checkpoint
    is measured, and the radius in use there is judged unless --rho is given. Without a run, the
    network is first trained for some steps with the plain gradient, since radii at the start of
    training are different. The numbers go to find-rho.json, and the curves to find-rho.png.
    """

    run: RunArgument = None
    """The run's folder, before all options. By default a recipe or a configuration is measured."""

    recipe: OptionalStr = None
    """The recipe that gives the defaults of all that follows; surrogap recipes lists them."""

    rhos: tuple[float, ...] = ()
    """The radii to measure. By default from 0.001 to 10, three in each factor of ten."""

    batches: int = 4
    """The number of batches to measure on. Pass as --batch-size the number of images that share a
    perturbation: with eight processes that climb on their own, an eighth of the batch."""

    train_steps: int = 200
    """Without a run: the number of steps to train for before."""

    config: Config = field(default_factory=Config)


def main(arguments: Sequence[str]) -> int:
    """Sweeps radii, and returns the exit status.

    Raises:
        ValueError: There is no such run or recipe, or the arguments do not fit.
        RunFailedError: The loss is not finite.
    """
    has_run = bool(arguments) and not arguments[0].startswith("-")
    base = base_config(arguments, Path(arguments[0]) if has_run else None)
    chosen = options(FindRho, "find-rho", arguments, default=FindRho(config=base))
    _check(chosen, base, arguments)
    from surrogap.experiments.radii import num_gradients, plain_parts, swept, train_plainly

    config, num_batches = chosen.config, chosen.batches
    parts = plain_parts(config, chosen.run, chosen.train_steps)
    results = Results(_folder(chosen, base), "find-rho", "find-rho", [FIGURE])
    before = 0 if chosen.run is not None else chosen.train_steps
    what = f"of {parts.images.order.batch_size:,} images each"
    cost = num_gradients(config, chosen.rhos, num_batches)
    tell_cost(cost + before, what + (f", {before:,} of them to train" if before else ""))
    with bar("find-rho") as tell:
        if chosen.run is None:
            train_plainly(parts, tell)
        sweep = swept(config, parts, chosen.rhos, num_batches, tell)
    rho = _judged_radius(chosen, parts, arguments)
    words = sweep.explain(rho)
    peak: float | None = getattr(config.objective, "rho", None)
    if rho is not None and rho != peak:
        words += f" It is the radius at this checkpoint; the schedule's largest is {peak:g}."
    table(sweep).print()
    print(words)
    from surrogap.analysis.figures import sweep_curves

    curves = sweep_curves(sweep, rho=rho, title=chosen.config.model.name)
    results.write(_numbers(chosen, sweep, words), {FIGURE: curves.savefig})
    print(results.told)
    return 0


def _check(chosen: FindRho, base: Config, arguments: Sequence[str]) -> None:
    integer("batches", chosen.batches, at_least=1, remedy="Pass a number such as 4.")
    integer("train_steps", chosen.train_steps, at_least=1, remedy="Pass a number such as 200.")
    for rho in chosen.rhos:
        number("rhos", rho, above=0.0, remedy="Pass positive radii, such as 0.05 0.1.")
    if chosen.run is None:
        return
    if arguments[0].startswith("-"):
        raise InvalidValueError(
            f"run must come before all options, got {chosen.run} after some. "
            f"Pass surrogap find-rho {chosen.run} and the options."
        )
    if chosen.recipe is not None:
        raise InvalidValueError(
            f"recipe must be left out where a run is measured, got {chosen.recipe}. "
            "The run has its own configuration."
        )
    was, now = base.flat(), chosen.config.flat()
    for name in _OF_THE_RUN:
        if was[name] != now[name]:
            raise InvalidValueError(
                f"{name} must be left out where a run is measured, got {now[name]}. "
                f"The run has {was[name]}."
            )


def _judged_radius(chosen: FindRho, parts: "Components", arguments: Sequence[str]) -> float | None:
    """Return the radius that was asked about, or the one that the run used at its checkpoint."""
    if chosen.run is None or {"rho", "objective"} & {*given_fields(arguments)}:
        rho: float | None = getattr(chosen.config.objective, "rho", None)
        return rho
    from surrogap.experiments.radii import radius_in_use

    return radius_in_use(chosen.config, parts, chosen.run)


def _folder(chosen: FindRho, base: Config) -> Path:
    out = chosen.config.output.out
    if out is not None and (chosen.run is None or out != base.output.out):
        return Path(out).expanduser()
    if chosen.run is not None:
        return chosen.run
    return Path("runs") / f"find-rho-{chosen.recipe or chosen.config.model.name}"


def table(sweep: "Sweep") -> Table:
    """What was seen at each radius."""
    rows = [
        (f"{r.rho:g}", f"{r.gap:.4g}", f"{r.perturbed_loss:.4g}", f"{r.cosine:.4f}")
        for r in sweep.radii
    ]
    return Table(("rho", "h", "f_p", "cosine of g and g_p"), rows)


def _numbers(chosen: FindRho, sweep: "Sweep", words: str) -> dict[str, Any]:
    return {
        "subject": chosen.run or chosen.recipe or chosen.config.model.name,
        "words": words,
        "low": sweep.low,
        "high": sweep.high,
        "center": sweep.center,
        "num_batches": sweep.num_batches,
        "train_steps": None if chosen.run is not None else chosen.train_steps,
        "radii": [asdict(radius) | {"gap": radius.gap} for radius in sweep.radii],
        "configuration": chosen.config.to_dict(),
    }
