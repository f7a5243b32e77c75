"""A sweep over radii for a configuration, along the ascent step of its objective."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surrogap.analysis.find_rho import USUAL_RHOS, Climb, Sweep, cost_of_find_rho, find_rho
from surrogap.analysis.surface import Progress, Surface
from surrogap.core.catalog import OBJECTIVES, create_objective
from surrogap.core.rho import InverseSqrt, radius
from surrogap.data import Batch
from surrogap.experiments.surfaces import load_all_weights, loss_fn_of
from surrogap.experiments.text_table import Table
from surrogap.training.checkpoints import Checkpoints, State
from surrogap.training.components import Components, components_of
from surrogap.training.config import Config
from surrogap.training.failure import RunFailedError
from surrogap.training.folder import CHECKPOINTS
from surrogap.training.objective_configs import PerturbedConfig
from surrogap.training.objectives import rho_of
from surrogap.training.processes import World, device_of
from surrogap.training.state import load_weights_and_moments
from surrogap.training.step import NonFiniteLossError, climb_batch


def components_for_sweep(config: Config, run: Path | None, num_steps: int) -> Components:
    """Build the model, its batches and its optimizer for training without perturbation.

    Args:
        config: The configuration to find a radius for.
        run: The folder of a run, whose weights are loaded, and the state of its optimizer if the
            objective uses it; None for a new model.
        num_steps: The number of steps to train a new model for.

    Raises:
        ValueError: There is no checkpoint, or its weights do not fit the model.
    """
    world = World(device_of(config.execution.device))
    components = components_of(_without_perturbation(config, run, num_steps), world)
    ascent_step_of(config, components)  # refuses an optimizer without momentum before training
    if run is None:
        return components
    load_all_weights(components.model, run)
    if OBJECTIVES[config.objective.name].takes_optimizer:
        load_weights_and_moments(components.model, components.optimizer, _newest(run), world)
    return components


def radius_in_use(config: Config, components: Components, run: Path) -> float | None:
    """Return the radius of the last step before a run's newest checkpoint; None without a radius.

    Args:
        config: The run's configuration.
        components: The model and the optimizer from `components_for_sweep`. The optimizer's
            learning rate is set to that of the step.
        run: The folder of the run.
    """
    if not isinstance(config.objective, PerturbedConfig):
        return None
    state = _newest(run)
    for group, saved in zip(
        components.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True
    ):
        group["lr"] = float(saved["lr"])
    rho = rho_of(config, config.objective, components.optimizer)
    if isinstance(rho, InverseSqrt):
        rho.load_state_dict({"num_steps": state["step"] - 1})
    return float(radius(rho))


def _newest(run: Path) -> State:
    state = Checkpoints(run / CHECKPOINTS).newest()
    assert state is not None  # its weights have been loaded
    return state


def _without_perturbation(config: Config, run: Path | None, num_steps: int) -> Config:
    """Return a configuration with the plain gradient, and batches that share one perturbation."""
    execution, schedule = config.execution, config.schedule
    changes: dict[str, Any] = {"objective": "vanilla", "capture": False, "compile": False}
    if execution.perturbation == "each":
        batch_size = config.data.batch_size // execution.micro_batches
        changes |= {"batch_size": batch_size, "micro_batches": 1}
    if run is not None:
        # The weights that the run started from are not needed, and may be gone.
        return config.override(**changes, weights=None)
    warms_up = schedule.warmup_steps or schedule.warmup_epochs
    changes |= {"steps": num_steps, "decay": "constant", "warmup_epochs": 0.0}
    return config.override(**changes, warmup_steps=num_steps // 4 if warms_up else 0)


def train_with_plain_gradient(components: Components, progress: Progress) -> None:
    """Train with the plain gradient for all steps.

    Raises:
        RunFailedError: A loss is not finite.
    """
    components.model.train()
    batches = chain.from_iterable(repeat(components.images))
    for step, (images, targets) in enumerate(islice(batches, components.num_steps), start=1):
        components.rate.set_(components.optimizer, step - 1)
        try:
            components.step(images, targets)
        except NonFiniteLossError:
            raise RunFailedError(
                f"The loss is not finite in step {step} of training without perturbation. "
                "Pass a smaller --lr."
            ) from None
        progress(step, components.num_steps)


def sweep_cost(config: Config, rhos: Sequence[float], num_batches: int) -> int:
    """Return the cost of `sweep_radii`, in gradients of one batch."""
    objective = config.objective
    has_climb = isinstance(objective, PerturbedConfig)
    passes = OBJECTIVES[objective.name].num_passes(**objective.arguments()) if has_climb else 0
    return cost_of_find_rho(len(rhos or USUAL_RHOS), num_batches) + num_batches * passes


def sweep_radii(
    config: Config,
    components: Components,
    rhos: Sequence[float],
    num_batches: int,
    progress: Progress,
    *,
    unit: float = 1.0,
) -> Sweep:
    """Sweep radii for a configuration.

    `components` are those of `components_for_sweep`, after training. Without `rhos`, the default
    radii are swept. `progress` is called with the number of computed gradients and the total. For
    `unit`, see `find_rho`.

    Raises:
        RuntimeError: A gradient or the ascent step is zero.
    """
    batches = list(islice(components.images, num_batches))
    loss_fn = loss_fn_of(config.objective)
    surface = Surface(components.model.train(), batches, loss_fn, is_checked=False)
    return find_rho(
        surface,
        rhos or USUAL_RHOS,
        num_batches=num_batches,
        unit=unit,
        climb=ascent_step_of(config, components),
        progress=progress,
    )


def ascent_step_of(config: Config, components: Components) -> Climb | None:
    """Return the ascent step of a configuration's objective; None if it has none.

    The objective itself runs at radius 1, and the weights of its last pass give the ascent step.
    This is valid for any objective whose ascent step is proportional to the radius.
    """
    settings = config.objective
    if not isinstance(settings, PerturbedConfig):
        return None
    # This process has only its own gradient.
    arguments = settings.arguments() | {"rho": 1.0, "scope": None}
    known = OBJECTIVES[settings.name].arguments
    arguments = {name: value for name, value in arguments.items() if name in known}
    objective = create_objective(settings.name, components.model, components.optimizer, **arguments)
    fraction: float = getattr(settings, "climb_fraction", 1.0)

    def climb(surface: Surface) -> Tensor:
        start, (batch,) = surface.position(), surface.batches
        reached = [start]

        def loss_of(samples: Batch) -> Tensor:
            reached.append(surface.position())
            return surface.loss_of(samples)

        first = None if fraction == 1 else partial(loss_of, climb_batch(batch, fraction))
        devices = [start.device] if start.is_cuda else []
        with torch.random.fork_rng(devices):
            objective.backward(partial(loss_of, batch), climb=first)
        components.model.zero_grad()
        return reached[-1] - start

    return climb


def sweep_table(sweep: Sweep) -> Table:
    """Return the measurements at each radius."""
    rows = [
        (f"{r.rho:g}", f"{r.gap:.4g}", f"{r.perturbed_loss:.4g}", f"{r.cosine:.4f}")
        for r in sweep.radii
    ]
    return Table(("rho", "h", "f_p", "cosine of g and g_p"), rows)


def sweep_values(sweep: Sweep) -> dict[str, Any]:
    """Return the suggested range and the measurements at each radius, for JSON."""
    return {
        "low": sweep.low,
        "high": sweep.high,
        "center": sweep.center,
        "unit": sweep.unit,
        "num_batches": sweep.num_batches,
        "radii": [asdict(radius) | {"gap": radius.gap} for radius in sweep.radii],
    }
