"""Every base optimizer and scheduler works with an objective as with plain gradients."""

import copy
import io
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.amp import GradScaler
from torch.optim import lr_scheduler

from surrogap import GSAM, EntropySGD
from surrogap.core.objective import Objective
from surrogap.rho import InverseSqrt, ProportionalToLR
from tests import equality, reference, toy_models
from tests.objective_cases import ALPHA, OBJECTIVES, every_memoryless

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")

Make = Callable[[nn.Module], optim.Optimizer]


def plain(cls: Callable[..., optim.Optimizer], **options: Any) -> Make:
    return lambda model: cls(model.parameters(), **options)


def muon(model: nn.Module) -> optim.Optimizer:
    """Muon supports only matrices."""
    return optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01)


# Every optimizer of torch.optim that takes dense gradients and no closure.
BASE_OPTIMIZERS: dict[str, Make] = {
    "Adadelta": plain(optim.Adadelta),
    "Adafactor": plain(optim.Adafactor),
    "Adagrad": plain(optim.Adagrad),
    "Adam": plain(optim.Adam, amsgrad=True),
    "AdamW": plain(optim.AdamW, weight_decay=0.3),
    "Adamax": plain(optim.Adamax),
    "ASGD": plain(optim.ASGD),
    "Muon": muon,
    "NAdam": plain(optim.NAdam),
    "RAdam": plain(optim.RAdam),
    "RMSprop": plain(optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": plain(optim.Rprop),
    "SGD": plain(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
}
FOREACH = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")
FOREACH += ("Rprop", "SGD")
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
for kind, names in (("foreach", FOREACH), ("fused", FUSED)):
    for base in names:
        options = {"lr": 0.01, kind: True}
        BASE_OPTIMIZERS[f"{base}, {kind}"] = plain(getattr(optim, base), **options)
# The adaptive optimizers that the paper names.
for base in ("AdaBelief", "Yogi", "AdaBound"):
    BASE_OPTIMIZERS[base] = plain(getattr(pytorch_optimizer, base), lr=1e-3)

every_optimizer = pytest.mark.parametrize("base", BASE_OPTIMIZERS)


def test_every_dense_optimizer_is_listed() -> None:
    known = {
        name
        for name, cls in vars(optim).items()
        if isinstance(cls, type) and issubclass(cls, optim.Optimizer)
    }
    # SparseAdam needs sparse gradients; LBFGS has its own test, since it takes a closure.
    assert known - {"Optimizer", "SparseAdam", "LBFGS"} <= set(BASE_OPTIMIZERS)


def batches() -> Iterator[toy_models.Batch]:
    return (toy_models.batch(seed=seed) for seed in itertools.count(10))


def run(
    model: nn.Module,
    optimizer: optim.Optimizer,
    fill: Callable[[toy_models.Batch], object],
    *,
    steps: int = 4,
    after: Callable[[], object] = lambda: None,
) -> Tensor:
    for data in itertools.islice(batches(), steps):
        optimizer.zero_grad()
        fill(data)
        optimizer.step()
        after()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def fill_by_hand(model: nn.Module, name: str) -> Callable[[toy_models.Batch], None]:
    """`.grad` from the float64 reference: the trajectory that an objective must follow."""

    def fill(data: toy_models.Batch) -> None:
        twin = copy.deepcopy(model)
        f, w = reference.loss_of(twin, lambda net: toy_models.cross_entropy(net, data))
        d = OBJECTIVES[name].reference(f, w, partial(reference.selected, model))
        sizes = [p.numel() for p in model.parameters()]
        for p, piece in zip(model.parameters(), d.split(sizes), strict=True):
            p.grad = piece.view(p.shape).clone()

    return fill


@every_optimizer
@every_memoryless
def test_trajectory_is_that_of_the_reference(name: str, base: str) -> None:
    model = toy_models.mlp().double()
    twin = copy.deepcopy(model)
    optimizer = BASE_OPTIMIZERS[base](model)
    objective = OBJECTIVES[name].make(model)
    ours = run(
        model,
        optimizer,
        lambda data: objective.backward(lambda: toy_models.cross_entropy(model, data)),
    )
    theirs = run(twin, BASE_OPTIMIZERS[base](twin), fill_by_hand(twin, name))
    assert equality.relative_error(ours, theirs) < 1e-8


@every_memoryless
def test_lbfgs_calls_the_objective_in_its_closure(name: str) -> None:
    model, data = toy_models.mlp().double(), toy_models.batch()
    twin = copy.deepcopy(model)

    def minimise(net: nn.Module, fill: Callable[[toy_models.Batch], object]) -> Tensor:
        optimizer = optim.LBFGS(net.parameters(), lr=0.1, max_iter=5)

        def closure() -> Tensor:
            optimizer.zero_grad()
            fill(data)
            return toy_models.cross_entropy(net, data).detach()

        optimizer.step(closure)
        return torch.cat([p.detach().reshape(-1) for p in net.parameters()])

    objective = OBJECTIVES[name].make(model)
    ours = minimise(
        model, lambda data: objective.backward(lambda: toy_models.cross_entropy(model, data))
    )
    assert equality.relative_error(ours, minimise(twin, fill_by_hand(twin, name))) < 1e-7


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)],
        milestones=[2],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def test_every_scheduler_is_listed() -> None:
    public = {name for name in lr_scheduler.__all__ if name != "LRScheduler"}
    assert public <= set(SCHEDULERS)


