"""The closures of a captured step, run without a graph: those of `objective.backward`."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from surrogap import GSAM, SAM
from surrogap.core.objective import Objective
from surrogap.core.static_batch import StaticBatch
from tests import equality, toy_models


def add_directions(objective: Objective, batch: StaticBatch) -> None:
    """What `CapturedStep` does before the update."""
    for passes in batch.calls:
        objective._refresh()
        objective._add_direction(passes, objective._numbers(), sync=True)


def gradients(objective: Objective) -> list[Tensor]:
    return [p.grad for p in objective.model.parameters() if p.grad is not None]


def static(objective: Objective, example: Sequence[Tensor], **settings: object) -> StaticBatch:
    options = {
        "loss_fn": lambda x, y: toy_models.cross_entropy(objective.model, (x, y)),
        "micro_batches": 1,
        "shares_perturbation": True,
        "climb_fraction": 1.0,
        **settings,
    }
    return StaticBatch(example, torch.device("cpu"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("shares", [True, False])
def test_micro_batches(shares: bool) -> None:
    model, batch = toy_models.mlp().double(), toy_models.batch()
    captured, objective = (GSAM(m, rho=0.1, alpha=0.4) for m in (copy.deepcopy(model), model))
    add_directions(captured, static(captured, batch, micro_batches=2, shares_perturbation=shares))
    chunks = zip(*(tensor.chunk(2) for tensor in batch), strict=True)
    closures = [lambda c=c: toy_models.cross_entropy(model, c) / 2 for c in chunks]
    for call in [closures] if shares else closures:
        objective.backward(call)
    assert equality.same_bits(gradients(captured), gradients(objective))


def test_a_climb_on_a_fraction_of_the_batch() -> None:
    model, (x, y) = toy_models.mlp().double(), toy_models.batch()
    captured, objective = (SAM(m, rho=0.1) for m in (copy.deepcopy(model), model))
    add_directions(captured, static(captured, (x, y), climb_fraction=0.25))
    num = round(0.25 * len(x))
    objective.backward(
        lambda: toy_models.cross_entropy(model, (x, y)),
        climb=lambda: toy_models.cross_entropy(model, (x[:num], y[:num])),
    )
    assert equality.same_bits(gradients(captured), gradients(objective))


@pytest.mark.parametrize("settings", [{}, {"climb_fraction": 0.5}, {"micro_batches": 2}])
def test_what_loss_fn_must_return(settings: dict[str, object]) -> None:
    objective = SAM(toy_models.mlp())
    batch = static(objective, toy_models.batch(), loss_fn=lambda x, y: 0.5, **settings)
    with pytest.raises(TypeError, match=r"loss_fn must return the loss as .*, got float"):
        add_directions(objective, batch)


def test_a_new_batch_is_copied_into_the_memory_of_the_example() -> None:
    model, (x, y) = toy_models.mlp().double(), toy_models.batch()
    captured, objective = (SAM(m, rho=0.1) for m in (copy.deepcopy(model), model))
    batch = static(captured, (torch.zeros_like(x), torch.zeros_like(y)))
    batch.copy_((x, y))
    x_before = x.clone()
    add_directions(captured, batch)
    objective.backward(lambda: toy_models.cross_entropy(model, (x_before, y)))
    assert equality.same_bits(gradients(captured), gradients(objective))


def test_a_twin_shares_weights_and_states_but_no_memory_of_a_step() -> None:
    """A graph and eager steps in between must not write to each other's copies."""
    model = toy_models.convnet().double()
    objective = SAM(model)
    objective.backward(lambda: toy_models.cross_entropy(model, toy_models.batch()))
    workspace = objective._workspace
    twin = workspace.twin()
    assert (twin.weights, twin.states) == (workspace.weights, workspace.states)
    assert (twin.arithmetic, workspace.arithmetic is None) == (None, False)
    assert twin.buffers_before is not workspace.buffers_before
    assert twin.buffers_after_first is not workspace.buffers_after_first
