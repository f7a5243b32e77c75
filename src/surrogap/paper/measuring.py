"""Measurements of a set-up: the time of a step of each method, and the radii of find-rho.

All steps are built first, and then timed in turns over several rounds, with nothing else on the
device. The best time of each counts, since disturbances only make a measurement longer.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from surrogap.experiments.radii import (
    components_for_sweep,
    sweep_radii,
    sweep_values,
    train_with_plain_gradient,
)
from surrogap.paper.ledger import Ledger, LedgerLine
from surrogap.paper.methods import METHODS
from surrogap.paper.plan import Measurement
from surrogap.paper.running import Environment, provenance
from surrogap.paper.tuning import trials
from surrogap.training.components import components_of
from surrogap.training.config import Config
from surrogap.training.processes import World

_NUM_WARM_UPS = 5


def measure(measurement: Measurement, environment: Environment, ledger: Ledger) -> LedgerLine:
    """Make a measurement, and return its line of the ledger.

    Args:
        measurement: The measurement.
        environment: The study and its images.
        ledger: The finished runs, which the settings of find-rho depend on.

    Raises:
        RunFailedError: The loss is not finite while training for find-rho.
        ValueError: The images are missing, or the configuration is not valid.
    """
    start = time.perf_counter()
    if measurement.kind == "timing":
        found = timing(measurement.setup, measurement.methods, environment)
    else:
        found = suggestions(measurement.setup, measurement.methods, environment, ledger)
    return {
        "key": measurement.key(environment.scale, ledger),
        "kind": measurement.kind,
        "scale": environment.scale.name,
        "setup": measurement.setup,
        **found,
        "seconds": round(time.perf_counter() - start, 2),
        **provenance(environment.device(measurement.setup), environment),
    }


def timing(setup: str, methods: Sequence[str], environment: Environment) -> dict[str, Any]:
    """Measure the seconds of a step of some methods, and of plain training.

    Methods with the same step are timed once.
    """
    scale = environment.scale
    num_rounds, num_steps = scale.timing  # a multiple of five, for "every 5th step"
    device = environment.device(setup)
    timed = dict.fromkeys(METHODS[method].step for method in ("vanilla", *methods))
    configs = {
        method: trials(scale, setup, method)[0].config(**environment.changes) for method in timed
    }
    steps = {method: _step(config, device) for method, config in configs.items()}
    return {
        "seconds_per_step": _best_times(steps, device, num_rounds, num_steps),
        "compile": configs["vanilla"].execution.compile,
        "num_rounds": num_rounds,
        "num_steps": num_steps,
        "num_threads": torch.get_num_threads(),
    }


def _step(config: Config, device: torch.device) -> Callable[[], object]:
    """A step on one batch, captured and warm."""
    # Without a reset, a process runs models after the eighth uncompiled. The captured steps keep
    # their kernels.
    torch.compiler.reset()
    components = components_of(config, World(device))
    images, targets = next(iter(components.images))
    components.model.train()
    step = partial(components.step, images, targets)
    for _ in range(_NUM_WARM_UPS):
        step()
    return step


def _best_times(
    steps: Mapping[str, Callable[[], object]], device: torch.device, num_rounds: int, number: int
) -> dict[str, float]:
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(num_rounds):
        for name, step in steps.items():
            _wait(device)
            start = time.perf_counter()
            for _ in range(number):
                step()
            _wait(device)
            best[name] = min(best[name], (time.perf_counter() - start) / number)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def suggestions(
    setup: str, methods: Sequence[str], environment: Environment, ledger: Ledger
) -> dict[str, Any]:
    """The results of `surrogap find-rho` for some methods, with a new model for each.

    It trains with the learning rate and weight decay that plain training was tuned to.
    """
    num_steps, num_batches = environment.scale.find_rho
    found = {}
    for method in methods:
        first = trials(environment.scale, setup, method, ledger)[0]
        config = first.config(**environment.changes)
        components = components_for_sweep(config, None, num_steps)
        train_with_plain_gradient(components, _ignore)
        sweep = sweep_radii(config, components, (), num_batches, _ignore)
        found[method] = {"words": sweep.explain(), **sweep_values(sweep)}
    return {"train_steps": num_steps, "suggestions": found}


def _ignore(done: int, total: int) -> None:
    """Show no progress: the work takes seconds."""
