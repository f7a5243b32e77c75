"""The images that a configuration names: a whole set, or a balanced subset of it."""

from surrogap.data import Splits, load, subset
from surrogap.training.groups import DataConfig


def images_of(
    config: DataConfig, data_root: str | None = None, *, download: bool = False
) -> Splits:
    """The splits of a run.

    Args:
        config: The set, and which of its training images and labels.
        data_root: The folder of the named sets, if not the configuration's own.
        download: Whether to fetch a named set that is missing.

    Raises:
        ValueError: The set is missing or damaged, or has too few images or no noisy labels.
        RuntimeError: It cannot be fetched.

    >>> images_of(DataConfig(train_per_class=100)).train
    TensorSet(1000 images of 1x28x28)
    """
    return subset(
        load(config.name, data_root or config.data_root, download=download),
        train_per_class=config.train_per_class,
        val_per_class=config.val_per_class,
        noisy_labels=config.train_labels == "noisy",
    )
