"""The closure's contract, and micro-batches."""

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from surrogap import GSAM, SAM
from tests import equality, toy_models
from tests.objective_cases import OBJECTIVES, RHO, every_objective


@every_objective
def test_gradients_accumulate(name: str, device: torch.device) -> None:
    """Several calls are m-sharpness: the sum of their directions."""
    model = toy_models.mlp().double().to(device)
    first, second = toy_models.batch(device=device, seed=1), toy_models.batch(device=device, seed=2)
    make = OBJECTIVES[name].make
    expected = toy_models.direction(make, model, first) + toy_models.direction(make, model, second)
    objective = make(model)
    objective.backward(toy_models.closure_of(model, first))
    held = [p.grad for p in model.parameters()]
    objective.backward(toy_models.closure_of(model, second))
    assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
    assert equality.relative_error(toy_models.flat_grad(model), expected) < 1e-15
    assert all(p.grad.stride() == p.stride() for p in model.parameters())


@every_objective
@pytest.mark.parametrize("sizes", [[4, 4], [1, 5, 2]])
def test_a_list_of_closures_is_one_batch(name: str, sizes: list[int]) -> None:
    model, (x, y) = toy_models.mlp().double(), toy_models.batch(8)
    whole = toy_models.direction(OBJECTIVES[name].make, model, (x, y))
    chunks = zip(x.split(sizes), y.split(sizes), strict=True)
    closures = [
        lambda chunk=chunk: (
            toy_models.cross_entropy(model, chunk) * len(chunk[1]) / 8,
            len(chunk[1]),
        )
        for chunk in chunks
    ]
    report = OBJECTIVES[name].make(model).backward(closures)
    assert equality.relative_error(toy_models.flat_grad(model), whole) < 1e-13
    if name != "MomentumSAM":
        plain = float(toy_models.cross_entropy(model, (x, y)).detach())
        assert float(report.loss) == pytest.approx(plain, rel=1e-14)
    assert report.aux == sizes


def test_the_list_differs_from_separate_calls() -> None:
    """One shared perturbation differs from one for each."""
    model, (x, y) = toy_models.mlp().double(), toy_models.batch(8)
    whole = toy_models.direction(partial(SAM, rho=RHO), model, (x, y))
    halves = [
        toy_models.direction(partial(SAM, rho=RHO), model, part)
        for part in zip(x.split(4), y.split(4), strict=True)
    ]
    assert equality.relative_error(sum(halves) / 2, whole) > 1e-3


def test_aux_is_that_of_the_first_pass() -> None:
    model, (x, y) = toy_models.mlp(), toy_models.batch()
    x = x.float()

    def closure() -> tuple[Tensor, Tensor]:
        logits = model(x)
        return nn.functional.cross_entropy(logits, y), logits

    report = SAM(model, rho=1.0).backward(closure)
    assert torch.equal(report.aux, model(x))
    assert report.aux.grad_fn is None
    assert SAM(model).backward(toy_models.closure_of(model, (x, y))).aux is None


@every_objective
def test_backward_runs_in_the_calling_thread(name: str, device: torch.device) -> None:
    model, data = toy_models.mlp().to(device), toy_models.batch(device=device)
    seen: set[tuple[int, bool]] = set()

    def observe(gradient: Tensor) -> None:
        # On a CPU torch always uses this thread, hence the flag.
        seen.add((threading.get_ident(), torch._C._is_multithreading_enabled()))

    model[3].weight.register_hook(observe)
    OBJECTIVES[name].make(model).backward(toy_models.closure_of(model, data))
    assert seen == {(threading.get_ident(), False)}


@pytest.mark.parametrize("mode", [True, False])
def test_the_callers_threading_mode_is_restored(mode: bool) -> None:
    model, data = toy_models.mlp(), toy_models.batch()

    def fail(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    with torch.autograd.set_multithreading_enabled(mode):
        GSAM(model).backward(toy_models.closure_of(model, data))
        assert torch._C._is_multithreading_enabled() == mode
        model[3].weight.register_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            GSAM(model).backward(toy_models.closure_of(model, data))
        assert torch._C._is_multithreading_enabled() == mode


def test_own_backward_is_called_once_per_pass() -> None:
    model, data = toy_models.mlp().double(), toy_models.batch()
    seen: list[Tensor] = []

    def backward(loss: Tensor) -> None:
        seen.append(loss.detach())
        (3 * loss).backward()

    expected = toy_models.direction(SAM, model, data)
    report = SAM(model).backward(toy_models.closure_of(model, data), backward=backward)
    assert [float(report.loss), float(report.perturbed_loss)] == [float(loss) for loss in seen]
    assert equality.relative_error(toy_models.flat_grad(model), 3 * expected) < 1e-10


def test_backward_may_be_called_without_gradients_enabled() -> None:
    model, data = toy_models.mlp(), toy_models.batch()
    expected = toy_models.direction(SAM, model, data)
    with torch.no_grad():
        SAM(model).backward(toy_models.closure_of(model, data))
    assert torch.equal(toy_models.flat_grad(model), expected)


def test_a_loss_with_one_element_is_a_scalar() -> None:
    model, data = toy_models.mlp(), toy_models.batch()
    closure = toy_models.closure_of(model, data)
    report = SAM(model).backward(lambda: closure().reshape(1, 1))
    assert report.loss.shape == report.gap.shape == ()


def linear_loss(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 3)).sum()


