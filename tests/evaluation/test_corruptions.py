"""Corruptions against their definitions, and against SciPy and colorsys."""

import colorsys
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import fft, ndimage
from torch import Tensor
from torch.nn.functional import interpolate

from surrogap.evaluation import CORRUPTIONS, corrupted
from surrogap.evaluation.corruptions import Noise

SEVERITIES = [1, 2, 3, 4, 5]
RANDOM = ["gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "fog"]


def photos(num: int = 6, channels: int = 3, side: int = 32) -> Tensor:
    """Smooth colours with some texture, over the whole range of values."""
    coarse = interpolate(torch.randn(num, channels, 6, 6), size=(side, side), mode="bicubic")
    x = coarse + 0.15 * torch.randn(num, channels, side, side)
    x = (x - x.amin((1, 2, 3), keepdim=True)) / (x.amax() - x.amin())
    return (255 * x.clamp(0, 1)).to(torch.uint8)


def constants(values: Any = range(256)) -> Tensor:
    return torch.tensor(list(values), dtype=torch.uint8)[:, None, None, None].repeat(1, 3, 8, 8)


def strength(name: str, severity: int) -> Any:
    return CORRUPTIONS[name].strengths[severity - 1]


def squared_distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).square().mean())


def nearly_equal(a: Tensor, b: Tensor) -> None:
    """Equal except for one value in a thousand, which rounding may change by one."""
    difference = (a.int() - b.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).double().mean() < 1e-3


