"""`climb=`: a first pass on a fraction of the batch."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from surrogap import ASAM, GSAM, SAM, EntropySGD, GapPenalty, Objective, Vanilla
from tests import equality, reference, toy_models
from tests.objective_cases import RHO

PART = 3


def subset_of(data: toy_models.Batch) -> toy_models.Batch:
    return data[0][:PART], data[1][:PART]


OBJECTIVES: dict[str, tuple[Callable[..., Objective], Callable[..., Tensor]]] = {
    "SAM": (lambda m: SAM(m, rho=RHO), lambda g, g_p: g_p),
    "SAM, one copy": (lambda m: SAM(m, rho=RHO, memory="low"), lambda g, g_p: g_p),
    "GSAM": (
        lambda m: GSAM(m, rho=RHO, alpha=0.4),
        lambda g, g_p: g_p - 0.4 * reference.orthogonal_part(g, g_p),
    ),
    "GapPenalty": (lambda m: GapPenalty(m, rho=RHO, lam=0.3), lambda g, g_p: 1.3 * g_p - 0.3 * g),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_direction_is_the_reference(name: str, device: torch.device) -> None:
    make, combine = OBJECTIVES[name]
    model, data = toy_models.mlp().double().to(device), toy_models.batch(device=device)
    whole, w = reference.loss_of(
        copy.deepcopy(model), lambda net: toy_models.cross_entropy(net, data)
    )
    subset, _ = reference.loss_of(
        copy.deepcopy(model), lambda net: toy_models.cross_entropy(net, subset_of(data))
    )
    g = reference.gradient(subset, w)
    point = w + reference.climb(subset, w, RHO)
    expected = combine(g, reference.gradient(whole, point))
    objective = make(model)
    report = objective.backward(
        lambda: (toy_models.cross_entropy(model, data), "whole"),
        climb=lambda: (toy_models.cross_entropy(model, subset_of(data)), "subset"),
    )
    assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-11
    assert report.aux == "whole"
    missing = ("loss", "gap", "grad_norm", "cosine")
    assert all(bool(getattr(report, field).isnan()) for field in missing)
    assert float(report.value) == float(report.perturbed_loss)
    assert float(report.perturbed_loss) == pytest.approx(float(whole(point)), rel=1e-12)
    g_p = reference.gradient(whole, point)
    assert float(report.perturbed_grad_norm) == pytest.approx(float(g_p.norm()), rel=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_climb_on_the_whole_batch_changes_nothing(name: str) -> None:
    model, data = toy_models.mlp(), toy_models.batch()
    closure = toy_models.closure_of(model, data)
    OBJECTIVES[name][0](model).backward(closure, climb=closure)
    expected = toy_models.direction(OBJECTIVES[name][0], model, data)
    assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-6


def test_lists_of_closures() -> None:
    model, (x, y) = toy_models.mlp().double(), toy_models.batch(8)
    quarters = [
        lambda i=i: nn.functional.cross_entropy(model(x[i : i + 2]), y[i : i + 2]) / 4
        for i in (0, 2, 4, 6)
    ]
    SAM(model, rho=RHO).backward(quarters, climb=[quarters[0], quarters[1]])
    apart = toy_models.flat_grad(model)
    model.zero_grad()
    SAM(model, rho=RHO).backward(
        lambda: nn.functional.cross_entropy(model(x), y),
        climb=lambda: nn.functional.cross_entropy(model(x[:4]), y[:4]),
    )
    assert equality.relative_error(apart, toy_models.flat_grad(model)) < 1e-12


def test_statistics_move_in_the_pass_at_w() -> None:
    model, data = toy_models.convnet(), toy_models.batch()
    plain = copy.deepcopy(model)
    plain(subset_of(data)[0].float())
    SAM(model).backward(
        toy_models.closure_of(model, data), climb=toy_models.closure_of(model, subset_of(data))
    )
    assert equality.same_bits(list(plain.buffers()), list(model.buffers()))


@pytest.mark.parametrize("kind", [Vanilla, EntropySGD])
def test_it_is_refused_without_a_first_pass(kind: type[Objective]) -> None:
    model, data = toy_models.mlp(), toy_models.batch()
    closure = toy_models.closure_of(model, data)
    with pytest.raises(ValueError, match=f"climb must be left out for {kind.__name__}, got one"):
        kind(model).backward(closure, climb=closure)


def test_what_is_not_a_closure() -> None:
    model = toy_models.mlp()
    with pytest.raises(TypeError, match="climb must be a function that runs the forward pass"):
        ASAM(model).backward(toy_models.closure_of(model, toy_models.batch()), climb=3)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda loss: 0.5, TypeError, "climb must return the loss as a tensor, .* got float"),
        (lambda loss: loss.expand(2), RuntimeError, r"climb must return a real scalar, got sh"),
        (Tensor.detach, RuntimeError, "climb must return a loss with a graph, got one without"),
    ],
)
def test_what_climb_must_return(
    wrong: Callable[[Tensor], object], error: type[Exception], message: str
) -> None:
    model = toy_models.mlp()
    closure = toy_models.closure_of(model, toy_models.batch())
    with pytest.raises(error, match=message):
        SAM(model).backward(closure, climb=lambda: wrong(closure()))


def test_a_norm_that_overflows_in_float16_leaves_the_direction_finite() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).half()
    x = torch.ones(8, 4, dtype=torch.float16)

    def loss(rows: Tensor) -> Tensor:
        return 300.0 * model(rows).mean()  # a squared norm of 4 * 300**2, above 65504

    SAM(model, rho=0.01).backward(lambda: loss(x), climb=lambda: loss(x[:2]))
    assert model.weight.grad is not None
    assert model.weight.grad.isfinite().all()
