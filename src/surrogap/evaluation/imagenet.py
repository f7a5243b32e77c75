"""ImageNet's published test sets: the paths of their images, and the labels.

Each function takes the folder that a test set was unpacked to, and checks that it is complete:
scores on half a test set would go unnoticed. Labels are positions in the list of synsets, so in all
test sets they are the classes of a model trained on ImageNet, or on some of its synsets.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from surrogap.checks import integer, one_of
from surrogap.errors import InvalidValueError

Sample = tuple[Path, int]

# The fifteen corruptions of ImageNet-C that the benchmark averages.
IMAGENET_C = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur"),
    *("motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast"),
    *("elastic_transform", "pixelate", "jpeg_compression"),
)

_SUFFIXES = (".jpeg", ".jpg", ".png")
_Folder = str | os.PathLike[str]


def imagenet_synsets() -> tuple[str, ...]:
    """The 1,000 synsets of ImageNet-1k, in the order of the classes.

    >>> imagenet_synsets()[0], len(imagenet_synsets())
    ('n01440764', 1000)
    """
    return _resource("imagenet_synsets.txt")


def imagenet_r_synsets() -> tuple[str, ...]:
    """The 200 synsets of ImageNet-R.

    >>> len(set(imagenet_r_synsets()) & set(imagenet_synsets()))
    200
    """
    return _resource("imagenet_r_synsets.txt")


def imagenet_real(root: _Folder, labels: _Folder) -> list[tuple[Path, list[int]]]:
    """The validation set with all correct labels of each image (ReaL, Beyer et al. 2020).

    Args:
        root: The folder of the validation set, with a folder for each synset. All images are
            required: the labels do not name them.
        labels: The file `real.json`: a list of labels for each image, in the order of the images'
            names. Images with an empty list are left out by `evaluate(truth="set")`.

    Returns:
        Paths and lists of labels, ordered by the images' names.

    Raises:
        ValueError: A folder is missing; or the file is not a list of lists of classes, with a list
            for each image; or two images have the same name.
    """
    samples = _samples(Path(root), _labels(None), None)
    paths = sorted((path for path, _ in samples), key=lambda path: path.name)
    lists = _label_lists(Path(labels), len(imagenet_synsets()))
    repeated = [name for name, n in Counter(path.name for path in paths).items() if n > 1]
    if repeated:
        raise InvalidValueError(
            f"root must hold images of different names, got {_few(repeated)} more than once in "
            f"{root}. Labels are assigned by name: unpack the test set again."
        )
    if len(lists) != len(paths):
        raise InvalidValueError(
            f"labels must have a list for each of the {len(paths)} images, got {len(lists)} in "
            f"{labels}. Pass the whole validation set, and the real.json that belongs to it."
        )
    return list(zip(paths, lists, strict=True))


def imagenet_v2(
    root: _Folder, synsets: Sequence[str] | None = None, *, num_images: int | None = 10_000
) -> list[Sample]:
    """ImageNet-V2 (Recht et al. 2019): folders `root/0` to `root/999`.

    The name of a folder is the position of its synset in `imagenet_synsets()`.

    Args:
        root: The folder of one of its three variants, such as
            `imagenetv2-matched-frequency-format-val`.
        synsets: The synsets in the order of the model's classes; None for ImageNet's. Other folders
            are left out.
        num_images: The expected number of images; None for any number. The default is the number
            for all of ImageNet's synsets.

    Returns:
        Paths and labels, ordered by class and then by name.

    Raises:
        ValueError: A folder is missing, the number of images is wrong, or a synset is not one of
            ImageNet's.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     for folder in ("0", "1"):
    ...         (Path(root) / folder).mkdir()
    ...         (Path(root) / folder / "1.jpeg").touch()
    ...     samples = imagenet_v2(root, ["n01443537", "n01440764"], num_images=2)
    >>> [(path.parent.name, label) for path, label in samples]
    [('1', 0), ('0', 1)]
    """
    folders = {synset: str(k) for k, synset in enumerate(imagenet_synsets())}
    labels = {folders[synset]: label for synset, label in _labels(synsets).items()}
    return _samples(Path(root), labels, num_images)


def imagenet_r(
    root: _Folder, synsets: Sequence[str] | None = None, *, num_images: int | None = 30_000
) -> tuple[list[Sample], list[int]]:
    """ImageNet-R (Hendrycks et al. 2021): renditions of 200 classes, with a folder for each.

    The arguments are those of `imagenet_v2`. Synsets without renditions have no images.

    Returns:
        Paths and labels in the model's classes, and the classes of the test set, for
        `evaluate(classes=...)`.

    Raises:
        ValueError: As for `imagenet_v2`, or no synset is one of ImageNet-R's.
    """
    subset = set(imagenet_r_synsets())
    own = {synset: label for synset, label in _labels(synsets).items() if synset in subset}
    if not own:
        raise InvalidValueError(
            "synsets must include some of imagenet_r_synsets(), got "
            f"{_few(synsets or [])}. Leave ImageNet-R out."
        )
    return _samples(Path(root), own, num_images), list(own.values())


def imagenet_c(
    root: _Folder,
    corruption: str,
    severity: int,
    synsets: Sequence[str] | None = None,
    *,
    num_images: int | None = 50_000,
) -> list[Sample]:
    """One test set of ImageNet-C: `root/fog/3/n01440764/ILSVRC2012_val_00000293.JPEG`.

    `root` has a folder for each corruption, one of `IMAGENET_C`, and in it one for each severity,
    from 1 to 5. All else is as for `imagenet_v2`.

    Raises:
        ValueError: As for `imagenet_v2`, or the corruption or the severity is unknown.
    """
    one_of("corruption", corruption, IMAGENET_C)
    integer("severity", severity, at_least=1, at_most=5, remedy="Pass 1 for the weakest.")
    folder = Path(root) / corruption / str(severity)
    return _samples(folder, _labels(synsets), num_images)


def _resource(name: str) -> tuple[str, ...]:
    text = (files("surrogap.evaluation") / "resources" / name).read_text(encoding="ascii")
    return tuple(text.split())


def _labels(synsets: Sequence[str] | None) -> dict[str, int]:
    known = imagenet_synsets()
    given = known if synsets is None else synsets
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise InvalidValueError(
            f"synsets must be among imagenet_synsets(), got {_few(unknown)}. ImageNet's test sets "
            "have images of these 1,000 synsets only."
        )
    return {synset: label for label, synset in enumerate(given)}


def _samples(root: Path, labels: Mapping[str, int], num_images: int | None) -> list[Sample]:
    """The images and labels in these folders."""
    _check_folders(root, list(labels))
    samples = [(path, label) for name, label in labels.items() for path in _images(root / name)]
    if num_images is not None and len(samples) != num_images:
        raise InvalidValueError(
            f"root must hold {num_images} images, got {len(samples)} in {root}. "
            "Unpack the test set again, or pass num_images=None for a subset of it."
        )
    without = sorted(set(labels.values()) - {label for _, label in samples})
    if without:
        names = [name for name, label in labels.items() if label in without]
        raise InvalidValueError(
            f"root must hold images of each class, got none in {_few(names)} of {root}. "
            "Unpack the test set again."
        )
    return samples


def _images(folder: Path) -> list[Path]:
    names = sorted(entry.name for entry in os.scandir(folder))
    return [
        folder / name
        for name in names
        if name.lower().endswith(_SUFFIXES) and not name.startswith(".")  # macOS leaves "._x.jpg"
    ]


def _check_folders(root: Path, expected: Sequence[str]) -> None:
    if not root.is_dir():
        raise InvalidValueError(
            f"root must be the folder of the test set, got {root}, which is not a folder. "
            "Pass the folder that it was unpacked to."
        )
    missing = [name for name in expected if not (root / name).is_dir()]
    if missing:
        raise InvalidValueError(
            f"root must hold the {len(expected)} folders {_few(expected)}, got {root} without "
            f"{_few(missing)}. Pass the folder that holds a folder for each class."
        )


def _label_lists(path: Path, num_classes: int) -> list[list[int]]:
    try:
        lists: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidValueError(
            f"labels must be a JSON file, got {path} ({error}). Pass the path of real.json."
        ) from error
    rows = lists if isinstance(lists, list) else [lists]
    wrong = [row for row in rows if not _are_classes(row, num_classes)]
    if wrong:
        raise InvalidValueError(
            f"labels must be a list of lists of classes below {num_classes}, got "
            f"{str(wrong[0])[:40]} in {path}. Pass the path of real.json."
        )
    return rows


def _are_classes(row: object, num_classes: int) -> bool:
    return isinstance(row, list) and all(
        isinstance(label, int) and 0 <= label < num_classes for label in row
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f", ... ({len(names)})" if len(names) > 3 else "")
