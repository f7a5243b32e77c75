"""Images and their labels: sets by name or path, augmentation, and loaders that can be resumed.

`load` finds a set and returns its `Splits`; `loader` makes the `Loader` of one split, which yields
`(images, targets)` on the device. Images are float32, NCHW, normalised by the set's mean and
standard deviation. Targets follow one rule: with mixup they are probabilities, float32 of
(batch, classes), in every batch; without it they are class numbers, int64 of (batch,).
`torch.nn.functional.cross_entropy` takes both.

Every random number comes from (seed, epoch, position), none from torch's global generator: a loader
resumed in mid-epoch yields the very batches that were left, and drawing from it changes nothing
else. This room needs the extra `train`, and `import surrogap` does not load it.
"""

from surrogap.errors import MissingPackageError

try:
    import numpy
    import PIL
    import torchvision
except ImportError as error:
    raise MissingPackageError(
        f"surrogap.data must have numpy, Pillow and torchvision, got {error}. "
        "Run pip install 'surrogap[train]'."
    ) from error

from surrogap.data.augmentation import AUGMENTATIONS, Augmentation
from surrogap.data.damaged import intact
from surrogap.data.loaders import FileLoader, Loader, TensorLoader, loader
from surrogap.data.mixup import mixup
from surrogap.data.randaugment import randaugment
from surrogap.data.sets import SETS, archive_of, load
from surrogap.data.splits import FileSet, Splits, TensorSet
from surrogap.data.streams import Batch
from surrogap.data.subsets import subset

__all__ = [
    "AUGMENTATIONS",
    "SETS",
    "Augmentation",
    "Batch",
    "FileLoader",
    "FileSet",
    "Loader",
    "Splits",
    "TensorLoader",
    "TensorSet",
    "archive_of",
    "intact",
    "load",
    "loader",
    "mixup",
    "randaugment",
    "subset",
]

del PIL, numpy, torchvision
