"""`surrogap find-rho`: suggest a range of radii rho, for a recipe or a run.

surrogap find-rho runs/a
surrogap find-rho --recipe cifar10-resnet18-gsam --rho 0.2
surrogap find-rho --recipe cifar10-resnet18-sam --perturb norms
surrogap find-rho runs/a --objective momentum-sam
surrogap find-rho --data data/images.npz --model vit_s32 --batch-size 64
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from surrogap.checks import integer, number
from surrogap.cli.defaults import base_config, given_fields, run_argument
from surrogap.cli.options import ConfigOptions, OptionalRunFolder, RecipeName, options
from surrogap.cli.terminal import print_cost, progress_bar
from surrogap.errors import InvalidValueError
from surrogap.experiments.result_files import ResultFiles
from surrogap.training.config import Config

if TYPE_CHECKING:
    from surrogap.training.components import Components

_FIGURE = "find-rho.png"
# Fields of a run that other values would contradict.
_FIXED_BY_RUN = ("model", "image_size", "weights", "data", "optimizer")


@dataclass(frozen=True)
class FindRho:
    """Suggest a range of radii rho, for a recipe, a configuration or a run.

    Measures the objective's ascent step at each radius on a few training batches, and suggests the
    radii that raise the loss by 0.05 to 0.5. For a run, it measures the newest checkpoint, and says
    whether the current radius, or --rho, is within the range. Without a run, it first trains the
    model with the plain gradient, since good radii differ at the start of training. Writes the
    numbers to find-rho.json, and the curves to find-rho.png.
    """

    run: OptionalRunFolder = None
    """The folder of the run, before all options. Without a run, a recipe or a configuration is
    measured."""

    recipe: RecipeName = None
    """The recipe that sets the defaults of all settings below; surrogap recipes lists the
    recipes."""

    rhos: Annotated[tuple[float, ...], arg(help_behavior_hint="")] = ()
    """The radii to measure. By default from 0.001 to 10, three per factor of ten."""

    batches: int = 4
    """The number of batches to measure on. --batch-size must be the number of images that share a
    perturbation: with eight processes and --scope replica, an eighth of the batch."""

    unit: float = 1.0
    """The unit of the gap: the suggested radii raise the loss by 0.05 to 0.5 times this. 1 suits
    cross-entropy with about ten classes. Otherwise pass about half the loss of an untrained
    model."""

    train_steps: int = 200
    """Without a run: number of training steps before the measurement."""

    config: ConfigOptions = field(default_factory=Config)


def main(arguments: Sequence[str]) -> int:
    """Sweep radii, and return the exit status.

    Raises:
        RunFailedError: The loss is not finite.
        ValueError: The run or the recipe does not exist, or the arguments are not valid.
    """
    base = base_config(arguments, run_argument(arguments))
    chosen = options(FindRho, "find-rho", arguments, default=FindRho(config=base))
    _check(chosen, base, arguments)
    from surrogap.analysis.figures import sweep_curves
    from surrogap.experiments import radii

    config, num_batches = chosen.config, chosen.batches
    components = radii.components_for_sweep(config, chosen.run, chosen.train_steps)
    files = ResultFiles(_folder(chosen, arguments), "find-rho", "find-rho", [_FIGURE])
    train_steps = chosen.train_steps if chosen.run is None else None
    cost = radii.sweep_cost(config, chosen.rhos, num_batches) + (train_steps or 0)
    trained = f", {train_steps:,} of them for training" if train_steps else ""
    print_cost(cost, f"of {components.images.order.batch_size:,} images each{trained}")
    with progress_bar("find-rho") as progress:
        if chosen.run is None:
            radii.train_with_plain_gradient(components, progress)
        sweep = radii.sweep_radii(
            config, components, chosen.rhos, num_batches, progress, unit=chosen.unit
        )
    rho = _judged_radius(chosen, components, arguments)
    words = sweep.explain(rho)
    largest: float | None = getattr(config.objective, "rho", None)
    if rho is not None and rho != largest:
        words += f" It is the radius at this checkpoint; the schedule's largest is {largest:g}."
    radii.sweep_table(sweep).print()
    print(words)
    subject = chosen.run or chosen.recipe or config.model.name
    values = {
        "subject": subject,
        "words": words,
        **radii.sweep_values(sweep),
        "train_steps": train_steps,
        "configuration": config.to_dict(),
    }
    curves = sweep_curves(sweep, rho=rho, title=str(subject))
    files.write(values, {_FIGURE: curves.savefig})
    print(files.summary)
    return 0


def _check(chosen: FindRho, base: Config, arguments: Sequence[str]) -> None:
    integer("batches", chosen.batches, at_least=1, remedy="Pass a number such as 4.")
    integer("train_steps", chosen.train_steps, at_least=1, remedy="Pass a number such as 200.")
    number("unit", chosen.unit, above=0.0, remedy="Leave it out for cross-entropy.")
    for rho in chosen.rhos:
        number("rhos", rho, above=0.0, remedy="Pass positive radii, such as 0.05 0.1.")
    if chosen.run is None:
        return
    if run_argument(arguments) is None:
        raise InvalidValueError(
            f"run must come before all options, got {chosen.run} after an option. "
            f"Pass surrogap find-rho {chosen.run}, and then the options."
        )
    if chosen.recipe is not None:
        raise InvalidValueError(
            f"recipe must be left out with a run, got {chosen.recipe}. "
            "The run has its own configuration."
        )
    was, now = base.flat(), chosen.config.flat()
    for name in _FIXED_BY_RUN:
        if was[name] != now[name]:
            raise InvalidValueError(
                f"{name} must be left out with a run, got {now[name]}. The run has {was[name]}."
            )


def _judged_radius(
    chosen: FindRho, components: "Components", arguments: Sequence[str]
) -> float | None:
    """Return the radius that was asked about, or else that of the run at its checkpoint."""
    if chosen.run is None or {"rho", "objective"} & {*given_fields(arguments)}:
        rho: float | None = getattr(chosen.config.objective, "rho", None)
        return rho
    from surrogap.experiments.radii import radius_in_use

    return radius_in_use(chosen.config, components, chosen.run)


def _folder(chosen: FindRho, arguments: Sequence[str]) -> Path:
    out = chosen.config.output.out
    if out is not None and "out" in given_fields(arguments):  # a recipe's is for its training
        return Path(out).expanduser()
    if chosen.run is not None:
        return chosen.run
    return Path("runs") / f"find-rho-{chosen.recipe or chosen.config.model.name}"
