"""The loss of a network over some of its training images, as a surface to measure on."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from surrogap.analysis.batches import LossFn
from surrogap.analysis.surface import Surface
from surrogap.data import Batch, Splits, loader
from surrogap.errors import InvalidValueError
from surrogap.training.config import Config
from surrogap.training.groups import ModelConfig
from surrogap.training.losses import loss_of
from surrogap.training.model import model_of, read_weights
from surrogap.training.objective_configs import ObjectiveConfig
from surrogap.training.processes import World


def part_of(splits: Splits, num_images: int, seed: int = 0) -> Splits:
    """The same set with a few of its training images, drawn at random: folders are sorted by class.

    Args:
        splits: The set, whose mean and standard deviation stay.
        num_images: How many to draw; all, where there are no more.
        seed: Of the draw.

    >>> from surrogap.data import load
    >>> part_of(load("embedded"), 300).train
    TensorSet(300 images of 1x28x28)
    """
    train = splits.train
    if num_images >= len(train):
        return splits
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(train), generator=generator)[:num_images].sort().values
    return replace(splits, train=train[drawn])


def still_batches(config: Config, splits: Splits, world: World, batch_size: int) -> list[Batch]:
    """All training images of a set as they are, on the device: read once, to be seen many times.

    Args:
        config: The size of the images, and how many workers read them.
        splits: The set.
        world: The processes, each of which gets its part, in as many batches as the others.
        batch_size: How many images of a process make a batch.
    """
    return list(
        loader(
            splits,
            "train",
            batch_size=batch_size,
            shuffle=False,
            drop_last=False,
            device=world.device,
            rank=world.rank,
            world_size=world.size,
            size=config.model.image_size,
            num_workers=config.data.num_workers,
        )
    )


def eval_batch_size(config: Config) -> int:
    """The number of images that one process evaluates at once.

    >>> eval_batch_size(Config().override(batch_size=32))
    128
    """
    return config.data.eval_batch_size or 4 * config.data.batch_size


def loss_fn_of(config: ObjectiveConfig) -> LossFn:
    """The loss that a run minimises, for a surface.

    >>> from surrogap.training.objective_configs import VanillaConfig
    >>> loss_fn = loss_fn_of(VanillaConfig(loss="sigmoid"))
    >>> loss_fn(nn.Identity(), (torch.zeros(4, 10), torch.arange(4))) / 10  # log 2 for each class
    tensor(0.6931)
    """
    loss = loss_of(config)

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        images, targets = batch
        return loss(model(images), targets)

    return loss_fn


def still_surface(
    config: Config, model: nn.Module, splits: Splits, world: World, batch_size: int
) -> Surface:
    """The loss of a network in evaluation mode over all training images of a set.

    Raises:
        RuntimeError: The network does not give the same loss twice.
    """
    batches = still_batches(config, splits, world, batch_size)
    return Surface(model.eval(), batches, loss_fn_of(config.objective))


def network_with(config: ModelConfig, splits: Splits, weights: Path | None) -> nn.Module:
    """A network with weights of its own, head included; or with random ones.

    Raises:
        ValueError: There are no weights there, or they are another network's.
    """
    model = model_of(replace(config, weights=None), splits)
    if weights is not None:
        load_whole(model, weights)
    return model


def load_whole(model: nn.Module, weights: Path) -> None:
    """Gives a network the weights of a run or of a file, all of them.

    Raises:
        ValueError: There are none there, or they are another network's.
    """
    try:
        model.load_state_dict(read_weights(weights))
    except RuntimeError as error:
        raise InvalidValueError(
            f"weights must be those of the network for its images, got {weights} "
            f"({str(error).splitlines()[-1].strip()}) Pass weights that were trained on them."
        ) from error
