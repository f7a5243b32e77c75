"""The whole step as a CUDA graph: zero_grad, the passes, clipping and the update.

A step launches thousands of kernels, and with a small model the GPU waits for the CPU to do so.
Captured once, they are launched together. A graph repeats the kernels that it captured, on the same
memory, so whatever changes from step to step must lie there: the batch, and the settings, which are
the learning rates and what an objective's `_numbers` returns.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_map_only

from surrogap.checks import integer, number
from surrogap.core.combine import Number
from surrogap.core.objective import Objective
from surrogap.core.passes import Closure, Passes, RandomState, Replayable
from surrogap.core.recording import (
    Twins,
    gradients_kept,
    memory_kept,
    settings_replaced,
    undone,
)
from surrogap.core.report import Report
from surrogap.core.weights import are_same, contents

LossFn = Callable[..., Tensor | tuple[Tensor, Any]]
_RandomStates = Callable[[Iterable[torch.device]], Replayable]

# As PyTorch recommends: libraries choose algorithms and allocate memory in their first calls.
_NUM_WARM_UPS = 3


def capture(
    objective: Objective,
    optimizer: Optimizer,
    loss_fn: LossFn,
    example_batch: Sequence[Tensor],
    *,
    micro_batches: int = 1,
    shares_perturbation: bool = True,
    climb_fraction: float = 1.0,
    clip_norm: float | None = None,
) -> "CapturedStep":
    """Capture a training step as a CUDA graph, and return a function that replays it.

    Capturing changes nothing: weights, statistics, the optimizer's state, `.grad` and the random
    generators are as before. Learning rates, `rho`, `alpha`, `lam` and `gamma` may change from step
    to step, and schedules and schedulers work as always. Everything else that the step depends on
    must stay as it is, and is checked: the model's parameters, buffers and mode, the optimizer's
    other settings and its state. So load checkpoints before. The graph has gradients of its own and
    leaves `.grad` alone; its memory stays allocated as long as the function lives. `Intermittent`
    has two graphs, which share their memory.

    Args:
        objective: Any objective of a model on one CUDA device.
        optimizer: SGD, Adam or AdamW, built with `fused=True`.
        loss_fn: From a batch, runs the forward pass and returns the loss or `(loss, aux)`, in
            autocast if you like. It runs a few times now, and never again: its kernels do.
        example_batch: Tensors like those of all batches: same number, shapes and dtypes.
        micro_batches: The number of micro-batches of equal size to split each batch into, along the
            first dimension; the loss is the mean of theirs.
        shares_perturbation: Whether one perturbation serves all micro-batches, or each has its own
            (m-sharpness). With several, the report holds the means of their losses and products.
        climb_fraction: The fraction of the batch that the first pass runs on, from its start; at
            least one row. Not together with `micro_batches`.
        clip_norm: The largest norm of the direction; None for no clipping.

    Returns:
        `step(*batch) -> Report`. The values of a report are its own, and so is `aux`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, the model is not on one CUDA device or is spread
            over processes, or the optimizer is not fused. `step`: a batch has another shape.
        RuntimeError: The step cannot be captured, because it waits for the GPU, for example.
            `step`: something other than the settings has changed.
    """
    if not isinstance(objective, Objective):
        raise TypeError(
            f"objective must be an objective, got {type(objective).__name__}. "
            "Pass one such as GSAM(model)."
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch optimizer, got {type(optimizer).__name__}. "
            "Pass the one that will step."
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
    _check_climb(objective, climb_fraction, micro_batches)
    return CapturedStep(
        *(objective, optimizer, loss_fn, example_batch, _device(objective)),
        *(micro_batches, shares_perturbation, climb_fraction, clip_norm),
    )


class _Graph:
    """One captured form of the step.

    Attributes:
        objective: The objective that it was captured with.
        values: Losses, radius and products of the last replay.
        aux: What the loss function returned beside the loss in the last replay.
    """

    values: Tensor
    aux: Any
    lacks_loss: bool

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._graph = torch.cuda.CUDAGraph()
        self._random_state = Twins(self._graph)

    def capture(
        self,
        run: Callable[[Objective, _RandomStates], Sequence[Report]],
        num_calls: int,
        pool: Any,
    ) -> None:
        """Capture what `run` does.

        Args:
            run: Takes a step.
            num_calls: The number of the objective's calls in it.
            pool: The memory that graphs share.

        Raises:
            RuntimeError: It cannot be captured.
        """
        try:
            with (
                self.objective._recording(num_calls),
                # "thread_local", so that other threads, which may load data, can go on.
                torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"),
            ):
                report = Report.mean(run(self.objective, self._random_state), divisor=num_calls)
                self.values = report._row()
                # An autocast around all this must not keep casts that only the graph makes.
                torch.clear_autocast_cache()
        except Exception as error:
            self._random_state.reset()
            raise RuntimeError(
                "loss_fn must do all its work on the GPU without waiting for it, got "
                f"{type(error).__name__}: {error}. Train with objective.backward instead."
            ) from error
        self.aux = tree_map_only(Tensor, Tensor.detach, report.aux)
        self.lacks_loss = report._lacks_loss

    def replay(self) -> Report:
        """Take a step."""
        self._random_state.align()
        self._graph.replay()
        loss, perturbed_loss, rho, *products = self.values.clone().unbind()
        return Report(
            *(loss, perturbed_loss, tree_map_only(Tensor, Tensor.clone, self.aux), rho),
            lambda: torch.stack(products),
            _lacks_loss=self.lacks_loss,
        )


@final
class CapturedStep:
    """A captured training step; `capture` returns one."""

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        loss_fn: LossFn,
        example_batch: Sequence[Tensor],
        device: torch.device,
        micro_batches: int,
        shares_perturbation: bool,
        climb_fraction: float,
        clip_norm: float | None,
    ) -> None:
        self._objective = objective
        self._optimizer = optimizer
        self._weights = objective._refresh()
        self._loss_fn = loss_fn
        self._clip_norm = clip_norm
        self._micro_batches = micro_batches
        self._num_calls = 1 if shares_perturbation else micro_batches
        self._climb_fraction = climb_fraction
        self._batch = [tensor.to(device, copy=True) for tensor in example_batch]
        values = self._read_settings()
        self._settings = torch.tensor(values, dtype=torch.float64, device=device)
        self._written = values
        self._device = device
        with torch.cuda.device(device):
            pool = torch.cuda.graph_pool_handle()
            self._graphs = [_Graph(variant) for variant in objective._variants()]
            for graph in self._graphs:
                self._warm_up(graph.objective)
                with memory_kept(self._weights), gradients_kept(self._weights, optimizer):
                    graph.capture(self._run, self._num_calls, pool)
        self._circumstances = self._read_circumstances()

    def __call__(self, *batch: Tensor) -> Report:
        """Take one step, on a batch like the example.

        Raises:
            ValueError: The batch has another number, shape or dtype of tensors.
            RuntimeError: Something has changed that the graph cannot follow.
        """
        self._check(batch)
        # A graph runs in the stream of the current device, which need not be the model's.
        with torch.cuda.device(self._device):
            for static, tensor in zip(self._batch, batch, strict=True):
                static.copy_(tensor, non_blocking=True)
            self._write_settings()
            report = self._graphs[self._objective._variant].replay()
        self._objective._advance()
        self._objective.report = report
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it
        return report

    def _read_settings(self) -> list[Number]:
        lrs = [group["lr"] for group in self._optimizer.param_groups]
        return [*self._objective._numbers(), *map(float, lrs)]

    def _write_settings(self) -> None:
        """Write those that have changed, by kernels: a copy might wait for the last step."""
        values = self._read_settings()
        for index, (value, written) in enumerate(zip(values, self._written, strict=True)):
            if value != written:
                self._settings[index].fill_(value)
        self._written = values

    def _warm_up(self, objective: Objective) -> None:
        """Run the step on a stream of its own, since some libraries allocate for each stream."""
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream), undone(objective, self._weights, self._optimizer):
            buffers, frozen = contents(self._weights.buffers), self._weights.frozen
            addresses = list(map(Tensor.data_ptr, frozen))
            for _ in range(_NUM_WARM_UPS):
                self._run(objective, RandomState)
            are_in_place = are_same(contents(self._weights.buffers), buffers)
            if not are_in_place or list(map(Tensor.data_ptr, frozen)) != addresses:
                raise RuntimeError(
                    "model must write to its buffers and frozen parameters in place, got one that "
                    "assigns new ones in its forward pass. Train with objective.backward instead."
                )
        current.wait_stream(stream)

    def _run(self, objective: Objective, random_state: _RandomStates) -> list[Report]:
        numbers, lrs = self._scalars()
        self._objective.model.zero_grad()
        with settings_replaced(self._optimizer, lrs):
            self._optimizer.zero_grad()
            reports = [
                objective._add_direction(
                    objective._refresh(),
                    Passes(closures, climb=self._climb_closure(), random_state=random_state),
                    *(numbers, True),
                )
                for closures in self._closures()
            ]
            if self._clip_norm is not None:
                clip_grad_norm_(self._weights.parameters, self._clip_norm)
            self._optimizer.step()
        return reports

    def _scalars(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the objective's numbers and the learning rates, as scalars on the device."""
        num_numbers = len(self._settings) - len(self._optimizer.param_groups)
        numbers, lrs = self._settings[:num_numbers], self._settings[num_numbers:]
        return list(numbers.unbind()), list(lrs.float().unbind())

    def _closures(self) -> list[Closure | list[Closure]]:
        """Return the closures of each call of the objective."""
        if self._micro_batches == 1:
            return [partial(self._loss_fn, *self._batch)]
        chunks = zip(*(t.chunk(self._micro_batches) for t in self._batch), strict=True)
        closures: list[Closure] = [partial(self._divided_loss, *chunk) for chunk in chunks]
        return [closures] if self._num_calls == 1 else list(closures)

    def _divided_loss(self, *chunk: Tensor) -> tuple[Tensor, Any]:
        result = self._loss_fn(*chunk)
        loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        # The objective refuses what is not a tensor.
        return loss / self._micro_batches if isinstance(loss, Tensor) else loss, aux

    def _climb_closure(self) -> Closure | None:
        if self._climb_fraction == 1.0:
            return None
        sizes = (max(1, round(self._climb_fraction * len(tensor))) for tensor in self._batch)
        return partial(self._loss_fn, *(t[:n] for t, n in zip(self._batch, sizes, strict=True)))

    def _check(self, batch: Sequence[Tensor]) -> None:
        mine, theirs = list(map(_kind, self._batch)), list(map(_kind, batch))
        if mine != theirs:
            raise ValueError(
                f"batch must be like the captured one, {mine}, got {theirs}. Drop the last batch "
                "of an epoch if it is smaller, or take its step with objective.backward."
            )
        now = self._read_circumstances()
        for (name, before), (_, after) in zip(self._circumstances, now, strict=True):
            if before != after:
                raise RuntimeError(
                    f"{name} changed since the step was captured. Capture it again after such a "
                    "change."
                )

    def _read_circumstances(self) -> list[tuple[str, object]]:
        """Return what the graph relies on, and cannot see."""
        objective, groups = self._objective, self._optimizer.param_groups
        weights = objective._refresh()
        buffers = contents(weights.buffers)
        states = [s for state in self._optimizer.state.values() for s in state.values()]
        settings = [
            (k, group[k]) for group in groups for k in self._optimizer.defaults if k != "lr"
        ]
        return [
            *objective._circumstances(),
            ("The memory of the model's parameters", _addresses(weights.parameters)),
            ("The memory of the model's buffers", _addresses(buffers)),
            ("The mode of the model", [m.training for m in weights.modules]),
            ("The optimizer's parameters", [id(p) for group in groups for p in group["params"]]),
            *((f"The optimizer's {name}", value) for name, value in settings),
            ("The memory of the optimizer's state", _addresses(states)),
        ]


