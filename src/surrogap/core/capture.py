"""The whole step as a CUDA graph: zero_grad, both passes, clipping and the update.

A step launches thousands of kernels, and on a small model the GPU waits for the processor to do so.
Recorded once, they are launched together. A graph repeats what it recorded, on the same memory, so
whatever changes from step to step must lie there: the batch, and the settings, which are the
learning rates and what an objective's `_numbers` gives.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_map_only

from surrogap.core.arguments import number
from surrogap.core.arithmetic import Number
from surrogap.core.objective import Objective
from surrogap.core.passes import Closure, Passes, RandomState, Replayable
from surrogap.core.recording import (
    Twins,
    gradients_kept,
    places_kept,
    settings_replaced,
    undone,
)
from surrogap.core.report import Report
from surrogap.core.weights import are_same, contents

LossFn = Callable[..., Tensor | tuple[Tensor, Any]]
_RandomStates = Callable[[Iterable[torch.device]], Replayable]

# As PyTorch recommends: libraries choose algorithms and make room in their first calls.
_NUM_WARM_UPS = 3


def capture(
    objective: Objective,
    optimizer: Optimizer,
    loss_fn: LossFn,
    example_batch: Sequence[Tensor],
    *,
    micro_batches: int = 1,
    shares_perturbation: bool = True,
    clip_norm: float | None = None,
) -> "CapturedStep":
    """Records a training step as a CUDA graph, and returns a function that replays it.

    Recording changes nothing: weights, statistics, the optimizer's state, `.grad` and the random
    generators are as before. Learning rates, `rho`, `alpha`, `lam` and `gamma` may change from step
    to step, and schedules and schedulers work as always. What else the step depends on must stay as
    it is, and is checked: the model's parameters, buffers and mode, the optimizer's other settings
    and its state. So load checkpoints before. `.grad` is left alone, the graph has gradients of its
    own, and what it works on stays allocated as long as the function lives.

    Args:
        objective: Any, of a model on one CUDA device.
        optimizer: SGD, Adam or AdamW, built with `fused=True`.
        loss_fn: From a batch, runs the forward pass and returns the loss or `(loss, aux)`, in
            autocast if you like. It runs a few times now, and never again: its kernels do.
        example_batch: Tensors such as all batches will be: their shapes, dtypes and number.
        micro_batches: Into how many parts of equal size to cut each batch, along the first
            dimension; the loss is the mean of theirs.
        shares_perturbation: Whether one perturbation serves all of them, or each has its own
            (m-sharpness). Of several, the report holds the means of their losses and products.
        clip_norm: To what to clip the norm of the direction; None for no clipping.

    Returns:
        `step(*batch) -> Report`. The report's values are its own; each `aux` too.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, the model is not on one CUDA device or is spread
            over processes, or the optimizer is not fused. `step`: a batch has another shape.
        RuntimeError: The step cannot be recorded, since it waits for the GPU, for example. `step`:
            something else than the settings has changed.
    """
    if not isinstance(objective, Objective):
        raise TypeError(
            f"objective must be one of surrogap's, got {type(objective).__name__}. "
            "Pass one such as GSAM(model)."
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch optimizer, got {type(optimizer).__name__}. "
            "Pass the one that is to be stepped."
        )
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn must be a function of a batch, got {type(loss_fn).__name__}. "
            "Pass one such as lambda x, y: criterion(model(x), y)."
        )
    if clip_norm is not None:
        number("clip_norm", clip_norm, above=0, remedy="Leave it out for no clipping.")
    _check_optimizer(optimizer)
    _check_batch(example_batch, micro_batches)
    return CapturedStep(
        *(objective, optimizer, loss_fn, example_batch, _device(objective)),
        *(micro_batches, shares_perturbation, clip_norm),
    )


@final
class CapturedStep:
    """A recorded training step; `capture` makes one."""

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        loss_fn: LossFn,
        example_batch: Sequence[Tensor],
        device: torch.device,
        num_parts: int,
        shares_perturbation: bool,
        clip_norm: float | None,
    ) -> None:
        self._objective = objective
        self._optimizer = optimizer
        self._recorded = objective._twin()
        self._weights = objective._look()
        self._loss_fn = loss_fn
        self._clip_norm = clip_norm
        self._num_parts = num_parts
        self._num_calls = 1 if shares_perturbation else num_parts
        self._batch = [tensor.to(device, copy=True) for tensor in example_batch]
        values = self._read_settings()
        self._settings = torch.tensor(values, dtype=torch.float64, device=device)
        self._written = values
        self._values: Tensor
        self._aux: Any
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            self._random_state = Twins(self._graph)
            self._warm_up()
            with places_kept(self._weights):
                self._record()
        self._circumstances = self._look_around()

    def __call__(self, *batch: Tensor) -> Report:
        """Takes one step, on a batch like the example.

        Raises:
            ValueError: The batch is not.
            RuntimeError: Something has changed that the graph cannot follow.
        """
        self._check(batch)
        # A graph runs in the stream of the current device, which need not be the model's.
        with torch.cuda.device(self._device):
            for static, tensor in zip(self._batch, batch, strict=True):
                static.copy_(tensor, non_blocking=True)
            self._write_settings()
            self._random_state.align()
            self._graph.replay()
        self._objective._advance()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it
        loss, perturbed_loss, rho, *_ = values = self._values.clone().unbind()
        aux = tree_map_only(Tensor, Tensor.clone, self._aux)
        return Report(loss, perturbed_loss, aux, rho, lambda: torch.stack(values[3:]), None)

    def _read_settings(self) -> list[Number]:
        lrs = [group["lr"] for group in self._optimizer.param_groups]
        return [*self._objective._numbers(), *map(float, lrs)]

    def _write_settings(self) -> None:
        """Those that have changed, each by a kernel, since a copy might wait for the last step."""
        values = self._read_settings()
        for index, (value, written) in enumerate(zip(values, self._written, strict=True)):
            if value != written:
                self._settings[index].fill_(value)
        self._written = values

    def _warm_up(self) -> None:
        """On a stream of its own, since some libraries make room for each stream."""
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream), undone(self._weights, self._optimizer):
            buffers, frozen = contents(self._weights.buffers), self._weights.frozen
            addresses = list(map(Tensor.data_ptr, frozen))
            for _ in range(_NUM_WARM_UPS):
                self._run(RandomState)
            are_in_place = are_same(contents(self._weights.buffers), buffers)
            if not are_in_place or list(map(Tensor.data_ptr, frozen)) != addresses:
                raise RuntimeError(
                    "model must write to its buffers and frozen parameters in place, got one that "
                    "assigns new ones in its forward pass. Train with objective.backward instead."
                )
        current.wait_stream(stream)

    def _record(self) -> None:
        try:
            with (
                gradients_kept(self._weights, self._optimizer),
                self._recorded._recording(self._num_calls),
                # So that other threads, which load data perhaps, may go on.
                torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
            ):
                reports = self._run(self._random_state)
                self._values = self._mean(reports)
                # An autocast around all this must not keep casts that only the graph makes.
                torch.clear_autocast_cache()
        except Exception as error:
            self._random_state.reset()
            raise RuntimeError(
                "loss_fn must do all its work on the GPU without waiting for it, got "
                f"{type(error).__name__}: {error}. Train with objective.backward instead."
            ) from error
        auxes = [tree_map_only(Tensor, Tensor.detach, report.aux) for report in reports]
        self._aux = auxes if self._num_calls > 1 else auxes[0]

    def _run(self, random_state: _RandomStates) -> list[Report]:
        numbers, lrs = self._scalars()
        self._objective.model.zero_grad()
        with settings_replaced(self._optimizer, lrs):
            self._optimizer.zero_grad()
            reports = [
                self._recorded._add_direction(
                    Passes(closures, random_state=random_state), numbers, sync=True
                )
                for closures in self._closures()
            ]
            if self._clip_norm is not None:
                clip_grad_norm_(self._weights.parameters, self._clip_norm)
            self._optimizer.step()
        return reports

    def _mean(self, reports: Sequence[Report]) -> Tensor:
        """Losses, radius and products, where each of several calls has but a part of the loss."""
        n = self._num_calls
        if n == 1:  # as mostly, and every operator is a kernel in the graph
            (r,) = reports
            return torch.stack([r.loss, r.perturbed_loss, r.rho, *r._three.unbind()])
        values = [
            torch.stack([n * r.loss, n * r.perturbed_loss, r.rho, *(n**2 * r._three).unbind()])
            for r in reports
        ]
        return torch.stack(values).mean(0)

    def _scalars(self) -> tuple[list[Tensor], list[Tensor]]:
        """The objective's numbers and the learning rates, where the graph finds them."""
        num_numbers = len(self._settings) - len(self._optimizer.param_groups)
        numbers, lrs = self._settings[:num_numbers], self._settings[num_numbers:]
        return list(numbers.unbind()), list(lrs.float().unbind())

    def _closures(self) -> list[Closure | list[Closure]]:
        """What each call of the objective's gets."""
        if self._num_parts == 1:
            return [lambda: self._loss_fn(*self._batch)]
        parts = zip(*(tensor.chunk(self._num_parts) for tensor in self._batch), strict=True)
        closures = [self._part(part) for part in parts]
        return [closures] if self._num_calls == 1 else list(closures)

    def _part(self, part: Sequence[Tensor]) -> Closure:
        def closure() -> tuple[Tensor, Any]:
            result = self._loss_fn(*part)
            loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
            # What is no tensor, the objective refuses.
            return loss / self._num_parts if isinstance(loss, Tensor) else loss, aux

        return closure

    def _check(self, batch: Sequence[Tensor]) -> None:
        mine, theirs = list(map(_kind, self._batch)), list(map(_kind, batch))
        if mine != theirs:
            raise ValueError(
                f"batch must be like the recorded one, {mine}, got {theirs}. Drop the last batch "
                "of an epoch if it is smaller, or take its step with objective.backward."
            )
        for (name, was), (_, now) in zip(self._circumstances, self._look_around(), strict=True):
            if was != now:
                raise RuntimeError(
                    f"{name} must stay as recorded, got others. Capture the step anew after such "
                    "a change."
                )

    def _look_around(self) -> list[tuple[str, object]]:
        """What the graph relies on, and cannot see."""
        weights, groups = self._objective._look(), self._optimizer.param_groups
        fixed, buffers = type(self._objective)._fixed, contents(weights.buffers)
        states = [s for state in self._optimizer.state.values() for s in state.values()]
        settings = [
            (k, group[k]) for group in groups for k in self._optimizer.defaults if k != "lr"
        ]
        return [
            *((f"the objective's {name}", getattr(self._objective, name)) for name in fixed),
            ("the model's parameters", list(map(Tensor.data_ptr, weights.parameters))),
            ("the model's buffers", _addresses(buffers)),
            ("the model's mode", [m.training for m in weights.modules]),
            ("the optimizer's parameters", [id(p) for group in groups for p in group["params"]]),
            *((f"the optimizer's {name}", value) for name, value in settings),
            ("the optimizer's state", _addresses(states)),
        ]


