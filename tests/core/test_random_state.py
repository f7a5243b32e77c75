"""Both passes draw the same random numbers."""
# ruff: noqa: NPY002  # libraries draw from NumPy's global generator

import copy
import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

from surrogap import SAM
from tests import equality, toy_models
from tests.objective_cases import OBJECTIVES, every_two_pass


class Noisy(nn.Module):
    """A model with every source of randomness that a forward pass may have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.dropout = nn.Dropout(0.5)
        self.depth = StochasticDepth(0.5, "row")

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.tanh(self.layers[0](x)))
        x = x + self.depth(torch.tanh(self.layers[1](x)))
        x = x + checkpoint(lambda h: self.dropout(self.layers[2](h)), x, use_reentrant=False)
        return random.random() * np.random.rand() * x.square().mean()


def draws(device: torch.device) -> list[float]:
    """The next random number of each generator."""
    return [
        float(torch.rand(())),
        float(torch.rand((), device=device)),
        random.random(),
        np.random.rand(),
    ]


def seed_everything() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


@every_two_pass
def test_both_passes_draw_the_same_numbers(name: str, device: torch.device) -> None:
    model, x = Noisy().double().to(device), torch.randn(32, 16, device=device).double()
    # Without a climb, both passes compute the same if their masks are the same.
    seed_everything()
    report = OBJECTIVES[name].make(model, rho=0.0).backward(lambda: model(x))
    assert float(report.gap) == 0.0
    assert name == "SAM-partial" or float(report.cosine) == pytest.approx(1.0, abs=1e-14)
    after = draws(device)
    # One plain pass, and the state of the generators after it.
    seed_everything()
    plain = copy.deepcopy(model)
    plain.zero_grad()
    loss = plain(x)
    loss.backward()
    assert torch.equal(report.loss, loss)
    assert equality.relative_error(toy_models.flat_grad(model), toy_models.flat_grad(plain)) < 1e-14
    assert after == draws(device)


@every_two_pass
def test_generators_are_as_after_one_pass_if_the_second_draws_more(name: str) -> None:
    model, x, counts = Noisy(), torch.randn(4, 16), iter([0, 5])

    def closure() -> Tensor:
        loss = model(x)
        for _ in range(next(counts)):
            draws(torch.device("cpu"))
        return loss

    seed_everything()
    OBJECTIVES[name].make(model).backward(closure)
    after = draws(torch.device("cpu"))
    seed_everything()
    model(x)
    assert after == draws(torch.device("cpu"))


@every_two_pass
def test_generators_are_as_after_one_pass_if_the_second_raises(name: str) -> None:
    model, x, numbers = Noisy(), torch.randn(4, 16), iter([1, 2])

    def closure() -> Tensor:
        loss = model(x)
        if next(numbers) == 2:
            torch.rand(3)
            raise KeyboardInterrupt
        return loss

    seed_everything()
    with pytest.raises(KeyboardInterrupt):
        OBJECTIVES[name].make(model).backward(closure)
    after = draws(torch.device("cpu"))
    seed_everything()
    model(x)
    assert after == draws(torch.device("cpu"))


def test_micro_batches_draw_different_numbers_and_each_the_same_in_both_passes() -> None:
    model, x, seen = Noisy(), torch.randn(4, 16), []

    def closure() -> Tensor:
        seen.append(float(torch.rand(())))
        return model(x)

    SAM(model).backward([closure, closure])
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]


def test_generators_are_read_only_if_the_closure_draws_from_them() -> None:
    """Reading the states of Python's and NumPy's takes longer than the rest of a small step."""
    model, x = nn.Linear(16, 1), torch.randn(4, 16)

    def closure(draw: Callable[[], float] = lambda: 1.0) -> Tensor:
        return draw() * model(x).square().mean()

    for draws_of, number in ((lambda: 1.0, 0), (random.random, 1), (np.random.rand, 1)):
        objective = SAM(model, rho=0.0)
        for _ in range(3):  # the first call and later ones
            report = objective.backward(lambda draw=draws_of: closure(draw))
            assert float(report.gap) == 0.0
        assert len(objective._workspace.weights.generators) == number


def test_one_of_several_closures_may_draw() -> None:
    model, x = nn.Linear(16, 1), torch.randn(4, 16)
    drawing, plain = (
        lambda: random.random() * model(x).square().mean(),
        lambda: model(x).square().mean(),
    )
    objective = SAM(model, rho=0.0)
    for _ in range(3):
        assert float(objective.backward([drawing, plain]).gap) == 0.0


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_copy_replays_the_numbers_too(draw: Callable[[], float], num_steps: int) -> None:
    model, x = nn.Linear(16, 1), torch.randn(4, 16)
    objective = SAM(model, rho=0.0)
    for _ in range(num_steps):
        objective.backward(lambda: draw() * model(x).square().mean())
    twin, other = pickle.loads(pickle.dumps(copy.deepcopy((model, objective))))
    for _ in range(2):
        assert float(other.backward(lambda: draw() * twin(x).square().mean()).gap) == 0.0
