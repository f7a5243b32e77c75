"""Intermittent: the steps that use the objective, their count, and the state."""

import pytest
import torch

from surrogap import GSAM, SAM, Intermittent, MomentumSAM
from surrogap.rho import InverseSqrt
from tests import equality, toy_models


@pytest.mark.parametrize(("every", "start"), [(1, 0), (3, 0), (1, 2), (3, 2), (2, 5)])
def test_which_steps_use_the_objective(every: int, start: int) -> None:
    model = toy_models.mlp().double()
    objective = Intermittent(GSAM(model, rho=0.2), every=every, start=start)
    for step in range(10):
        closure = toy_models.closure_of(model, toy_models.batch(seed=step))
        is_active = step >= start and (step - start) % every == 0
        expected = toy_models.direction(
            (lambda m: GSAM(m, rho=0.2)) if is_active else (lambda m: SAM(m, rho=0.0)),
            model,
            toy_models.batch(seed=step),
        )
        model.zero_grad()
        report = objective.backward(closure)
        assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-12
        assert bool(report.rho.isnan()) != is_active
        assert float(report.value) == float(report.loss)


def test_calls_that_share_a_step_are_of_one_kind() -> None:
    model = toy_models.mlp()
    objective, closure = (
        Intermittent(SAM(model), every=2),
        toy_models.closure_of(model, toy_models.batch()),
    )
    rhos = []
    for _ in range(2):
        rhos += [
            objective.backward(closure, sync=sync).rho.isnan() for sync in (False, False, True)
        ]
    assert list(map(bool, rhos)) == [False] * 3 + [True] * 3


def test_schedules_advance_at_every_step() -> None:
    model = toy_models.mlp()
    objective = Intermittent(SAM(model, rho=InverseSqrt(0.6)), every=4)
    closure = toy_models.closure_of(model, toy_models.batch())
    reports = [objective.backward(closure) for _ in range(9)]
    assert [float(reports[t].rho) for t in (0, 4, 8)] == pytest.approx([0.6, 0.6 / 5**0.5, 0.2])


def test_a_run_resumes_from_its_state() -> None:
    model = toy_models.mlp()
    objective = Intermittent(SAM(model, rho=InverseSqrt(0.6)), every=3)
    closure = toy_models.closure_of(model, toy_models.batch())
    for _ in range(4):
        objective.backward(closure)
    state = objective.state_dict()
    assert state == {"num_steps": 4, "objective": {"rho": {"num_steps": 4}}}
    resumed = Intermittent(SAM(model, rho=InverseSqrt(0.6)), every=3)
    resumed.load_state_dict(state)
    for _ in range(5):
        mine, its = objective.backward(closure).rho, resumed.backward(closure).rho
        assert equality.same_bits([mine], [its])
    with pytest.raises(ValueError, match="state must hold num_steps"):
        resumed.load_state_dict({})


def test_a_step_that_raises_is_not_counted() -> None:
    model = toy_models.mlp()
    objective = Intermittent(SAM(model), every=2)
    with pytest.raises(ZeroDivisionError):
        objective.backward(lambda: 1 / 0)
    assert objective.num_steps == 0


def test_climb_is_for_the_steps_that_climb() -> None:
    model, calls = toy_models.mlp(), []
    objective = Intermittent(SAM(model), every=2)
    closure = toy_models.closure_of(model, toy_models.batch())

    def climb() -> torch.Tensor:
        calls.append(1)
        return closure()

    for _ in range(4):
        objective.backward(closure, climb=climb)
    assert len(calls) == 2
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(ValueError, match="climb must be left out for MomentumSAM"):
        Intermittent(MomentumSAM(model, optimizer)).backward(closure, climb=climb)


def test_repr_and_rho() -> None:
    objective = Intermittent(SAM(toy_models.mlp(), rho=0.2), every=5)
    assert repr(objective) == "Intermittent(SAM(rho=0.2), every=5, start=0)"
    objective.rho = 0.4
    assert objective.objective.rho == objective.rho == 0.4
    assert objective.num_passes == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"start": -1}, ValueError, "start must be at least 0, got -1"),
        ({"every": 2.0}, TypeError, "every must be an integer, got 2.0"),
        ({"start": True}, TypeError, "start must be an integer, got True"),
    ],
)
def test_wrong_numbers(arguments: dict[str, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Intermittent(SAM(toy_models.mlp()), **arguments)


def test_what_is_not_an_objective() -> None:
    with pytest.raises(TypeError, match="objective must be an objective, got Sequential"):
        Intermittent(toy_models.mlp())
