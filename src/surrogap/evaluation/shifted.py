"""ImageNet's test sets as they are published: which image has which label.

Each function takes the folder that a set was unpacked to, and checks that all of it is there: half
a test set gives a score like any other. Labels are places in the list of synsets, so that they are
the classes of a model that was trained on ImageNet, in all sets.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from surrogap.checks import integer, one_of
from surrogap.errors import InvalidValueError

Sample = tuple[Path, int]

# Of ImageNet-C: the fifteen that the benchmark is a mean of, and the four for validation.
IMAGENET_C = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur"),
    *("motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast"),
    *("elastic_transform", "pixelate", "jpeg_compression"),
)
IMAGENET_C_EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")

_SUFFIXES = (".jpeg", ".jpg", ".png")


def imagenet_synsets() -> tuple[str, ...]:
    """The 1,000 synsets of ImageNet, in the order of the classes.

    >>> imagenet_synsets()[0], len(imagenet_synsets())
    ('n01440764', 1000)
    """
    return _resource("imagenet_synsets.txt")


def imagenet_r_synsets() -> tuple[str, ...]:
    """The 200 synsets that ImageNet-R has.

    >>> len(set(imagenet_r_synsets()) & set(imagenet_synsets()))
    200
    """
    return _resource("imagenet_r_synsets.txt")


def imagenet_a_synsets() -> tuple[str, ...]:
    """The 200 synsets that ImageNet-A has.

    >>> len(set(imagenet_a_synsets()) & set(imagenet_synsets()))
    200
    """
    return _resource("imagenet_a_synsets.txt")


def imagenet_val(
    root: str | os.PathLike[str],
    synsets: Sequence[str] | None = None,
    *,
    num_images: int | None = 50_000,
) -> list[Sample]:
    """The validation set: `root/n01440764/ILSVRC2012_val_00000293.JPEG`.

    Args:
        root: The folder with a folder for each synset.
        synsets: In the order of the classes. None: ImageNet's.
        num_images: How many images there must be. None: any number.

    Returns:
        Paths and labels, by class and then by name.

    Raises:
        ValueError: A folder is missing or too much, or the number of images is another.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     for synset in ("n01440764", "n01443537"):
    ...         (Path(root) / synset).mkdir()
    ...         (Path(root) / synset / "1.JPEG").touch()
    ...     samples = imagenet_val(root, ["n01440764", "n01443537"], num_images=2)
    >>> [(path.parent.name, label) for path, label in samples]
    [('n01440764', 0), ('n01443537', 1)]
    """
    return _samples(Path(root), _numbered(_given(synsets)), num_images)


def imagenet_real(
    root: str | os.PathLike[str],
    labels: str | os.PathLike[str],
    synsets: Sequence[str] | None = None,
    *,
    num_images: int | None = 50_000,
) -> list[tuple[Path, list[int]]]:
    """The validation set with all labels that are right (ReaL, Beyer et al. 2020).

    Args:
        root: The validation set's folder, as for `imagenet_val`.
        labels: The file `real.json`: a list of labels for each image, in the order of the images'
            names. Where it is empty, nobody knows; `evaluate(truth="set")` leaves these out.
        synsets: In the order of the classes. None: ImageNet's.
        num_images: How many images there must be. None: as many as there are lists.

    Returns:
        Paths and lists of labels, by the images' names.

    Raises:
        ValueError: A folder is missing or too much, the number of images is another, the file is no
            list of lists of classes, or two images have one name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     for synset, name in (("n01440764", "2.JPEG"), ("n01443537", "1.JPEG")):
    ...         (Path(root) / synset).mkdir()
    ...         (Path(root) / synset / name).touch()
    ...     real = Path(root) / "real.json"
    ...     _ = real.write_text("[[], [0, 1]]")
    ...     samples = imagenet_real(root, real, ["n01440764", "n01443537"], num_images=2)
    >>> [(path.name, labels) for path, labels in samples]
    [('1.JPEG', []), ('2.JPEG', [0, 1])]
    """
    samples = imagenet_val(root, synsets, num_images=num_images)
    paths = sorted((path for path, _ in samples), key=lambda path: path.name)
    lists = _label_lists(Path(labels), len(_given(synsets)))
    twice = [name for name, n in Counter(path.name for path in paths).items() if n > 1]
    if twice:
        raise InvalidValueError(
            f"root must hold images of different names, got {_few(twice)} more than once in "
            f"{root}. The labels follow the names: unpack the set anew."
        )
    if len(lists) != len(paths):
        raise InvalidValueError(
            f"labels must have a list for each of the {len(paths)} images, got {len(lists)} in "
            f"{labels}. Pass the whole validation set, and the real.json that belongs to it."
        )
    return list(zip(paths, lists, strict=True))


def imagenet_v2(
    root: str | os.PathLike[str], *, num_classes: int = 1000, num_images: int | None = 10_000
) -> list[Sample]:
    """ImageNet-V2 (Recht et al. 2019): `root/0` to `root/999`, named by the class's number.

    Args:
        root: The folder of one of its three variants, such as
            `imagenetv2-matched-frequency-format-val`.
        num_classes: How many classes there are.
        num_images: How many images there must be. None: any number.

    Returns:
        Paths and labels, by class as a number (as text, 10 would come before 2) and then by name.

    Raises:
        ValueError: A folder is missing or too much, or the number of images is another.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     for number in range(11):
    ...         (Path(root) / str(number)).mkdir()
    ...         (Path(root) / str(number) / "a.jpeg").touch()
    ...     samples = imagenet_v2(root, num_classes=11, num_images=11)
    >>> samples[2][0].parent.name, samples[2][1]
    ('2', 2)
    """
    return _samples(Path(root), {str(k): k for k in range(num_classes)}, num_images)


def imagenet_r(
    root: str | os.PathLike[str],
    synsets: Sequence[str] | None = None,
    subset: Sequence[str] | None = None,
    *,
    num_images: int | None = 30_000,
) -> tuple[list[Sample], list[int]]:
    """ImageNet-R (Hendrycks et al. 2021): renditions of 200 classes, a folder for each.

    Args:
        root: The folder `imagenet-r`.
        synsets: All synsets in the order of the model's classes. None: ImageNet's.
        subset: Those that the set has. None: ImageNet-R's.
        num_images: How many images there must be. None: any number.

    Returns:
        Paths and labels in the model's classes, and the classes that the set has: pass these on as
        `evaluate(classes=...)`.

    Raises:
        ValueError: A folder is missing or too much, the number of images is another, or the subset
            is none of the synsets.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     (Path(root) / "n2").mkdir()
    ...     (Path(root) / "n2" / "art_0.jpg").touch()
    ...     samples, classes = imagenet_r(root, ["n1", "n2", "n3"], ["n2"], num_images=1)
    >>> samples[0][1], classes
    (1, [1])
    """
    return _part(root, synsets, imagenet_r_synsets() if subset is None else subset, num_images)


def imagenet_a(
    root: str | os.PathLike[str],
    synsets: Sequence[str] | None = None,
    subset: Sequence[str] | None = None,
    *,
    num_images: int | None = 7_500,
) -> tuple[list[Sample], list[int]]:
    """ImageNet-A (Hendrycks et al. 2021): hard photographs of 200 classes, as `imagenet_r`.

    Args:
        root: The folder `imagenet-a`.
        synsets: All synsets in the order of the model's classes. None: ImageNet's.
        subset: Those that the set has. None: ImageNet-A's.
        num_images: How many images there must be. None: any number.

    Returns:
        Paths and labels in the model's classes, and the classes that the set has.

    Raises:
        ValueError: As `imagenet_r`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     (Path(root) / "n3").mkdir()
    ...     (Path(root) / "n3" / "0.jpg").touch()
    ...     samples, classes = imagenet_a(root, ["n1", "n2", "n3"], ["n3"], num_images=1)
    >>> samples[0][1], classes
    (2, [2])
    """
    return _part(root, synsets, imagenet_a_synsets() if subset is None else subset, num_images)


def imagenet_c(
    root: str | os.PathLike[str],
    corruption: str,
    severity: int,
    synsets: Sequence[str] | None = None,
    *,
    num_images: int | None = 50_000,
) -> list[Sample]:
    """One of ImageNet-C's sets: `root/fog/3/n01440764/ILSVRC2012_val_00000293.JPEG`.

    Args:
        root: The folder with a folder for each corruption.
        corruption: One of `IMAGENET_C` or `IMAGENET_C_EXTRA`.
        severity: From 1 to 5.
        synsets: In the order of the classes. None: ImageNet's.
        num_images: How many images there must be. None: any number.

    Returns:
        Paths and labels, by class and then by name.

    Raises:
        ValueError: The corruption or the severity does not exist, a folder is missing or too much,
            or the number of images is another.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     folder = Path(root) / "fog" / "3" / "n01440764"
    ...     folder.mkdir(parents=True)
    ...     (folder / "1.JPEG").touch()
    ...     samples = imagenet_c(root, "fog", 3, ["n01440764"], num_images=1)
    >>> len(samples)
    1
    """
    known = (*IMAGENET_C, *IMAGENET_C_EXTRA)
    one_of("corruption", corruption, known)
    integer("severity", severity, at_least=1, at_most=5, remedy="Pass 1 for the weakest.")
    folder = Path(root) / corruption / str(severity)
    return _samples(folder, _numbered(_given(synsets)), num_images)


def mean_over_corruptions(values: Mapping[tuple[str, int], float]) -> float:
    """The mean over corruptions and severities of a score, such as accuracy.

    Args:
        values: By corruption and severity; each corruption has the same severities.

    Raises:
        ValueError: There are none, or some severities are missing.

    >>> mean_over_corruptions({("fog", 1): 0.75, ("fog", 2): 0.25, ("snow", 1): 1, ("snow", 2): 0})
    0.5
    """
    if not values:
        raise InvalidValueError(
            "values must hold at least one score, got none. Evaluate a set first."
        )
    names, severities = ({key[i] for key in values} for i in (0, 1))
    missing = [(a, b) for a in names for b in severities if (a, b) not in values]
    if missing:
        raise InvalidValueError(
            f"values must hold the same severities for each corruption, got none for "
            f"{_few(sorted(map(str, missing)))}. Evaluate these too, or leave the corruption out."
        )
    return sum(values.values()) / len(values)


def mean_corruption_error(accuracies: Mapping[tuple[str, int], float]) -> float:
    """The mean error over corruptions and severities: `1 - mean_over_corruptions(accuracies)`.

    The "mCE" that papers report for ImageNet-C is another number: it divides the errors of each
    corruption by AlexNet's before the mean. This one is not normalised, as is usual for CIFAR-10-C.

    Args:
        accuracies: By corruption and severity; each corruption has the same severities.

    Raises:
        ValueError: There are none, or some severities are missing.

    >>> mean_corruption_error({("fog", 1): 0.75, ("fog", 2): 0.5})
    0.375
    """
    return 1 - mean_over_corruptions(accuracies)


def _resource(name: str) -> tuple[str, ...]:
    text = (files("surrogap.evaluation") / "resources" / name).read_text(encoding="ascii")
    return tuple(text.split())


def _given(synsets: Sequence[str] | None) -> Sequence[str]:
    return imagenet_synsets() if synsets is None else synsets


def _numbered(synsets: Sequence[str]) -> dict[str, int]:
    labels = {synset: label for label, synset in enumerate(synsets)}
    if len(labels) < len(synsets) or not labels:
        raise InvalidValueError(
            f"synsets must be different names, and one or more, got {len(synsets)} of which "
            f"{len(labels)} differ. Pass None for ImageNet's."
        )
    return labels


def _part(
    root: str | os.PathLike[str],
    synsets: Sequence[str] | None,
    subset: Sequence[str],
    num_images: int | None,
) -> tuple[list[Sample], list[int]]:
    labels = _numbered(_given(synsets))
    unknown = [synset for synset in subset if synset not in labels]
    if unknown:
        raise InvalidValueError(
            f"subset must be a part of the synsets, got {_few(unknown)} beside them. "
            "Pass all of the model's classes as synsets."
        )
    part = {synset: label for synset, label in labels.items() if synset in set(subset)}
    return _samples(Path(root), part, num_images), list(part.values())


def _samples(root: Path, labels: Mapping[str, int], num_images: int | None) -> list[Sample]:
    """The images in each of these folders, which must be all there are."""
    _check_folders(root, labels)
    samples = [(path, label) for name, label in labels.items() for path in _images(root / name)]
    if num_images is not None and len(samples) != num_images:
        raise InvalidValueError(
            f"root must hold {num_images} images, got {len(samples)} in {root}. "
            "Unpack the set anew, or pass num_images=None to use a part of it."
        )
    without = sorted(set(labels.values()) - {label for _, label in samples})
    if without:
        names = [name for name, label in labels.items() if label in without]
        raise InvalidValueError(
            f"root must hold images of each class, got none in {_few(names)} of {root}. "
            "Unpack the set anew."
        )
    return samples


def _images(folder: Path) -> list[Path]:
    names = sorted(entry.name for entry in os.scandir(folder))
    return [
        folder / name
        for name in names
        if name.lower().endswith(_SUFFIXES) and not name.startswith(".")  # macOS leaves "._x.jpg"
    ]


def _check_folders(root: Path, expected: Collection[str]) -> None:
    if not root.is_dir():
        raise InvalidValueError(
            f"root must be the folder of the set, got {root}, which is no folder. "
            "Pass where it was unpacked."
        )
    found = {e.name for e in os.scandir(root) if e.is_dir() and not e.name.startswith(".")}
    missing = [name for name in expected if name not in found]
    others = sorted(found - set(expected))
    if missing or others:
        got = [f"without {_few(missing)}"] * bool(missing) + [f"with {_few(others)}"] * bool(others)
        raise InvalidValueError(
            f"root must hold the {len(expected)} folders {_few(list(expected))} and no others, got "
            f"{root} {' and '.join(got)}. Pass the folder that holds a folder for each class."
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