def advance(scheduler: Any) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


@pytest.mark.parametrize("scheduled", SCHEDULERS)
def test_schedulers(scheduled: str) -> None:
    """The learning rate is the same as without an objective, and the radius follows it."""
    model, twin = toy_models.mlp().double(), toy_models.mlp().double()
    bounds = {"rho_max": 0.2, "rho_min": 0.02, "lr_max": 0.1, "lr_min": 0.001}
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    bare = optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    objective = GSAM(model, rho=ProportionalToLR(optimizer, **bounds), alpha=ALPHA)
    ours, theirs = SCHEDULERS[scheduled](optimizer), SCHEDULERS[scheduled](bare)
    seen = set()
    for data in itertools.islice(batches(), 7):
        lr = optimizer.param_groups[0]["lr"]
        assert lr == bare.param_groups[0]["lr"]
        optimizer.zero_grad()
        bare.zero_grad()
        rho = objective.backward(lambda data=data: toy_models.cross_entropy(model, data)).rho
        toy_models.cross_entropy(twin, data).backward()
        line = 0.02 + 0.18 * (lr - 0.001) / 0.099
        assert float(rho) == pytest.approx(min(max(line, 0.0), 0.2), abs=1e-12)
        seen.add(lr)
        optimizer.step()
        bare.step()
        advance(ours)
        advance(theirs)
    assert len(seen) > 1


class Run:
    """Model, optimizer, scheduler, scaler and objective, as in a training script."""

    def __init__(self, base: str, make: Callable[[nn.Module, optim.Optimizer], Objective] | None):
        torch.manual_seed(4)
        self.model = nn.Sequential(toy_models.convnet(), nn.Dropout(0.2), nn.Linear(3, 3))
        self.optimizer = BASE_OPTIMIZERS[base](self.model)
        self.scheduler = lr_scheduler.CosineAnnealingLR(self.optimizer, 8)
        self.scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.objective = make(self.model, self.optimizer) if make else None

    def step(self, data: toy_models.Batch) -> None:
        self.optimizer.zero_grad()
        closure = toy_models.closure_of(self.model, data)
        if self.objective:
            self.objective.backward(closure, scaler=self.scaler)
        else:
            self.scaler.scale(closure()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def save(self) -> bytes:
        parts = (self.model, self.optimizer, self.scheduler, self.scaler)
        file = io.BytesIO()
        torch.save([*(part.state_dict() for part in parts), torch.get_rng_state()], file)
        return file.getvalue()

    def load(self, checkpoint: bytes) -> None:
        *states, rng = torch.load(io.BytesIO(checkpoint))
        parts = (self.model, self.optimizer, self.scheduler, self.scaler)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        torch.set_rng_state(rng)


def gsam(model: nn.Module, optimizer: optim.Optimizer) -> Objective:
    lr = optimizer.param_groups[0]["lr"]
    rho = ProportionalToLR(optimizer, rho_max=0.2, rho_min=0.02, lr_max=lr, lr_min=lr / 100)
    return GSAM(model, rho=rho, alpha=ALPHA)


@every_optimizer
def test_resume_is_bit_identical_and_the_checkpoint_no_larger(base: str) -> None:
    data = list(itertools.islice(batches(), 6))
    whole, bare = Run(base, gsam), Run(base, None)
    for item in data[:3]:
        whole.step(item)
        bare.step(item)
    checkpoint = whole.save()
    assert len(checkpoint) <= len(bare.save())
    for item in data[3:]:
        whole.step(item)
    expected = whole.save()
    resumed = Run(base, gsam)
    resumed.load(checkpoint)
    for item in data[3:]:
        resumed.step(item)
    assert equality.same_bits(equality.bits(whole.model), equality.bits(resumed.model))
    assert resumed.save() == expected


@pytest.mark.parametrize("stateful", ["InverseSqrt", "scoping"])
def test_resume_of_what_counts_steps(stateful: str) -> None:
    def make(model: nn.Module, _: optim.Optimizer) -> Objective:
        if stateful == "InverseSqrt":
            return GSAM(model, rho=InverseSqrt(0.3))
        return EntropySGD(model, scoping=0.2)

    def counter(run: Run) -> Any:
        return run.objective.rho if stateful == "InverseSqrt" else run.objective

    data = list(itertools.islice(batches(), 4))
    whole, resumed, forgetful = (Run("SGD", make) for _ in range(3))
    for item in data[:2]:
        whole.step(item)
    checkpoint, count = whole.save(), counter(whole).state_dict()
    for item in data[2:]:
        whole.step(item)
    counter(resumed).load_state_dict(count)
    for other in (resumed, forgetful):
        other.load(checkpoint)
        for item in data[2:]:
            other.step(item)
    assert equality.same_bits(equality.bits(whole.model), equality.bits(resumed.model))
    assert not equality.same_bits(equality.bits(whole.model), equality.bits(forgetful.model))
