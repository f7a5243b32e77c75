"""RandAugment for batches, against torchvision's for single images."""

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from surrogap.data import randaugment
from surrogap.data.randaugment import OPERATIONS, operate
from tests.data.synthetic import pixels


def batch(number: int, channels: int = 3) -> Tensor:
    return torch.from_numpy(pixels(number, channels, 12, 9))


def test_the_operations_are_torchvisions() -> None:
    assert set(OPERATIONS) == set(v2.RandAugment._AUGMENTATION_SPACE)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_an_operation_gives_torchvisions_pixels(operation: str, channels: int) -> None:
    class Only(v2.RandAugment):
        _AUGMENTATION_SPACE = {operation: v2.RandAugment._AUGMENTATION_SPACE[operation]}  # noqa: RUF012

    images, signs = batch(5, channels), set()
    for magnitude in (0, 1, 7, 10, 15, 29, 30):
        for seed in range(3):
            # torchvision draws the operation, then the sign.
            torch.manual_seed(seed)
            torch.randint(1, ())
            signs.add(sign := -1 if torch.rand(()) <= 0.5 else 1)
            torch.manual_seed(seed)
            expected = torch.stack([_alone(Only(1, magnitude), image, seed) for image in images])
            assert torch.equal(operate(images, operation, magnitude, sign), expected)
    assert signs == {1, -1}


def _alone(transform: v2.RandAugment, image: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return transform(image)


def test_every_image_has_its_own_operations(device: torch.device) -> None:
    images = batch(64)
    generator = torch.Generator().manual_seed(1)
    expected = images
    for _ in range(2):
        operation = torch.randint(len(OPERATIONS), (64,), generator=generator)
        sign = 1 - 2 * torch.randint(2, (64,), generator=generator)
        expected = torch.cat(
            [
                operate(expected[i : i + 1], OPERATIONS[operation[i]], 10, int(sign[i]))
                for i in range(64)
            ]
        )
        assert len(operation.unique()) > 10
    found = randaugment(images.to(device), 10, torch.Generator().manual_seed(1))
    # Devices differ by one of 255 levels, and near thresholds.
    close = (found.cpu().int() - expected.int()).abs() <= (device.type != "cpu")
    assert close.float().mean() > (0.98 if device.type != "cpu" else 0.999999)


def test_no_operation_leaves_all_as_it_was() -> None:
    images = batch(3)
    assert torch.equal(randaugment(images, 10, torch.Generator(), num_operations=0), images)
