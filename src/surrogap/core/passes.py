"""The passes of a step: closures run forward and backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from surrogap.core.first_call import first_backward_pass, first_forward_pass
from surrogap.core.gradients import versions
from surrogap.core.vectors import wide
from surrogap.core.weights import Weights
from surrogap.errors import InvalidTypeError, InvalidValueError, UnsupportedError

Closure = Callable[[], Tensor | tuple[Tensor, Any]]

EXAMPLE = "Pass one such as lambda: loss_fn(model(x), y)."


class Passes:
    """Forward and backward passes over one batch.

    Args:
        closure: Runs the forward pass and returns the loss or `(loss, aux)`; or a list of such
            functions, whose losses are added.
        scaler: Multiplies the loss before its backward pass.
        backward: Called on the loss in place of `loss.backward()`.
        first: The passes at `w`, if they differ.
        name: The name of the argument `closure` in error messages.
    """

    def __init__(
        self,
        closure: Closure | Sequence[Closure],
        scaler: GradScaler | None = None,
        backward: Callable[[Tensor], object] | None = None,
        first: "Passes | None" = None,
        *,
        name: str = "closure",
    ) -> None:
        self._is_single = callable(closure)
        closures = [closure] if callable(closure) else closure
        if not isinstance(closures, list | tuple) or not all(map(callable, closures)):
            raise InvalidTypeError(
                f"{name} must be a function that runs the forward pass and returns the loss, or a "
                f"list of them, got {type(closure).__name__}. {EXAMPLE}"
            )
        if not closures:
            raise InvalidValueError(f"{name} must not be an empty list, got []. {EXAMPLE}")
        if len(closures) > 1:
            _check_late_binding(name, closures)
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise InvalidTypeError(
                f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}. "
                "Leave it out to train without loss scaling."
            )
        self._closures: Sequence[Closure] = closures
        self._scaler = scaler
        self._backward = backward or Tensor.backward
        self.first = first
        self._name = name

    def run(self, weights: Weights, *, needs_graph: bool = True) -> tuple[Tensor, Any]:
        """Run one pass: add the gradient of the loss to `.grad`.

        Args:
            weights: The model's tensors.
            needs_graph: Whether to reject a loss without a graph.

        Returns:
            The unscaled loss, in at least float32, and aux.
        """
        results = [self._run(closure, weights, needs_graph) for closure in self._closures]
        loss = sum((loss for loss, _ in results[1:]), start=results[0][0])
        auxes = [aux for _, aux in results]
        return loss, auxes[0] if self._is_single else auxes

    def _run(self, closure: Closure, weights: Weights, needs_graph: bool) -> tuple[Tensor, Any]:
        forget_weights()
        is_first_call = not weights.is_checked
        with torch.enable_grad():
            with first_forward_pass(weights) if is_first_call else nullcontext():
                before = versions(weights)
                loss, aux = self._checked(closure())
                self._check_gradients(weights, before)
            if needs_graph and not loss.requires_grad:
                raise UnsupportedError(
                    f"{self._name} must return a loss with a graph, got one without a graph. "
                    "Compute it from the model's output, without detach(), item() or no_grad()."
                )
            checks = first_backward_pass(loss, weights) if is_first_call else nullcontext()
            is_guarded = is_first_call or self._backward is not Tensor.backward
            guard = _unstepped(weights) if is_guarded else nullcontext()
            devices = weights.devices
            threading, precision = _in_this_thread(devices), _outside_autocast(devices)
            with checks, threading, precision, guard, self._new_graph():
                if loss.requires_grad:
                    self._backward(loss if self._scaler is None else self._scaler.scale(loss))
        # A copy, since a model compiled with CUDA graphs reuses the memory of its outputs. By a
        # multiplication, since in a profile memory copies took longer to launch.
        copy = loss.detach().to(wide(loss.dtype)) * 1
        # The report outlives the step, and must not keep the autograd graph alive: its gradient
        # accumulators belong to this stream, and cannot be captured on another.
        if aux is not None:  # usually it is None, and walking a tree takes time
            aux = tree_map_only(Tensor, Tensor.detach, aux)
        return copy.reshape(()), aux

    def _check_gradients(self, weights: Weights, before: list[int | None]) -> None:
        if versions(weights) != before:
            raise UnsupportedError(
                f"{self._name} must call neither backward nor zero_grad, got one that changed "
                ".grad. Return the loss; the objective calls backward itself, once per pass."
            )

    @contextmanager
    def _new_graph(self) -> Iterator[None]:
        """Context manager that explains torch's error about a freed graph."""
        try:
            yield
        except RuntimeError as error:
            if "through the graph a second time" not in str(error):
                raise
            raise UnsupportedError(
                f"{self._name} must run the forward pass, got a loss whose forward pass ran "
                f"outside of it. {self._name} is called once per pass: call the model in it. "
                f"{EXAMPLE}"
            ) from error

    def evaluate(self) -> tuple[Tensor, Any]:
        """Run the forward pass of a single closure, and return its loss as `run` does, and aux."""
        loss, aux = self._checked(self._closures[0]())
        return loss.detach().to(wide(loss.dtype)).reshape(()), aux

    def _checked(self, result: Any) -> tuple[Tensor, Any]:
        loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(loss, Tensor):
            raise InvalidTypeError(
                f"{self._name} must return the loss as a tensor, or (loss, aux), "
                f"got {type(loss).__name__}. Return one such as cross_entropy(model(x), y)."
            )
        if loss.numel() != 1 or not loss.is_floating_point():
            raise UnsupportedError(
                f"{self._name} must return a real scalar, got shape {tuple(loss.shape)} and dtype "
                f"{loss.dtype}. Reduce the loss with .mean() or .sum(); in a tuple put it first."
            )
        return loss, aux

    def scale(self, device: torch.device) -> Tensor | None:
        """Return the scale of the loss as a scalar on `device`; None without a scaler."""
        if self._scaler is None:
            return None
        return self._scaler.scale(torch.ones((), dtype=torch.float32, device=device))


