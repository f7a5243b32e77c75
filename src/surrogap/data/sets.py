"""Sets by name or path."""

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

# From a name, a root and whether to download to a set.
SETS: dict[str, Callable[[Path, bool], Splits]] = {
    "embedded": lambda root, download: embedded(),
    "cifar10": partial(cifar, 10),
    "cifar100": partial(cifar, 100),
    "flowers102": flowers102,
    "pets37": pets37,
    "imagenet": imagenet,
}


def archive_of(name_or_path: str | Path, root: str | Path = "data") -> Path | None:
    """The `.npz` archive that holds a set, given by its path or in the folder of the named sets.

    >>> archive_of("embedded") is None
    True
    """
    path = Path(name_or_path).expanduser()
    if name_or_path in SETS:
        path = Path(root).expanduser() / f"{name_or_path}.npz"
    return path if path.suffix == ".npz" and path.is_file() else None


def load(name_or_path: str | Path, root: str | Path = "data", *, download: bool = False) -> Splits:
    """A set of images, split into train and test.

    Args:
        name_or_path: A name: "embedded" (a subset of Fashion-MNIST, in the package), "cifar10",
            "cifar100", "flowers102", "pets37" or "imagenet". Or a path: of an `.npz` archive, or of
            a folder with `train` and `val` or `test` in ImageFolder's layout. A name comes first:
            write "./cifar10" for a folder of that name.
        root: The folder that holds the named sets: as their authors publish them, or as the archive
            NAME.npz, which comes first.
        download: Whether to fetch a named set that is not there. With several processes, let one
            of them do it before the others ask.

    Raises:
        ValueError: There is no such set, it is not where it should be, or it is damaged.
        RuntimeError: It cannot be fetched.

    >>> splits = load("embedded")
    >>> splits.train, splits.classes[:3]
    (TensorSet(5000 images of 1x28x28), ('T-shirt/top', 'Trouser', 'Pullover'))
    """
    path = Path(name_or_path).expanduser()
    remedy = (
        "The path of an .npz archive, or of a folder with train and val in it, will do too. For "
        "other data, such as tables, use an objective in a training loop of your own: README.md."
    )
    if name_or_path not in SETS:
        if path.is_dir():
            return read_folder(path)
        if path.is_file() and path.suffix == ".npz":
            return read_archive(path)
        if len(path.parts) > 1 or path.suffix:
            raise InvalidValueError(
                f"name_or_path must be one of {', '.join(SETS)}, or a set of images, got "
                f"{name_or_path}. "
                f"{remedy}"
            )
    name = one_of("name_or_path", str(name_or_path), SETS, remedy=remedy)
    archive = archive_of(name, root)
    if archive is not None:
        return replace(read_archive(archive), name=name)
    return SETS[name](Path(root).expanduser(), download)
