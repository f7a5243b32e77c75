"""Tensors that a captured step must not move."""

import pytest
import torch
from torch import nn

from surrogap.core.captured_step import memory_kept
from surrogap.core.weights import Weights
from tests import equality


@pytest.mark.parametrize("name", ["0.weight", "1.bias", "1.running_mean"])
def test_tensors_that_moved_are_restored_and_reported(name: str, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
    model[1].requires_grad_(False)
    tensors = dict(model.state_dict(keep_vars=True))
    before = [tensor.detach().clone() for tensor in tensors.values()]
    place = tensors[name].data_ptr()
    with (
        pytest.raises(RuntimeError, match="model must write to its weights and buffers in place"),
        memory_kept(Weights(model)),
    ):
        tensors[name].data = tensors[name].data + 1.0
    assert tensors[name].data_ptr() == place
    assert equality.same_bits(before, list(tensors.values()))


def test_writes_in_place_are_allowed(device: torch.device) -> None:
    model = nn.Linear(3, 3).to(device)
    with memory_kept(Weights(model)):
        model.weight.data.add_(1.0)


def test_an_error_is_passed_on() -> None:
    with pytest.raises(ZeroDivisionError), memory_kept(Weights(nn.Linear(3, 3))):
        raise ZeroDivisionError
