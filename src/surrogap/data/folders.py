"""Datasets in folders: `train/CLASS/image.jpg`, the layout of torchvision's ImageFolder."""

import os
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from surrogap.data.splits import FileSet, Splits
from surrogap.errors import InvalidValueError

_REMEDY = "A dataset is a folder with train/CLASS/IMAGE and val/CLASS/IMAGE or test/CLASS/IMAGE."


def read_folder(path: str | Path, name: str | None = None) -> Splits:
    """Read the dataset in a folder.

    Args:
        path: A folder with the subfolders `train` and `test`, or `train` and `val`, each with one
            folder per class. If there is no `test`, `val` is the test split, as in ImageNet.
        name: The name of the dataset; by default its path.

    Raises:
        ValueError: A subfolder is missing or has no images, or the splits have different classes.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for subfolder in ("train/cat", "train/dog", "val/cat", "val/dog"):
    ...         Path(folder, subfolder).mkdir(parents=True)
    ...         Image.new("RGB", (8, 8)).save(Path(folder, subfolder, "1.png"))
    ...     read_folder(folder, name="pets")
    Splits('pets', 2 classes, train: 2, test: 2)
    """
    root = Path(path)
    present = [split for split in ("train", "val", "test") if (root / split).is_dir()]
    if "train" not in present or len(present) < 2:
        raise InvalidValueError(
            f"path must be a folder with train and val or test in it, got {root}, which has "
            f"{', '.join(present) or 'none of them'}. {_REMEDY}"
        )
    found = {split: _images(root / split) for split in present}
    for split, (_, classes) in found.items():
        if classes != found["train"][1]:
            odd = sorted({*classes} ^ {*found["train"][1]})
            raise InvalidValueError(
                f"path must have the same classes in train and {split}, got {root}, where only one "
                f"has {', '.join(odd[:5])}{' and others' * (len(odd) > 5)}. "
                f"{_REMEDY}"
            )
    return Splits(
        name or str(root),
        found["train"][1],
        train=found["train"][0],
        test=found["test" if "test" in found else "val"][0],
        val=found["val"][0] if len(found) == 3 else None,
    )


def _images(folder: Path) -> tuple[FileSet, tuple[str, ...]]:
    """Return the images and the classes of a split, in the order of torchvision's ImageFolder."""
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        for subfolder, _, names in sorted(os.walk(folder / name, followlinks=True)):
            images = [name for name in sorted(names) if name.lower().endswith(IMG_EXTENSIONS)]
            paths += (os.path.join(subfolder, name) for name in images)
            labels += [label] * len(images)
    present = set(labels)
    empty = [name for label, name in enumerate(classes) if label not in present]
    if empty or not classes:
        raise InvalidValueError(
            f"path must have images of each class, got {folder} with no images in "
            f"{', '.join(empty[:5]) or 'it'}. {_REMEDY}"
        )
    return FileSet(paths, labels), tuple(classes)