def cut(x: np.ndarray) -> Tensor:
    """The original's conversion, apart from rounding noise."""
    return torch.from_numpy(np.floor(np.clip(x, 0, 1) * 255 + 1e-6).astype(np.uint8))


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize(("channels", "side"), [(3, 32), (1, 28), (3, 20)])
def test_shape_dtype_and_the_images_themselves(name: str, channels: int, side: int) -> None:
    if (name, channels) == ("saturate", 1):
        return
    images = photos(channels=channels, side=side)
    before = images.clone()
    out = corrupted(images, name, 3)
    assert (out.shape, out.dtype) == (images.shape, torch.uint8)
    assert torch.equal(images, before)
    assert not torch.equal(out, images)
    assert corrupted(images[:0], name, 3).shape == images[:0].shape


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_sides_may_differ(name: str) -> None:
    images = photos(side=32)[..., :20]
    assert corrupted(images, name, 5).shape == images.shape
    assert corrupted(images.transpose(2, 3), name, 5).shape == (6, 3, 20, 32)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_severity_raises_the_distance(name: str) -> None:
    images = photos(32)
    distances = [squared_distance(corrupted(images, name, s), images) for s in SEVERITIES]
    ordered = [distances] if name != "saturate" else [distances[:2], distances[2:]]
    for part in ordered:  # the first two of saturate go the other way
        assert part == sorted(part)
        assert len(set(part)) == len(part)
        assert part[0] > 0


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_device_and_the_images_behind_do_not_matter(name: str, device: torch.device) -> None:
    images = photos(11)
    whole = corrupted(images, name, 4, seed=3)
    assert torch.equal(corrupted(images.to(device), name, 4, seed=3).cpu(), whole)
    assert torch.equal(corrupted(images[:5], name, 4, seed=3), whole[:5])


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(11)
    whole = [corrupted(images, name, 4) for name in CORRUPTIONS]
    monkeypatch.setattr("surrogap.evaluation.corruptions._CHUNK", 4)
    parts = [corrupted(images, name, 4) for name in CORRUPTIONS]
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_seed_alone_decides(name: str) -> None:
    images = photos()
    first = corrupted(images, name, 2, seed=1)
    state = torch.get_rng_state()
    assert torch.equal(corrupted(images, name, 2, seed=1), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(corrupted(images, name, 2, seed=2), first) == (name not in RANDOM)


def test_images_and_seeds_have_noise_of_their_own() -> None:
    grey = torch.full((200, 3, 16, 16), 128, dtype=torch.uint8)
    deviation = [
        corrupted(grey, "gaussian_noise", 3, seed).double().flatten(1) - 127.5 for seed in (0, 1)
    ]
    noise = torch.nn.functional.normalize(torch.cat(deviation), dim=1)
    off_diagonal = (noise @ noise.T).triu(1)
    # Cosines of independent noise have variance 1 / 768; there are 80,000 of them.
    assert off_diagonal.abs().max() < 6 / math.sqrt(768)
    assert squared_distance(off_diagonal, torch.zeros(())) * 2 == pytest.approx(1 / 768, rel=0.05)


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", ["gaussian_noise", "speckle_noise", "shot_noise"])
def test_variance_of_noise_on_grey(name: str, severity: int) -> None:
    c, x = strength(name, severity), 128 / 255
    variance = {"gaussian_noise": c**2, "speckle_noise": (x * c) ** 2, "shot_noise": x / c}[name]
    out = corrupted(torch.full((16, 3, 32, 32), 128, dtype=torch.uint8), name, severity)
    # Truncation subtracts half a step, and adds the variance of a uniform number. 49,152 values
    # give the variance to 0.6 %. Counts of photons are so coarse that it subtracts more or less.
    expected = 255**2 * variance + 1 / 12
    assert float(out.double().var()) == pytest.approx(expected, rel=0.03)
    sigma = math.sqrt(expected / out.numel())
    assert float(out.double().mean()) == pytest.approx(127.5, abs=5 * sigma + 0.1)


def test_black_stays_black_where_noise_is_proportional() -> None:
    black = constants([0])
    for name in ("shot_noise", "speckle_noise", "fog"):
        assert torch.equal(corrupted(black, name, 5), black)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_impulse_noise_is_salt_and_pepper(severity: int) -> None:
    amount, grey = strength("impulse_noise", severity), torch.full((16, 3, 32, 32), 99).byte()
    out = corrupted(grey, "impulse_noise", severity)
    for value, p in ((0, amount / 2), (255, amount / 2), (99, 1 - amount)):
        sigma = math.sqrt(p * (1 - p) / out.numel())
        assert float((out == value).double().mean()) == pytest.approx(p, abs=5 * sigma)


@pytest.mark.parametrize("name", ["gaussian_blur", "defocus_blur", "contrast", "pixelate"])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_what_is_constant_stays(name: str, severity: int) -> None:
    assert torch.equal(corrupted(constants(), name, severity), constants())


@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_blur_equals_scipy(severity: int) -> None:
    images = photos()
    sigma = (0, 0, *[strength("gaussian_blur", severity)] * 2)
    expected = ndimage.gaussian_filter(images.numpy() / 255, sigma, mode="nearest", truncate=4.0)
    nearly_equal(corrupted(images, "gaussian_blur", severity), cut(expected))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_defocus_blur_equals_scipy(severity: int) -> None:
    images = photos()
    radius, softness = strength("defocus_blur", severity)
    y, x = np.mgrid[-8:9, -8:9]
    disk = (x**2 + y**2 <= radius**2).astype(np.float64)
    side = math.exp(-1 / (2 * softness**2))
    bell = np.array([side, 1, side]) / (1 + 2 * side)
    kernel = ndimage.convolve(disk / disk.sum(), np.outer(bell, bell), mode="constant")
    expected = ndimage.correlate(images.numpy() / 255, kernel[None, None], mode="mirror")
    nearly_equal(corrupted(images, "defocus_blur", severity), cut(expected))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_scales_the_deviation_from_the_mean(severity: int) -> None:
    images = photos()
    out = corrupted(images, "contrast", severity).double()
    mean = images.double().mean((2, 3), keepdim=True)
    exact = strength("contrast", severity) * (images.double() - mean) + mean
    assert ((exact - out) > -1e-5).all()  # truncated
    assert ((exact - out) < 1).all()


def in_hsv(images: Tensor, change: Any) -> Tensor:
    """Pixel by pixel through the standard library."""
    rows = []
    for r, g, b in (images.permute(0, 2, 3, 1).reshape(-1, 3).double() / 255).tolist():
        rows.append(colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(r, g, b))))
    n, _, h, w = images.shape
    return cut(np.array(rows).reshape(n, h, w, 3)).permute(0, 3, 1, 2)


