"""The sets that a trained network is scored on: its own test set, and what is shifted from it.

Small images in memory are corrupted on the fly. Networks for ImageNet are scored on the sets that
are published for it, where their folders are.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from surrogap.data import FileSet, Splits, TensorSet, loader
from surrogap.evaluation import (
    CORRUPTIONS,
    IMAGENET_C,
    corrupted,
    imagenet_c,
    imagenet_r,
    imagenet_r_synsets,
    imagenet_real,
    imagenet_v2,
    label_sets,
)
from surrogap.evaluation.metrics import Truth

Batches = Iterable[tuple[Tensor, Tensor]]
# From a set of images to its batches, as the network wants them.
Loading = Callable[[Splits], Batches]

SEVERITIES = range(1, 6)
_SYNSET = re.compile(r"n\d{8}")


@final
@dataclass(frozen=True)
class Places:
    """The paths of test sets beside the run's own images; None for those that are missing.

    Attributes:
        votes: How many people chose each class for each test image, as CIFAR-10H has it, or which
            part of them: an `.npy` file, or an `.npz` archive with `test_human_counts` or `counts`.
        real: ReaL's labels of ImageNet's validation set, `real.json`.
        v2: ImageNet-V2.
        r: ImageNet-R.
        c: ImageNet-C.
    """

    votes: Path | None = None
    real: Path | None = None
    v2: Path | None = None
    r: Path | None = None
    c: Path | None = None


@final
@dataclass(frozen=True)
class Trial:
    """Something to score a network on.

    Attributes:
        name: What it is.
        batches: Makes its batches.
        truth: What their labels are.
        classes: The classes that it has, if not all.
        corruption: The corruption and its severity; None without one.
    """

    name: str
    batches: Callable[[], Batches]
    truth: Truth = "label"
    classes: Sequence[int] | None = None
    corruption: tuple[str, int] | None = None


def trials(
    splits: Splits, places: Places, loading: Loading, *, with_corruptions: bool = True
) -> Iterator[Trial]:
    """The sets that there are for a network, its own test set first.

    Args:
        splits: What it was trained on.
        places: Where the others are.
        loading: Makes batches.
        with_corruptions: Whether to corrupt images that are in memory.

    Raises:
        ValueError: A set does not suit the network, or is not whole.
    """
    yield Trial("test", partial(loading, splits))
    if places.votes is not None:
        yield _voted(splits, places.votes, loading)
    yield from _imagenet(splits, places, loading)
    if with_corruptions and isinstance(splits.test, TensorSet):
        yield from _corrupted(splits, loading)


def loading_of(batch_size: int, device: torch.device, **settings: Any) -> Loading:
    """Makes batches of the part "test", in its order."""
    return lambda splits: loader(splits, "test", batch_size=batch_size, device=device, **settings)


def _corrupted(splits: Splits, loading: Loading) -> Iterator[Trial]:
    def batches(name: str, severity: int) -> Batches:
        assert isinstance(splits.test, TensorSet)
        images = corrupted(splits.test.images, name, severity)
        return loading(replace(splits, test=TensorSet(images, splits.test.labels)))

    for name in CORRUPTIONS:
        if name == "saturate" and splits.channels == 1:  # grey has no colour to change
            continue
        for severity in SEVERITIES:
            made = partial(batches, name, severity)
            yield Trial(f"{name} {severity}", made, corruption=(name, severity))


def _voted(splits: Splits, path: Path, loading: Loading) -> Trial:
    votes = read_votes(path)
    shape = (len(splits.test), len(splits.classes))
    if votes.shape != shape:
        raise ValueError(
            f"votes must have a row for each test image and a column for each class, {shape}, got "
            f"{tuple(votes.shape)} in {path}. Pass those of this test set."
        )
    return Trial("votes", lambda: _with_truth(loading(splits), votes), truth="votes")


def read_votes(path: Path) -> Tensor:
    """Read the number, or the share, of people who chose each class for each test image.

    Raises:
        ValueError: There is no such file, or it holds something else.
    """
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            array = found if isinstance(found, np.ndarray) else _counts(found)
        if array.dtype.kind not in "iuf":
            raise ValueError(f"its numbers are {array.dtype}")
        votes = torch.from_numpy(array.astype(np.float64))
        if not votes.isfinite().all():
            raise ValueError("some of its numbers are not finite")
    except Exception as error:  # what is damaged decides which kind
        raise ValueError(
            f"votes must be an .npy file of counts, or an .npz archive with test_human_counts, got "
            f"{path} ({error}). Pass cifar10h-counts.npy, as it is published."
        ) from error
    return votes


def has_votes(path: Path) -> bool:
    """Return whether a set's archive holds people's votes on its test images."""
    if path.suffix != ".npz" or not path.is_file():
        return False
    with np.load(path, allow_pickle=False) as archive:
        return "test_human_counts" in archive.files


def _counts(archive: Mapping[str, np.ndarray]) -> np.ndarray:
    for name in ("test_human_counts", "counts"):
        if name in archive:
            return archive[name]
    raise ValueError(f"it has {', '.join(archive) or 'nothing'}")


def _with_truth(batches: Batches, truth: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a set in its order, with another truth for each image."""
    position = 0
    for images, _ in batches:
        yield images, truth[position : position + len(images)]
        position += len(images)


