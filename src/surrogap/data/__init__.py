"""Image datasets by name or path, augmentation, and resumable loaders.

`load` returns the `Splits` of a dataset. `loader` returns the `Loader` of one split, which yields
`(images, targets)` on the device. Images are float32, NCHW, normalised by the dataset's mean and
standard deviation. With mixup, targets are probabilities in every batch: float32 of shape
(batch, classes). Without it they are class indices: int64 of shape (batch,).
`torch.nn.functional.cross_entropy` takes both.

Random numbers depend only on (seed, epoch, position), and torch's global generator is not used. A
loader that is resumed mid-epoch therefore yields exactly the remaining batches. This package needs
the extra `train`; `import surrogap` does not load it.
"""

from surrogap.errors import MissingPackageError

try:
    import numpy
    import PIL
    import torchvision
except ImportError as error:
    raise MissingPackageError(
        f"surrogap.data needs numpy, Pillow and torchvision ({error}). "
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
