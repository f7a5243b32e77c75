"""Accelerate and Fabric, which need no adapter, against loops written by hand."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from surrogap import GSAM, SAM, Intermittent
from surrogap.rho import InverseSqrt
from tests.integrations.by_hand import gsam_backward

LR, RHO, ALPHA, CLIP = 0.1, 0.05, 0.4, 0.3
NUM_BATCHES, BATCH_SIZE, NUM_STEPS = 5, 4, 3


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(dtype)


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_BATCHES * BATCH_SIZE, 6, generator=generator).to(dtype)
    return TensorDataset(x, torch.arange(len(x)) % 3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def train_by_hand(model: nn.Module) -> None:
    """A perturbation per batch, two batches a step, the last step one."""
    optimizer = sgd(model)
    for index, (x, y) in enumerate(DataLoader(data(), BATCH_SIZE)):
        torch.manual_seed(index)
        closure = lambda x=x, y=y: cross_entropy(model(x), y) / 2  # noqa: E731
        gsam_backward(model, closure, rho=RHO, alpha=ALPHA)
        if index % 2 == 1 or index == NUM_BATCHES - 1:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


def assert_same_state(some: nn.Module, others: nn.Module, *, exactly: bool = False) -> None:
    for name, value in some.state_dict().items():
        expected = others.state_dict()[name]
        torch.testing.assert_close(value, expected, rtol=0, atol=0 if exactly else 1e-9)


@pytest.fixture
def accelerator() -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_is_the_loop_by_hand(accelerator: Any) -> None:
    model, by_hand = network(), network()
    wrapped, optimizer, loader = accelerator.prepare(
        model, sgd(model), DataLoader(data(), BATCH_SIZE)
    )
    objective = Intermittent(GSAM(wrapped, rho=RHO, alpha=ALPHA))
    for index, (x, y) in enumerate(loader):
        torch.manual_seed(index)
        with accelerator.accumulate(wrapped):
            loss = objective.loss(
                lambda x=x, y=y: cross_entropy(wrapped(x), y),
                scaler=accelerator.scaler,
                sync=accelerator.sync_gradients,
            )
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    train_by_hand(by_hand)
    assert_same_state(model, by_hand)
    assert objective.num_steps == NUM_STEPS


def test_a_checkpoint_of_accelerate_has_the_state_of_the_objective(
    accelerator: Any, tmp_path: Path
) -> None:
    model = accelerator.prepare(network())
    x, y = data()[:BATCH_SIZE]
    objective = Intermittent(GSAM(model, rho=InverseSqrt(RHO)), every=2)
    accelerator.register_for_checkpointing(objective)
    objective.loss(lambda: cross_entropy(model(x), y)).backward()
    accelerator.save_state(tmp_path)
    saved = objective.state_dict()
    objective.loss(lambda: cross_entropy(model(x), y)).backward()
    assert objective.state_dict() != saved
    accelerator.load_state(tmp_path)
    assert (
        objective.state_dict() == saved == {"num_steps": 1, "objective": {"rho": {"num_steps": 1}}}
    )


def train_with_fabric(
    fabric: Any, model: nn.Module, optimizer: Any, backward: Callable[..., object]
) -> None:
    dtype = next(model.parameters()).dtype
    for index, (x, y) in enumerate(DataLoader(data(dtype), BATCH_SIZE)):
        torch.manual_seed(index)
        is_last = index % 2 == 1 or index == NUM_BATCHES - 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            backward(lambda x=x, y=y: cross_entropy(model(x), y) / 2)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()


def test_fabric_is_the_loop_by_hand() -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model, by_hand = network(), network()
    wrapped, optimizer = fabric.setup(model, sgd(model))
    objective = GSAM(wrapped, rho=RHO, alpha=ALPHA)
    backward = partial(objective.backward, backward=fabric.backward)
    train_with_fabric(fabric, wrapped, optimizer, backward)
    train_by_hand(by_hand)
    assert_same_state(model, by_hand)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_radius_of_zero_is_the_unmodified_loop_of_fabric(precision: str) -> None:
    fabric_module = pytest.importorskip("lightning.fabric")
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1, precision=precision)
    model, unmodified = network(torch.float32), network(torch.float32)
    wrapped, optimizer = fabric.setup(model, sgd(model))
    objective = SAM(wrapped, rho=0.0)
    backward = partial(objective.backward, backward=fabric.backward)
    train_with_fabric(fabric, wrapped, optimizer, backward)
    wrapped, optimizer = fabric.setup(unmodified, sgd(unmodified))
    train_with_fabric(fabric, wrapped, optimizer, lambda closure: fabric.backward(closure()))
    assert_same_state(model, unmodified, exactly=True)