def own_backward(model: nn.Module) -> Tensor:
    loss = linear_loss(model)
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_closure_that_sets_gradients_to_zero(set_to_none: bool) -> None:
    model = nn.Linear(3, 1)

    def closure() -> Tensor:
        model.zero_grad(set_to_none=set_to_none)
        return linear_loss(model)

    with pytest.raises(RuntimeError, match="closure must call neither backward nor zero_grad"):
        SAM(model).backward(closure)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (lambda m: m(torch.ones(2, 3)), RuntimeError, r"return a real scalar, got shape \(2, 1\)"),
        (
            lambda m: (m(torch.ones(2, 3)), linear_loss(m)),
            RuntimeError,
            r"return a real scalar, got shape \(2, 1\).*in a tuple put it first",
        ),
        (lambda m: 0.5, TypeError, r"return the loss as a tensor, or \(loss, aux\), got float"),
        (lambda m: None, TypeError, "return the loss as a tensor.*got NoneType"),
        (lambda m: (1, 2, 3), TypeError, "return the loss as a tensor.*got tuple"),
        (lambda m: torch.tensor(1.0), RuntimeError, "return a loss with a graph, got one without"),
        (lambda m: torch.tensor(1), RuntimeError, "return a real scalar.*dtype torch.int64"),
        (
            lambda m: torch.view_as_complex(m(torch.ones(2, 3)).view(1, 2)).sum(),
            RuntimeError,
            "return a real scalar.*dtype torch.complex64",
        ),
        (own_backward, RuntimeError, "closure must call neither backward nor zero_grad, got one"),
    ],
)
def test_bad_closures(
    bad: Callable[[nn.Module], object], error: type[Exception], message: str, number: int
) -> None:
    model = nn.Linear(3, 1)
    before, passes = equality.bits(model), iter([1, 2])

    def closure() -> object:
        return bad(model) if next(passes) == number else linear_loss(model)

    with pytest.raises(error, match=message):
        SAM(model).backward(closure)
    assert equality.same_bits(before, equality.bits(model))
    assert all(p.grad is None for p in model.parameters())


def test_a_later_closure_of_a_list_must_not_call_backward_either() -> None:
    model = nn.Linear(3, 1)
    good = partial(linear_loss, model)
    with pytest.raises(RuntimeError, match="closure must call neither backward"):
        SAM(model).backward([good, lambda: own_backward(model)])
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("number", [1, 2])
def test_nesting_is_refused(number: int) -> None:
    model = toy_models.convnet()
    plain, passes = toy_models.closure_of(model, toy_models.batch()), iter([1, 2])
    before = equality.bits(model)

    def closure() -> Tensor:
        if next(passes) == number:
            GSAM(model).backward(plain)
        return plain()

    with pytest.raises(RuntimeError, match="closure must call neither backward"):
        SAM(model).backward(closure)
    assert equality.same_bits(before, equality.bits(model))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.tensor(1.0),), TypeError, "closure must be a function.*got Tensor. Pass one such"),
        (([],), ValueError, r"closure must not be an empty list, got \[\]"),
        (([1],), TypeError, "closure must be a function"),
        ((None,), TypeError, "closure must be a function.*got NoneType"),
    ],
)
def test_bad_closure_arguments(
    arguments: tuple[object, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SAM(nn.Linear(3, 1)).backward(*arguments)


def test_bad_scaler() -> None:
    model = nn.Linear(3, 1)
    closure = partial(linear_loss, model)
    with pytest.raises(TypeError, match=r"scaler must be a .*GradScaler, got float"):
        SAM(model).backward(closure, scaler=2.0)


@every_objective
@pytest.mark.parametrize("way", ["backward", "loss"])
def test_a_batch_is_freed_without_the_garbage_collector(name: str, way: str) -> None:
    """It may hold much of a GPU's memory, and the collector may run many steps later."""
    model = toy_models.mlp()
    objective = OBJECTIVES[name].make(model)
    gc.disable()
    try:
        for seed in range(2):
            x, y = toy_models.batch(seed=seed)
            result = getattr(objective, way)(toy_models.closure_of(model, (x, y)))
        batch = weakref.ref(x)
        del x, result
        assert batch() is None
    finally:
        gc.enable()


def test_a_forward_pass_outside_the_closure_is_refused() -> None:
    model, (x, y) = toy_models.mlp().double(), toy_models.batch()
    before, out = equality.bits(model), model(x)
    message = "closure must run the forward pass, got a loss whose forward pass ran outside of it"
    with pytest.raises(RuntimeError, match=message):
        SAM(model).backward(lambda: nn.functional.cross_entropy(out, y))
    assert equality.same_bits(before, equality.bits(model))
