"""The test sets of a trained model: its own, and distribution shifts of it.

Images in memory are corrupted on the fly. Models for ImageNet are evaluated on the published
variants of its validation set, if their folders exist.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor

from surrogap.data import FileSet, Splits, TensorSet, archive_of, intact, loader
from surrogap.data.damaged import OnChecked
from surrogap.errors import InvalidValueError
from surrogap.evaluation import (
    IMAGENET_C,
    corrupted,
    corruptions_of,
    imagenet_c,
    imagenet_r,
    imagenet_real,
    imagenet_synsets,
    imagenet_v2,
    label_sets,
)
from surrogap.evaluation.metrics import Truth
from surrogap.training.groups import DataConfig
from surrogap.training.images import images_of

Batches = Iterable[tuple[Tensor, Tensor]]
# Maps a dataset to the batches of its test split.
MakeBatches = Callable[[Splits], Batches]

SEVERITIES = range(1, 6)
# The names under which the additional test sets are published.
_USUAL_NAMES = {
    "votes": "cifar10h-counts.npy",
    "real": "real.json",
    "v2": "imagenetv2-matched-frequency-format-val",
    "r": "imagenet-r",
    "c": "imagenet-c",
}


@final
@dataclass(frozen=True)
class EvalSetPaths:
    """The paths of additional test sets; None for those that are missing.

    Attributes:
        votes: The number or fraction of people who chose each class for each test image, as in
            CIFAR-10H: an `.npy` file, or an `.npz` archive with `test_human_counts` or `counts`.
        real: The ReaL labels of ImageNet's validation set, `real.json`.
        v2: The folder of ImageNet-V2.
        r: The folder of ImageNet-R.
        c: The folder of ImageNet-C.
    """

    votes: Path | None = None
    real: Path | None = None
    v2: Path | None = None
    r: Path | None = None
    c: Path | None = None

    def or_found(self, data: str, data_root: Path) -> Self:
        """Return the paths, with those that are None replaced by test sets found in `data_root`.

        Args:
            data: The name or path of the dataset that the model was trained on.
            data_root: The folder of named datasets.
        """
        paths = asdict(self)
        for name in {"cifar10": ("votes",), "imagenet": ("real", "v2", "r", "c")}.get(data, ()):
            usual = data_root / _USUAL_NAMES[name]
            if paths[name] is None and usual.exists():
                paths[name] = usual
        paths["votes"] = paths["votes"] or archived_votes(data, data_root)
        return type(self)(**paths)


@final
@dataclass(frozen=True)
class EvalSet:
    """A test set.

    Attributes:
        name: The name.
        splits: A function that returns a dataset with the test set as its test split.
        truth: The kind of labels.
        labels: Labels of the images in their order; None for those of the test split.
        classes: The indices of the classes that occur in it; None for all.
        corruption: The corruption and its severity; None without one.
    """

    name: str
    splits: Callable[[], Splits]
    truth: Truth = "label"
    labels: Tensor | None = None
    classes: Sequence[int] | None = None
    corruption: tuple[str, int] | None = None

    def batches(self, make_batches: MakeBatches) -> Batches:
        """Return the batches of images and labels, in order."""
        batches = make_batches(self.splits())
        return batches if self.labels is None else _with_labels(batches, self.labels)


def _with_labels(batches: Batches, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    position = 0
    for images, _ in batches:
        yield images, labels[position : position + len(images)]
        position += len(images)


def eval_sets(
    splits: Splits, paths: EvalSetPaths, *, with_corruptions: bool = True
) -> Iterator[EvalSet]:
    """Yield the test sets of a model, its own test split first.

    Raises:
        ValueError: A test set does not fit the model, or is incomplete.
    """
    yield EvalSet("test", lambda: splits)
    if paths.votes is not None:
        yield _voted(splits, paths.votes)
    if any((paths.real, paths.v2, paths.r, paths.c)):
        yield from _imagenet(splits, paths)
    if with_corruptions and isinstance(splits.test, TensorSet):
        yield from _corrupted(splits)


def batch_maker(batch_size: int, device: torch.device, **settings: Any) -> MakeBatches:
    """Return a function that returns the batches of a test split, in order."""
    return lambda splits: loader(splits, "test", batch_size=batch_size, device=device, **settings)


def _corrupted(splits: Splits) -> Iterator[EvalSet]:
    def corrupt(name: str, severity: int) -> Splits:
        assert isinstance(splits.test, TensorSet)
        images = corrupted(splits.test.images, name, severity)
        return replace(splits, test=TensorSet(images, splits.test.labels))

    for name, severity in product(corruptions_of(splits.channels), SEVERITIES):
        made = partial(corrupt, name, severity)
        yield EvalSet(f"{name} {severity}", made, corruption=(name, severity))


def _voted(splits: Splits, path: Path) -> EvalSet:
    votes = read_votes(path)
    shape = (len(splits.test), len(splits.classes))
    if votes.shape != shape:
        raise InvalidValueError(
            f"votes must have a row for each test image and a column for each class, {shape}, got "
            f"{tuple(votes.shape)} in {path}. Pass the votes for this test set."
        )
    return EvalSet("votes", lambda: splits, truth="votes", labels=votes)


def read_votes(path: Path) -> Tensor:
    """Read the number or fraction of people who chose each class for each test image.

    Raises:
        ValueError: The file is missing, or does not hold votes.
    """
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            array = found if isinstance(found, np.ndarray) else _counts(found)
        return torch.from_numpy(array.astype(np.float64))
    except Exception as error:  # NumPy's error depends on how the file is damaged
        raise InvalidValueError(
            f"votes must be an .npy file of counts, or an .npz archive with test_human_counts, got "
            f"{path} ({error}). Pass a file such as cifar10h-counts.npy of CIFAR-10H."
        ) from error


def archived_votes(data: str, data_root: str | Path) -> Path | None:
    """Return the archive of a dataset if it holds human votes on the test images, else None."""
    path = archive_of(data, data_root)
    if path is None:
        return None
    with np.load(path, allow_pickle=False) as archive:
        return path if "test_human_counts" in archive.files else None


def _counts(archive: Mapping[str, np.ndarray]) -> np.ndarray:
    for name in ("test_human_counts", "counts"):
        if name in archive:
            return archive[name]
    raise ValueError(f"its arrays are {', '.join(archive) or 'missing'}")


def _imagenet(splits: Splits, paths: EvalSetPaths) -> Iterator[EvalSet]:
    synsets = _synsets(splits)
    if not isinstance(splits.test, FileSet):
        raise InvalidValueError(
            f"ImageNet's test sets require a run on image files, got {splits.name}, whose images "
            "are in memory. Leave them out."
        )
    # The number of images is known, and checked, for all of ImageNet only.
    settings: dict[str, Any] = {} if synsets is None else {"num_images": None}
    if paths.real is not None:
        if synsets is not None:
            raise InvalidValueError(
                "ImageNet-ReaL requires a run on all 1,000 classes of ImageNet, got "
                f"{splits.name} with {len(splits.classes)}. Leave {paths.real} out."
            )
        # The validation set is the run's own test split, in folders by class.
        root = Path(splits.test.paths[0]).parent.parent
        real = imagenet_real(root, paths.real)
        labels = label_sets([labels for _, labels in real], len(splits.classes))
        files = partial(_files, splits, [(path, 0) for path, _ in real])
        yield EvalSet("ImageNet-ReaL", files, truth="set", labels=labels)
    if paths.v2 is not None:
        samples = imagenet_v2(paths.v2, synsets, **settings)
        yield EvalSet("ImageNet-V2", partial(_files, splits, samples))
    if paths.r is not None:
        samples, classes = imagenet_r(paths.r, synsets, **settings)
        yield EvalSet("ImageNet-R", partial(_files, splits, samples), classes=classes)
    if paths.c is not None:
        for name, severity in product(IMAGENET_C, SEVERITIES):
            samples = imagenet_c(paths.c, name, severity, synsets, **settings)
            files = partial(_files, splits, samples)
            yield EvalSet(f"{name} {severity}", files, corruption=(name, severity))


def _files(splits: Splits, samples: Sequence[tuple[Path, int]]) -> Splits:
    paths, labels = zip(*samples, strict=True)
    return replace(splits, test=FileSet([str(path) for path in paths], labels))


def intact_test_images(config: DataConfig, *, download: bool, on_checked: OnChecked) -> Splits:
    """Return the splits of a run, after checking its test files for damage.

    Training files are not read in an evaluation, so they are not checked.

    Raises:
        ValueError: The dataset is missing, or a test file is damaged and may not be skipped.
    """
    splits = images_of(replace(config, skip_damaged=False), download=download)
    return intact(splits, ["test"], skip_damaged=config.skip_damaged, on_checked=on_checked)


def _synsets(splits: Splits) -> list[str] | None:
    """Return the classes as synsets, or None for all 1,000 of ImageNet.

    Raises:
        ValueError: Some of the classes are not synsets of ImageNet-1k.
    """
    known = imagenet_synsets()
    # torchvision names the classes of ImageNet in English.
    if splits.classes == known or (splits.name == "imagenet" and len(splits.classes) == len(known)):
        return None
    unknown = [name for name in splits.classes if name not in known]
    if unknown:
        raise InvalidValueError(
            "ImageNet's test sets require a run on ImageNet-1k, or on some of its 1,000 synsets, "
            f"got {splits.name}, whose classes include {', '.join(unknown[:3])}. Leave them out."
        )
    return list(splits.classes)
