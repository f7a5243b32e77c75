"""The weights are restored bit for bit, and `.grad` is never lost."""

import copy
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from surrogap import GSAM, SAM
from surrogap.core.objective import Objective
from tests import equality, toy_models
from tests.objective_cases import (
    NUM_PASSES,
    OBJECTIVES,
    every_memoryless,
    every_objective,
    every_two_pass,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class BrokenError(Exception):
    """The error that closures raise in these tests."""


def raising_in_pass(number: int, error: BaseException, closure: Callable[[], Tensor]) -> Callable:
    """A closure that raises after the forward pass of the given pass."""
    passes = iter(range(1, 100))

    def run() -> Tensor:
        loss = closure()
        if next(passes) == number:
            raise error
        return loss

    return run


@every_objective
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_weights_are_restored(
    name: str, dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    model = toy_models.MODELS[kind]().to(device, dtype)
    objective, closure = (
        OBJECTIVES[name].make(model),
        toy_models.closure_of(model, toy_models.batch(device=device)),
    )
    before, pointers = equality.bits(model), [p.data_ptr() for p in model.parameters()]
    for _ in range(3):
        objective.backward(closure)
        assert equality.same_bits(before, equality.bits(model))
    assert pointers == [p.data_ptr() for p in model.parameters()]
    assert toy_models.flat_grad(model).norm() > 0


@every_objective
def test_the_second_pass_runs_at_other_weights(name: str) -> None:
    """Otherwise the test above would pass for an objective that never moves the weights."""
    model = toy_models.mlp()
    seen: list[Tensor] = []
    closure = toy_models.closure_of(model, toy_models.batch())

    def observe() -> Tensor:
        seen.append(torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()]))
        return closure()

    OBJECTIVES[name].make(model).backward(observe)
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    distances = [float((w - start).norm()) for w in seen[name != "MomentumSAM" :]]
    assert len(distances) == {"Vanilla": 0, "EntropySGD": 2}.get(name, 1)
    assert all(distance > 1e-2 for distance in distances)
    if not name.startswith(("Vanilla", "ASAM", "EntropySGD")):
        assert distances[0] == pytest.approx(0.1, rel=1e-5)


@every_objective
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("error", [BrokenError(), KeyboardInterrupt(), torch.OutOfMemoryError()])
def test_nothing_changes_when_the_closure_raises(
    name: str, number: int, error: BaseException, device: torch.device
) -> None:
    number = min(number, NUM_PASSES[name])
    model = toy_models.convnet().to(device)
    closure = toy_models.closure_of(model, toy_models.batch(device=device))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    kept = model[0].weight.grad
    before = equality.bits(model)
    objective = OBJECTIVES[name].make(model)
    with pytest.raises(type(error)):
        objective.backward(raising_in_pass(number, error, closure))
    assert equality.same_bits(before, equality.bits(model))
    assert model[0].weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert all(p.grad is None for p in list(model.parameters())[1:])
    # The objective still works.
    model[0].weight.grad = None
    expected = toy_models.direction(OBJECTIVES[name].make, model, toy_models.batch(device=device))
    objective.backward(closure)
    assert torch.equal(toy_models.flat_grad(model), expected)


@every_objective
def test_nothing_changes_when_the_backward_pass_raises(name: str) -> None:
    model = toy_models.convnet()
    closure, before = toy_models.closure_of(model, toy_models.batch()), equality.bits(model)
    calls = iter(range(100))

    def backward(loss: Tensor) -> None:
        loss.backward()
        if NUM_PASSES[name] == 1 or next(calls) == 1:
            raise BrokenError

    with pytest.raises(BrokenError):
        OBJECTIVES[name].make(model).backward(closure, backward=backward)
    assert equality.same_bits(before, equality.bits(model))
    assert all(p.grad is None for p in model.parameters())


