"""Exact copies of many tensors. Without a GPU, Triton's interpreter runs the kernels."""

import pytest
import torch

from surrogap.core.copies import Copies, room_for
from surrogap.core.fused_copies import FusedCopies
from tests import zoo


@pytest.mark.parametrize("cls", [Copies, FusedCopies])
def test_what_was_saved_last_comes_back(cls: type[Copies], device: torch.device) -> None:
    tensors = [
        torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device)
        for shape in [(), (7,), (0,), (9001,), (3, 5)]
    ]
    copies = cls(tensors)
    for _ in range(3):
        before = [tensor.clone() for tensor in tensors]
        copies.save()
        for _ in range(2):
            for tensor in tensors:
                tensor.add_(1)
            assert not zoo.same_bits(before, tensors)
            copies.restore()
            assert zoo.same_bits(before, tensors)
        for tensor in tensors:
            tensor.mul_(3)


@pytest.mark.parametrize("cls", [Copies, FusedCopies])
def test_memory_that_has_grown_is_found(cls: type[Copies], device: torch.device) -> None:
    """It lies elsewhere then, and where it was may be another's."""
    tensor = torch.arange(64, dtype=torch.int32, device=device)
    copies, before, place = cls([tensor]), tensor.clone(), tensor.data_ptr()
    copies.save()
    tensor.untyped_storage().resize_(2**24)
    tensor.zero_()
    assert tensor.data_ptr() != place
    copies.restore()
    assert torch.equal(tensor, before)


def test_the_room_fits_the_device_and_dtype(device: torch.device) -> None:
    words = [torch.zeros(3, dtype=torch.int32, device=device)]
    assert isinstance(room_for(words), FusedCopies) == (device.type == "cuda")
    assert not isinstance(room_for([torch.zeros(3, device=device)]), FusedCopies)