def _addresses(tensors: Iterable[object]) -> list[int | None]:
    return [t.data_ptr() if isinstance(t, Tensor) else None for t in tensors]


def _kind(tensor: object) -> object:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return tuple(tensor.shape), tensor.dtype


def _device(objective: Objective) -> torch.device:
    weights = objective._refresh()
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


def _check_climb(objective: Objective, climb_fraction: float, micro_batches: int) -> None:
    remedy = "Pass a fraction such as 0.25."
    number("climb_fraction", climb_fraction, above=0, at_most=1, remedy=remedy)
    objective._check_climb(climb_fraction < 1)
    if climb_fraction < 1 and micro_batches > 1:
        raise ValueError(
            f"climb_fraction must be 1 with micro_batches, got {climb_fraction} and "
            f"micro_batches={micro_batches}. Pass one of the two."
        )


def _check_batch(batch: Sequence[Tensor], micro_batches: int) -> None:
    if not isinstance(batch, list | tuple) or not all(isinstance(t, Tensor) for t in batch):
        raise TypeError(
            f"example_batch must be a tuple of tensors, got {type(batch).__name__}. "
            "Pass what the step will get, such as (x, y)."
        )
    integer("micro_batches", micro_batches, at_least=1, remedy="Leave it out for one.")
    if any(not t.ndim or len(t) % micro_batches for t in batch if micro_batches != 1):
        sizes = [tuple(tensor.shape) for tensor in batch]
        raise ValueError(
            f"micro_batches must divide the batch, got {micro_batches} for shapes {sizes}. "
            "Pass a divisor of the batch size."
        )
