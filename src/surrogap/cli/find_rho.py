"""`surrogap find-rho`: tell which radii make sense, for a recipe or a run.

surrogap find-rho runs/a
surrogap find-rho --recipe cifar10-resnet18-gsam --rho 0.2
surrogap find-rho --data data/images.npz --model vit_s32 --batch-size 64
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surrogap.cli.options import options
from surrogap.cli.results import Results, Tell, bar, tell_cost
from surrogap.cli.subject import RunArgument
from surrogap.cli.train import recipe
from surrogap.core.arguments import number
from surrogap.experiments.tables import Table
from surrogap.training.arguments import at_least
from surrogap.training.config import Config

if TYPE_CHECKING:
    from surrogap.analysis import Sweep
    from surrogap.training.parts import Parts

FIGURE = "find-rho.png"
# What a run was trained with: another value would measure something else under its name.
_OF_THE_RUN = ("model", "image_size", "weights", "data")


@dataclass(frozen=True)
class FindRho:
    """Tell which radii make sense for a recipe, a configuration or a run.

    On a few training batches it looks at what a second pass would see at each radius: the perturbed
    loss, and how far its gradient has turned. Of a run, the newest checkpoint is measured; without
    one, the network is trained for some steps before, plainly, for at the start the surface is
    another one. The numbers go to find-rho.json, and the curves to find-rho.png.
    """

    run: RunArgument = None
    """The run's folder, before all options. By default a recipe or a configuration is looked at."""

    recipe: str | None = None
    """The recipe that gives the defaults of all that follows; surrogap recipes lists them."""

    rhos: tuple[float, ...] = ()
    """The radii to look at. By default from 0.001 to 10, three in each factor of ten."""

    batches: int = 4
    """How many batches to look at. Pass as --batch-size how many images share a perturbation: with
    eight processes that climb on their own, an eighth of the batch."""

    train_steps: int = 200
    """Without a run: for how many steps to train before."""

    config: Config = field(default_factory=Config)


def main(arguments: Sequence[str]) -> int:
    """Sweeps radii, and returns the exit status.

    Raises:
        ValueError: There is no such run or recipe, or the arguments do not fit.
        RunFailedError: The loss is not finite.
    """
    base = _base(arguments)
    chosen = options(FindRho, "find-rho", arguments, default=FindRho(config=base))
    _check(chosen, base, arguments)
    parts = _parts(chosen)
    results = Results(_folder(chosen, base), "find-rho", "find-rho", [FIGURE])
    _tell_cost(chosen, parts)
    with bar("find-rho") as tell:
        if chosen.run is None:
            _train(parts, tell)
        sweep = _sweep(chosen, parts, tell)
    rho = judged(chosen.config)
    words = sweep.explain(rho)
    table(sweep).print()
    print(words)
    from surrogap.analysis.figures import sweep_curves

    curves = sweep_curves(sweep, rho=rho, title=chosen.config.model.name)
    results.write(_numbers(chosen, sweep, words), {FIGURE: curves.savefig})
    print(results.told)
    return 0


def _base(arguments: Sequence[str]) -> Config:
    """The configuration of the run or of the recipe that the arguments name, or the default one."""
    if arguments and not arguments[0].startswith("-"):
        from surrogap.training.folder import read_config

        return read_config(Path(arguments[0]))
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--recipe")
    try:
        name = parser.parse_known_args(arguments)[0].recipe
    except argparse.ArgumentError:  # tyro will tell
        name = None
    return Config() if name is None else recipe(name)


def _check(chosen: FindRho, base: Config, arguments: Sequence[str]) -> None:
    at_least("batches", chosen.batches, 1, remedy="Pass a number such as 4.")
    at_least("train_steps", chosen.train_steps, 1, remedy="Pass a number such as 200.")
    for rho in chosen.rhos:
        number("rhos", rho, above=0.0, remedy="Pass positive radii, such as 0.05 0.1.")
    if chosen.run is None:
        return
    if arguments[0].startswith("-"):
        raise ValueError(
            f"run must come before all options, got {chosen.run} after some. "
            f"Pass surrogap find-rho {chosen.run} and the options."
        )
    if chosen.recipe is not None:
        raise ValueError(
            f"recipe must be left out where a run is measured, got {chosen.recipe}. "
            "The run has its own configuration."
        )
    was, now = base.flat(), chosen.config.flat()
    for name in _OF_THE_RUN:
        if was[name] != now[name]:
            raise ValueError(
                f"{name} must be left out where a run is measured, got {now[name]}. "
                f"The run has {was[name]}."
            )


