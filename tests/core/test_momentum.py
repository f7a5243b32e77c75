"""MomentumSAM: trajectories against a plain loop, and refused optimizers."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from timm.optim import Lookahead
from torch import Tensor, nn, optim

from surrogap import MomentumSAM, Report
from surrogap.rho import InverseSqrt, ProportionalToLR
from tests import equality, reference, toy_models
from tests.objective_cases import OBJECTIVES, every_objective

RHO = 0.3


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def by_hand(f: reference.Loss, w: Tensor, v: Tensor | None) -> Tensor:
    return reference.gradient(f, w) if v is None else reference.momentum_sam(f, w, v, RHO)


def sgd(gradient: Tensor, w: Tensor, state: dict[str, Tensor]) -> Tensor:
    v = gradient if "v" not in state else 0.9 * state["v"] + gradient
    state["v"] = v
    return w - 0.1 * v


def adam(gradient: Tensor, w: Tensor, state: dict[str, Tensor]) -> Tensor:
    zeros = torch.zeros_like(w)
    t = state["t"] = state.get("t", 0) + 1
    v = state["v"] = 0.9 * state.get("v", zeros) + 0.1 * gradient
    s = state["s"] = 0.999 * state.get("s", zeros) + 0.001 * gradient**2
    return w - 0.01 * (v / (1 - 0.9**t)) / ((s / (1 - 0.999**t)).sqrt() + 1e-8)


OPTIMIZERS = {
    "sgd": (partial(optim.SGD, lr=0.1, momentum=0.9), sgd),
    "adam": (partial(optim.Adam, lr=0.01), adam),
    "adamw": (partial(optim.AdamW, lr=0.01, weight_decay=0.0), adam),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_twenty_steps_are_those_of_a_plain_loop(kind: str, device: torch.device) -> None:
    make, update = OPTIMIZERS[kind]
    model = toy_models.mlp().double().to(device)
    w, state = flat(list(model.parameters())), {}
    # Two parameter groups: the norm is over both.
    groups = [{"params": model[1].parameters()}, {"params": model[3].parameters()}]
    optimizer = make(groups)
    objective = MomentumSAM(model, optimizer, rho=RHO)
    for seed in range(20):
        data = toy_models.batch(seed=seed, device=device)
        f, _ = reference.loss_of(
            copy.deepcopy(model), lambda net, d=data: toy_models.cross_entropy(net, d)
        )
        expected = by_hand(f, w, state.get("v"))
        before = equality.bits(model)
        report = objective.backward(toy_models.closure_of(model, data))
        assert equality.same_bits(before, equality.bits(model))
        assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-9
        assert float(report.perturbed_grad_norm) == pytest.approx(float(expected.norm()))
        w = update(expected, w, state)
        optimizer.step()
        optimizer.zero_grad()
    assert equality.relative_error(flat(list(model.parameters())), w) < 1e-9


def stepped(model: nn.Module, **settings: object) -> tuple[optim.Optimizer, MomentumSAM]:
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    objective = MomentumSAM(model, optimizer, **settings)
    objective.backward(toy_models.closure_of(model, toy_models.batch(seed=5)))
    optimizer.step()
    optimizer.zero_grad()
    return optimizer, objective


def test_one_pass_and_its_report() -> None:
    model, calls = toy_models.mlp().double(), []
    _, objective = stepped(model, rho=RHO)
    closure = toy_models.closure_of(model, toy_models.batch())

    def counted() -> tuple[Tensor, str]:
        calls.append(1)
        return closure(), "aux"

    report = objective.backward(counted)
    assert len(calls) == objective.num_passes == 1
    assert report.aux == "aux"
    assert all(
        bool(getattr(report, name).isnan()) for name in ("loss", "gap", "grad_norm", "cosine")
    )
    assert float(report.value) == float(report.perturbed_loss) > 0
    assert float(report.rho) == RHO


def test_no_momentum_yet_is_the_plain_gradient() -> None:
    model, data = toy_models.mlp(), toy_models.batch()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    MomentumSAM(model, optimizer).backward(toy_models.closure_of(model, data))
    ours = toy_models.flat_grad(model)
    model.zero_grad()
    toy_models.closure_of(model, data)().backward()
    assert torch.equal(ours, toy_models.flat_grad(model))


def test_a_parameter_without_momentum_does_not_climb() -> None:
    model, seen = toy_models.mlp(), []
    optimizer = optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9)
    objective, closure = (
        MomentumSAM(model, optimizer, rho=RHO),
        toy_models.closure_of(model, toy_models.batch()),
    )
    objective.backward(closure)
    optimizer.step()
    before = equality.bits(model)

    def look() -> Tensor:
        seen.extend(equality.bits(model))
        return closure()

    objective.backward(look)
    assert equality.same_bits(before[:2], seen[:2])
    moved = flat(before[2:]) - flat(seen[2:])
    assert float(moved.norm()) == pytest.approx(RHO, rel=1e-5)


def test_perturb_selects_what_climbs() -> None:
    model, seen = toy_models.convnet(), []
    _, objective = stepped(model, rho=RHO, perturb="norms")
    before, closure = equality.bits(model), toy_models.closure_of(model, toy_models.batch())

    def look() -> Tensor:
        seen.extend(p.detach().clone() for p in model.parameters())
        return closure()

    objective.backward(look)
    moved = [not torch.equal(a, b) for a, b in zip(before, seen, strict=False)]
    names = [name for name, _ in model.named_parameters()]
    assert {name for name, has in zip(names, moved, strict=False) if has} == {"1.weight", "1.bias"}


def test_accumulated_calls_share_the_momentum() -> None:
    model = toy_models.mlp().double()
    _, objective = stepped(model, rho=RHO)
    halves = [toy_models.closure_of(model, toy_models.batch(seed=seed)) for seed in (1, 2)]
    for half in halves:
        objective.backward(lambda half=half: half() / 2, sync=half is halves[-1])
    apart = toy_models.flat_grad(model)
    model.zero_grad()
    objective.backward(lambda: (halves[0]() + halves[1]()) / 2)
    assert equality.relative_error(apart, toy_models.flat_grad(model)) < 1e-12


def test_it_follows_schedules() -> None:
    model = toy_models.mlp()
    optimizer, objective = stepped(model, rho=InverseSqrt(0.2))
    closure = toy_models.closure_of(model, toy_models.batch())
    assert float(objective.backward(closure).rho) == pytest.approx(0.2 / 2**0.5)
    assert objective.state_dict() == {"rho": {"num_steps": 2}}
    objective.rho = ProportionalToLR(optimizer, rho_max=2.0, rho_min=0.0, lr_max=0.2, lr_min=0.0)
    assert float(objective.backward(closure).rho) == pytest.approx(1.0)


def test_a_scaler_changes_nothing() -> None:
    model = toy_models.mlp()
    optimizer, objective = stepped(model, rho=RHO)
    closure = toy_models.closure_of(model, toy_models.batch())
    report = objective.backward(closure)
    plain, norm = toy_models.flat_grad(model), float(report.perturbed_grad_norm)
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    report = objective.backward(closure, scaler=scaler)
    scaler.unscale_(optimizer)
    assert equality.relative_error(toy_models.flat_grad(model), plain) < 1e-6
    assert float(report.perturbed_grad_norm) == pytest.approx(norm, rel=1e-6)


class ZeroRedundancyOptimizer(optim.SGD):
    pass


class Heavy(optim.Optimizer):
    """An optimizer whose momentum has another name."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 0.1, "momentum": 0.9})

    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mass"] = torch.ones_like(parameter)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda p: optim.SGD(p, lr=0.1),
            ValueError,
            "must have momentum, got SGD without it. Pass SGD",
        ),
        (lambda p: optim.RMSprop(p), ValueError, "must have momentum, got RMSprop without"),
        (
            lambda p: optim.SGD(p, lr=0.1, momentum=0.9, maximize=True),
            ValueError,
            "optimizer must minimize, got maximize=True. Negate the loss",
        ),
        (
            lambda p: ZeroRedundancyOptimizer(p, lr=0.1, momentum=0.9),
            TypeError,
            "got ZeroRedundancyOptimizer, which shards it over processes",
        ),
        (lambda p: "sgd", TypeError, "optimizer must be a torch optimizer, got str"),
    ],
)
def test_refused_optimizers(
    make: Callable[..., object], error: type[Exception], message: str
) -> None:
    model = toy_models.mlp()
    with pytest.raises(error, match=message):
        MomentumSAM(model, make(model.parameters()))


