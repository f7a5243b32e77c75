"""Datasets by name or path."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from surrogap.checks import one_of
from surrogap.data.archives import read_archive
from surrogap.data.embedded import embedded
from surrogap.data.folders import read_folder
from surrogap.data.published import cifar, flowers102, imagenet, pets37
from surrogap.data.splits import Splits
from surrogap.errors import InvalidValueError

# The datasets by name. Each function takes the root folder, and whether to download.
SETS: dict[str, Callable[[Path, bool], Splits]] = {
    "embedded": lambda root, download: embedded(),
    "cifar10": partial(cifar, 10),
    "cifar100": partial(cifar, 100),
    "flowers102": flowers102,
    "pets37": pets37,
    "imagenet": imagenet,
}


def archive_of(name_or_path: str | Path, root: str | Path = "data") -> Path | None:
    """Return the path of a dataset's `.npz` archive; None if there is no such file.

    The archive of a named dataset is NAME.npz in the folder `root`.

    >>> archive_of("embedded") is None
    True
    """
    path = Path(name_or_path).expanduser()
    if name_or_path in SETS:
        path = Path(root).expanduser() / f"{name_or_path}.npz"
    return path if path.suffix == ".npz" and path.is_file() else None


def load(name_or_path: str | Path, root: str | Path = "data", *, download: bool = False) -> Splits:
    """Load an image dataset, split into train and test.

    Args:
        name_or_path: A name: "embedded" (a subset of Fashion-MNIST, in the package), "cifar10",
            "cifar100", "flowers102", "pets37" or "imagenet". Or a path: of an `.npz` archive, or of
            a folder with `train` and `val` or `test` in ImageFolder's layout. Names take
            precedence: write "./cifar10" for a folder of that name.
        root: The folder of the named datasets, as their authors publish them or as the archive
            NAME.npz, which takes precedence.
        download: Download a named dataset that is missing. With several processes, let one of them
            call `load` before the others.

    Raises:
        ValueError: The dataset is unknown, missing or damaged.
        RuntimeError: It cannot be downloaded.

    >>> splits = load("embedded")
    >>> splits.train, splits.classes[:3]
    (TensorSet(5000 images of 1x28x28), ('T-shirt/top', 'Trouser', 'Pullover'))
    """
    path = Path(name_or_path).expanduser()
    remedy = (
        "pass the path of an .npz archive, or of a folder with train and val in it. For other "
        "data, such as tables, use an objective in your own loop: docs/tutorials/tabular.md."
    )
    if name_or_path not in SETS:
        if path.is_dir():
            return read_folder(path)
        if path.is_file() and path.suffix == ".npz":
            return read_archive(path)
        if len(path.parts) > 1 or path.suffix:
            raise InvalidValueError(
                f"name_or_path must be one of {', '.join(SETS)}, or the path of a dataset, got "
                f"{name_or_path}. Please {remedy}"
            )
    name = one_of("name_or_path", str(name_or_path), SETS, remedy=f"Or {remedy}")
    archive = archive_of(name, root)
    if archive is not None:
        return replace(read_archive(archive), name=name)
    return SETS[name](Path(root).expanduser(), download)