def coloured() -> Tensor:
    """With greys, black and white among the pixels, which have no hue."""
    images = photos(2)
    images[0, :, :2] = torch.arange(64, dtype=torch.uint8).view(2, 32) * 4
    images[0, :, 2, :4], images[0, :, 3, :4] = 0, 255
    return images


@pytest.mark.parametrize("severity", SEVERITIES)
def test_brightness_shifts_the_value_and_nothing_else(severity: int) -> None:
    images, shift = coloured(), strength("brightness", severity)
    out = corrupted(images, "brightness", severity)
    nearly_equal(out, in_hsv(images, lambda h, s, v: (h, s, min(v + shift, 1))))
    value = images.amax(1).double() + 255 * shift
    assert torch.equal(out.amax(1), value.add(1e-6).clamp(max=255).byte())
    # A single channel is its own value.
    assert torch.equal(
        corrupted(images.amax(1, keepdim=True), "brightness", severity)[:, 0], out.amax(1)
    )


@pytest.mark.parametrize("severity", SEVERITIES)
def test_saturate_changes_the_saturation_and_nothing_else(severity: int) -> None:
    images, (factor, shift) = coloured(), strength("saturate", severity)
    out = corrupted(images, "saturate", severity)
    nearly_equal(out, in_hsv(images, lambda h, s, v: (h, min(s * factor + shift, 1), v)))
    assert torch.equal(out.amax(1), images.amax(1))