def test_a_momentum_of_another_name_is_refused_at_the_second_step() -> None:
    model, closure = toy_models.mlp(), None
    optimizer = Heavy(model.parameters())
    objective, closure = (
        MomentumSAM(model, optimizer),
        toy_models.closure_of(model, toy_models.batch()),
    )
    assert isinstance(objective.backward(closure), Report)
    optimizer.step()
    message = "must keep its momentum as momentum_buffer or exp_avg, in a plain tensor of the "
    with pytest.raises(ValueError, match=f"{message}parameter's shape, got Heavy with mass. Pass"):
        objective.backward(closure)


class Quantised(Tensor):
    """A tensor of another class, as optimizers with 8-bit states have."""


@pytest.mark.parametrize(
    "state",
    [
        lambda p: p[:1],  # of low rank, as GaLore's
        lambda p: torch.Tensor._make_subclass(Quantised, p.detach()),
        lambda p: {0.9: p.detach()},  # AggMo's
    ],
)
def test_a_momentum_that_is_not_a_number_for_each_weight(
    state: Callable[[Tensor], object],
) -> None:
    model = toy_models.mlp()
    optimizer, objective = stepped(model)
    optimizer.state[model[1].weight]["momentum_buffer"] = state(model[1].weight)
    with pytest.raises(ValueError, match="got SGD with momentum_buffer"):
        objective.backward(toy_models.closure_of(model, toy_models.batch()))


