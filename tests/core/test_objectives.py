"""Directions against the reference, identities, closed forms, and wrong arguments."""

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surrogap import ASAM, GSAM, SAM, EntropySGD, GapPenalty, Vanilla
from surrogap.core.objective import Objective
from tests import equality, reference, toy_models
from tests.objective_cases import (
    ALPHA,
    OBJECTIVES,
    RHO,
    every_objective,
    every_two_pass,
    every_whole_climb,
)


@every_objective
@pytest.mark.parametrize("kind", toy_models.MODELS)
def test_direction_is_the_reference(name: str, kind: str, device: torch.device) -> None:
    model, data = toy_models.MODELS[kind]().double().to(device), toy_models.batch(device=device)
    f, w = reference.loss_of(copy.deepcopy(model), lambda net: toy_models.cross_entropy(net, data))
    entry = OBJECTIVES[name]
    expected = entry.reference(f, w, lambda select: reference.selected(model, select).to(device))
    assert equality.relative_error(toy_models.direction(entry.make, model, data), expected) < 1e-11


@every_objective
def test_direction_in_float32(name: str, device: torch.device) -> None:
    model, data = toy_models.mlp().to(device), toy_models.batch(device=device)
    single = toy_models.direction(OBJECTIVES[name].make, model, data)
    double = toy_models.direction(OBJECTIVES[name].make, model.double(), data)
    assert single.dtype == torch.float32
    assert equality.relative_error(single, double) < 2e-5


def select_first_layer(name: str, _: nn.Parameter) -> bool:
    return name.startswith("1.")


@pytest.mark.parametrize("name", ["SAM", "GSAM", "GSAM-plain", "GapPenalty"])
def test_perturb_selects_what_climbs_and_all_descend(name: str) -> None:
    model, data = toy_models.mlp().double(), toy_models.batch()
    makers: dict[str, Callable[[nn.Module], Objective]] = {
        "SAM": lambda m: SAM(m, rho=RHO, perturb=select_first_layer),
        "GSAM": lambda m: GSAM(m, rho=RHO, alpha=0.4, perturb=select_first_layer),
        "GSAM-plain": lambda m: GSAM(
            m, rho=RHO, alpha=0.4, minimize="plain", perturb=select_first_layer
        ),
        "GapPenalty": lambda m: GapPenalty(m, rho=RHO, lam=0.1, perturb=select_first_layer),
    }
    f, w = reference.loss_of(copy.deepcopy(model), lambda net: toy_models.cross_entropy(net, data))
    mask = torch.arange(w.numel()) < model[1].weight.numel() + model[1].bias.numel()
    delta = reference.climb(f, w, RHO, mask=mask)
    expected = {
        "SAM": lambda: reference.sam(f, w, delta),
        "GSAM": lambda: reference.gsam(f, w, delta, 0.4),
        "GSAM-plain": lambda: reference.gsam_plain(f, w, delta, 0.4),
        "GapPenalty": lambda: reference.gap_penalty(f, w, delta, 0.1),
    }[name]()
    assert (
        equality.relative_error(toy_models.direction(makers[name], model, data), expected) < 1e-11
    )


def test_asam_with_perturb() -> None:
    model, data = toy_models.mlp().double(), toy_models.batch()
    f, w = reference.loss_of(copy.deepcopy(model), lambda net: toy_models.cross_entropy(net, data))
    not_bias, g = reference.selected(model, reference.is_not_bias), reference.gradient(f, w)
    scaling = torch.where(not_bias, w.abs() + 0.01, 0.0)
    delta = 0.5 * scaling**2 * g / (scaling * g).norm()
    only = toy_models.direction(lambda m: ASAM(m, perturb=lambda _, p: p.ndim >= 2), model, data)
    assert equality.relative_error(only, reference.sam(f, w, delta)) < 1e-11
    # If only biases climb, T is 1, and ASAM is SAM.
    vectors = toy_models.direction(lambda m: ASAM(m, perturb=lambda _, p: p.ndim < 2), model, data)
    sam = toy_models.direction(
        lambda m: SAM(m, rho=0.5, perturb=lambda _, p: p.ndim < 2), model, data
    )
    assert torch.equal(vectors, sam)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_alpha_zero_is_sam_bit_for_bit(dtype: torch.dtype, device: torch.device) -> None:
    model, data = toy_models.Attention().to(device, dtype), toy_models.batch(device=device)
    sam = toy_models.direction(lambda m: SAM(m, rho=RHO), model, data)
    gsam = toy_models.direction(lambda m: GSAM(m, rho=RHO, alpha=0.0), model, data)
    assert equality.same_bits([sam], [gsam])