# Table K.1 of the JPEG standard: the steps of luminance at quality 50.
STEPS = np.array(
    [
        [16, 11, 10, 16, 24, 40, 51, 61],
        [12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56],
        [14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77],
        [24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101],
        [72, 92, 95, 98, 112, 100, 103, 99],
    ]
)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_jpeg_rounds_cosines_to_steps(severity: int) -> None:
    quality = strength("jpeg_compression", severity)
    steps = (STEPS * (5000 // quality if quality < 50 else 200 - 2 * quality) + 50) // 100
    images = photos(channels=1)
    blocks = images.numpy().reshape(-1, 4, 8, 4, 8) - 128.0
    cosines = fft.dctn(blocks, axes=(2, 4), norm="ortho")
    number = np.abs(cosines) / steps[:, None] + 0.5  # halves are rounded away from zero
    rounded = np.sign(cosines) * steps[:, None] * np.floor(number + 1e-9)
    exact = np.clip(fft.idctn(rounded, axes=(2, 4), norm="ortho") + 128, 0, 255)
    # Rounding makes 0.25, and in some blocks libjpeg's integers take a cosine to the next step.
    for other in SEVERITIES:
        out = corrupted(images, "jpeg_compression", other).numpy().reshape(exact.shape)
        assert (np.abs(out - exact).mean() < 0.5) == (other == severity)
    # Grey in colours has no chrominance.
    colours = corrupted(images.expand(-1, 3, -1, -1), "jpeg_compression", severity)
    greys = corrupted(images, "jpeg_compression", severity).expand(-1, 3, -1, -1)
    assert torch.equal(colours, greys)


def boxes(x: np.ndarray, new: int) -> np.ndarray:
    """Resize the last axis: rounded means of the pixels whose centres are in the box of a new one.

    In units of `1 / (2 * old * new)` of the width, all positions are integers. A box has the width
    of an old or of a new pixel, whichever is larger, and includes its right end.
    """
    old = x.shape[-1]
    centres, half = new * (2 * np.arange(old) + 1), max(old, new)
    columns = []
    for middle in old * (2 * np.arange(new) + 1):
        inside = x[..., (middle - half < centres) & (centres <= middle + half)]
        num = inside.shape[-1]
        columns.append((2 * inside.sum(-1) + num) // (2 * num))
    return np.stack(columns, -1)


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("shape", [(9, 9), (27, 27), (28, 28), (32, 32), (20, 32), (64, 48)])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixelate_takes_means_over_boxes(
    severity: int, shape: tuple[int, int], channels: int
) -> None:
    images = photos(2, channels, side=64)[..., : shape[0], : shape[1]]
    factor = strength("pixelate", severity)
    x = images.numpy().astype(np.int64)
    for height, width in ([int(side * factor) for side in shape], shape):
        x = boxes(boxes(x, width).swapaxes(2, 3), height).swapaxes(2, 3)
    assert np.array_equal(corrupted(images, "pixelate", severity).numpy(), x)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_fog_spans_its_range(severity: int) -> None:
    density, _ = strength("fog", severity)
    out = corrupted(torch.full((3, 3, 32, 32), 255).byte(), "fog", severity)
    assert out.amax((1, 2, 3)).tolist() == [255] * 3
    assert out.amin((1, 2, 3)).tolist() == [int(255 / (1 + density) + 1e-6)] * 3


def slow_clouds(uniforms: list[float], size: int, decay: float) -> np.ndarray:
    """Diamond-square, point by point: the mean of four neighbours at a distance, and a bump."""
    height = {(0, 0): 0.0}
    wibble, step = 100.0, size

    def bump(order: int, i: int, j: int) -> float:
        num = size // step
        return wibble**2 * (2 * uniforms[num**2 * (1 + order) + i * num + j] - 1)

    def mean(*points: tuple[int, int]) -> float:
        return sum(height[y % size, x % size] for y, x in points) / 4

    while step >= 2:
        half, cells = step // 2, range(size // step)
        for i in cells:
            for j in cells:
                y, x = i * step + half, j * step + half
                corners = [(y + a, x + b) for a in (-half, half) for b in (-half, half)]
                height[y, x] = mean(*corners) + bump(0, i, j)
        for i in cells:
            for j in cells:
                for order, y, x in (
                    (1, i * step, j * step + half),
                    (2, i * step + half, j * step),
                ):
                    cross = [(y - half, x), (y + half, x), (y, x - half), (y, x + half)]
                    height[y, x] = mean(*cross) + bump(order, i, j)
        wibble, step = wibble / decay, half
    out = np.array([[height[y, x] for x in range(size)] for y in range(size)])
    return (out - out.min()) / (out.max() - out.min())


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_fog_equals_a_slow_diamond_square(severity: int) -> None:
    density, decay = strength("fog", severity)
    uniforms = Noise(0, range(3)).uniform(32**2)
    images = photos(3)
    expected = np.stack([slow_clouds(row, 32, decay) for row in uniforms.tolist()])[:, None]
    x = images.numpy() / 255
    most = x.max((1, 2, 3), keepdims=True)
    out = corrupted(images, "fog", severity)
    nearly_equal(out, cut((x + density * expected) * most / (most + density)))


def test_unknown_names_list_the_known_and_the_closest() -> None:
    message = (
        r"name must be one of gaussian_noise, shot_noise, .*, got 'gausian_noise'\. "
        r"The closest is 'gaussian_noise'\."
    )
    with pytest.raises(ValueError, match=message):
        corrupted(photos(), "gausian_noise", 1)


@pytest.mark.parametrize("severity", [0, 6, 2.0, True, "3"])
def test_wrong_severities(severity: Any) -> None:
    message = f"severity must be .*, got {severity!r}. Pass 1 for the weakest."
    with pytest.raises((TypeError, ValueError), match=message):
        corrupted(photos(), "fog", severity)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1. Pass one such as 0"),
        ({"seed": 0.5}, TypeError, "seed must be an integer, got 0.5. Pass one such as 0"),
        (
            {"images": torch.zeros(2, 3, 32, 32)},
            TypeError,
            "images must be a uint8 tensor, got torch.float32. Corrupt images before norm",
        ),
        ({"images": [1]}, TypeError, "images must be a uint8 tensor, got list. Corrupt images"),
        (
            {"images": torch.zeros(2, 32, 32, 3).byte()},
            ValueError,
            r"images must have shape \(images, 1 or 3, height, width\) and sides of at least 4, "
            r"got \(2, 32, 32, 3\). Move the channels",
        ),
        ({"images": torch.zeros(3, 32, 32).byte()}, ValueError, r"got \(3, 32, 32\). Move"),
        ({"images": torch.zeros(1, 3, 32, 3).byte()}, ValueError, r"got \(1, 3, 32, 3\). Move"),
        (
            {"images": torch.zeros(1, 1, 8, 8).byte(), "name": "saturate"},
            ValueError,
            "images must have three channels for 'saturate', got 1. Grey images have no saturation",
        ),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        corrupted(**{"images": photos(), "name": "fog", "severity": 1, **change})
