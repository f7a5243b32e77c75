"""Sets in folders: `train/CLASS/image.jpg`, as torchvision's ImageFolder lays them out."""

from pathlib import Path

from torchvision.datasets import ImageFolder

from surrogap.data.splits import FileSet, Splits
from surrogap.errors import InvalidValueError

_REMEDY = "A set is a folder with train/CLASS/IMAGE and val/CLASS/IMAGE or test/CLASS/IMAGE."


def read_folder(path: str | Path, name: str | None = None) -> Splits:
    """The set in a folder.

    Args:
        path: A folder with the subfolders `train` and `test`, or `train` and `val`; each has one
            folder for each class. Where there is no `test`, `val` is what to test on, as ImageNet
            has it; where there are all three, each is what it is called.
        name: What to call it, if not by its path.

    Raises:
        ValueError: A subfolder is missing or holds no images, or the splits differ in classes.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for place in ("train/cat", "train/dog", "val/cat", "val/dog"):
    ...         Path(folder, place).mkdir(parents=True)
    ...         Image.new("RGB", (8, 8)).save(Path(folder, place, "1.png"))
    ...     read_folder(folder, name="pets")
    Splits('pets', 2 classes, train: 2, test: 2)
    """
    root = Path(path)
    present = [part for part in ("train", "val", "test") if (root / part).is_dir()]
    if "train" not in present or len(present) < 2:
        raise InvalidValueError(
            f"path must be a folder with train and val or test in it, got {root}, which has "
            f"{', '.join(present) or 'none of them'}. {_REMEDY}"
        )
    found = {part: _images(root / part) for part in present}
    for part, (_, classes) in found.items():
        if classes != found["train"][1]:
            odd = sorted({*classes} ^ {*found["train"][1]})
            raise InvalidValueError(
                f"path must have the same classes in train and {part}, got {root}, where one has "
                f"{', '.join(odd[:5])}{' and more' * (len(odd) > 5)} and the other has not. "
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
    try:
        images = ImageFolder(str(folder))
    except FileNotFoundError as error:  # no class, or a class without an image
        raise InvalidValueError(
            f"path must have images of each class, got {folder}, where torchvision says: {error} "
            f"{_REMEDY}"
        ) from error
    paths, labels = zip(*images.samples, strict=True)
    return FileSet(list(paths), list(labels)), tuple(images.classes)
