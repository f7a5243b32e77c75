"""A sweep over the radii of a configuration, along the ascent step of its objective."""

import math
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surrogap.analysis.find_rho import USUAL_RHOS, Climb, Sweep, cost_of_find_rho, find_rho
from surrogap.analysis.surface import Surface
from surrogap.core.catalog import OBJECTIVES
from surrogap.core.rho import InverseSqrt, radius
from surrogap.data import Batch
from surrogap.experiments.surfaces import load_whole, loss_fn_of
from surrogap.training.checkpoints import Checkpoints, State
from surrogap.training.components import Components, components_of
from surrogap.training.config import Config
from surrogap.training.failure import RunFailedError
from surrogap.training.folder import CHECKPOINTS
from surrogap.training.objective_configs import PerturbedConfig
from surrogap.training.objectives import built, rho_of
from surrogap.training.processes import World, device_of
from surrogap.training.state import load_weights_and_moments
from surrogap.training.step import NonFiniteLossError, climb_batch

Progress = Callable[[int, int], object]


def plain_parts(config: Config, run: Path | None, num_steps: int) -> Components:
    """Build the network, its batches and its optimizer for plain training.

    Args:
        config: The configuration whose radius is in question.
        run: The folder of a run, whose weights are loaded, and the optimizer's state if the
            objective uses it; None for a network to be trained.
        num_steps: The steps to train a network for.

    Raises:
        ValueError: There is no checkpoint, or it is of another network.
    """
    world = World(device_of(config.execution.device))
    parts = components_of(_plain(config, run, num_steps), world)
    if run is None:
        return parts
    load_whole(parts.model, run)
    if OBJECTIVES[config.objective.name].takes_optimizer:
        load_weights_and_moments(parts.model, parts.optimizer, _newest(run), world)
    return parts


def radius_in_use(config: Config, parts: Components, run: Path) -> float | None:
    """Return the radius of the last step before a run's newest checkpoint; None without a radius.

    Args:
        config: The run's configuration.
        parts: Its model and optimizer, as `plain_parts` built them. The optimizer gets the learning
            rate of that step.
        run: The run's folder.
    """
    if not isinstance(config.objective, PerturbedConfig):
        return None
    state = _newest(run)
    for group, saved in zip(
        parts.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True
    ):
        group["lr"] = float(saved["lr"])
    rho = rho_of(config, config.objective, parts.optimizer)
    if isinstance(rho, InverseSqrt):
        rho.load_state_dict({"num_steps": state["step"] - 1})
    return float(radius(rho))


def _newest(run: Path) -> State:
    state = Checkpoints(run / CHECKPOINTS).newest()
    assert state is not None  # or its weights could not have been loaded
    return state


def _plain(config: Config, run: Path | None, num_steps: int) -> Config:
    """The configuration of plain training, on batches of the size that shares a perturbation."""
    execution, schedule = config.execution, config.schedule
    changes: dict[str, Any] = {"objective": "vanilla", "capture": False, "compile": False}
    if execution.perturbation == "each":
        batch_size = config.data.batch_size // execution.micro_batches
        changes |= {"batch_size": batch_size, "micro_batches": 1}
    if run is not None:
        # The weights that it started from may be gone, and do not matter any more.
        return config.override(**changes, weights=None)
    warms_up = schedule.warmup_steps or schedule.warmup_epochs
    changes |= {"steps": num_steps, "decay": "constant", "warmup_epochs": 0.0}
    return config.override(**changes, warmup_steps=num_steps // 4 if warms_up else 0)


def train_plainly(parts: Components, progress: Progress) -> None:
    """Train with the plain gradient, up to the last step.

    Raises:
        RunFailedError: A loss is not finite.
    """
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
            progress(step, parts.num_steps)
            if step == parts.num_steps:
                break


def num_gradients(config: Config, rhos: Sequence[float], num_batches: int) -> int:
    """Return the cost of `swept`, in gradients of single batches."""
    objective = config.objective
    has_climb = isinstance(objective, PerturbedConfig)
    passes = OBJECTIVES[objective.name].num_passes(**objective.arguments()) if has_climb else 0
    return cost_of_find_rho(len(rhos or USUAL_RHOS), num_batches) + num_batches * passes


def swept(
    config: Config, parts: Components, rhos: Sequence[float], num_batches: int, progress: Progress
) -> Sweep:
    """Sweep radii for a configuration.

    Args:
        config: The configuration whose radius is in question.
        parts: Its network, as `plain_parts` built it, trained for some steps.
        rhos: The radii; by default the usual ones.
        num_batches: The number of training batches to measure on.
        progress: Called with the number of gradients computed, and all.

    Raises:
        RuntimeError: A gradient or the ascent step is zero.
    """
    batches = list(islice(parts.images, num_batches))
    loss_fn = loss_fn_of(config.objective)
    surface = Surface(parts.model.train(), batches, loss_fn, is_checked=False)
    # To guess is too large a loss for a network that has learned; one that has not is close to it.
    guessing = math.log(parts.images.num_classes)
    uses_entropy = config.objective.loss == "cross-entropy"
    has_learned = uses_entropy and float(surface.loss()) < guessing / 2
    return find_rho(
        surface,
        rhos or USUAL_RHOS,
        num_batches=num_batches,
        ceiling=guessing if has_learned else math.inf,
        climb=climb_of(config, parts),
        progress=progress,
    )


def climb_of(config: Config, parts: Components) -> Climb | None:
    """Return the ascent step of a configuration's objective; None if it has none.

    The objective itself runs, at radius 1, and its last pass shows where it has climbed to. So this
    holds for any objective whose ascent step is proportional to the radius.
    """
    settings = config.objective
    if not isinstance(settings, PerturbedConfig):
        return None
    # Of several processes' gradients there is only this one's.
    arguments = settings.arguments() | {"rho": 1.0, "scope": None}
    known = OBJECTIVES[settings.name].arguments
    arguments = {name: value for name, value in arguments.items() if name in known}
    objective = built(settings.name, parts.model, parts.optimizer, arguments)
    fraction: float = getattr(settings, "climb_fraction", 1.0)

    def climb(surface: Surface) -> Tensor:
        start, (batch,) = surface.position(), surface.batches
        reached = [start]

        def closure_of(part: Batch) -> Callable[[], Tensor]:
            def closure() -> Tensor:
                reached.append(surface.position())
                return surface.loss_of(part)

            return closure

        first = None if fraction == 1 else closure_of(climb_batch(batch, fraction))
        devices = [start.device] if start.is_cuda else []
        with torch.random.fork_rng(devices):
            objective.backward(closure_of(batch), climb=first)
        parts.model.zero_grad()
        return reached[-1] - start

    return climb
