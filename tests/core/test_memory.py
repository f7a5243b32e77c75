"""The memory of a step: two copies of the parameters while it runs, none afterwards."""

import gc

import pytest
import torch
from torch import Tensor, nn

from surrogap.core.arithmetic import Memory
from tests.objective_cases import NUM_PASSES, OBJECTIVES, TWO_PASS, every_objective

pytestmark = pytest.mark.gpu


def wide_network(dtype: torch.dtype) -> nn.Module:
    """64 MiB of float32 parameters, and almost no activations."""
    layers = (nn.Linear(1024, 1024, dtype=dtype, device="cuda") for _ in range(16))
    return nn.Sequential(*layers)


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


# float64 uses the plain arithmetic, the others the fused one.
@every_objective
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_between_steps(name: str, dtype: torch.dtype, fails: bool) -> None:
    model, x = wide_network(dtype), torch.randn(8, 1024, dtype=dtype, device="cuda")
    objective = OBJECTIVES[name].make(model)

    def closure() -> Tensor:
        return model(x).square().mean()

    def raising() -> Tensor:
        loss = closure()
        numbers.append(1)
        if len(numbers) == min(2, NUM_PASSES[name]):
            raise KeyboardInterrupt
        return loss

    objective.backward(closure)  # loads kernels and handles
    model.zero_grad()
    before = allocated()
    for _ in range(3):
        numbers: list[int] = []
        if fails:
            with pytest.raises(KeyboardInterrupt):
                objective.backward(raising)
        else:
            objective.backward(closure)
        model.zero_grad()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert allocated() - before < 0.01 * size


@every_objective
def test_a_loss_that_is_dropped_is_freed(name: str) -> None:
    model, x = wide_network(torch.float32), torch.randn(8, 1024, device="cuda")
    objective = OBJECTIVES[name].make(model)

    def closure() -> Tensor:
        return model(x).square().mean()

    objective.loss(closure).backward()
    model.zero_grad()
    before = allocated()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    loss = objective.loss(closure)
    assert allocated() - before < 1.05 * size  # the direction
    del loss
    assert allocated() - before < 0.01 * size


@pytest.mark.parametrize("name", TWO_PASS)
@pytest.mark.parametrize(
    ("dtype", "memory", "limit"),
    [
        (torch.float32, "exact", 2.05),
        (torch.float32, "low", 1.05),
        (torch.bfloat16, "exact", 2.05),
        # The plain arithmetic also holds chunks of intermediate results.
        (torch.float64, "exact", 2.7),
    ],
)
def test_copies_while_it_runs(name: str, dtype: torch.dtype, memory: Memory, limit: float) -> None:
    """In addition to the peak of a plain pass, which holds one gradient."""
    model, x = wide_network(dtype), torch.randn(8, 1024, dtype=dtype, device="cuda")
    objective = OBJECTIVES[name].make(model, memory=memory)
    size = sum(p.numel() * p.element_size() for p in model.parameters())

    def closure() -> Tensor:
        return model(x).square().mean()

    def peak(step: object) -> int:
        for _ in range(2):
            model.zero_grad()
            allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
        return torch.cuda.max_memory_allocated()

    plain = peak(lambda: closure().backward())
    ours = peak(lambda: objective.backward(closure))
    assert (ours - plain) / size < limit
    by_loss = peak(lambda: objective.loss(closure).backward())
    assert (by_loss - ours) / size < 0.05
