"""Augmentation: crop, flip and the paper's policies."""

from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from surrogap.data import AUGMENTATIONS, Augmentation
from surrogap.data.augmentation import augmentation_of, augmented, transform_of_files
from tests.data.synthetic import pixels


def images(number: int = 64, size: int = 32, channels: int = 3) -> Tensor:
    return torch.from_numpy(pixels(number, channels, size, size))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_papers_augmentations() -> None:
    # Appendix on data augmentation: light is flip and crop; medium and strong have mixup with
    # probability 0.2 and RandAugment of magnitude 10 and 15.
    light = Augmentation(crop=True, flip=True)
    assert AUGMENTATIONS["none"] == Augmentation(False, False, 0, 0.0)
    assert AUGMENTATIONS["light"] == light
    for name, magnitude in (("medium", 10), ("strong", 15)):
        found = AUGMENTATIONS[name]
        assert (found.crop, found.flip, found.magnitude, found.mixup) == (
            True,
            True,
            magnitude,
            0.2,
        )
    assert augmentation_of(light) is light


def test_none_does_nothing_and_draws_nothing() -> None:
    batch, source = images(), generator()
    before = source.get_state()
    assert augmented(batch, AUGMENTATIONS["none"], source) is batch
    assert torch.equal(source.get_state(), before)


@pytest.mark.parametrize(("size", "pad"), [(32, 4), (28, 3), (64, 8), (4, 0)])
def test_light_is_a_window_of_the_padded_image(size: int, pad: int, device: torch.device) -> None:
    batch = images(48, size)
    found = augmented(batch.to(device), AUGMENTATIONS["light"], generator()).cpu()
    padded = functional.pad(batch, (pad,) * 4)
    # All crops and their mirror images, for each image: (2, rows, columns, image, ...).
    windows = padded.unfold(2, size, 1).unfold(3, size, 1).permute(2, 3, 0, 1, 4, 5)
    both = torch.stack([windows, windows.flip(-1)])
    is_it = (both == found).flatten(4).all(4)
    assert (is_it.flatten(0, 2).sum(0) == 1).all()
    sides, rows, columns, _ = (index.unique().tolist() for index in is_it.nonzero().unbind(1))
    assert sides == [0, 1]
    # 48 images and 2 * pad + 1 shifts: nearly all shifts occur, including the outermost.
    assert len(rows) > pad
    assert len(columns) > pad
    assert max(rows + columns) <= 2 * pad


def test_crop_and_flip_alone() -> None:
    batch = images(64, 8, channels=1)
    flipped = augmented(batch, Augmentation(flip=True), generator())
    is_flipped = (flipped == batch.flip(3)).flatten(1).all(1)
    assert torch.equal(flipped[~is_flipped], batch[~is_flipped])
    assert 16 < is_flipped.sum() < 48  # four standard deviations of 64 coins
    cropped = augmented(batch, Augmentation(crop=True), generator())
    assert (cropped[:, 0, 4, 4, None, None] == batch[:, 0, 3:6, 3:6]).flatten(1).any(1).all()


def test_medium_is_randaugment_after_light() -> None:
    from surrogap.data import randaugment

    batch, source = images(), generator()
    expected = randaugment(augmented(batch, AUGMENTATIONS["light"], source), 10, source)
    assert torch.equal(augmented(batch, AUGMENTATIONS["medium"], generator()), expected)


def test_files_are_cut_to_size() -> None:
    picture = Image.fromarray(pixels(60, 90, 3))
    for name in AUGMENTATIONS:
        result = transform_of_files(AUGMENTATIONS[name], 21)(picture)
        assert result.size == (21, 21)
    # For evaluation: resize the shorter side to 24, since 24 * 7/8 = 21, and crop the centre.
    resized = picture.resize((36, 24), Image.Resampling.BILINEAR)
    expected = resized.crop((8, 2, 29, 23))
    assert transform_of_files(Augmentation(), 21)(picture).tobytes() == expected.tobytes()


def test_files_have_inceptions_crop_flip_and_randaugment() -> None:
    names = [
        type(step).__name__ for step in transform_of_files(AUGMENTATIONS["strong"], 224).transforms
    ]
    assert names == ["RandomResizedCrop", "RandomHorizontalFlip", "RandAugment"]
    crop, _, rand = transform_of_files(AUGMENTATIONS["strong"], 224).transforms
    assert (crop.scale, crop.ratio) == ((0.08, 1.0), (0.75, 4 / 3))
    assert (rand.num_ops, rand.magnitude, rand.num_magnitude_bins) == (2, 15, 31)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"magnitude": 31},
            ValueError,
            "magnitude must be at most 30, got 31. Pass an integer",
        ),
        ({"magnitude": -1}, ValueError, "magnitude must be at least 0, got -1"),
        ({"magnitude": 1.5}, TypeError, "magnitude must be an integer, got 1.5"),
        ({"mixup": 1.1}, ValueError, "mixup must be at least 0 and at most 1, got 1.1. Pass"),
        ({"mixup": float("nan")}, ValueError, "mixup must be at least 0 and at most 1, got nan"),
        ({"mixup": "0.2"}, TypeError, "mixup must be a number, got str. Pass"),
        ({"mixup_alpha": 0.0}, ValueError, "mixup_alpha must be above 0 and finite, got 0.0. For"),
        ({"mixup_alpha": True}, TypeError, "mixup_alpha must be a number, got bool"),
    ],
)
def test_bad_augmentations(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Augmentation(**changes)


def test_unknown_names() -> None:
    message = (
        "augmentation must be one of none, light, medium, strong, got 'lite'. The closest is "
        "'light'. Or pass an Augmentation."
    )
    with pytest.raises(ValueError, match=message):
        augmentation_of("lite")