def _addresses(tensors: Iterable[object]) -> list[int | None]:
    return [t.data_ptr() if isinstance(t, Tensor) else None for t in tensors]


def _kind(tensor: object) -> object:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return tuple(tensor.shape), tensor.dtype


def _device(objective: Objective) -> torch.device:
    weights = objective._look()
    if weights.wrappers or weights.are_sharded:
        raise ValueError(
            "model must be trained by one process, got one that is spread over several. "
            "Train it with objective.backward."
        )
    devices = weights.devices
    if len(devices) > 1 or next(iter(devices)).type != "cuda":
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"model must be on one CUDA device, got {names}. Train it with objective.backward."
        )
    return devices.pop()


def _check_optimizer(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if not group.get("fused"):
            raise ValueError(
                f"optimizer must be fused, got {name} with fused={group.get('fused')}. Build SGD, "
                "Adam or AdamW with fused=True; train others with objective.backward."
            )
        is_new = isinstance(optimizer, SGD) and not optimizer.state
        if is_new and group["momentum"] and group["dampening"]:
            raise ValueError(
                f"optimizer must have taken a step if it has dampening, got a new {name}. Its "
                "first step is unlike the others: take it with objective.backward."
            )


def _check_batch(batch: Sequence[Tensor], num_parts: int) -> None:
    if not isinstance(batch, list | tuple) or not all(isinstance(t, Tensor) for t in batch):
        raise TypeError(
            f"example_batch must be a tuple of tensors, got {type(batch).__name__}. "
            "Pass what the step will get, such as (x, y)."
        )
    if isinstance(num_parts, bool) or not isinstance(num_parts, int):
        raise TypeError(
            f"micro_batches must be a whole number, got {type(num_parts).__name__}. "
            "Leave it out for one."
        )
    if num_parts < 1 or any(not t.ndim or len(t) % num_parts for t in batch if num_parts != 1):
        sizes = [tuple(tensor.shape) for tensor in batch]
        raise ValueError(
            f"micro_batches must divide the batch, got {num_parts} for shapes {sizes}. "
            "Pass a divisor of the batch size."
        )
