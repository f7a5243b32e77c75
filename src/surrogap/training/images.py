"""The images of a configuration: a whole set, or a balanced subset of it."""

from surrogap.data import Splits, intact, load, subset
from surrogap.data.damaged import OnChecked
from surrogap.training.groups import DataConfig


def images_of(
    config: DataConfig,
    *,
    download: bool = False,
    check: bool = False,
    on_checked: OnChecked | None = None,
) -> Splits:
    """Return the splits of a run.

    Args:
        config: The set, and the choice of training images and labels.
        download: Download a named set that is missing.
        check: Check image files for damage. Damaged files are left out with a warning if the
            configuration has `skip_damaged`, and otherwise an error. If `check` is False, they are
            left out silently, or not noticed.
        on_checked: Called with the number of files that were checked, and the total number.

    Raises:
        ValueError: The set is missing or damaged, or has too few images or no noisy labels.
        RuntimeError: It cannot be downloaded.

    >>> images_of(DataConfig(train_per_class=100)).train
    TensorSet(1000 images of 1x28x28)
    """
    splits = subset(
        load(config.name, config.data_root, download=download),
        train_per_class=config.train_per_class,
        val_per_class=config.val_per_class,
        noisy_labels=config.train_labels == "noisy",
    )
    if not (check or config.skip_damaged):
        return splits
    return intact(splits, skip_damaged=config.skip_damaged, warn=check, on_checked=on_checked)
