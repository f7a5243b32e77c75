"""Augmentation: crop, flip, RandAugment and mixup."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.transforms import v2

from surrogap.checks import integer, number, one_of
from surrogap.data.randaugment import MAX_MAGNITUDE, randaugment


@final
@dataclass(frozen=True)
class Augmentation:
    """An augmentation policy, applied in this order, with random numbers for each image.

    Args:
        crop: Crop at random. Small images in memory are padded with black by an eighth of their
            size (4 pixels of 32) and cropped; files get Inception's random resized crop (8 to
            100 % of the area, aspect ratio 3/4 to 4/3).
        flip: Flip horizontally with probability 0.5.
        magnitude: The magnitude of RandAugment on torchvision's scale, from 0 (none) to 30; two
            operations per image. The scale of timm and TensorFlow covers a similar range from 0
            to 10: their 10 is stronger than 10 here.
        mixup: The probability that an image is mixed with another of its batch. If above 0, all
            targets are probabilities.
        mixup_alpha: The parameter of the Beta distribution: mixed images are
            `lam * x_i + (1 - lam) * x_j` with lam from Beta(alpha, alpha). The authors of mixup use
            0.2 for ImageNet.

    Raises:
        TypeError: An argument is not a number.
        ValueError: A number is out of range.

    >>> AUGMENTATIONS["medium"]
    Augmentation(crop=True, flip=True, magnitude=10, mixup=0.2, mixup_alpha=0.2)
    """

    crop: bool = False
    flip: bool = False
    magnitude: int = 0
    mixup: float = 0.0
    mixup_alpha: float = 0.2

    def __post_init__(self) -> None:
        remedy = f"Pass an integer from 0 (none) to {MAX_MAGNITUDE}, such as 10."
        integer("magnitude", self.magnitude, at_least=0, at_most=MAX_MAGNITUDE, remedy=remedy)
        remedy = "Pass a probability such as 0.2, as the paper does, or 0 for no mixup."
        number("mixup", self.mixup, at_most=1.0, remedy=remedy)
        number("mixup_alpha", self.mixup_alpha, above=0.0, remedy="For no mixup pass mixup=0.")


# The paper's three policies (appendix, data augmentation), and none. The paper says "mixup with
# probability 0.2" and does not say how lam is drawn. Mixup(alpha=0.2) on every image is
# Augmentation(..., mixup=1.0).
AUGMENTATIONS = {
    "none": Augmentation(),
    "light": Augmentation(crop=True, flip=True),
    "medium": Augmentation(crop=True, flip=True, magnitude=10, mixup=0.2),
    "strong": Augmentation(crop=True, flip=True, magnitude=15, mixup=0.2),
}


def augmentation_of(augmentation: str | Augmentation) -> Augmentation:
    """Return an augmentation, given by name or as an `Augmentation`.

    Raises:
        ValueError: The name is unknown.

    >>> augmentation_of("light").flip
    True
    """
    if isinstance(augmentation, Augmentation):
        return augmentation
    return AUGMENTATIONS[
        one_of("augmentation", augmentation, AUGMENTATIONS, remedy="Or pass an Augmentation.")
    ]


def augmented(images: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
    """Crop, flip and apply RandAugment to a batch of small images. Mixup comes later.

    Shift, flip and operations are drawn for each image.

    Args:
        images: uint8, NCHW, on any device.
        augmentation: The policy.
        generator: A generator on the CPU, so that the numbers are the same on all devices.

    >>> images = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 4, 4)
    >>> augmented(images, Augmentation(flip=True), torch.Generator().manual_seed(3))[0, 0, 0]
    tensor([3, 2, 1, 0], dtype=torch.uint8)
    """
    if augmentation.crop or augmentation.flip:
        images = _cropped_and_flipped(images, augmentation, generator)
    if augmentation.magnitude:
        images = randaugment(images, augmentation.magnitude, generator)
    return images


def _cropped_and_flipped(
    images: Tensor, augmentation: Augmentation, generator: torch.Generator
) -> Tensor:
    """Crop and flip by indexing rows and columns, in one pass over the pixels."""
    number, channels, height, width = images.shape
    pad = max(height, width) // 8 if augmentation.crop else 0
    shifts = torch.randint(2 * pad + 1, (2, number, 1), generator=generator)
    rows = shifts[0] + torch.arange(height)
    columns = shifts[1] + torch.arange(width)
    if augmentation.flip:
        is_flipped = torch.rand(number, 1, generator=generator, dtype=torch.float32) < 0.5
        columns = torch.where(is_flipped, columns.flip(1), columns)
    rows, columns = rows.to(images.device), columns.to(images.device)
    image = torch.arange(number, device=images.device)
    channel = torch.arange(channels, device=images.device)
    return functional.pad(images, (pad, pad, pad, pad))[
        image[:, None, None, None], channel[:, None, None], rows[:, None, :, None],
        columns[:, None, None, :],
    ]  # fmt: skip


def transform_of_files(augmentation: Augmentation, size: int) -> Any:
    """Return torchvision's transform from a PIL image to one of `size` x `size` pixels.

    Without `crop` it is the evaluation transform: resize the shorter side to 8/7 of the size, then
    crop the centre. It draws from torch's global generator, which the caller seeds and restores.

    >>> from PIL import Image
    >>> transform_of_files(Augmentation(), 32)(Image.new("RGB", (80, 60))).size
    (32, 32)
    """
    steps: list[Any] = []
    if augmentation.crop:
        steps += [v2.RandomResizedCrop(size, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))]
    else:
        steps += [v2.Resize(round(size * 8 / 7)), v2.CenterCrop(size)]
    if augmentation.flip:
        steps += [v2.RandomHorizontalFlip()]
    if augmentation.magnitude:
        steps += [v2.RandAugment(num_ops=2, magnitude=augmentation.magnitude)]
    return v2.Compose(steps)