class Initialised(nn.Module):
    """A layer that initialises its weights from the first batch, as ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 4))
        self.register_buffer("is_initialised", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_initialised:
            self.weight.data.copy_(1 / x.std(0, keepdim=True))
            self.is_initialised.fill_(True)
        return (x * self.weight).square().mean()


@every_objective
def test_weights_that_the_first_pass_initialises(name: str) -> None:
    model, x = Initialised(), 50 * torch.randn(64, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    is_momentum = name == "MomentumSAM"  # the table's has momentum before the first step
    objective = MomentumSAM(model, optimizer) if is_momentum else OBJECTIVES[name].make(model)
    objective.backward(lambda: model(x))
    assert model.is_initialised
    assert torch.equal(model.weight, 1 / x.std(0, keepdim=True))


def test_the_optimizer_of_another_model_is_refused_once_it_has_momentum() -> None:
    model, other = toy_models.mlp(), toy_models.mlp()
    optimizer, _ = stepped(other)
    objective = MomentumSAM(model, optimizer)
    closure = toy_models.closure_of(model, toy_models.batch())
    message = "optimizer must train the perturbed parameters, got SGD, which trains none of them."
    with pytest.raises(ValueError, match=message):
        objective.backward(closure)
    optimizer.add_param_group({"params": model.parameters()})  # they have no momentum yet
    objective.backward(closure)


def test_inside_lookahead_it_reads_the_momentum_of_the_inner_optimizer() -> None:
    model = toy_models.mlp()
    inner, objective = stepped(model)
    closure = toy_models.closure_of(model, toy_models.batch())
    expected = objective.backward(closure)
    wrapped = MomentumSAM(model, Lookahead(inner), rho=objective.rho)
    assert float(wrapped.backward(closure).perturbed_loss) == float(expected.perturbed_loss)


def test_climb_is_refused() -> None:
    model = toy_models.mlp()
    _, objective = stepped(model)
    closure = toy_models.closure_of(model, toy_models.batch())
    with pytest.raises(ValueError, match="climb must be left out for MomentumSAM, got one"):
        objective.backward(closure, climb=closure)
