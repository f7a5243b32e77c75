"""The components of a run, built from its configuration: loaders, model, optimizer, step."""

from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from surrogap.core.objective import Objective
from surrogap.data import Loader, Splits, loader
from surrogap.data.damaged import OnChecked
from surrogap.errors import InvalidValueError
from surrogap.training.config import Config
from surrogap.training.images import images_of
from surrogap.training.losses import loss_of
from surrogap.training.model import model_of, wrapped
from surrogap.training.objectives import objective_of
from surrogap.training.optimizers import LearningRate, optimizer_of
from surrogap.training.processes import World
from surrogap.training.step import CUDAGraphStep, EagerStep, Step


@final
@dataclass(frozen=True)
class Components:
    """The components of a run.

    Attributes:
        images: The loader of the training images.
        eval_images: The loaders for evaluation, by the name of their split.
        model: The model, wrapped for its processes.
        optimizer: The optimizer.
        objective: The objective.
        rate: The learning rate of each step.
        step: The training step.
        num_steps: The number of steps of the run.
    """

    images: Loader
    eval_images: dict[str, Loader]
    model: nn.Module
    optimizer: Optimizer
    objective: Objective
    rate: LearningRate
    step: Step
    num_steps: int


def components_of(config: Config, world: World, on_checked: OnChecked | None = None) -> Components:
    """Build the components of a run.

    The same seed gives the same weights on any number of processes.

    Args:
        config: The configuration of the run.
        world: Its processes.
        on_checked: Called with the number of image files that were checked, and the total number.

    Raises:
        ImportError: A package is not installed.
        ValueError: The images are missing or damaged, or settings do not fit together.

    >>> components = components_of(Config().override(model="small_mlp"), World(torch.device("cpu")))
    >>> components.num_steps
    780
    """
    _check(config, world)
    torch.manual_seed(config.execution.seed)
    splits = splits_of(config, world, on_checked).to(world.device)
    model = wrapped(model_of(config.model, splits), config, world)
    optimizer = optimizer_of(config.optimizer, model, fused=config.execution.capture)
    images = _loader(config, world, splits, "train")
    eval_images = {name: _loader(config, world, splits, name) for name in _eval_splits(config)}
    objective = objective_of(config, model, optimizer, len(images))
    num_steps = config.schedule.steps or config.schedule.epochs * len(images)
    rate = LearningRate(config.schedule, config.optimizer.lr, num_steps, len(images))
    kind = CUDAGraphStep if config.execution.capture else EagerStep
    step = kind(config, model, objective, optimizer, loss_of(config.objective), world)
    # From here on, each process has its own random numbers, such as those of dropout.
    torch.manual_seed(config.execution.seed + world.rank)
    return Components(images, eval_images, model, optimizer, objective, rate, step, num_steps)


def splits_of(config: Config, world: World, on_checked: OnChecked | None = None) -> Splits:
    """Return the images of a configuration. Only the first process downloads and checks them.

    Raises:
        ValueError: They are missing or damaged.
        RuntimeError: They cannot be downloaded.
    """
    found: list[Splits] = []

    def load_in_first() -> None:
        download = config.data.download
        found.append(images_of(config.data, download=download, check=True, on_checked=on_checked))

    world.from_first(load_in_first)
    splits = found[0] if found else images_of(config.data)
    if splits.val is None and "val" in _eval_splits(config):
        raise InvalidValueError(
            f"eval_on must be test for {config.data.name}, which has no validation images, got "
            f"{config.output.eval_on}. Pass --val-per-class to hold some out."
        )
    return splits


def _eval_splits(config: Config) -> tuple[str, ...]:
    chosen = config.output.eval_on
    return ("val", "test") if chosen == "both" else (chosen,)


def _loader(config: Config, world: World, splits: Splits, split: str) -> Loader:
    data, is_train = config.data, split == "train"
    in_evaluation = data.batch_size_in_evaluation(world.size)
    return loader(
        splits,
        split,
        batch_size=data.batch_size // world.size if is_train else in_evaluation,
        augmentation=data.augmentation if is_train else "none",
        seed=config.execution.seed,
        device=world.device,
        rank=world.rank,
        world_size=world.size,
        size=config.model.image_size,
        num_workers=data.num_workers,
    )


def _check(config: Config, world: World) -> None:
    execution, batch_size = config.execution, config.data.batch_size
    if batch_size % (world.size * execution.micro_batches):
        raise InvalidValueError(
            f"batch_size must be a multiple of processes times micro-batches, got {batch_size} for "
            f"{world.size} processes with {execution.micro_batches} each. Pass a multiple."
        )
    if execution.capture and (world.device.type != "cuda" or world.is_shared):
        got = "several processes" if world.is_shared else f"device {world.device}"
        raise InvalidValueError(
            f"capture must be used with one process on a CUDA device, got {got}. Pass --no-capture."
        )