def _imagenet(splits: Splits, places: Places, loading: Loading) -> Iterator[Trial]:
    if not any((places.real, places.v2, places.r, places.c)):
        return
    synsets = _synsets(splits)
    _check_are_files(splits)
    # All of ImageNet must be there to the last image; of a part of its classes nobody knows.
    settings: dict[str, Any] = {} if synsets is None else {"num_images": None}
    if places.real is not None:
        yield _real(splits, places.real, synsets, loading, settings)
    if places.v2 is not None:
        samples = imagenet_v2(places.v2, num_classes=len(splits.classes), **settings)
        yield Trial("ImageNet-V2", partial(_files, splits, samples, loading))
    if places.r is not None:
        subset = None if synsets is None else [s for s in imagenet_r_synsets() if s in synsets]
        samples, classes = imagenet_r(places.r, synsets, subset, **settings)
        made = partial(_files, splits, samples, loading)
        yield Trial("ImageNet-R", made, classes=classes)
    if places.c is not None:
        for name in IMAGENET_C:
            for severity in SEVERITIES:
                samples = imagenet_c(places.c, name, severity, synsets, **settings)
                made = partial(_files, splits, samples, loading)
                yield Trial(f"{name} {severity}", made, corruption=(name, severity))


def _synsets(splits: Splits) -> list[str] | None:
    """The classes as synsets, or None for all of ImageNet's.

    Raises:
        ValueError: The network knows other classes.
    """
    if len(splits.classes) == 1000 and (
        splits.name == "imagenet" or all(map(_SYNSET.fullmatch, splits.classes))
    ):
        return None
    if all(map(_SYNSET.fullmatch, splits.classes)):
        return list(splits.classes)
    raise ValueError(
        "ImageNet's shifted sets must go with a run on ImageNet, or on some of its synsets, got "
        f"{splits.name} with the classes {', '.join(splits.classes[:3])}, ... Leave them out."
    )


def _check_are_files(splits: Splits) -> None:
    if not isinstance(splits.test, FileSet):
        raise ValueError(
            f"ImageNet's shifted sets must go with a run on image files, got {splits.name}, whose "
            "images are in memory. Leave them out."
        )


def _files(splits: Splits, samples: Sequence[tuple[Path, int]], loading: Loading) -> Batches:
    paths, labels = zip(*samples, strict=True)
    part = FileSet([str(path) for path in paths], labels)
    return loading(replace(splits, test=part))


def _real(
    splits: Splits,
    path: Path,
    synsets: Sequence[str] | None,
    loading: Loading,
    settings: dict[str, Any],
) -> Trial:
    # The validation set is the run's own test set: its folder is two above an image.
    assert isinstance(splits.test, FileSet)
    root = Path(splits.test.paths[0]).parent.parent
    samples = imagenet_real(root, path, synsets, **settings)
    sets = label_sets([labels for _, labels in samples], len(splits.classes))
    ordered = [(path, 0) for path, _ in samples]
    made: Callable[[], Batches] = lambda: _with_truth(_files(splits, ordered, loading), sets)  # noqa: E731
    return Trial("ImageNet-ReaL", made, truth="set")
