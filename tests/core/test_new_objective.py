"""Friendly-SAM of the how-to page: against a float64 reference, scaled, captured, resumed."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from surrogap import GSAM, Intermittent, Objective, capture
from surrogap.parts import Along, Combine, Gradient, Penalty, SurrogateGap
from tests import equality, reference, toy_models
from tests.new_objective import BLOCKS, FriendlySAM

RHO, SIGMA = 0.2, 0.7


def test_it_is_short_and_uses_only_public_names() -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 25
    imports = [line for line in lines if line.startswith(("import", "from"))]
    assert imports == ["from surrogap import Objective", "from surrogap.parts import Along"]


def friendly(f: reference.Loss, w: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """The direction and the next `m`."""
    g = reference.gradient(f, w)
    v = g - m
    return reference.gradient(f, w + RHO * v / (v.norm() + 1e-12)), SIGMA * m + (1 - SIGMA) * g


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def reference_walk(model: nn.Module, device: torch.device, steps: int = 20) -> Tensor:
    model = copy.deepcopy(model).double()
    w, m = flat(model), torch.zeros_like(flat(model))
    for seed in range(steps):
        data = toy_models.batch(seed=seed, device=device)
        f, _ = reference.loss_of(model, lambda net, d=data: toy_models.cross_entropy(net, d))
        d, m = friendly(f, w, m)
        w = w - 0.1 * d
    return w


def make(model: nn.Module, **settings: object) -> FriendlySAM:
    return FriendlySAM(model, rho=RHO, sigma=SIGMA, **settings)


@pytest.mark.parametrize("memory", ["exact", "low"])
@pytest.mark.parametrize("kind", ["mlp", "convnet", "attention"])
def test_twenty_steps_are_the_reference(kind: str, memory: str, device: torch.device) -> None:
    model = toy_models.MODELS[kind]().double().to(device)
    expected = reference_walk(model, device)
    objective = make(model, memory=memory)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(20):
        data = toy_models.batch(seed=seed, device=device)
        report = objective.backward(toy_models.closure_of(model, data))
        assert float(report.gap) == float(report.perturbed_loss - report.loss)
        assert 0 < float(report.cosine) < 1
        optimizer.step()
        optimizer.zero_grad()
    assert equality.relative_error(flat(model), expected) < 1e-9


def test_with_a_scaler_and_clipping(device: torch.device) -> None:
    """`m` is unscaled, and a step that overflows in either pass does not change it."""
    model = toy_models.mlp().to(device)
    plain = copy.deepcopy(model)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    scaled, unscaled = make(model), make(plain)
    for seed in range(20):
        data = toy_models.batch(seed=seed, device=device)
        closure, passes = toy_models.closure_of(model, data), iter(range(2))
        overflowing = {3: 0, 7: 1}.get(seed)
        before = copy.deepcopy(scaled.state_dict())

        def poisoned(closure=closure, passes=passes, overflowing=overflowing) -> Tensor:
            return closure() * (float("inf") if next(passes) == overflowing else 1.0)

        scaled.backward(poisoned, scaler=scaler)
        scaler.unscale_(optimizers[0])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()
        if overflowing is not None:
            after = scaled.state_dict()["along"]
            assert all(torch.equal(m, after[name]) for name, m in before["along"].items())
            continue
        unscaled.backward(toy_models.closure_of(plain, data))
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert float(scaler.get_scale()) == 2.0**10
    assert equality.relative_error(flat(model), flat(plain)) < 1e-5
    for name, m in unscaled.state_dict()["along"].items():
        assert equality.relative_error(scaled.state_dict()["along"][name], m) < 1e-4


def scaled_call(
    objective: FriendlySAM, way: str, closure: object, scaler: torch.amp.GradScaler, sync: bool
) -> None:
    if way == "backward":
        objective.backward(closure, scaler=scaler, sync=sync)
    else:
        scaler.scale(objective.loss(closure, scaler=scaler, sync=sync)).backward()


@pytest.mark.parametrize("way", ["backward", "loss"])
def test_a_step_of_several_calls_that_overflows_leaves_the_state(way: str) -> None:
    """In any of its calls and in either pass, against an explicit loop that skips the step."""
    model = toy_models.mlp().double()
    w, m = flat(model), torch.zeros_like(flat(model))
    f_of = partial(reference.loss_of, copy.deepcopy(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    objective = make(model)
    overflows = {2: (0, 0), 3: (1, 1), 5: (2, 0), 7: (2, 1)}  # of a step: the call and the pass
    for step in range(9):
        now, direction, saved = m, 0.0, objective.state_dict()
        for call in range(3):
            data = toy_models.batch(seed=3 * step + call)
            closure, passes = toy_models.closure_of(model, data), iter(range(2))

            def poisoned(closure=closure, passes=passes, here=(step, call)) -> Tensor:
                is_poisoned = overflows.get(here[0]) == (here[1], next(passes))
                return closure() * (float("inf") if is_poisoned else 1.0) / 3

            scaled_call(objective, way, poisoned, scaler, sync=call == 2)
            if call < 2 and step:  # a checkpoint within a step is that of before the step
                within = objective.state_dict()["along"]
                assert all(torch.equal(saved["along"][name], within[name]) for name in within)
            f, _ = f_of(lambda net, data=data: toy_models.cross_entropy(net, data) / 3)
            d, now = friendly(f, w, now)
            direction += d
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step not in overflows:
            w, m = w - 0.1 * direction, now
        state = torch.cat([t.reshape(-1) for t in objective.state_dict()["along"].values()])
        assert equality.relative_error(state, m) < 1e-9
        assert equality.relative_error(flat(model), w) < 1e-9
    assert float(scaler.get_scale()) == 2.0**8


def test_a_loaded_state_is_not_that_of_an_unfinished_step() -> None:
    model = toy_models.mlp()
    objective, closure = make(model), toy_models.closure_of(model, toy_models.batch())
    objective.backward(closure)
    saved = objective.state_dict()
    objective.backward(closure)
    objective.backward(closure, sync=False)
    objective.load_state_dict(saved)
    model.zero_grad()
    objective.backward(lambda: closure() * float("inf"))
    after = objective.state_dict()["along"]
    assert all(torch.equal(m, after[name]) for name, m in saved["along"].items())


def test_a_step_that_raises_leaves_the_state() -> None:
    model = toy_models.mlp()
    objective, closure = make(model), toy_models.closure_of(model, toy_models.batch())
    objective.backward(closure)
    before, losses = objective.state_dict()["along"], iter([1.0])
    with pytest.raises(StopIteration):
        objective.backward(lambda: closure() * next(losses))
    after = objective.state_dict()["along"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_state_dict_round_trip() -> None:
    model = toy_models.mlp()
    objective = make(model)
    for seed in range(3):
        objective.backward(toy_models.closure_of(model, toy_models.batch(seed=seed)))
    file = io.BytesIO()
    torch.save(objective.state_dict(), file)
    file.seek(0)
    resumed = make(model)
    resumed.load_state_dict(torch.load(file))
    directions = []
    for each in (objective, resumed, make(model)):
        model.zero_grad()
        each.backward(toy_models.closure_of(model, toy_models.batch(seed=9)))
        directions.append(toy_models.flat_grad(model))
    assert torch.equal(directions[0], directions[1])
    assert not torch.equal(directions[0], directions[2])
    assert all("weight" in name or "bias" in name for name in objective.state_dict()["along"])
    other = make(toy_models.Attention())
    with pytest.raises(ValueError, match="state must belong to this model, got one with"):
        other.load_state_dict(objective.state_dict())


def test_a_state_of_before_the_first_step_is_zero() -> None:
    model = toy_models.mlp()
    objective, closure = make(model), toy_models.closure_of(model, toy_models.batch())
    fresh = objective.state_dict()
    objective.backward(closure)
    saved = objective.state_dict()
    objective.load_state_dict(fresh)
    assert not any(m.any() for m in objective.state_dict()["along"].values())
    name = next(iter(saved["along"]))
    with pytest.raises(ValueError, match=r"state must belong to this model, got .* of shape \(1,"):
        objective.load_state_dict({"along": {name: saved["along"][name][:1]}})


def test_some_parameters_climb() -> None:
    model, data = toy_models.convnet().double(), toy_models.batch()
    objective = make(model, perturb="norms")
    for _ in range(2):
        model.zero_grad()
        objective.backward(toy_models.closure_of(model, data))
    assert set(objective.state_dict()["along"]) == {"1.weight", "1.bias"}


def test_in_half_precision() -> None:
    model, data = toy_models.mlp().bfloat16(), toy_models.batch()
    objective, before = make(model), equality.bits(model)
    objective.backward(toy_models.closure_of(model, data))
    assert equality.same_bits(before, equality.bits(model))
    states = objective.state_dict()["along"].values()
    assert all(m.dtype == torch.float32 and float(m.norm()) > 0 for m in states)


class Backwards(Along):
    """The gradient of the last step: a vector that does not need a first pass."""

    needs_gradient = False
    has_state = True
    sign = -1

    def vector(self, parameters: object, g: object, m: list[Tensor]) -> list[Tensor]:
        assert g == []
        return m

    def update(self, g: object, m: list[Tensor]) -> list[Tensor]:
        return [each + 1 for each in m]


def test_a_state_without_a_first_pass() -> None:
    model, seen = toy_models.mlp().double(), []
    objective = Objective(model, rho=0.5, along=Backwards())
    closure = toy_models.closure_of(model, toy_models.batch())

    def look() -> Tensor:
        seen.append(flat(model))
        return closure()

    for _ in range(2):
        objective.backward(look)
    assert torch.equal(seen[0], flat(model))
    assert float((flat(model) - seen[1]).norm()) == pytest.approx(0.5)
    assert float((flat(model) - seen[1]).min()) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("wrap", [lambda o: o, partial(Intermittent, every=2)])
def test_captured_steps_are_eager_ones(wrap) -> None:
    models = [toy_models.mlp().cuda()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True) for m in models]
    eager, graph = (wrap(make(model)) for model in models)
    batches = [toy_models.batch(seed=seed, device="cuda") for seed in range(20)]
    batches = [(x.float(), y) for x, y in batches]
    step = capture(
        graph, optimizers[1], lambda x, y: toy_models.cross_entropy(models[1], (x, y)), batches[0]
    )
    for batch in batches:
        eager.backward(lambda batch=batch: toy_models.cross_entropy(models[0], batch))
        optimizers[0].step()
        optimizers[0].zero_grad()
        step(*batch)
    assert equality.same_bits(equality.bits(models[0]), equality.bits(models[1]))
    states = [o.state_dict() for o in (eager, graph)]
    states = [s.get("objective", s)["along"] for s in states]
    assert equality.same_bits(list(states[0].values()), list(states[1].values()))


@pytest.mark.parametrize("combine", [SurrogateGap(-1.0), Penalty(-1.0)], ids=repr)
def test_the_settings_of_a_combination_are_checked_at_construction(combine: Combine) -> None:
    with pytest.raises(ValueError, match=r"(alpha|lam) must be at least 0 and finite, got -1.0"):
        Objective(toy_models.mlp(), along=Gradient(), combine=combine)


def test_it_composes_with_a_combination() -> None:
    """GSAM's direction with Friendly-SAM's climb: `g` and the climb's vector are separate."""
    from tests.new_objective import namespace

    model, data = toy_models.mlp().double(), toy_models.batch()
    f, w = reference.loss_of(copy.deepcopy(model), lambda net: toy_models.cross_entropy(net, data))
    along = namespace["WithoutMean"](0.5)
    objective = Objective(model, rho=RHO, along=along, combine=SurrogateGap(0.4))
    first = toy_models.direction(partial(GSAM, rho=RHO, alpha=0.4), model, data)
    objective.backward(toy_models.closure_of(model, data))
    assert equality.relative_error(toy_models.flat_grad(model), first) < 1e-12  # m is 0, so v is g
    other = toy_models.batch(seed=7)
    h, _ = reference.loss_of(copy.deepcopy(model), lambda net: toy_models.cross_entropy(net, other))
    v = reference.gradient(h, w) - 0.5 * reference.gradient(f, w)
    expected = reference.gsam(h, w, RHO * v / v.norm(), 0.4)
    model.zero_grad()
    objective.backward(toy_models.closure_of(model, other))
    assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-11