def test_alpha_zero_is_sam_even_for_negative_zeros() -> None:
    def run(make: Callable[[nn.Module], Objective]) -> Tensor:
        model = nn.Linear(2, 1, bias=False)
        slopes = iter([torch.tensor([1.0, 1.0]), torch.tensor([-0.0, -1.0])])
        make(model).backward(lambda: (model.weight * next(slopes)).sum())
        return model.weight.grad

    assert equality.same_bits([run(SAM)], [run(partial(GSAM, alpha=0.0))])


def test_asam_with_eta_one_at_zero_weights_is_sam() -> None:
    model, data = toy_models.mlp().double(), toy_models.batch()
    for p in model.parameters():
        nn.init.zeros_(p)
    nn.init.ones_(model[3].bias[:1])
    asam = toy_models.direction(lambda m: ASAM(m, rho=RHO, eta=1.0), model, data)
    sam = toy_models.direction(lambda m: SAM(m, rho=RHO), model, data)
    assert torch.equal(asam, sam)


@every_two_pass
def test_rho_zero_is_the_plain_gradient(name: str) -> None:
    model, data = toy_models.convnet().double(), toy_models.batch()

    ours = toy_models.direction(partial(OBJECTIVES[name].make, rho=0.0), model, data)
    assert equality.relative_error(ours, toy_models.direction(Vanilla, model, data)) < 1e-15


def test_rho_zero_of_sam_is_the_plain_gradient_bit_for_bit() -> None:
    model, data = toy_models.convnet(), toy_models.batch()
    sam = toy_models.direction(lambda m: SAM(m, rho=0.0), model, data)
    assert torch.equal(sam, toy_models.direction(Vanilla, model, data))


def test_vanilla_is_loss_backward_bit_for_bit(device: torch.device) -> None:
    model, data = toy_models.convnet().to(device), toy_models.batch(device=device)
    ours = toy_models.direction(Vanilla, model, data)
    toy_models.closure_of(model, data)().backward()
    assert torch.equal(ours, toy_models.flat_grad(model))


def test_lam_zero_is_sam_bit_for_bit() -> None:
    model, data = toy_models.mlp(), toy_models.batch()
    sam = toy_models.direction(lambda m: SAM(m, rho=RHO), model, data)
    assert torch.equal(
        sam, toy_models.direction(lambda m: GapPenalty(m, rho=RHO, lam=0), model, data)
    )


def test_alpha_zero_of_plain_is_the_plain_gradient() -> None:
    model, data = toy_models.mlp(), toy_models.batch()
    gsam = toy_models.direction(
        lambda m: GSAM(m, rho=RHO, alpha=0.0, minimize="plain"), model, data
    )
    assert torch.equal(gsam, toy_models.direction(Vanilla, model, data))


def test_ascent_is_orthogonal_to_the_perturbed_gradient() -> None:
    model, data = toy_models.mlp().double(), toy_models.batch()
    g_p = toy_models.direction(lambda m: SAM(m, rho=RHO), model, data)
    g_perp = g_p - toy_models.direction(lambda m: GSAM(m, rho=RHO, alpha=1.0), model, data)
    g = toy_models.direction(Vanilla, model, data)
    assert g_perp.norm() > 1e-3 * g.norm()
    assert abs(float(g_perp @ g_p)) < 1e-13 * float(g_perp.norm() * g_p.norm())
    assert float(g_perp @ g) > 0  # an ascent: the loss rises along g_perp


