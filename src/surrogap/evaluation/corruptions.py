"""CIFAR-10-C, computed on demand: corruptions of small images in five severities.

The definitions and severities are those of CIFAR-10-C's generator (Hendrycks and Dietterich 2019,
`make_cifar_c.py` of github.com/hendrycks/robustness), for images of 32 pixels; other sizes are
corrupted by the same rules. The random numbers differ, so scores are close to those on the
published files, not equal. Twelve of its nineteen corruptions are implemented; motion, zoom and
glass blur, snow, frost, spatter and elastic are not. A mean over these twelve is therefore not the
published mean over fifteen.

Each image has its own stream of random numbers, from the seed and the image's index. The result
therefore does not depend on the device, and one seed gives the same noise in each severity, only
stronger.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from surrogap.checks import check_seed, integer, one_of
from surrogap.errors import InvalidTypeError, InvalidValueError

# Added before truncation: a value just below an integer is rounding noise.
_ROUNDING = 1e-6
# The number of images that are in float64 at a time. At 32 pixels they fit into the CPU's cache:
# the twelve corruptions take half as long as with a thousand images at a time.
_CHUNK = 64


@final
class Noise:
    """Random numbers for some images of a test set, from the CPU's generator on any device.

    Each call restarts the streams, so a corruption may call only one method, once.

    Args:
        seed: The seed of the test set.
        indices: The index of each image in the test set.

    >>> whole = Noise(0, range(4)).normal(2)
    >>> torch.equal(whole[2:], Noise(0, [2, 3]).normal(2))
    True
    """

    def __init__(self, seed: int, indices: Sequence[int]) -> None:
        # torch seeds with 32 bits. Knuth's multiplier keeps the streams of two seeds apart.
        self._seeds = [(seed * 2_654_435_761 + index) % 2**32 for index in indices]
        self._generator = torch.Generator()

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers of shape (images, *shape)."""
        return self._each(lambda _, rng: torch.randn(shape, dtype=torch.float64, generator=rng))

    def uniform(self, *shape: int) -> Tensor:
        """Numbers in [0, 1) of shape (images, *shape)."""
        return self._each(lambda _, rng: torch.rand(shape, dtype=torch.float64, generator=rng))

    def poisson(self, rates: Tensor) -> Tensor:
        """Poisson counts with these expectations, which have a row for each image."""
        rates = rates.cpu()
        return self._each(lambda i, rng: torch.poisson(rates[i], generator=rng))

    def _each(self, draw: Callable[[int, torch.Generator], Tensor]) -> Tensor:
        generator = self._generator
        return torch.stack(
            [draw(i, generator.manual_seed(seed)) for i, seed in enumerate(self._seeds)]
        )


@final
@dataclass(frozen=True)
class Corruption:
    """A corruption and its strengths.

    Attributes:
        function: Maps uint8 images, a strength and noise to uint8 images.
        strengths: The strengths for severities 1 to 5.

    >>> CORRUPTIONS["contrast"].strengths
    (0.75, 0.5, 0.4, 0.3, 0.15)
    """

    function: Callable[[Tensor, Any, Noise], Tensor]
    strengths: tuple[Any, Any, Any, Any, Any]


def _unit(images: Tensor) -> Tensor:
    return images.double() / 255


def _bytes(x: Tensor) -> Tensor:
    """Clip to [0, 1] and truncate instead of rounding, the original's conversion to uint8."""
    return (x.clamp(0, 1) * 255 + _ROUNDING).to(torch.uint8)


def gaussian_noise(images: Tensor, scale: float, noise: Noise) -> Tensor:
    """`x + scale * z`, z standard normal."""
    return _bytes(_unit(images) + scale * noise.normal(*images.shape[1:]).to(images.device))


def speckle_noise(images: Tensor, scale: float, noise: Noise) -> Tensor:
    """`x + x * scale * z`, z standard normal."""
    x = _unit(images)
    return _bytes(x + x * scale * noise.normal(*images.shape[1:]).to(images.device))


def shot_noise(images: Tensor, photons: float, noise: Noise) -> Tensor:
    """`Poisson(x * photons) / photons`."""
    return _bytes(noise.poisson(_unit(images) * photons).to(images.device) / photons)


def impulse_noise(images: Tensor, amount: float, noise: Noise) -> Tensor:
    """Salt and pepper: a value becomes 0 or 1, each with probability `amount / 2`."""
    hit, salt = noise.uniform(2, *images.shape[1:]).to(images.device).unbind(1)
    return torch.where(hit < amount, torch.where(salt < 0.5, 255, 0), images).to(torch.uint8)


