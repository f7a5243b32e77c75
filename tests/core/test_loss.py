"""`objective.loss`: a scalar that replaces the loss in any training loop."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from surrogap import GSAM, SAM, EntropySGD, Intermittent, MomentumSAM, Objective, Vanilla
from surrogap.rho import InverseSqrt
from tests import equality, toy_models
from tests.core.test_scaling import SCALE, scaler_for
from tests.new_objective import FriendlySAM
from tests.objective_cases import NUM_PASSES, OBJECTIVES, every_objective


def pair(name: str, kind: str = "convnet", **to: object) -> tuple[nn.Module, nn.Module]:
    model = toy_models.MODELS[kind]().to(**to)
    return model, copy.deepcopy(model)


@every_objective
@pytest.mark.parametrize("kind", toy_models.MODELS)
def test_backward_adds_what_objective_backward_adds(
    name: str, kind: str, device: torch.device
) -> None:
    """Bit for bit, in addition to an existing `.grad`; buffers and generators agree too."""
    model, twin = pair(name, kind, device=device)
    data = toy_models.batch(device=device)
    objective, other = (OBJECTIVES[name].make(each) for each in (model, twin))
    for _ in range(2):
        state = torch.get_rng_state()
        loss = objective.loss(toy_models.closure_of(model, data))
        after = torch.get_rng_state()
        loss.backward()
        torch.set_rng_state(state)
        report = other.backward(toy_models.closure_of(twin, data))
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(loss.detach(), report.value)
        assert torch.equal(toy_models.flat_grad(model), toy_models.flat_grad(twin))
        assert equality.same_bits(equality.bits(model), equality.bits(twin))
        assert objective.report is not None
        assert other.report is report
        for field in ("loss", "perturbed_loss", "grad_norm", "perturbed_grad_norm", "cosine"):
            mine, its = getattr(objective.report, field), getattr(report, field)
            assert torch.equal(mine.nan_to_num(-1), its.nan_to_num(-1)), field


@every_objective
def test_the_incoming_gradient_multiplies_the_direction(name: str) -> None:
    model, data = toy_models.mlp().double(), toy_models.batch()
    expected = toy_models.direction(OBJECTIVES[name].make, model, data)
    loss = OBJECTIVES[name].make(model).loss(toy_models.closure_of(model, data))
    value = float(loss.detach())
    loss = loss / 3
    loss *= 2  # in place, as some loops do
    assert float(loss.detach()) == pytest.approx(value * 2 / 3)
    loss.backward()
    assert equality.relative_error(toy_models.flat_grad(model), expected * 2 / 3) < 1e-15


class Summed(nn.Module):
    """A model that adds views of two parameters, so that autograd gives both one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = (nn.Parameter(torch.randn(2, 2).double()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.p.view(4) + self.q.view(4)) @ x


@every_objective
def test_gradients_that_share_memory_are_multiplied_once(name: str) -> None:
    model, x = Summed(), torch.arange(4).double()
    OBJECTIVES[name].make(model).backward(lambda: model(x))
    expected = toy_models.flat_grad(model).clone()
    model.zero_grad()
    (OBJECTIVES[name].make(model).loss(lambda: model(x)) / 2).backward()
    assert equality.relative_error(toy_models.flat_grad(model), expected / 2) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    model, twin = pair("GSAM", "mlp", dtype=dtype)
    data = toy_models.batch()
    loss = GSAM(model).loss(toy_models.closure_of(model, data))
    assert loss.dtype == torch.float32
    (loss / 3).backward()
    GSAM(twin).backward(toy_models.closure_of(twin, data))
    expected = (toy_models.flat_grad(twin).float() * (torch.tensor(1.0) / 3)).to(dtype)
    assert torch.equal(toy_models.flat_grad(model), expected)


def plain_loop(
    model: nn.Module, make_loss: Callable[[nn.Module, toy_models.Batch], Tensor]
) -> Tensor:
    """The weights after three steps with accumulation, loss scaling and clipping."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=SCALE)
    for step in range(3):
        for index in range(4):
            loss = make_loss(model, toy_models.batch(seed=10 * step + index)) / 4
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return torch.cat([tensor.double().reshape(-1) for tensor in equality.bits(model)])


@pytest.mark.parametrize("make", [Vanilla, partial(SAM, rho=0.0)])
@pytest.mark.parametrize("kind", toy_models.MODELS)
def test_without_a_perturbation_the_loop_is_unchanged(
    make: Callable[[nn.Module], Objective], kind: str
) -> None:
    model, twin = pair("SAM", kind)
    objective = make(twin)
    expected = plain_loop(model, lambda net, data: toy_models.closure_of(net, data)())
    actual = plain_loop(twin, lambda net, data: objective.loss(toy_models.closure_of(net, data)))
    assert torch.equal(actual, expected)


@every_objective
def test_accumulation_scaling_and_clipping_together(name: str) -> None:
    """In float64: one perturbation per micro-batch; the mean, scaled and clipped."""
    model, twin = pair(name, "mlp", dtype=torch.float64)
    objective, other = (OBJECTIVES[name].make(each) for each in (model, twin))
    actual = plain_loop(model, lambda net, data: objective.loss(toy_models.closure_of(net, data)))

    def by_hand(net: nn.Module, data: toy_models.Batch) -> Tensor:
        before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        other.backward(toy_models.closure_of(net, data))
        directions = [p.grad for p in net.parameters()]
        for parameter, gradient in zip(net.parameters(), before, strict=True):
            parameter.grad = gradient
        # A loss that is linear in the parameters, with this gradient.
        pairs = zip(net.parameters(), directions, strict=True)
        return sum(((p * d).sum() for p, d in pairs), start=torch.zeros(()))

    assert equality.relative_error(actual, plain_loop(twin, by_hand)) < 1e-13


@every_objective
def test_with_a_scaler_the_passes_are_scaled(name: str, device: torch.device) -> None:
    """By the factor that the caller scales the loss with. The report is unscaled."""
    model, data = toy_models.mlp().double().to(device), toy_models.batch(device=device)
    plain, scaler, scales = copy.deepcopy(model), scaler_for(device), []
    objective, closure = OBJECTIVES[name].make(model), toy_models.closure_of(model, data)

    def watched() -> Tensor:
        loss = closure()
        loss.register_hook(lambda incoming: scales.append(float(incoming)))
        return loss

    loss = objective.loss(watched, scaler=scaler)
    scaler.scale(loss).backward()
    report = OBJECTIVES[name].make(plain).backward(toy_models.closure_of(plain, data))
    assert scales == [SCALE] * NUM_PASSES[name]
    assert float(loss.detach()) == pytest.approx(float(report.value), rel=1e-14)
    assert (
        equality.relative_error(toy_models.flat_grad(model), SCALE * toy_models.flat_grad(plain))
        < 1e-13
    )
    assert objective.report is not None
    for field in ("grad_norm", "perturbed_grad_norm"):
        mine, its = getattr(objective.report, field), getattr(report, field)
        assert float(mine) == pytest.approx(float(its), rel=1e-12, nan_ok=True)


def test_with_a_scaler_float16_gradients_do_not_underflow() -> None:
    model, data = toy_models.mlp(), toy_models.batch()
    x, sizes = data[0].float(), []
    scaler = GradScaler("cpu", init_scale=2.0**16)

    def closure() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return 1e-8 * nn.functional.cross_entropy(model(x), data[1])

    for given in (None, scaler):
        scaler.scale(GSAM(model).loss(closure, scaler=given)).backward()
        sizes.append(float(toy_models.flat_grad(model).norm()))
        model.zero_grad()
    expected = 2.0**16 * 1e-8 * float(toy_models.direction(GSAM, model, data).norm())
    assert sizes == [0.0, pytest.approx(expected, rel=0.01)]


@pytest.mark.parametrize("overflowing", [1, 2])
def test_an_overflow_skips_the_step(overflowing: int) -> None:
    model, number = toy_models.mlp(), iter(range(1, 3))
    objective, closure = GSAM(model), toy_models.closure_of(model, toy_models.batch())
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), equality.bits(model)
    scaler = GradScaler("cpu", init_scale=SCALE)
    loss = objective.loss(
        lambda: closure() * (float("inf") if next(number) == overflowing else 1.0), scaler=scaler
    )
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert equality.same_bits(before, equality.bits(model))
    assert scaler.get_scale() == SCALE / 2


@every_objective
def test_both_passes_run_in_the_callers_autocast(name: str) -> None:
    model, twin = pair(name, "mlp")
    data = toy_models.batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = OBJECTIVES[name].make(model).loss(toy_models.closure_of(model, data))
        OBJECTIVES[name].make(twin).backward(toy_models.closure_of(twin, data))
    loss.backward()  # outside of the closure, as training loops do
    assert torch.equal(toy_models.flat_grad(model), toy_models.flat_grad(twin))


@every_objective
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_one_plain_pass(name: str, mode: Callable[[], object]) -> None:
    model, twin = pair(name)
    objective, closure, calls = OBJECTIVES[name].make(model), None, []
    closure = toy_models.closure_of(model, toy_models.batch())
    with mode():
        loss = objective.loss(lambda: (calls.append(1) or closure(), "aux"))
        expected = toy_models.closure_of(twin, toy_models.batch())()
    assert len(calls) == 1
    assert not loss.requires_grad
    assert torch.equal(loss, expected)
    assert equality.same_bits(equality.bits(model), equality.bits(twin))
    assert all(parameter.grad is None for parameter in model.parameters())
    report = objective.report
    assert report is not None
    assert report.aux == "aux"
    assert torch.equal(report.loss, loss)
    assert bool(report.gap.isnan())
    assert bool(report.grad_norm.isnan())


def test_without_gradients_the_loss_is_a_scalar_in_float32_too() -> None:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        loss = SAM(model).loss(lambda: model(torch.ones(2, 3)).mean().bfloat16().reshape(1))
    assert loss.shape == ()
    assert loss.dtype == torch.float32


def test_a_second_backward_is_an_error() -> None:
    model = toy_models.mlp()
    loss = SAM(model).loss(toy_models.closure_of(model, toy_models.batch()))
    loss.backward(retain_graph=True)
    before = toy_models.flat_grad(model)
    with pytest.raises(RuntimeError, match="must be called once, got a second call"):
        loss.backward()
    assert torch.equal(toy_models.flat_grad(model), before)


@every_objective
def test_without_backward_it_is_a_forward_pass(name: str) -> None:
    model, twin = pair(name)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    own = [parameter.grad for parameter in model.parameters()]
    objective = OBJECTIVES[name].make(model)
    before = objective.state_dict()
    loss = objective.loss(toy_models.closure_of(model, toy_models.batch()))
    held = [weakref.ref(t) for t in tensors_of(loss)]
    del loss
    assert held
    assert all(reference() is None for reference in held)
    assert all(p.grad is g for p, g in zip(model.parameters(), own, strict=True))
    assert bool((toy_models.flat_grad(model) == 0.5).all())
    assert objective.state_dict() == before
    if name != "MomentumSAM":  # whose statistics are those of the perturbed weights
        toy_models.closure_of(twin, toy_models.batch())()
    assert name == "MomentumSAM" or equality.same_bits(equality.bits(model), equality.bits(twin))


def tensors_of(loss: Tensor) -> list[Tensor]:
    """The memory that a loss holds until `backward`."""
    cells = loss.grad_fn.on_backward.__closure__
    (direction,) = (c.cell_contents for c in cells if type(c.cell_contents).__name__ == "Direction")
    return [tensor for tensor in direction._tensors if tensor is not None]


def test_the_direction_becomes_grad_without_a_copy() -> None:
    model = toy_models.mlp()
    loss = GSAM(model).loss(toy_models.closure_of(model, toy_models.batch()))
    addresses = [tensor.data_ptr() for tensor in tensors_of(loss)]
    loss.backward()
    assert [p.grad.data_ptr() for p in model.parameters()] == addresses
    references = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    gc.collect()
    assert all(reference() is None for reference in references)  # the loss is still alive
    assert loss.grad_fn is not None


@every_objective
def test_an_error_in_a_pass_leaves_everything(name: str) -> None:
    model, number = toy_models.convnet(), iter(range(1, 4))
    objective, closure = (
        OBJECTIVES[name].make(model),
        toy_models.closure_of(model, toy_models.batch()),
    )
    objective.loss(closure).backward()
    before, grad, state = equality.bits(model), toy_models.flat_grad(model), objective.state_dict()

    def raising() -> Tensor:
        loss = closure()
        if next(number) == NUM_PASSES[name]:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        objective.loss(raising)
    assert equality.same_bits(before, equality.bits(model))
    assert torch.equal(toy_models.flat_grad(model), grad)
    assert objective.state_dict() == state


def test_steps_are_counted_when_backward_runs() -> None:
    model = toy_models.mlp()
    rho = InverseSqrt(0.1)
    objective, closure = SAM(model, rho=rho), toy_models.closure_of(model, toy_models.batch())
    objective.loss(closure)
    loss = objective.loss(closure)
    assert rho.num_steps == 0
    loss.backward()
    assert rho.num_steps == 1
    objective.loss(closure, sync=False).backward()
    assert rho.num_steps == 1
    with torch.no_grad():
        objective.loss(closure)
    assert rho.num_steps == 1


def test_intermittent_counts_and_alternates() -> None:
    model = toy_models.mlp()
    objective, closure = (
        Intermittent(SAM(model), every=2),
        toy_models.closure_of(model, toy_models.batch()),
    )
    radii = []
    for sync in (False, True, False, True, True):
        objective.loss(closure, sync=sync).backward()
        assert objective.report is not None
        radii.append(bool(objective.report.rho.isnan()))
    assert radii == [False, False, True, True, False]
    assert objective.num_steps == 3


def test_entropy_sgd_counts_for_scoping() -> None:
    model = toy_models.mlp()
    objective, closure = (
        EntropySGD(model, scoping=0.1),
        toy_models.closure_of(model, toy_models.batch()),
    )
    objective.loss(closure).backward()
    objective.loss(closure)
    assert objective.num_steps == 1


def test_momentum_sam_returns_the_perturbed_loss() -> None:
    model = toy_models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    objective, closure = (
        MomentumSAM(model, optimizer),
        toy_models.closure_of(model, toy_models.batch()),
    )
    for _ in range(2):
        loss = objective.loss(closure)
        loss.backward()
        optimizer.step()
    assert objective.report is not None
    assert torch.equal(loss.detach(), objective.report.perturbed_loss)
    assert bool(objective.report.loss.isnan())


def means(objective: Objective) -> list[Tensor]:
    return list(objective.state_dict().get("along", {}).values())


def test_a_state_moves_when_backward_runs() -> None:
    model, twin = pair("SAM", "mlp")
    objective, other = FriendlySAM(model), FriendlySAM(twin)
    for seed in range(3):
        data = toy_models.batch(seed=seed)
        before = means(objective)
        objective.loss(toy_models.closure_of(model, toy_models.batch(seed=50 + seed)))
        loss = objective.loss(toy_models.closure_of(model, data))
        assert equality.same_bits(
            before or [torch.zeros_like(m) for m in means(objective)], means(objective)
        )
        (loss / 2).backward()
        other.backward(toy_models.closure_of(twin, data))
        assert equality.same_bits(means(objective), means(other))


@pytest.mark.parametrize("overflowing", [1, 2])
def test_an_overflow_leaves_the_state(overflowing: int) -> None:
    model, number = toy_models.mlp(), iter(range(1, 3))
    objective, closure = FriendlySAM(model), toy_models.closure_of(model, toy_models.batch())
    objective.loss(closure).backward()
    before = means(objective)
    model.zero_grad()
    objective.loss(
        lambda: closure() * (float("inf") if next(number) == overflowing else 1.0)
    ).backward()
    assert not bool(toy_models.flat_grad(model).isfinite().all())
    assert equality.same_bits(before, means(objective))


def test_an_overflow_in_the_callers_scale_leaves_the_state() -> None:
    model = toy_models.mlp()
    objective, closure = FriendlySAM(model), toy_models.closure_of(model, toy_models.batch())
    objective.loss(closure).backward()
    before = means(objective)
    (objective.loss(closure) * float("inf")).backward()
    assert equality.same_bits(before, means(objective))


def test_several_losses_add_up() -> None:
    model, twin = pair("GSAM", "mlp", dtype=torch.float64)
    objective, other = GSAM(model), GSAM(twin)
    losses = [
        objective.loss(toy_models.closure_of(model, toy_models.batch(seed=seed)))
        for seed in range(2)
    ]
    (losses[0] + 0.5 * losses[1]).backward()
    expected = [toy_models.direction(GSAM, twin, toy_models.batch(seed=seed)) for seed in range(2)]
    other.backward(toy_models.closure_of(twin, toy_models.batch(seed=0)))
    assert (
        equality.relative_error(toy_models.flat_grad(model), expected[0] + 0.5 * expected[1])
        < 1e-13
    )


def test_other_terms_of_the_loss_add_up() -> None:
    model, twin = pair("GSAM", "mlp", dtype=torch.float64)
    data = toy_models.batch()
    (GSAM(model).loss(toy_models.closure_of(model, data)) + penalty(model)).backward()
    penalty(twin).backward()
    expected = toy_models.flat_grad(twin) + toy_models.direction(GSAM, twin, data)
    assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-13


def penalty(model: nn.Module) -> Tensor:
    return sum((p.square().sum() for p in model.parameters()), start=torch.zeros(()))


def test_hooks_of_parameters_act_once_on_each_gradient() -> None:
    """A mask or a factor in a hook must not be applied again to the direction."""
    model, data = toy_models.mlp().double(), toy_models.batch()
    expected = toy_models.direction(GSAM, model, data)
    calls: list[int] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: calls.append(1) or 0.5 * gradient)
    GSAM(model).loss(toy_models.closure_of(model, data)).backward()
    assert len(calls) == 2 * len(list(model.parameters()))
    assert equality.relative_error(toy_models.flat_grad(model), 0.5 * expected) < 1e-12


def test_a_list_is_refused() -> None:
    model = toy_models.mlp()
    closure = toy_models.closure_of(model, toy_models.batch())
    with pytest.raises(
        TypeError, match=r"closure must be one function, got list\. Pass one such as"
    ):
        SAM(model).loss([closure, closure])


def test_before_the_first_call_there_is_no_report() -> None:
    assert SAM(toy_models.mlp()).report is None


def test_parameters_may_be_frozen_before_backward() -> None:
    """Two heads trained in turn, with the sum of their losses."""
    model, (x, y) = toy_models.mlp(), toy_models.batch()
    body, heads = model[:-1], nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 3)])
    parts = nn.ModuleList([body, heads])

    def train(loss: Callable[[Callable[[], Tensor]], Tensor]) -> list[Tensor]:
        parts.zero_grad()
        losses = []
        for one, other in (heads, reversed(heads)):
            other.requires_grad_(False)
            losses.append(loss(lambda head=one: nn.functional.cross_entropy(head(body(x)), y)))
            other.requires_grad_(True)
        sum(losses).backward()
        return [parameter.grad for parameter in parts.parameters()]

    x = x.float()
    plain = train(lambda closure: closure())
    found = train(SAM(parts, rho=0.0).loss)
    for a, b in zip(plain, found, strict=True):
        assert equality.relative_error(b, a) < 1e-6


@every_objective
@pytest.mark.parametrize("way", ["backward", "loss"])
def test_gradients_may_be_detached_in_place(name: str, way: str) -> None:
    """As many copies of `zero_grad` do, which refuse views."""
    model = toy_models.mlp()
    result = getattr(OBJECTIVES[name].make(model), way)(
        toy_models.closure_of(model, toy_models.batch())
    )
    if way == "loss":
        result.backward()
    for parameter in model.parameters():
        parameter.grad.detach_()
        parameter.grad.zero_()
