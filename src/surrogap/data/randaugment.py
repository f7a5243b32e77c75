"""RandAugment for whole batches, with different operations for each image.

torchvision's RandAugment draws its operations once per call, so a whole batch would share them.
Here they are drawn for each image, and torchvision's function is then called once for all images
with the same operation. The operations, their ranges and their order are torchvision's, and the
pixels are equal bit for bit, which a test checks.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

MAX_MAGNITUDE = 30

# Maps the strength at magnitude 30 to the strength at the magnitude in use.
_Level = Callable[[float], float]


def _affine(
    images: Tensor, *, shift: tuple[int, int] = (0, 0), slopes: tuple[float, float] = (0.0, 0.0)
) -> Tensor:
    result: Tensor = functional.affine(
        images,
        angle=0.0,
        translate=list(shift),
        scale=1.0,
        shear=[math.degrees(math.atan(slope)) for slope in slopes],
        center=[0, 0] if any(slopes) else None,
    )
    return result


_SIGNED: dict[str, Callable[[Tensor, _Level], Tensor]] = {
    "ShearX": lambda images, level: _affine(images, slopes=(level(0.3), 0.0)),
    "ShearY": lambda images, level: _affine(images, slopes=(0.0, level(0.3))),
    "TranslateX": lambda images, level: _affine(
        images, shift=(int(level(150 / 331 * images.shape[-1])), 0)
    ),
    "TranslateY": lambda images, level: _affine(
        images, shift=(0, int(level(150 / 331 * images.shape[-2])))
    ),
    "Rotate": lambda images, level: functional.rotate(images, level(30.0)),
    "Brightness": lambda images, level: functional.adjust_brightness(images, 1.0 + level(0.9)),
    "Color": lambda images, level: functional.adjust_saturation(images, 1.0 + level(0.9)),
    "Contrast": lambda images, level: functional.adjust_contrast(images, 1.0 + level(0.9)),
    "Sharpness": lambda images, level: functional.adjust_sharpness(images, 1.0 + level(0.9)),
}
_UNSIGNED: dict[str, Callable[[Tensor, _Level], Tensor]] = {
    "Identity": lambda images, level: images,
    "Posterize": lambda images, level: functional.posterize(images, 8 - round(level(4.0))),
    "Solarize": lambda images, level: functional.solarize(images, 255 * (1.0 - level(1.0))),
    "AutoContrast": lambda images, level: functional.autocontrast(images),
    "Equalize": lambda images, level: functional.equalize(images),
}
OPERATIONS = (*_SIGNED, *_UNSIGNED)


def operate(images: Tensor, operation: str, magnitude: int, sign: int = 1) -> Tensor:
    """Apply one operation of RandAugment to all images of a batch.

    Args:
        images: uint8, NCHW.
        operation: One of `OPERATIONS`.
        magnitude: From 0 to 30.
        sign: 1 or -1, for operations with two directions.

    >>> images = torch.full((1, 3, 2, 2), 100, dtype=torch.uint8)
    >>> int(operate(images, "Brightness", 30).max())
    190
    """

    def level(most: float) -> float:
        # linspace in float32 gives exactly torchvision's numbers.
        levels = torch.linspace(0.0, most, MAX_MAGNITUDE + 1, dtype=torch.float32)
        strength = float(levels[magnitude])
        return sign * strength if operation in _SIGNED else strength

    return (_SIGNED | _UNSIGNED)[operation](images, level)


def randaugment(
    images: Tensor, magnitude: int, generator: torch.Generator, num_operations: int = 2
) -> Tensor:
    """Apply RandAugment (Cubuk et al. 2020) to a batch, with different operations for each image.

    Args:
        images: uint8, NCHW, with one or three channels, on any device.
        magnitude: From 0 to 30, on torchvision's scale.
        generator: A generator on the CPU.
        num_operations: The number of operations in sequence.

    >>> images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    >>> randaugment(images, 10, torch.Generator().manual_seed(0)).shape
    torch.Size([4, 3, 8, 8])
    """
    for _ in range(num_operations):
        # A code is an operation with its sign; images with the same code are processed together.
        operation = torch.randint(len(OPERATIONS), (len(images),), generator=generator)
        sign = torch.randint(2, (len(images),), generator=generator)
        sign *= operation < len(_SIGNED)
        codes = 2 * operation + sign
        order = codes.argsort(stable=True).to(images.device)
        images, start, pieces = images[order], 0, []
        for code, count in enumerate(codes.bincount().tolist()):
            if count:
                piece = images[start : start + count]
                pieces.append(operate(piece, OPERATIONS[code // 2], magnitude, 1 - 2 * (code % 2)))
            start += count
        images = torch.empty_like(images).index_copy_(0, order, torch.cat(pieces))
    return images
