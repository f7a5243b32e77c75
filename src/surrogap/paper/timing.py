"""The time of a step of each method, measured with nothing else on the device.

All steps are built first and then timed in turns, several times. The best time of each counts,
since disturbances only make a measurement longer.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from surrogap.paper.methods import METHODS
from surrogap.paper.running import Environment
from surrogap.paper.tuning import trials
from surrogap.training.components import components_of
from surrogap.training.config import Config
from surrogap.training.processes import World

_NUM_WARM_UPS = 5


def timing(setup: str, methods: Sequence[str], environment: Environment) -> dict[str, Any]:
    """Measure the seconds of a step of some methods.

    Args:
        setup: The set-up's letter.
        methods: The methods; plain training is always among them. Methods with the same step are
            timed once.
        environment: The study and its images.
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
    }


def _step(config: Config, device: torch.device) -> Callable[[], object]:
    """A step on one batch, captured and warm."""
    # Of the models that one process compiles, those after the eighth would run uncompiled. The
    # captured steps keep their kernels.
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
