"""Reading of image files, in worker processes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional

from surrogap.data.order import Order
from surrogap.data.seeds import derived
from surrogap.data.splits import FileSet


class Request(NamedTuple):
    """A file to read, its label, and the seed of its augmentation."""

    path: str
    label: int
    seed: int


@final
class RequestSampler:
    """A batch sampler of requests, from a position in an epoch.

    It runs in the main process and sends paths and seeds to the workers: a list of a million files
    in each worker would take gigabytes.
    """

    def __init__(self, order: Order, dataset: FileSet) -> None:
        self.order = order
        self.dataset = dataset
        self.epoch = 0
        self.position = 0

    def __iter__(self) -> Iterator[list[Request]]:
        paths, labels = self.dataset.paths, self.dataset.labels
        images, seeds = self.order.images(self.epoch), (self.order.seed, self.epoch)
        for position in range(self.position, len(self.order)):
            indices = self.order.indices(position)
            yield [
                Request(paths[image], labels[image], derived("image", *seeds, index))
                for index, image in zip(indices.tolist(), images[indices].tolist(), strict=True)
            ]


@final
@dataclass(frozen=True)
class Unreadable:
    """A file that cannot be read as an image, and the reason.

    Workers return it as a value: DataLoader would put the traceback of an exception into the
    message.
    """

    path: str
    reason: str


@final
class Reader(Dataset[tuple[Tensor, int] | Unreadable]):
    """A torch dataset that reads and transforms images. Its indices are requests.

    Args:
        transform: A function from a PIL image to another. It may draw from torch's global
            generator, which is seeded for each image and restored.

    >>> reader = Reader(transform=None)
    >>> reader[Request("nowhere.png", label=0, seed=0)].path
    'nowhere.png'
    """

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __getitem__(self, request: Request) -> tuple[Tensor, int] | Unreadable:
        try:
            with Image.open(request.path) as file:
                image = _in_colour(file)
        except Exception as error:  # Pillow's formats raise errors of many kinds
            return Unreadable(request.path, reason_of(error))
        # CPU only: torch.manual_seed would also seed the GPUs, which fork_rng does not restore.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(request.seed)
            return functional.pil_to_tensor(self.transform(image)), request.label


def _in_colour(image: Image.Image) -> Image.Image:
    """Return the image as RGB with 8 bits per channel.

    Raises:
        ValueError: The range of its pixel values is unknown.
    """
    check_mode(image)
    if _has_16_bits(image):  # Pillow would clip them at 255
        return Image.fromarray((np.asarray(image) // 257).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def check_mode(image: Image.Image) -> None:
    """Check that the range of an image's pixel values is known, from its header alone.

    Raises:
        ValueError: The pixels are 32-bit integers or floats.
    """
    if image.mode in ("I", "F") and not _has_16_bits(image):
        raise ValueError(f"its pixels must have 8 or 16 bits, got Pillow's mode {image.mode}")


def _has_16_bits(image: Image.Image) -> bool:
    # Older versions of Pillow open 16-bit PNG files in mode "I".
    return image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG")


def reason_of(error: Exception) -> str:
    """Return a short reason why Pillow could not read a file.

    >>> reason_of(FileNotFoundError(2, "No such file or directory", "1.jpg"))
    'No such file or directory'
    """
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def collated(
    images: Sequence[tuple[Tensor, int] | Unreadable],
) -> tuple[Tensor, Tensor] | Unreadable:
    """Collate images into a batch, or return the first file that could not be read.

    >>> collated([(torch.zeros(3, 2, 2), 1), (torch.zeros(3, 2, 2), 0)])[1]
    tensor([1, 0])
    """
    read = []
    for image in images:
        if isinstance(image, Unreadable):
            return image
        read.append(image)
    pixels, labels = zip(*read, strict=True)
    return torch.stack(pixels), torch.tensor(labels)
