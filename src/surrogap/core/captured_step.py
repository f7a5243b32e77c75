"""A captured training step: zero_grad, the passes, clipping and the update in one graph."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from surrogap.core.buffers import Buffers, moved, places_of
from surrogap.core.combine import Number
from surrogap.core.gradients import cleared
from surrogap.core.graph import Graph
from surrogap.core.objective import Objective
from surrogap.core.report import Report
from surrogap.core.static_batch import StaticBatch
from surrogap.core.weights import Weights, are_same, contents
from surrogap.errors import UnsupportedError

# As PyTorch recommends: libraries select algorithms and allocate memory in their first calls.
_NUM_WARM_UPS = 3


@final
class CapturedStep:
    """A captured training step. Create it with `capture`."""

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        batch: StaticBatch,
        device: torch.device,
        clip_norm: float | None,
    ) -> None:
        self._objective = objective
        self._optimizer = optimizer
        self._weights = objective._refresh()
        self._batch = batch
        self._device = device
        self._clip_norm = clip_norm
        self._written = self._read_settings()
        self._settings = torch.tensor(self._written, dtype=torch.float64, device=device)
        with torch.cuda.device(device):
            pool = torch.cuda.graph_pool_handle()
            self._graphs = {form: Graph(form) for form in objective._forms()}
            for graph in self._graphs.values():
                self._warm_up(graph.objective)
                graph.capture(self._run, len(batch.calls), pool)
        self._invariants = self._read_invariants()

    def __call__(self, *batch: Tensor) -> Report:
        """Take one training step, on the tensors of a batch like `example_batch`.

        `capture` documents the result and the errors.
        """
        self._batch.check(batch)
        self._check_invariants()
        # A graph runs on the stream of the current device, which may not be the model's.
        with torch.cuda.device(self._device):
            self._batch.copy_(batch)
            self._write_settings()
            report = self._graphs[self._objective._current].replay()
        self._objective._advance()
        self._objective.report = report
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # read by schedulers
        return report

    def _read_settings(self) -> list[Number]:
        lrs = [group["lr"] for group in self._optimizer.param_groups]
        return [*self._objective._numbers(), *map(float, lrs)]

    def _write_settings(self) -> None:
        """Write the changed settings with fill kernels: a copy might wait for the last step."""
        values = self._read_settings()
        for index, (value, written) in enumerate(zip(values, self._written, strict=True)):
            if value != written:
                self._settings[index].fill_(value)
        self._written = values

    def _warm_up(self, objective: Objective) -> None:
        """Run the step on a side stream, as PyTorch recommends before a capture."""
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream), _undone(objective, self._weights, self._optimizer):
            for _ in range(_NUM_WARM_UPS):
                self._run(objective)
        current.wait_stream(stream)

    def _run(self, objective: Objective) -> list[Report]:
        num_numbers = len(self._settings) - len(self._optimizer.param_groups)
        numbers = self._settings[:num_numbers].unbind()
        lrs = self._settings[num_numbers:].float().unbind()
        reports = []
        with (
            memory_kept(self._weights),
            cleared(_parameters(self._weights, self._optimizer)),
            _settings_replaced(self._optimizer, lrs),
        ):
            for passes in self._batch.calls:
                objective._refresh()
                reports.append(objective._add_direction(passes, numbers, sync=True))
            if self._clip_norm is not None:
                clip_grad_norm_(self._weights.parameters, self._clip_norm)
            self._optimizer.step()
        return reports

    def _check_invariants(self) -> None:
        now = self._read_invariants()
        for (name, before), (_, after) in zip(self._invariants, now, strict=True):
            if before != after:
                raise UnsupportedError(
                    f"{name} changed since the step was captured. Capture it again after such a "
                    "change."
                )

    def _read_invariants(self) -> list[tuple[str, object]]:
        """Return names and values of what the graph depends on but cannot observe."""
        objective, groups = self._objective, self._optimizer.param_groups
        weights = objective._refresh()
        buffers = contents(weights.buffers)
        states = [s for state in self._optimizer.state.values() for s in state.values()]
        settings = [
            (k, group[k]) for group in groups for k in self._optimizer.defaults if k != "lr"
        ]
        return [
            *objective._invariants(climbs_on_part=self._batch.climbs_on_part),
            ("The memory of the model's parameters", _addresses(weights.parameters)),
            ("The memory of the model's buffers", _addresses(buffers)),
            ("The mode of the model", [m.training for m in weights.modules]),
            ("The optimizer's parameters", [id(p) for group in groups for p in group["params"]]),
            *((f"The optimizer's {name}", value) for name, value in settings),
            ("The memory of the optimizer's state", _addresses(states)),
        ]


def _addresses(tensors: Iterable[object]) -> list[int | None]:
    return [t.data_ptr() if isinstance(t, Tensor) else None for t in tensors]


@contextmanager
def _undone(objective: Objective, weights: Weights, optimizer: Optimizer) -> Iterator[None]:
    """Context manager that undoes the training steps in its body.

    State that the optimizer and the objective did not have before is set to zero.
    """
    parameters = _parameters(weights, optimizer)
    copies = [parameter.detach().clone() for parameter in parameters]
    before = {key: state.clone() for key, state in _states(objective, optimizer).items()}
    with torch.random.fork_rng([torch.cuda.current_device()]), Buffers().kept(weights.buffers):
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, copies)
                for key, state in _states(objective, optimizer).items():
                    state.copy_(before[key]) if key in before else state.zero_()


@contextmanager
def memory_kept(weights: Weights) -> Iterator[None]:
    """Context in which weights and buffers must stay in their memory, as a graph requires.

    Tensors whose `.data` was assigned are restored; buffers replaced by other tensors are not.
    """
    before = _tensors(weights)
    places = places_of(t for t in before if t is not None and t.layout is torch.strided)
    try:
        yield
    finally:
        assigned = moved(places)
        for tensor, place in assigned:
            tensor.data = place
        if assigned or not are_same(_tensors(weights), before):
            raise UnsupportedError(
                "model must write to its weights and buffers in place, got one that assigns new "
                "ones in its forward pass. Train with objective.backward instead."
            )


@contextmanager
def _settings_replaced(optimizer: Optimizer, lrs: Sequence[Tensor]) -> Iterator[None]:
    """Context in which the optimizer reads its learning rates from the device, as a graph must."""
    before = [dict(group) for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr
        if "capturable" in group:
            group["capturable"] = True
    try:
        yield
    finally:
        for group, settings in zip(optimizer.param_groups, before, strict=True):
            group.update(settings)


def _states(objective: Objective, optimizer: Optimizer) -> dict[object, Tensor]:
    """Return the state of the objective, and of the optimizer by parameter and name."""
    states: dict[object, Tensor] = {m: m for m in objective._workspace.states.tensors}
    for parameter, state in optimizer.state.items():
        states |= {(parameter, k): v for k, v in state.items() if isinstance(v, Tensor)}
    return states


def _tensors(weights: Weights) -> list[Tensor | None]:
    return [*weights.parameters, *weights.frozen, *contents(weights.buffers)]


def _parameters(weights: Weights, optimizer: Optimizer) -> list[Tensor]:
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    every = (*weights.parameters, *weights.frozen, *mine)
    return list({id(parameter): parameter for parameter in every}.values())
