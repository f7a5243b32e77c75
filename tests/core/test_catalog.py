"""The catalog of objectives against their classes."""

import inspect

import pytest
import torch

import surrogap
from surrogap.core.catalog import OBJECTIVES, create_objective
from surrogap.core.objective import Objective
from surrogap.core.objectives import Shared
from tests import toy_models

NOT_BY_NAME = {"Objective", "Intermittent"}


def arguments_of(cls: type[Objective]) -> dict[str, object]:
    parameters = inspect.signature(cls.__init__).parameters
    own = {n: p.default for n, p in parameters.items() if p.kind == p.KEYWORD_ONLY}
    if "shared" in parameters:
        base = inspect.signature(Objective.__init__).parameters
        own |= {name: base[name].default for name in Shared.__annotations__}
    return own


def test_every_public_objective_has_a_name() -> None:
    classes = {
        name
        for name in surrogap.__all__
        if isinstance(getattr(surrogap, name), type)
        and issubclass(getattr(surrogap, name), Objective)
    }
    assert {entry.class_name for entry in OBJECTIVES.values()} == classes - NOT_BY_NAME


@pytest.mark.parametrize("name", OBJECTIVES)
def test_arguments_and_defaults_are_those_of_the_class(name: str) -> None:
    entry = OBJECTIVES[name]
    assert dict(entry.arguments) == arguments_of(getattr(surrogap, entry.class_name))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_from_its_name_makes_as_many_passes(name: str) -> None:
    model, calls = toy_models.mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    objective = create_objective(name, model, optimizer)
    assert type(objective).__name__ == OBJECTIVES[name].class_name
    closure = toy_models.closure_of(model, toy_models.batch())

    def counted() -> torch.Tensor:
        calls.append(1)
        return closure()

    objective.backward(counted)
    assert len(calls) == objective.num_passes == OBJECTIVES[name].num_passes()


def test_the_number_of_passes_may_be_an_argument() -> None:
    model = toy_models.mlp()
    objective = create_objective(
        "entropy-sgd", model, torch.optim.SGD(model.parameters()), inner_steps=3
    )
    assert objective.num_passes == OBJECTIVES["entropy-sgd"].num_passes(inner_steps=3) == 3