def _bell(sigma: float, radius: int, device: torch.device) -> Tensor:
    """A sampled Gaussian, normalized to a sum of 1."""
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float64, device=device)
    weights = torch.exp(-(offsets**2) / (2 * sigma**2))
    return weights / weights.sum()


def _filtered(x: Tensor, kernel: Tensor, border: str) -> Tensor:
    """Correlate each channel with a kernel of odd size, at the same image size."""
    (height, width), planes = kernel.shape, x.flatten(0, 1)[:, None]
    planes = pad(planes, (width // 2, width // 2, height // 2, height // 2), mode=border)
    return conv2d(planes, kernel[None, None])[:, 0].view_as(x)


def gaussian_blur(images: Tensor, sigma: float, noise: Noise) -> Tensor:
    """A Gaussian, truncated at four sigma, with replicated borders."""
    bell = _bell(sigma, int(4 * sigma + 0.5), images.device)
    x = _filtered(_unit(images), bell[:, None], "replicate")
    return _bytes(_filtered(x, bell[None], "replicate"))


def defocus_blur(images: Tensor, strength: tuple[float, float], noise: Noise) -> Tensor:
    """A disk with soft edges, with reflected borders."""
    radius, softness = strength
    half = int(radius) + 1
    offsets = torch.arange(-half, half + 1, dtype=torch.float64, device=images.device)
    disk = (offsets[:, None] ** 2 + offsets**2 <= radius**2).double()
    bell = _bell(softness, 1, images.device)
    kernel = conv2d((disk / disk.sum())[None, None], torch.outer(bell, bell)[None, None], padding=1)
    return _bytes(_filtered(_unit(images), kernel[0, 0], "reflect"))


def contrast(images: Tensor, factor: float, noise: Noise) -> Tensor:
    """`mean + factor * (x - mean)`, with the mean of each channel of each image."""
    x = _unit(images)
    mean = x.mean((2, 3), keepdim=True)
    return _bytes(mean + factor * (x - mean))


def brightness(images: Tensor, shift: float, noise: Noise) -> Tensor:
    """Add `shift` to the value of HSV, the largest channel; hue and saturation stay the same."""
    x = _unit(images)
    value = x.amax(1, keepdim=True)
    brighter = (value + shift).clamp(max=1)
    # A colour of given hue and saturation is proportional to its value; black has neither.
    return _bytes(torch.where(value > 0, x * brighter / value, brighter))


def saturate(images: Tensor, strength: tuple[float, float], noise: Noise) -> Tensor:
    """The saturation of HSV times a factor, plus a shift; hue and value stay the same."""
    if images.shape[1] != 3:
        raise InvalidValueError(
            f"images must have three channels for 'saturate', got {images.shape[1]}. "
            "Grey images have no saturation: leave this corruption out."
        )
    factor, shift = strength
    x = _unit(images)
    value = x.amax(1, keepdim=True)
    span = value - x.amin(1, keepdim=True)
    # The hue: the distance of each channel from the value, relative to the largest. Grey is red.
    red = x.new_tensor([0.0, 1.0, 1.0])[:, None, None]
    hue = torch.where(span > 0, (value - x) / span, red)
    saturation = torch.where(value > 0, span / value, 0.0)
    return _bytes(value * (1 - hue * (saturation * factor + shift).clamp(0, 1)))


def _with_pillow(images: Tensor, change: Callable[[Any], Any]) -> Tensor:
    """Apply a function from PIL images to PIL images, on the CPU."""
    # Only two corruptions need torchvision, whose import takes seconds.
    from torchvision.transforms.functional import pil_to_tensor, to_pil_image

    changed = [pil_to_tensor(change(to_pil_image(image))) for image in images.cpu()]
    return torch.stack(changed).to(images.device)


def jpeg_compression(images: Tensor, quality: int, noise: Noise) -> Tensor:
    """Encode as JPEG and decode."""
    from PIL import Image

    def compressed(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return _with_pillow(images, compressed)


def pixelate(images: Tensor, factor: float, noise: Noise) -> Tensor:
    """Downsample by a factor and upsample again, with box filters."""
    from PIL.Image import Resampling

    height, width = images.shape[2:]
    small, box = (int(width * factor), int(height * factor)), Resampling.BOX
    return _with_pillow(images, lambda image: image.resize(small, box).resize((width, height), box))


def _plasma(uniforms: Tensor, size: int, decay: float) -> Tensor:
    """Periodic clouds in [0, 1], by the diamond-square algorithm.

    A point halfway between four others is their mean plus a random number, which shrinks by
    `decay**2` with each halving. Levels of 1, 4, 16, ... cells take three numbers for each cell, in
    all `size**2 - 1`.
    """
    clouds = torch.zeros(len(uniforms), size, size, dtype=torch.float64, device=uniforms.device)
    wibble, step = 100.0, size
    while step >= 2:
        num, half = size // step, step // 2
        level = uniforms[:, num**2 : 4 * num**2].view(-1, 3, num, num)
        bumps = wibble**2 * (2 * level - 1)
        corners = clouds[:, ::step, ::step]
        below = corners + corners.roll(-1, 1)
        middles = (below + below.roll(-1, 2)) / 4 + bumps[:, 0]
        clouds[:, half::step, half::step] = middles
        tops = corners + corners.roll(-1, 2) + middles + middles.roll(1, 1)
        sides = corners + corners.roll(-1, 1) + middles + middles.roll(1, 2)
        clouds[:, ::step, half::step] = tops / 4 + bumps[:, 1]
        clouds[:, half::step, ::step] = sides / 4 + bumps[:, 2]
        wibble, step = wibble / decay, half
    low, high = clouds.amin((1, 2), keepdim=True), clouds.amax((1, 2), keepdim=True)
    return (clouds - low) / (high - low)


def fog(images: Tensor, strength: tuple[float, float], noise: Noise) -> Tensor:
    """`(x + density * clouds) * max(x) / (max(x) + density)`, same clouds for each channel."""
    density, decay = strength
    height, width = images.shape[2:]
    size = 2 ** math.ceil(math.log2(max(height, width)))
    clouds = _plasma(noise.uniform(size**2).to(images.device), size, decay)
    x = _unit(images)
    most = x.amax((1, 2, 3), keepdim=True)
    return _bytes((x + density * clouds[:, None, :height, :width]) * most / (most + density))


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": Corruption(gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": Corruption(shot_noise, (500, 250, 100, 75, 50)),
    "impulse_noise": Corruption(impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "speckle_noise": Corruption(speckle_noise, (0.06, 0.1, 0.12, 0.16, 0.2)),
    "gaussian_blur": Corruption(gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    "defocus_blur": Corruption(
        defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))
    ),
    "fog": Corruption(fog, ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))),
    "brightness": Corruption(brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": Corruption(contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    # The first two reduce the saturation, the others increase it.
    "saturate": Corruption(saturate, ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2))),
    "pixelate": Corruption(pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": Corruption(jpeg_compression, (80, 65, 58, 50, 40)),
}