@every_two_pass
@pytest.mark.parametrize("factor", [2.0**-10, 1e3])
def test_direction_scales_with_the_loss(name: str, factor: float) -> None:
    model, data = toy_models.mlp().double(), toy_models.batch()
    make = partial(OBJECTIVES[name].make, eps=0.0)  # only eps is not homogeneous
    one = toy_models.direction(make, model, data)
    closure = toy_models.closure_of(model, data)
    make(model).backward(lambda: factor * closure())
    assert equality.relative_error(toy_models.flat_grad(model), factor * one) < 1e-14


class Quadratic(nn.Module):
    """`f(w) = w' H w / 2`, with eigenvalues 1, 2, ..., n."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q
        self.hessian = basis @ torch.diag(torch.arange(1.0, size + 1).double()) @ basis.T
        self.top = basis[:, -1]
        self.w = nn.Parameter(torch.randn(size, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.w @ self.hessian @ self.w / 2


def test_quadratic_gap_has_its_closed_form() -> None:
    model = Quadratic()
    g = (model.hessian @ model.w).detach()
    expected = RHO * g.norm() + RHO**2 / 2 * (g @ model.hessian @ g) / (g @ g)
    report = SAM(model, rho=RHO).backward(model)
    assert float(report.gap) == pytest.approx(float(expected), rel=1e-11)


def test_gap_at_a_minimum_gives_the_top_eigenvalue() -> None:
    """Lemma 3.3: `sigma_max = 2 h / rho^2`, for a climb along the top eigenvector."""
    model = Quadratic()
    with torch.no_grad():
        model.w.copy_(1e-9 * model.top)
    report = SAM(model, rho=RHO, eps=0.0).backward(model)
    assert float(2 * report.gap / report.rho**2) == pytest.approx(6.0, rel=1e-7)


@every_whole_climb
@pytest.mark.parametrize("eps", [0.0, 1e-12])
def test_no_climb_along_a_zero_gradient(name: str, eps: float) -> None:
    model = Quadratic()
    nn.init.zeros_(model.w)
    report = OBJECTIVES[name].make(model, eps=eps).backward(model)
    assert torch.equal(model.w.grad, torch.zeros(6, dtype=torch.float64))
    assert float(report.gap) == 0.0
    assert math.isnan(report.cosine)


def test_direction_at_a_cosine_of_almost_one(device: torch.device) -> None:
    """In float32, with 1 - cosine = 1e-7: at this angle a cosine alone would be rounded away."""
    size, angle = 10**6, math.sqrt(2e-7)
    generator = torch.Generator().manual_seed(3)
    g, other = torch.randn(2, size, generator=generator, dtype=torch.float64)
    other = reference.orthogonal_part(other, g)
    g, g_p = g.float(), (math.cos(angle) * g + math.sin(angle) * other * g.norm() / other.norm())
    g_p = g_p.float()
    # The gradients of the passes are set explicitly: linear losses with slope g, then g_p.
    model = nn.Linear(size, 1, bias=False).to(device)
    slopes = iter([g.to(device), g_p.to(device)])
    report = GSAM(model, alpha=ALPHA).backward(lambda: model(next(slopes)).sum())
    expected = g_p.double() - ALPHA * reference.orthogonal_part(g.double(), g_p.double())
    assert equality.relative_error(toy_models.flat_grad(model), expected) < 3e-7
    assert abs(1 - float(report.cosine) - 1e-7) < 2.5e-7
    # The term that the ascent adds is accurate up to the rounding of g and g_p.
    ascent = toy_models.flat_grad(model).double() - g_p.double()
    assert equality.relative_error(ascent, expected - g_p.double()) < 1e-3


BAD_NUMBERS = [-0.1, float("nan"), float("inf"), "0.1", None, True, torch.tensor(0.1)]


@pytest.mark.parametrize("value", BAD_NUMBERS)
@pytest.mark.parametrize(
    ("objective", "argument"),
    [
        *((cls, "rho") for cls in (SAM, ASAM, GSAM, GapPenalty)),
        *((cls, "eps") for cls in (SAM, ASAM, GSAM, GapPenalty)),
        (GSAM, "alpha"),
        (ASAM, "alpha"),
        (ASAM, "eta"),
        (GapPenalty, "lam"),
        *((EntropySGD, name) for name in ("gamma", "inner_lr", "noise", "averaging", "scoping")),
    ],
)
def test_bad_numbers(objective: type[Objective], argument: str, value: object) -> None:
    is_number = isinstance(value, float)
    message = f"{argument} must be {'(at least|above)' if is_number else 'a number'}.*, got .*"
    with pytest.raises(ValueError if is_number else TypeError, match=message):
        objective(nn.Linear(2, 1), **{argument: value})


def test_numbers_of_numpy_and_integers_are_numbers() -> None:
    import numpy as np

    assert SAM(nn.Linear(2, 1), rho=np.float32(0.5)).rho == 0.5
    assert GSAM(nn.Linear(2, 1), rho=1, alpha=2).alpha == 2.0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SAM([nn.Linear(2, 1)]), TypeError, "model must be a torch.nn.Module, got list"),
        (lambda: SAM(nn.ReLU()), ValueError, "model must have a trainable parameter, got none"),
        (
            lambda: SAM(nn.Linear(2, 1).requires_grad_(False)),
            ValueError,
            "model must have a trainable parameter, got none",
        ),
        (
            lambda: SAM(nn.Linear(2, 1, dtype=torch.complex64)),
            ValueError,
            "weight must be real, got torch.complex64. Store it",
        ),
        (
            lambda: SAM(nn.Linear(2, 1), perturb=lambda name, p: False),
            ValueError,
            "perturb must select a trainable parameter, got False for all of them. The first "
            "name is 'weight'",
        ),
        (
            lambda: GSAM(nn.Linear(2, 1), perturb="norm"),
            ValueError,
            "perturb must be \"norms\" or a function of .* got 'norm'. Pass",
        ),
        (
            lambda: GSAM(nn.Linear(2, 1), perturb=3),
            TypeError,
            'perturb must be "norms" or a function of a parameter.s name and the parameter, got',
        ),
        (
            lambda: SAM(nn.Linear(2, 1), perturb="norms"),
            ValueError,
            'perturb="norms" must find a trainable parameter of a normalisation layer, got none '
            "among 2. If they are frozen, as with LoRA, unfreeze them",
        ),
        (
            lambda: GSAM(nn.Linear(2, 1), minimize="gap"),
            ValueError,
            'minimize must be "perturbed" or "plain", got \'gap\'',
        ),
    ],
)
def test_bad_arguments(make: Callable[[], Objective], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (GSAM, "rho", -1.0),
        (GSAM, "rho", float("nan")),
        (GSAM, "rho", "wide"),
        (GSAM, "rho", 10**400),
        (GSAM, "alpha", float("nan")),
        (GSAM, "minimize", "perturb"),
        (GapPenalty, "lam", -1.0),
        (EntropySGD, "gamma", float("nan")),
    ],
)
def test_settings_are_checked_at_each_step(kind: type[Objective], name: str, value: object) -> None:
    model, data = toy_models.mlp(), toy_models.batch()
    objective = kind(model)
    before = equality.bits(model)
    setattr(objective, name, value)
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        objective.backward(toy_models.closure_of(model, data))
    assert equality.same_bits(before, equality.bits(model))
    assert all(p.grad is None for p in model.parameters())


def test_perturb_is_evaluated_at_each_step() -> None:
    """Freezing the only parameters that climb is an error at the next step."""
    model, data = toy_models.mlp(), toy_models.batch()
    objective = SAM(model, perturb=select_first_layer)
    objective.backward(toy_models.closure_of(model, data))
    model[1].requires_grad_(False)
    with pytest.raises(ValueError, match="perturb must select a trainable parameter"):
        objective.backward(toy_models.closure_of(model, data))


@every_two_pass
def test_memory_must_be_known(name: str) -> None:
    with pytest.raises(ValueError, match=r'memory must be "exact" or "low", got \'none\'\. Leave'):
        OBJECTIVES[name].make(toy_models.mlp(), memory="none")


@every_two_pass
def test_low_memory_is_refused_in_half_precision(name: str) -> None:
    message = 'memory must be "exact" for parameters in half precision, got "low"'
    with pytest.raises(ValueError, match=message):
        OBJECTIVES[name].make(toy_models.mlp().bfloat16(), memory="low")
    model = toy_models.mlp()
    objective = OBJECTIVES[name].make(model, memory="low")
    with pytest.raises(ValueError, match=message):  # also if it is cast later
        objective.backward(toy_models.closure_of(model.bfloat16(), toy_models.batch()))


@every_two_pass
def test_low_memory_changes_no_more_than_rounding(name: str, device: torch.device) -> None:
    model, data = toy_models.mlp().to(device), toy_models.batch(device=device)
    exact, low = (
        toy_models.direction(partial(OBJECTIVES[name].make, memory=memory), model, data)
        for memory in ("exact", "low")
    )
    assert equality.relative_error(low, exact) < 1e-4


@pytest.mark.parametrize(
    ("objective", "text"),
    [
        (Vanilla, "Vanilla()"),
        (SAM, "SAM(rho=0.1)"),
        (GSAM, "GSAM(rho=0.1, alpha=0.1)"),
        (partial(GSAM, alpha=0.2, minimize="plain"), "GSAM(rho=0.1, alpha=0.2, minimize='plain')"),
        (partial(ASAM, rho=1.0, memory="low"), "ASAM(rho=1.0, eta=0.01, alpha=0.0, memory='low')"),
        (partial(GapPenalty, lam=0.3, eps=0.0), "GapPenalty(rho=0.1, lam=0.3, eps=0.0)"),
        (OBJECTIVES["MomentumSAM"].make, "MomentumSAM(rho=0.1)"),
        (
            EntropySGD,
            "EntropySGD(gamma=0.03, inner_steps=5, inner_lr=0.1, noise=0.0001, averaging=0.75, "
            "scoping=0.0)",
        ),
    ],
)
def test_repr_shows_the_settings(objective: Callable[[nn.Module], Objective], text: str) -> None:
    assert repr(objective(toy_models.mlp())) == text


def test_repr_shows_settings_that_are_not_defaults() -> None:
    assert repr(SAM(toy_models.convnet(), perturb="norms")) == "SAM(rho=0.1, perturb='norms')"


@every_objective
def test_state_is_empty_without_state(name: str) -> None:
    model = toy_models.mlp()
    objective = OBJECTIVES[name].make(model)
    objective.backward(toy_models.closure_of(model, toy_models.batch()))
    state = objective.state_dict()
    expected = {"num_steps": 1, "objective": {}} if name == "Intermittent" else {}
    assert state == expected
    objective.load_state_dict(state)


def pickled(pair: tuple[nn.Module, Objective]) -> tuple[nn.Module, Objective]:
    copied: tuple[nn.Module, Objective] = pickle.loads(pickle.dumps(pair))
    return copied


@every_objective
@pytest.mark.parametrize("kind", ["convnet", "attention"])
@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
def test_a_copy_trains_its_own_model(name: str, kind: str, make: Callable[..., Any]) -> None:
    model, data = toy_models.MODELS[kind](), toy_models.batch()
    objective = OBJECTIVES[name].make(model)
    objective.backward(toy_models.closure_of(model, data))
    model.zero_grad()
    twin, other = make((model, objective))
    assert other.report is None
    before = equality.bits(model)
    other.backward(toy_models.closure_of(twin, data))
    assert equality.same_bits(before, equality.bits(model))
    assert all(parameter.grad is None for parameter in model.parameters())
    objective.backward(toy_models.closure_of(model, data))
    assert torch.equal(toy_models.flat_grad(model), toy_models.flat_grad(twin))
    assert equality.same_bits(equality.bits(model), equality.bits(twin))