def forget_weights() -> None:
    """Clear caches derived from the previous weights.

    The caller may be inside `autocast` or `parametrize.cached`.
    """
    torch.clear_autocast_cache()
    parametrize._cache.clear()


def _in_this_thread(devices: set[torch.device]) -> AbstractContextManager[None]:
    """Context in which backward passes run in the calling thread, if there is one device.

    Torch runs them in one thread per device, so that several devices work in parallel. With one
    device this gains nothing, and an eager step of a small model waits for the other thread.
    """
    return nullcontext() if len(devices) > 1 else torch.autograd.set_multithreading_enabled(False)


@contextmanager
def _outside_autocast(devices: set[torch.device]) -> Iterator[None]:
    """Context in which autocast is off, as torch recommends for backward passes.

    A training loop calls `loss.backward()` outside of autocast, and the caller may be inside it.
    There a backward pass would round what the forward pass computed in float32 on purpose.
    """
    with ExitStack() as stack:
        for kind in {device.type for device in devices}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def _unstepped(weights: Weights) -> Iterator[None]:
    """Context in which a backward pass must not step the optimizer."""
    own = set(map(id, weights.parameters))

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise UnsupportedError(
                "backward must not step the optimizer, got one that does, as timm's NativeScaler "
                "and optimizers in hooks do. Step afterwards; for a GradScaler pass scaler=."
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _check_late_binding(name: str, closures: Sequence[Closure]) -> None:
    """Reject functions made in a loop that all read its variables, and so its last values."""
    seen: dict[object, Closure] = {}
    for closure in closures:
        if not isinstance(closure, FunctionType) or closure.__defaults__ or closure.__kwdefaults__:
            continue
        key = (id(closure.__code__), *map(id, closure.__closure__ or ()))
        if seen.setdefault(key, closure) is not closure:
            raise InvalidValueError(
                f"{name} must be a list of functions with a batch each, got several that read the "
                "same variables. Functions made in a loop all see its last batch. Bind the batch: "
                "lambda x=x, y=y: loss_fn(model(x), y)."
            )