# Python drops an interrupt in a callback of the garbage collector, with a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["SAM", "ASAM", "EntropySGD"])
def test_an_interrupt_at_any_moment(name: str) -> None:
    """A real signal, which may also interrupt the climb and the restore."""
    model, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(20))), torch.randn(4, 32)
    objective, before = OBJECTIVES[name].make(model), equality.bits(model)
    generator, num_interrupts = random.Random(0), 0
    start = time.perf_counter()
    objective.backward(lambda: model(x).square().mean())
    objective.backward(lambda: model(x).square().mean())
    duration = (time.perf_counter() - start) / 2
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(300):
            try:
                # Again after a second, since Python drops an interrupt in a finalizer.
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.2, 1.2) * duration, 1.0)
                while True:
                    objective.backward(lambda: model(x).square().mean())
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
                num_interrupts += 1
            assert equality.same_bits(before, equality.bits(model))
            torch.set_grad_enabled(True)  # torch's own contexts can be interrupted too
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert num_interrupts == 300


@every_objective
def test_graphs_from_before_the_call_stay_valid(name: str, device: torch.device) -> None:
    model, data = toy_models.mlp().double().to(device), toy_models.batch(device=device)
    expected = toy_models.direction(OBJECTIVES[name].make, model, data)
    other = toy_models.closure_of(model, toy_models.batch(seed=5, device=device))()
    OBJECTIVES[name].make(model).backward(toy_models.closure_of(model, data))
    other.backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    toy_models.closure_of(twin, toy_models.batch(seed=5, device=device))().backward()
    assert (
        equality.relative_error(toy_models.flat_grad(model), expected + toy_models.flat_grad(twin))
        < 1e-14
    )


def test_a_climb_that_fails_midway_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two dtypes, the first has moved already when the second fails."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    before, copy_, calls = equality.bits(model), torch._foreach_copy_, iter(range(100))

    def failing(*arguments: object) -> None:
        if next(calls) == 1:
            raise torch.OutOfMemoryError
        copy_(*arguments)

    monkeypatch.setattr(torch, "_foreach_copy_", failing)
    with pytest.raises(torch.OutOfMemoryError):
        SAM(model).backward(lambda: model[1](model[0](torch.ones(1, 2)).double()).sum())
    assert next(calls) > 2
    assert equality.same_bits(before, equality.bits(model))


def test_an_interrupt_while_weights_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two dtypes, the first is restored already when the interrupt comes."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    before, copy_, calls, passes = equality.bits(model), torch._foreach_copy_, [], iter([1.0])

    def struck(*arguments: object) -> None:
        calls.append(None)
        if len(calls) == 4:  # two writes for the climb, and the second of two to restore
            raise KeyboardInterrupt
        copy_(*arguments)

    def closure() -> Tensor:
        return next(passes) * model[1](model[0](torch.ones(1, 2)).double()).sum()

    monkeypatch.setattr(torch, "_foreach_copy_", struck)
    with pytest.raises(KeyboardInterrupt):
        SAM(model, rho=1.0).backward(closure)
    assert equality.same_bits(before, equality.bits(model))


