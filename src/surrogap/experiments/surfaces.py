"""The loss of a model over some of its training images, as a surface to measure."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from surrogap.analysis.batches import LossFn
from surrogap.analysis.surface import Surface
from surrogap.data import Batch, Loader, Splits, loader
from surrogap.errors import InvalidValueError
from surrogap.training.config import Config
from surrogap.training.groups import ModelConfig
from surrogap.training.images import images_of
from surrogap.training.losses import loss_of
from surrogap.training.model import model_of, read_weights
from surrogap.training.objective_configs import ObjectiveConfig
from surrogap.training.processes import World


def random_subset(splits: Splits, num_images: int, seed: int = 0) -> Splits:
    """Return the dataset with a random subset of its training images.

    The subset is random because image folders are sorted by class.

    Args:
        splits: The dataset. Its mean and standard deviation stay the same.
        num_images: The size of the subset. If there are fewer images, all are kept.
        seed: The seed of the draw.

    >>> from surrogap.data import load
    >>> random_subset(load("embedded"), 300).train
    TensorSet(300 images of 1x28x28)
    """
    train = splits.train
    if num_images >= len(train):
        return splits
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(train), generator=generator)[:num_images].sort().values
    return replace(splits, train=train[drawn])


def unaugmented_loader(
    config: Config, splits: Splits, world: World, batch_size: int | None = None
) -> Loader:
    """Return a loader of all training images, in order and without augmentation.

    The processes share the images and have the same number of batches, by default with the batch
    size of evaluation.
    """
    return loader(
        splits,
        "train",
        batch_size=batch_size or config.data.batch_size_in_evaluation(world.size),
        shuffle=False,
        drop_last=False,
        device=world.device,
        rank=world.rank,
        world_size=world.size,
        size=config.model.image_size,
        num_workers=config.data.num_workers,
    )


def loss_fn_of(config: ObjectiveConfig) -> LossFn:
    """Return the loss that a run minimises, as a function of the model and a batch.

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


def model_with_weights(config: ModelConfig, splits: Splits, weights: Path | None) -> nn.Module:
    """Build a model for a dataset, and load all of its weights, including the head.

    Args:
        config: The model. `config.weights` is ignored: those files may be gone.
        splits: The dataset.
        weights: The folder of a run or a file; None for random weights.

    Raises:
        ValueError: There are no weights, or they do not fit the model.
    """
    model = model_of(replace(config, weights=None), splits)
    if weights is not None:
        load_all_weights(model, weights)
    return model


def load_all_weights(model: nn.Module, weights: Path) -> None:
    """Load all weights of a model from the folder of a run or from a file.

    Raises:
        ValueError: There are no weights, or they do not fit the model.
    """
    try:
        model.load_state_dict(read_weights(weights))
    except RuntimeError as error:
        raise InvalidValueError(
            f"weights must fit the model, got {weights} ({str(error).splitlines()[-1].strip()}) "
            "Pass weights of the same model, trained on a dataset with the same classes."
        ) from error


@final
@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, and its loss over a random subset of the training images.

    Attributes:
        config: The configuration of the model, the dataset and the loss.
        splits: The whole dataset.
        device: The device of the model and the images.
        surface: The loss over the subset, without augmentation, in evaluation mode.
        num_images: The size of the subset.
    """

    config: Config
    splits: Splits
    device: torch.device
    surface: Surface
    num_images: int

    def description(self) -> dict[str, Any]:
        """Return the model, the dataset and the device, for JSON."""
        return {
            "model": self.config.model.name,
            "data": self.config.data.name,
            "loss_function": self.config.objective.loss,
            "num_images": self.num_images,
            "num_weights": self.surface.space.size,
            "device": str(self.device),
        }


def load_model(
    config: Config,
    weights: Path | None,
    *,
    num_images: int,
    batch_size: int,
    seed: int,
    device: torch.device,
) -> LoadedModel:
    """Load a model and a random subset of its training images, which stay on the device.

    The weights are those of a run's folder or of a file; None for random ones. The seed determines
    the subset and random weights.

    Raises:
        ValueError: Weights or images are missing, or they do not fit together.
        RuntimeError: The model does not return the same loss twice.
    """
    splits = images_of(config.data)
    torch.manual_seed(seed)
    model = model_with_weights(config.model, splits, weights).to(device)
    images = random_subset(splits, num_images, seed)
    batches = list(unaugmented_loader(config, images, World(device), batch_size))
    surface = Surface(model.eval(), batches, loss_fn_of(config.objective))
    return LoadedModel(config, splits, device, surface, len(images.train))