def corruptions_of(channels: int) -> list[str]:
    """Return the corruptions of images with one or three channels: grey ones have no saturation."""
    return [name for name in CORRUPTIONS if name != "saturate" or channels == 3]


def corrupted(images: Tensor, name: str, severity: int, seed: int = 0) -> Tensor:
    """Return corrupted images, on the device of the images.

    Args:
        images: uint8 of shape (images, channels, height, width), with one or three channels, and
            sides of at least four pixels.
        name: One of `CORRUPTIONS`.
        severity: From 1, the weakest, to 5.
        seed: The seed of the noise.

    Raises:
        TypeError: The images are not uint8.
        ValueError: An argument is out of bounds.

    >>> grey = torch.full((1, 3, 32, 32), 100, dtype=torch.uint8)
    >>> corrupted(grey, "brightness", severity=2)[0, :, 0, 0]  # 100 + 0.1 * 255
    tensor([125, 125, 125], dtype=torch.uint8)
    """
    one_of("name", name, CORRUPTIONS)
    integer("severity", severity, at_least=1, at_most=5, remedy="Pass 1 for the weakest.")
    check_seed(seed)
    _check_images(images)
    corruption = CORRUPTIONS[name]
    strength = corruption.strengths[severity - 1]
    result = torch.empty_like(images)
    for start in range(0, len(images), _CHUNK):
        chunk = images[start : start + _CHUNK]
        noise = Noise(seed, range(start, start + len(chunk)))
        result[start : start + _CHUNK] = corruption.function(chunk, strength, noise)
    return result


def _check_images(images: Tensor) -> None:
    if not isinstance(images, Tensor) or images.dtype != torch.uint8:
        got = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise InvalidTypeError(
            f"images must be a uint8 tensor, got {got}. Corrupt images before normalization."
        )
    if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 4:
        raise InvalidValueError(
            f"images must have shape (images, 1 or 3, height, width) and sides of at least 4, got "
            f"{tuple(images.shape)}. Move the channels to the second dimension."
        )