class Switching(nn.Module):
    """Four layers. Each pass uses those that the next item of `plan` names."""

    def __init__(self, plan: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcd"})
        self.plan = iter(plan)

    def forward(self, x: Tensor) -> Tensor:
        for name in next(self.plan):
            x = torch.tanh(self.layers[name](x))
        return x.square().mean()


@pytest.mark.parametrize("dtype", DTYPES)
@every_objective
def test_gradient_in_one_pass_only(name: str, dtype: torch.dtype) -> None:
    plans = {"Vanilla": ["ac"], "MomentumSAM": ["ac"], "EntropySGD": ["ab", "ab", "ac"]}
    model = Switching(plans.get(name, ["ab", "ac"])).to(dtype)
    before = equality.bits(model)
    x = torch.randn(3, 4, dtype=dtype)
    OBJECTIVES[name].make(model).backward(lambda: model(x))
    assert equality.same_bits(before, equality.bits(model))
    filled = {key for key, layer in model.layers.items() if layer.weight.grad is not None}
    is_g_p_alone = name in ("Vanilla", "MomentumSAM", "SAM-partial")
    assert filled == ({"a", "c"} if is_g_p_alone else {"a", "b", "c"})
    assert model.layers["d"].weight.grad is None


def test_direction_where_one_pass_has_no_gradient() -> None:
    """A missing gradient counts as zero: `d = -alpha g` on b, `b g_p` on c."""
    model = Switching(["ab", "ac"]).double()
    alpha, x = 0.4, torch.randn(3, 4, dtype=torch.float64)
    twin = copy.deepcopy(model)
    GSAM(model, rho=0.05, alpha=alpha).backward(lambda: model(x))

    def use(names: str) -> Tensor:
        twin.plan = iter([names])
        twin.zero_grad()
        twin(x).backward()
        return toy_models.flat_grad(twin)

    g = use("ab")
    with torch.no_grad():
        for p, step in zip(twin.parameters(), g.split([16, 4] * 4), strict=True):
            p += 0.05 * step.view(p.shape) / (g.norm() + 1e-12)
    g_p = use("ac")
    expected = g_p - alpha * (g - (g @ g_p) / (g_p @ g_p) * g_p)
    assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-12


def test_set_of_used_layers_may_change_from_step_to_step() -> None:
    """At learning rate 0 weights do not drift, whichever layers a step uses, unlike in peers."""
    model = Switching(["ab", "ab", "cd", "cd", "bc", "bd", "a", "a"])
    before = equality.bits(model)
    optimizer, objective = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9), SAM(model)
    for _ in range(4):
        optimizer.zero_grad()
        objective.backward(lambda: model(torch.ones(2, 4)))
        optimizer.step()
    assert equality.same_bits(before, equality.bits(model))


@every_objective
def test_mixed_dtypes(name: str) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for dtype in DTYPES)

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = torch.tanh(part(x.to(part.weight.dtype)))
            return x.square().sum()

    model = Mixed()
    before = equality.bits(model)
    OBJECTIVES[name].make(model).backward(lambda: model(torch.ones(2, 4)))
    assert equality.same_bits(before, equality.bits(model))
    for part, dtype in zip(model.parts, DTYPES, strict=True):
        assert part.weight.grad.dtype == dtype
        assert part.weight.grad.norm() > 0


@every_objective
def test_frozen_parameters_stay_out(name: str) -> None:
    model, data = toy_models.mlp().double(), toy_models.batch()
    model[1].requires_grad_(False)
    small = copy.deepcopy(nn.Sequential(*list(model)[2:]))
    hidden = (model[1](data[0].flatten(1)), data[1])
    expected = toy_models.direction(OBJECTIVES[name].make, small, hidden)
    before = equality.bits(model)
    assert torch.equal(toy_models.direction(OBJECTIVES[name].make, model, data), expected)
    assert equality.same_bits(before, equality.bits(model))
    assert model[1].weight.grad is None


@every_objective
def test_freezing_in_mid_training(name: str) -> None:
    model, data = toy_models.mlp().double(), toy_models.batch()
    objective = OBJECTIVES[name].make(model)
    objective.backward(toy_models.closure_of(model, data))
    model.zero_grad()
    model[1].requires_grad_(False)
    before = equality.bits(model)
    expected = toy_models.direction(OBJECTIVES[name].make, model, data)
    objective.backward(toy_models.closure_of(model, data))
    assert torch.equal(toy_models.flat_grad(model), expected)
    assert equality.same_bits(before, equality.bits(model))
    assert model[1].weight.grad is None


@every_objective
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_have_the_layout_of_their_parameters(
    name: str, memory_format: torch.memory_format
) -> None:
    model, data = toy_models.convnet().double(), toy_models.batch()
    expected = toy_models.direction(OBJECTIVES[name].make, model, data)
    model = model.to(memory_format=memory_format)
    OBJECTIVES[name].make(model).backward(toy_models.closure_of(model, data))
    assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-12
    for p in model.parameters():
        assert p.grad.stride() == p.stride()


@every_objective
def test_parameters_that_are_views_with_gaps(name: str) -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = torch.randn(6, 8, dtype=torch.float64)
            self.weight = nn.Parameter(self.whole[:, ::2])
            self.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))

        def forward(self) -> Tensor:
            return torch.tanh(self.weight).square().sum() + self.empty.sum()

    model = Sliced()
    whole = model.whole.clone()
    objective = OBJECTIVES[name].make(model)
    objective.backward(model)
    assert torch.equal(model.whole, whole)
    dense = nn.Linear(4, 6, bias=False, dtype=torch.float64)
    with torch.no_grad():
        dense.weight.copy_(model.weight)
    OBJECTIVES[name].make(dense).backward(lambda: torch.tanh(dense.weight).square().sum())
    assert equality.relative_error(model.weight.grad, dense.weight.grad) < 1e-12


