"""Runs resume from a distributed checkpoint, also with fewer processes or another wrapper."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from surrogap import GSAM, SAM, EntropySGD
from surrogap.rho import InverseSqrt
from tests import equality, toy_models
from tests.distributed.processes import Processes

NUM_MICRO_BATCHES, SIZE = 4, 4  # micro-batches of a global batch, and samples in each
SAVED_AT, NUM_STEPS = 3, 7


@dataclass(frozen=True)
class Case:
    """The objective and optimizer of a case. Each case has state that counts steps.

    Scope "global" is one climb for the whole batch; "replica" one for each micro-batch.
    """

    wrapper: Literal["ddp", "fsdp2"]
    objective: Literal["GSAM", "SAM", "EntropySGD"]
    optimizer: Literal["AdamW", "SGD"]
    scope: Literal["replica", "global"] = "global"
    network: str = "mlp"


CASES = {
    "ddp-replica": Case("ddp", "GSAM", "AdamW", "replica"),
    "ddp-global": Case("ddp", "GSAM", "AdamW"),
    "ddp-global-momentum": Case("ddp", "SAM", "SGD"),
    "ddp-entropy": Case("ddp", "EntropySGD", "SGD", "replica"),
    "fsdp2": Case("fsdp2", "GSAM", "AdamW"),
    "fsdp2-momentum": Case("fsdp2", "SAM", "SGD"),
    "fsdp2-entropy": Case("fsdp2", "EntropySGD", "AdamW"),
}
# Its statistics depend on the samples of a process, so fewer processes are another model.
BATCH_NORM = {"ddp-batch-norm": Case("ddp", "GSAM", "SGD", "replica", "convnet")}


def scaled(closure: Callable[[], Tensor], factor: float) -> Callable[[], Tensor]:
    return lambda: closure() * factor


class Run:
    """A training run in one process."""

    def __init__(self, case: Case, seed: int) -> None:
        torch.manual_seed(seed)
        self.case = case
        model = toy_models.MODELS[case.network]().double()
        if case.wrapper == "ddp":
            model = DistributedDataParallel(model)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.model: nn.Module = model
        if case.optimizer == "AdamW":
            self.optimizer = AdamW(model.parameters(), lr=0.01)
        else:
            self.optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        if case.objective == "EntropySGD":
            self.objective = EntropySGD(model, inner_steps=3, noise=0.0, gamma=0.5, scoping=0.3)
            self.counter = self.objective
        else:
            make = {"GSAM": GSAM, "SAM": SAM}[case.objective]
            self.counter = InverseSqrt(0.5)
            self.objective = make(model, rho=self.counter, scope=case.scope)

    def train(self, steps: range) -> None:
        for step in steps:
            batches = self._batches(step)
            # Entropy-SGD is not homogeneous in the loss, so its gradients are divided instead.
            shares = (1 / len(batches), 1.0)
            of_loss, of_grad = reversed(shares) if self.objective is self.counter else shares
            for index, batch in enumerate(batches):
                closure = scaled(toy_models.closure_of(self.model, batch), of_loss)
                self.objective.backward(closure, sync=index == len(batches) - 1)
            for parameter in self.model.parameters():
                parameter.grad.mul_(of_grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def _batches(self, step: int) -> list[toy_models.Batch]:
        """This process's micro-batches: together, unless each has its own climb."""
        num_mine = NUM_MICRO_BATCHES // dist.get_world_size()
        first = dist.get_rank() * num_mine
        micro_batches = [
            toy_models.batch(SIZE, seed=100 * step + first + index) for index in range(num_mine)
        ]
        if self.case.scope == "replica":
            return micro_batches
        return [
            (torch.cat([x for x, _ in micro_batches]), torch.cat([y for _, y in micro_batches]))
        ]

    def save(self, folder: Path) -> None:
        weights, moments = get_state_dict(self.model, self.optimizer)
        state = {"model": weights, "optimizer": moments}
        state |= {"scheduler": self.scheduler, "counter": self.counter}
        dcp.save(state, checkpoint_id=folder)

    def load(self, folder: Path, *, without_counter: bool) -> None:
        weights, moments = get_state_dict(self.model, self.optimizer)
        state = {"model": weights, "optimizer": moments}
        state |= {"scheduler": self.scheduler, "counter": self.counter}
        if without_counter:
            del state["counter"]
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments
        )

    def state(self) -> list[Tensor]:
        """The unsharded weights, buffers and optimizer state."""
        parameters = list(self.model.parameters())
        moments = [self.optimizer.state[parameter] for parameter in parameters]
        return [
            (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
            for tensor in (
                *(*parameters, *self.model.buffers()),
                *(moment[name] for moment in moments for name in sorted(moment)),
            )
        ]


def start_save_and_go_on(case: Case, folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """In each process: the state when it was saved, and at the end."""
    run = Run(case, seed=0)
    run.train(range(SAVED_AT))
    run.save(folder)
    saved = run.state()
    run.train(range(SAVED_AT, NUM_STEPS))
    return saved, run.state()


def resume(
    case: Case, folder: Path, *, without_counter: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """In each process: the state that was loaded, and at the end."""
    run = Run(case, seed=1)  # other initial weights, which loading replaces
    run.load(folder, without_counter=without_counter)
    found = run.state()
    run.train(range(SAVED_AT, NUM_STEPS))
    return found, run.state()


@dataclass(frozen=True)
class Saved:
    case: Case
    folder: Path
    state: list[Tensor]
    last: list[Tensor]


@pytest.fixture(scope="module")
def one() -> Iterator[Processes]:
    processes = Processes(1)
    yield processes
    processes.stop()


@pytest.fixture(scope="module")
def saved(four: Processes, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """A checkpoint of four processes for each case, and their final state."""

    @cache
    def run(name: str) -> Saved:
        case, folder = (CASES | BATCH_NORM)[name], tmp_path_factory.mktemp(name)
        (state, last), *others = four.run(start_save_and_go_on, case, folder)
        for other in others:
            assert equality.same_bits(other[1], last)
        return Saved(case, folder, state, last)

    return run


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of a tensor."""
    return max(equality.relative_error(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("name", [*CASES, *BATCH_NORM])
def test_as_many_processes_resume_bit_for_bit(
    name: str, four: Processes, saved: Callable[[str], Saved]
) -> None:
    run = saved(name)
    for found, last in four.run(resume, run.case, run.folder):
        assert equality.same_bits(found, run.state)
        assert equality.same_bits(last, run.last)


@pytest.mark.parametrize("number", ["two", "one"])
@pytest.mark.parametrize("name", CASES)
def test_fewer_processes_resume_up_to_rounding(
    name: str, number: str, saved: Callable[[str], Saved], request: pytest.FixtureRequest
) -> None:
    run = saved(name)
    for found, last in request.getfixturevalue(number).run(resume, run.case, run.folder):
        assert equality.same_bits(found, run.state)
        assert error(last, run.last) < 1e-10


@pytest.mark.parametrize("number", ["four", "two", "one"])
@pytest.mark.parametrize("name", ["ddp-global", "ddp-global-momentum", "fsdp2", "fsdp2-momentum"])
def test_replicas_resume_as_shards_and_shards_as_replicas(
    name: str, number: str, saved: Callable[[str], Saved], request: pytest.FixtureRequest
) -> None:
    run = saved(name)
    other = replace(run.case, wrapper="fsdp2" if run.case.wrapper == "ddp" else "ddp")
    for found, last in request.getfixturevalue(number).run(resume, other, run.folder):
        assert equality.same_bits(found, run.state)
        assert error(last, run.last) < 1e-10


@pytest.mark.parametrize("name", CASES)
def test_without_the_count_of_steps_the_result_differs(
    name: str, four: Processes, saved: Callable[[str], Saved]
) -> None:
    # So the tests above would notice if the radius or the scoping restarted.
    run = saved(name)
    for found, last in four.run(partial(resume, without_counter=True), run.case, run.folder):
        assert equality.same_bits(found, run.state)
        assert error(last, run.last) > 1e-4