def judged(config: Config) -> float | None:
    """The radius that a configuration trains with; None if it has none in the Euclidean ball."""
    objective = config.objective
    if not objective.has_radius or objective.name == "asam":
        return None
    return 0.05 if objective.rho is None else objective.rho


def _folder(chosen: FindRho, base: Config) -> Path:
    out = chosen.config.output.out
    if out is not None and (chosen.run is None or out != base.output.out):
        return Path(out).expanduser()
    if chosen.run is not None:
        return chosen.run
    return Path("runs") / f"find-rho-{chosen.recipe or chosen.config.model.name}"


def _parts(chosen: FindRho) -> "Parts":
    """The network and its batches as plain training has them; of a run, with its weights."""
    from surrogap.experiments.surfaces import load_whole
    from surrogap.training.parts import parts_of
    from surrogap.training.processes import World, device_of

    world = World(device_of(chosen.config.execution.device))
    parts = parts_of(_plain(chosen), world)
    if chosen.run is not None:
        load_whole(parts.model, chosen.run)
    return parts


def _plain(chosen: FindRho) -> Config:
    """The configuration of plain training on what shares a perturbation."""
    config, execution = chosen.config, chosen.config.execution
    changes: dict[str, Any] = {"objective": "vanilla", "capture": False, "compile": False}
    if execution.perturbation == "each":
        batch_size = config.data.batch_size // execution.micro_batches
        changes |= {"batch_size": batch_size, "micro_batches": 1}
    if chosen.run is not None:
        changes["weights"] = None  # what it started from may be gone, and does not matter any more
    else:
        schedule = config.schedule
        warms_up = schedule.warmup_steps or schedule.warmup_epochs
        changes |= {"steps": chosen.train_steps, "decay": "constant", "warmup_epochs": 0.0}
        changes["warmup_steps"] = chosen.train_steps // 4 if warms_up else 0
    return config.override(**changes)


def _tell_cost(chosen: FindRho, parts: "Parts") -> None:
    from surrogap.analysis.find_rho import USUAL_RHOS, cost_of_find_rho

    cost = cost_of_find_rho(len(chosen.rhos or USUAL_RHOS), chosen.batches)
    before = 0 if chosen.run is not None else chosen.train_steps
    what = f"of {parts.images.order.batch_size:,} images each"
    tell_cost(cost + before, what + (f", {before:,} of them to train" if before else ""))


def _train(parts: "Parts", tell: Tell) -> None:
    from surrogap.training.failure import RunFailedError
    from surrogap.training.step import NonFiniteLossError

    parts.model.train()
    step = 0
    while step < parts.num_steps:
        for images, targets in parts.images:
            parts.rate.set_(parts.optimizer, step)
            step += 1
            try:
                parts.step(images, targets)
            except NonFiniteLossError:
                raise RunFailedError(
                    f"loss must be finite, got one that is not in step {step} of plain training. "
                    "Pass a smaller --lr."
                ) from None
            tell(step, parts.num_steps)
            if step == parts.num_steps:
                break


def _sweep(chosen: FindRho, parts: "Parts", tell: Tell) -> "Sweep":
    from surrogap.analysis import Surface, find_rho
    from surrogap.analysis.find_rho import USUAL_RHOS
    from surrogap.experiments.surfaces import loss_fn_of

    objective = chosen.config.objective
    batches = list(islice(parts.images, chosen.batches))
    surface = Surface(parts.model.train(), batches, loss_fn_of(objective), is_checked=False)
    # To guess is too large a loss for a network that has learned; one that has not is close to it.
    guessing = math.log(parts.images.num_classes)
    has_learned = objective.loss == "cross-entropy" and float(surface.loss()) < guessing / 2
    return find_rho(
        surface,
        chosen.rhos or USUAL_RHOS,
        num_batches=chosen.batches,
        ceiling=guessing if has_learned else math.inf,
        progress=tell,
    )


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