def test_the_model_may_change_between_steps() -> None:
    """The next step uses layers that were replaced or added, and not those removed."""
    model, data = toy_models.mlp().double(), toy_models.batch()
    objective = SAM(model)

    def check() -> None:
        model.zero_grad()
        before = equality.bits(model)
        expected = toy_models.direction(SAM, model, data)
        objective.backward(toy_models.closure_of(model, data))
        assert torch.equal(toy_models.flat_grad(model), expected)
        assert equality.same_bits(before, equality.bits(model))

    check()
    model[3] = nn.Linear(16, 3).double()
    check()
    model.append(nn.Sequential(nn.Linear(3, 3).double(), nn.BatchNorm1d(3).double().eval()))
    check()
    model[3].bias = nn.Parameter(torch.ones(3).double())
    check()
    nn.utils.parametrizations.weight_norm(model[3])
    check()
    del model[4]
    check()


def test_a_thousand_steps_in_bfloat16_at_learning_rate_zero_do_not_drift() -> None:
    """Restoring by subtraction, as peers do, drifts by 1.7e-3 here."""
    model = toy_models.mlp().bfloat16()
    before, closure = equality.bits(model), toy_models.closure_of(model, toy_models.batch())
    objective = GSAM(model, rho=0.5)
    for _ in range(1000):
        objective.backward(closure)
    assert equality.same_bits(before, equality.bits(model))


@every_memoryless
@pytest.mark.parametrize("assigns", [False, True])
def test_a_frozen_parameter_that_a_pass_writes_moves_once(assigns: bool, name: str) -> None:
    model, data = toy_models.Followed(assigns), toy_models.batch()
    plain, objective = copy.deepcopy(model), OBJECTIVES[name].make(model)
    for _ in range(2):
        plain(data[0].float())
        objective.backward(toy_models.closure_of(model, data))
        assert equality.same_bits(equality.bits(plain), equality.bits(model))


@every_two_pass
@pytest.mark.parametrize("assigns", [False, True])
def test_all_passes_read_the_same_frozen_parameters(assigns: bool, name: str) -> None:
    """From the second call on: then a radius of 0 gives the plain gradient, and a gap of 0."""
    model, data = toy_models.Followed(assigns).double(), toy_models.batch()
    objective = OBJECTIVES[name].make(model, rho=0.0)
    objective.backward(toy_models.closure_of(model, data))
    model.zero_grad()
    plain = copy.deepcopy(model)
    toy_models.closure_of(plain, data)().backward()
    assert float(objective.backward(toy_models.closure_of(model, data)).gap) == 0.0
    own = [toy_models.flat_grad(each.first) for each in (plain, model)]
    assert equality.relative_error(*own) < 1e-14
    assert equality.same_bits(equality.bits(plain), equality.bits(model))


def test_a_frozen_parameter_is_as_after_one_pass_if_the_second_raises() -> None:
    model, data = toy_models.Followed(assigns=False), toy_models.batch()
    plain, losses = copy.deepcopy(model), iter([1.0])
    plain(data[0].float())
    with pytest.raises(StopIteration):
        SAM(model).backward(lambda: toy_models.closure_of(model, data)() * next(losses))
    assert equality.same_bits(equality.bits(plain), equality.bits(model))


class Quantised(nn.Parameter):
    """A parameter of a special class, whose data must not be read."""

    def data_ptr(self) -> int:
        raise RuntimeError


def test_frozen_parameters_of_other_classes_are_ignored() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].weight = Quantised(torch.randn(3, 3), requires_grad=False)
    with torch.inference_mode():
        model[0].bias = nn.Parameter(torch.zeros(3), requires_grad=False)
    SAM(model).backward(lambda: model(torch.ones(2, 3)).square().mean())
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None


def test_a_teacher_may_be_created_in_the_first_pass() -> None:
    """The parameters of the teacher require gradients, but do not get any."""
    model, x = nn.Sequential(nn.Linear(3, 1)), torch.randn(4, 3)

    def closure() -> Tensor:
        if len(model) == 1:
            model.append(copy.deepcopy(model[0]))
        with torch.no_grad():
            target = model[1](x) + 1.0
        return (model[0](x) - target).square().mean()

    objective = SAM(model)
    for _ in range(2):
        objective.backward(closure)
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is None


@pytest.mark.filterwarnings("ignore:.*torch.jit:")
def test_torchscript_is_refused() -> None:
    script = torch.jit.trace(nn.Linear(3, 1), torch.randn(2, 3))
    with pytest.raises(TypeError, match="model must not contain TorchScript modules"):
        SAM(nn.Sequential(nn.Linear(3, 3), script))


def test_loss_must_reach_the_model() -> None:
    model, other = toy_models.mlp(), toy_models.mlp()
    with pytest.raises(RuntimeError, match="loss must depend on the model's trainable parameters"):
        SAM(model).backward(toy_models.closure_of(other, toy_models.batch()))
    assert all(p.grad is None for p in model.parameters())


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    before = equality.bits(model)
    message = "0.weight must have a dense gradient, got layout torch.sparse_coo. Build its layer"
    with pytest.raises(RuntimeError, match=message):
        SAM(model).backward(lambda: model(torch.tensor([1, 2])).sum())
    assert equality.same_bits(before, equality.bits(model))
    assert all(p.grad is None for p in model.parameters())


def test_gradients_of_another_dtype_are_refused_by_name() -> None:
    model = nn.Linear(3, 1).bfloat16()
    model.bias.grad_dtype = torch.float32
    before = equality.bits(model)
    message = "bias must have a gradient of its own dtype, got torch.float32. Do not set its"
    with pytest.raises(RuntimeError, match=message):
        SAM(model).backward(lambda: model(torch.ones(2, 3).bfloat16()).sum())
    assert equality.same_bits(before, equality.bits(model))
    assert all(p.grad is None for p in model.parameters())


def test_an_optimizer_inside_backward_is_refused_by_name() -> None:
    model = toy_models.mlp()
    objective = SAM(model)
    before = equality.bits(model)
    handle = model[3].bias.register_post_accumulate_grad_hook(lambda p: None)
    message = "3.bias must not have a post-accumulate-grad hook, got one from tests.core"
    with pytest.raises(RuntimeError, match=message):
        objective.backward(toy_models.closure_of(model, toy_models.batch()))
    with pytest.raises(RuntimeError, match=message):
        GSAM(model)
    assert equality.same_bits(before, equality.bits(model))
    handle.remove()
    objective.backward(toy_models.closure_of(model, toy_models.batch()))


@pytest.mark.gpu
@every_objective
def test_one_model_on_two_devices(name: str) -> None:
    class Split(nn.Module):
        def __init__(self, second: str) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.first = nn.Linear(4, 8).double()
            self.second = nn.Linear(8, 3).double().to(second)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.second(torch.tanh(self.first(x)).to(self.second.weight.device)))

    def run(second: str) -> tuple[Tensor, float]:
        model = Split(second)
        before = equality.bits(model)
        objective: Objective = OBJECTIVES[name].make(model)
        threads: list[int] = []
        model.second.weight.register_hook(lambda gradient: threads.append(threading.get_ident()))

        def closure() -> Tensor:
            return model(torch.ones(2, 4).double()).square().mean()

        torch.autograd.grad(closure(), model.second.weight)
        report = objective.backward(closure)
        assert equality.same_bits(before, equality.bits(model))
        assert report.loss.device.type == second
        assert len(set(threads)) == 1  # torch's default, so that both devices work in parallel
        return toy_models.flat_grad(model), float(report.perturbed_grad_norm)

    (one, norm), (two, same_norm) = run("cpu"), run("cuda")
    assert equality.relative_error(two, one) < 1e-12
    assert norm == pytest.approx(same_norm, rel=1e-12, nan_ok=True)
