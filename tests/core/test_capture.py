"""Captured steps against eager ones, and steps that cannot be captured."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from surrogap import (
    GSAM,
    SAM,
    EntropySGD,
    Intermittent,
    MomentumSAM,
    Objective,
    Report,
    Vanilla,
    capture,
)
from surrogap.core import graph
from surrogap.core.passes import Passes
from surrogap.core.report import MEASURES
from surrogap.rho import InverseSqrt, ProportionalToLR
from tests import equality, reference, toy_models
from tests.objective_cases import OBJECTIVES, every_memoryless, every_objective, every_two_pass

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": partial(SGD, lr=0.125, fused=True),
    "Nesterov": partial(SGD, lr=0.125, momentum=0.875, nesterov=True, fused=True),
    "Adam": partial(Adam, lr=2**-7, fused=True),
    "AdamW": partial(AdamW, lr=2**-7, weight_decay=0.25, fused=True),
}


def trainable_alone(parameters: Any) -> Optimizer:
    return SGD([p for p in parameters if p.requires_grad], lr=0.125, fused=True)


MODELS = {**toy_models.MODELS, "dropout": partial(toy_models.Attention, dropout=0.3)}
every_optimizer = pytest.mark.parametrize("kind_of_optimizer", OPTIMIZERS)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


class Run:
    """A training run of a model, with captured or eager steps."""

    def __init__(
        self,
        model: nn.Module,
        make_objective: Callable[[nn.Module], Objective],
        make_optimizer: Callable[[Any], Optimizer] = OPTIMIZERS["SGD"],
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        self.model = copy.deepcopy(model).to("cuda", dtype)
        self.optimizer = make_optimizer(self.model.parameters())
        self.objective = make_objective(self.model)
        self.dtype = dtype
        self.settings = settings

    def batch(self, index: int) -> toy_models.Batch:
        x, y = toy_models.batch(device="cuda", seed=index)
        return x.to(self.dtype), y

    def loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(x)
        return nn.functional.cross_entropy(logits, y), logits

    def captured(self) -> Callable[..., Report]:
        return capture(self.objective, self.optimizer, self.loss, self.batch(0), **self.settings)

    def eager(self, *batch: Tensor) -> Report:
        self.optimizer.zero_grad()
        report = self.objective.backward(lambda: self.loss(*batch))
        self.optimizer.step()
        return report

    @property
    def state(self) -> list[Tensor]:
        states = self.optimizer.state.values()
        inner = [v.clone() for s in states for v in s.values() if isinstance(v, Tensor)]
        return [*equality.bits(self.model), *inner]


def pair(*arguments: Any, **settings: Any) -> tuple[Run, Run]:
    return Run(*arguments, **settings), Run(*arguments, **settings)


# Every objective with every model and every optimizer.
CROSSED = [(name, kind, "Nesterov") for name in OBJECTIVES for kind in MODELS]
CROSSED += [(name, "dropout", kind) for name in ("Vanilla", "GSAM") for kind in OPTIMIZERS]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "kind", "kind_of_optimizer"), CROSSED)
def test_fifty_captured_steps_are_fifty_eager_ones(
    name: str, kind: str, kind_of_optimizer: str
) -> None:
    """Bit for bit, with dropout, and with learning rates that float32 holds exactly."""
    arguments = (MODELS[kind](), OBJECTIVES[name].make, OPTIMIZERS[kind_of_optimizer])
    eager, graph = pair(*arguments)
    step = graph.captured()
    reports = []
    for run, take in ((eager, eager.eager), (graph, step)):
        torch.manual_seed(3)
        schedule = LambdaLR(run.optimizer, lambda t: 2.0 ** -(t // 10))
        for index in range(50):
            report = take(*run.batch(index % 7))
            schedule.step()
            if index == 25 and hasattr(run.objective, "alpha"):
                run.objective.alpha = 0.7
            if index == 30 and hasattr(run.objective, "rho"):
                run.objective.rho = 0.03
        reports.append(report)
    assert equality.same_bits(eager.state, graph.state)
    assert torch.equal(reports[0].value, reports[1].value)
    assert torch.equal(reports[0].aux, reports[1].aux)
    for measure in ("gap", "grad_norm", "perturbed_grad_norm", "cosine", "rho"):
        ours, expected = (getattr(report, measure) for report in reversed(reports))
        torch.testing.assert_close(ours, expected, equal_nan=True)


@pytest.mark.gpu
@every_memoryless
@pytest.mark.parametrize("kind", toy_models.MODELS)
def test_the_direction_is_the_reference(name: str, kind: str) -> None:
    """In float64: plain SGD with a learning rate of 1 subtracts the direction."""
    run = Run(toy_models.MODELS[kind](), OBJECTIVES[name].make, partial(SGD, lr=1.0, fused=True))
    run.model.double()
    run.dtype = torch.float64
    data = run.batch(0)
    f, w = reference.loss_of(
        copy.deepcopy(run.model), lambda net: toy_models.cross_entropy(net, data)
    )
    expected = OBJECTIVES[name].reference(
        f, w, lambda select: reference.selected(run.model, select).cuda()
    )
    before = nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()
    run.captured()(*data)
    taken = before - nn.utils.parameters_to_vector(run.model.parameters()).detach()
    assert equality.relative_error(taken, expected) < 1e-11


@pytest.mark.gpu
@every_two_pass
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back(name: str, dtype: torch.dtype) -> None:
    """With a learning rate of zero, weights stay bit-identical over many steps."""
    run = Run(MODELS["dropout"](), OBJECTIVES[name].make, partial(SGD, lr=0.0, fused=True), dtype)
    step, before = run.captured(), equality.bits(run.model)
    for index in range(20):
        report = step(*run.batch(index))
    assert equality.same_bits(before, equality.bits(run.model))
    assert float(report.gap) != 0


@pytest.mark.gpu
@every_objective
@every_optimizer
@pytest.mark.parametrize("num_steps", [0, 3])
def test_capturing_changes_nothing(name: str, kind_of_optimizer: str, num_steps: int) -> None:
    arguments = (toy_models.convnet(), OBJECTIVES[name].make, OPTIMIZERS[kind_of_optimizer])
    run, untouched = pair(*arguments)
    for _ in range(num_steps):
        for each in (run, untouched):
            each.eager(*each.batch(0))
    gradients = [p.grad for p in run.model.parameters()]
    seeds = torch.get_rng_state(), torch.cuda.get_rng_state()
    run.captured()
    assert torch.equal(torch.get_rng_state(), seeds[0])
    assert torch.equal(torch.cuda.get_rng_state(), seeds[1])
    assert all(p.grad is g for p, g in zip(run.model.parameters(), gradients, strict=True))
    if num_steps:
        assert equality.differing(run.state, untouched.state) == {}
    for each in (run, untouched):
        each.eager(*each.batch(1))
    assert equality.differing(run.state, untouched.state) == {}


@pytest.mark.gpu
def test_both_passes_have_the_same_masks_and_steps_have_others() -> None:
    run = Run(MODELS["dropout"](), partial(SAM, rho=0.0), partial(SGD, lr=0.0, fused=True))
    step = run.captured()
    reports = [step(*run.batch(0)) for _ in range(3)]
    assert all(torch.equal(report.loss, report.perturbed_loss) for report in reports)
    assert len({float(report.loss) for report in reports}) == 3
    torch.manual_seed(5)
    first = step(*run.batch(0)).loss
    torch.manual_seed(5)
    assert torch.equal(step(*run.batch(0)).loss, first)
    assert not torch.equal(reports[0].loss, first)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [GSAM, partial(EntropySGD, scoping=0.1, noise=0.01)])
def test_schedules_advance(make: Callable[..., Objective]) -> None:
    def objective(model: nn.Module) -> Objective:
        return make(model, rho=InverseSqrt(0.5)) if make is GSAM else make(model)

    eager, graph = pair(toy_models.mlp(), objective)
    step = graph.captured()
    for run, take in ((eager, eager.eager), (graph, step)):
        torch.manual_seed(3)
        for index in range(5):
            report = take(*run.batch(index))
    assert equality.same_bits(eager.state, graph.state)
    if make is GSAM:
        assert float(report.rho) == pytest.approx(0.5 / 5**0.5)
        assert graph.objective.rho.num_steps == 5
    else:
        assert graph.objective.num_steps == 5


@pytest.mark.gpu
def test_the_radius_follows_the_learning_rate_and_schedulers_do_not_warn() -> None:
    run = Run(toy_models.mlp(), GSAM)
    bounds = {"rho_max": 0.5, "rho_min": 0.1, "lr_max": 0.125, "lr_min": 0.0}
    run.objective.rho = ProportionalToLR(run.optimizer, **bounds)
    step = run.captured()
    schedule = LambdaLR(run.optimizer, lambda t: 1 / (t + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in range(4):
            assert float(step(*run.batch(index)).rho) == pytest.approx(0.1 + 0.4 / (index + 1))
            schedule.step()
    assert isinstance(run.optimizer.param_groups[0]["lr"], float)


@pytest.mark.gpu
@every_objective
def test_in_bfloat16_autocast(name: str) -> None:
    eager, graph = pair(toy_models.convnet(), OBJECTIVES[name].make)
    for run in (eager, graph):
        run.loss = _autocast(run.loss)
    step = graph.captured()
    for index in range(5):
        eager.eager(*eager.batch(index))
        step(*graph.batch(index))
    assert equality.same_bits(eager.state, graph.state)


def _autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*batch: Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return function(*batch)

    return wrapped


@pytest.mark.gpu
@every_objective
@pytest.mark.parametrize("shares", [True, False])
def test_micro_batches(name: str, shares: bool) -> None:
    arguments = (toy_models.mlp(), OBJECTIVES[name].make)
    eager, graph = pair(*arguments)
    graph.settings = {"micro_batches": 4, "shares_perturbation": shares}
    step = graph.captured()
    for index in range(3):
        report = step(*graph.batch(index))
        chunks = zip(*(t.chunk(4) for t in eager.batch(index)), strict=True)
        closures = [lambda chunk=chunk: eager.loss(*chunk)[0] / 4 for chunk in chunks]
        eager.optimizer.zero_grad()
        calls = [closures] if shares else closures
        reports = [eager.objective.backward(call) for call in calls]
        eager.optimizer.step()
        loss = torch.stack([r.value for r in reports]).sum()
        torch.testing.assert_close(report.value, loss)
        norms = torch.stack([r.grad_norm for r in reports]) * len(calls)
        norm = norms.square().mean().sqrt()
        torch.testing.assert_close(report.grad_norm, norm, equal_nan=True)
    assert equality.same_bits(eager.state, graph.state)
    assert len(report.aux) == 4


@pytest.mark.gpu
@every_objective
def test_clipping(name: str) -> None:
    eager, graph = pair(toy_models.mlp(), OBJECTIVES[name].make)
    graph.settings = {"clip_norm": 0.125}
    step = graph.captured()
    for index in range(3):
        step(*graph.batch(index))
        eager.optimizer.zero_grad()
        eager.objective.backward(lambda index=index: eager.loss(*eager.batch(index)))
        nn.utils.clip_grad_norm_(eager.model.parameters(), 0.125)
        eager.optimizer.step()
    assert equality.same_bits(eager.state, graph.state)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings
@pytest.mark.parametrize("name", ["Vanilla", "GSAM", "EntropySGD"])
@pytest.mark.parametrize("kind", ["convnet", "dropout"])
def test_compiled_models(name: str, kind: str) -> None:
    torch.compiler.reset()
    eager, graph = pair(MODELS[kind](), OBJECTIVES[name].make)
    for run in (eager, graph):
        compiled = torch.compile(run.model)
        run.loss = lambda x, y, net=compiled: nn.functional.cross_entropy(net(x), y)
    step = graph.captured()
    for run, take in ((eager, eager.eager), (graph, step)):
        torch.manual_seed(3)
        for index in range(5):
            report = take(*run.batch(index))
    assert report.loss.isfinite()
    if kind == "convnet":
        assert equality.same_bits(eager.state, graph.state)
    else:  # the compiler draws its seeds separately
        assert equality.relative_error(*map(_weights, (graph, eager))) < 0.2


def _weights(run: Run) -> Tensor:
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_draws_the_same_masks_in_both_passes() -> None:
    torch.compiler.reset()
    run = Run(MODELS["dropout"](), partial(SAM, rho=0.0), partial(SGD, lr=0.0, fused=True))
    compiled = torch.compile(run.model)
    run.loss = lambda x, y: nn.functional.cross_entropy(compiled(x), y)
    step = run.captured()
    reports = [step(*run.batch(0)) for _ in range(3)]
    assert all(torch.equal(report.loss, report.perturbed_loss) for report in reports)
    assert len({float(report.loss) for report in reports}) == 3


@pytest.mark.gpu
def test_later_steps_do_not_overwrite_a_report() -> None:
    run = Run(toy_models.mlp(), GSAM)
    step = run.captured()
    first = step(*run.batch(0))
    loss, aux, cosine = float(first.loss), first.aux.clone(), float(first.cosine)
    step(*run.batch(1))
    assert (float(first.loss), float(first.cosine)) == (loss, cosine)
    assert torch.equal(first.aux, aux)
    assert not first.aux.requires_grad


@pytest.mark.gpu
def test_eager_and_captured_steps_may_alternate() -> None:
    eager, mixed = pair(toy_models.convnet(), GSAM, OPTIMIZERS["AdamW"])
    step = mixed.captured()
    for index in range(6):
        eager.eager(*eager.batch(index))
        (step if index % 2 else mixed.eager)(*mixed.batch(index))
    assert equality.same_bits(eager.state, mixed.state)


@pytest.mark.gpu
def test_batches_may_come_from_the_host() -> None:
    here, there = pair(toy_models.mlp(), GSAM)
    for run in (here, there):
        step = run.captured()
        for index in range(3):
            batch = run.batch(index)
            step(*(batch if run is here else [t.cpu() for t in batch]))
    assert equality.same_bits(here.state, there.state)


@pytest.mark.gpu
def test_other_batches_are_refused() -> None:
    run = Run(toy_models.mlp(), GSAM)
    step, before, (x, y) = run.captured(), run.state, run.batch(0)
    for batch in ((x[:5], y[:5]), (x.double(), y), (x,), (x, 3)):
        with pytest.raises(ValueError, match="batch must have the shapes and dtypes of"):
            step(*batch)
    assert equality.same_bits(before, run.state)


CHANGES: dict[str, Callable[[Run], object]] = {
    "The mode of the model": lambda run: run.model.eval(),
    "The memory of the model's parameters": lambda run: run.model.to("cpu").to("cuda"),
    "The memory of the model's buffers": lambda run: run.model[1].to("cpu").to("cuda"),
    "The optimizer's weight_decay": lambda run: run.optimizer.param_groups[0].update(
        weight_decay=0.5
    ),
    "The memory of the optimizer's state": lambda run: run.optimizer.load_state_dict(
        copy.deepcopy(run.optimizer.state_dict())
    ),
    "The objective's perturb": lambda run: setattr(run.objective, "perturb", lambda n, p: True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("what", CHANGES)
def test_changes_after_the_capture_are_refused(what: str) -> None:
    run = Run(toy_models.convnet(), GSAM, OPTIMIZERS["AdamW"])
    step = run.captured()
    step(*run.batch(0))
    CHANGES[what](run)
    before = run.state
    with pytest.raises(
        RuntimeError, match=r"changed since the step was captured\. Capture"
    ) as error:
        step(*run.batch(1))
    assert what in str(error.value) or what == "The memory of the model's buffers"
    assert equality.same_bits(before, run.state)


@pytest.mark.gpu
def test_a_loss_that_synchronises_is_refused_and_changes_nothing() -> None:
    run, untouched = pair(MODELS["dropout"](), GSAM)
    loss = run.loss

    def waiting(x: Tensor, y: Tensor) -> Tensor:
        value, _ = loss(x, y)
        return value * float(value.detach() > -1)

    run.loss = waiting
    with pytest.raises(RuntimeError, match="loss_fn must run on the GPU without") as error:
        run.captured()
    assert error.value.__cause__ is not None
    del error  # its frames hold the graph of the loss
    run.loss = loss
    for each in (run, untouched):
        torch.manual_seed(3)
        step = each.captured()
        for index in range(3):
            step(*each.batch(index))
            each.eager(*each.batch(index))
    assert equality.same_bits(run.state, untouched.state)


@pytest.fixture
def random_state(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """The random state of a graph, with substitutes for CUDA, which a CPU does not have."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock())
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    random_state = MagicMock()
    monkeypatch.setattr(graph, "GraphRandomState", lambda _: random_state)
    return random_state


def test_only_the_passes_of_a_graph_draw_from_its_random_state(random_state: MagicMock) -> None:
    model = toy_models.mlp().double()
    objective, passes = SAM(model), Passes(toy_models.closure_of(model, toy_models.batch()))
    captured = graph.Graph(objective)

    def run(of: Objective) -> list[Report]:
        of._refresh()
        return [of._add_direction(passes, of._numbers(), sync=True)]

    run(captured.objective)  # a warm-up
    random_state.replayed.assert_not_called()
    captured.capture(run, 1, None)
    random_state.replayed.assert_called_once_with()
    run(objective)
    random_state.replayed.assert_called_once_with()


def test_a_lack_of_memory_is_reported_as_such(random_state: MagicMock) -> None:
    captured = graph.Graph(GSAM(toy_models.mlp()))

    def run(*_: Any) -> list[Report]:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\.$"):
        captured.capture(run, 1, None)
    random_state.reset.assert_called_once_with()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.linear(x.flatten(1))


class Constrained(nn.Module):
    """A model that bounds the norm of its weights, as many of EEG signals do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = torch.renorm(self.linear.weight.data, p=2, dim=0, maxnorm=1.0)
        return self.linear(x.flatten(1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "make", [Counting, Constrained, partial(toy_models.Followed, assigns=True)]
)
def test_tensors_that_are_replaced_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(RuntimeError, match="model must write to its weights and buffers in place"):
        Run(make(), GSAM).captured()


@pytest.mark.gpu
@every_objective
def test_frozen_parameters_that_a_pass_writes_move_once(name: str) -> None:
    eager, graph = pair(toy_models.Followed(), OBJECTIVES[name].make, trainable_alone)
    for run in (eager, graph):  # a first step finds the frozen parameters that a pass writes to
        torch.manual_seed(2)
        run.eager(*run.batch(3))
    before = graph.state
    step = graph.captured()
    assert equality.same_bits(before, graph.state)
    for run, take in ((eager, eager.eager), (graph, step)):
        torch.manual_seed(3)
        for index in range(3):
            take(*run.batch(index))
    assert equality.same_bits(eager.state, graph.state)


CHEAPER: dict[str, Callable[..., Objective]] = {
    "norms": lambda m, _: SAM(m, rho=0.2, perturb="norms"),
    "intermittent": lambda m, _: Intermittent(GSAM(m, rho=0.2), every=3, start=2),
    "intermittent momentum": lambda m, o: Intermittent(MomentumSAM(m, o, rho=0.2), every=2),
    "momentum": lambda m, o: MomentumSAM(m, o, rho=0.2),
    "momentum of norms": lambda m, o: MomentumSAM(m, o, rho=0.2, perturb="norms"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHEAPER)
@pytest.mark.parametrize("kind", ["convnet", "dropout"])
@pytest.mark.parametrize("kind_of_optimizer", ["Nesterov", "AdamW"])
def test_cheaper_steps_are_eager_ones(name: str, kind: str, kind_of_optimizer: str) -> None:
    """With new optimizers, whose initial momentum is zero in the graph and absent outside."""
    eager, graph = pair(MODELS[kind](), Vanilla, OPTIMIZERS[kind_of_optimizer])
    for run in (eager, graph):
        run.objective = CHEAPER[name](run.model, run.optimizer)
    # The first eager call would compute all gradients. Torch multiplies by a weight that requires a
    # gradient with mm, and by one that does not with bmm, which rounds differently.
    eager.objective._workspace.weights.is_checked = True
    before = equality.bits(graph.model)
    step = graph.captured()
    assert equality.same_bits(before, equality.bits(graph.model))
    reports: list[list[Report]] = [[], []]
    for run, take, seen in ((eager, eager.eager, reports[0]), (graph, step, reports[1])):
        torch.manual_seed(3)
        seen += [take(*run.batch(index)) for index in range(15)]
    assert equality.same_bits(eager.state, graph.state)
    assert eager.objective.state_dict() == graph.objective.state_dict()
    for mine, its in zip(*reports, strict=True):
        assert torch.equal(mine.aux, its.aux)
        for measure in (*MEASURES, "value"):
            one, other = getattr(mine, measure), getattr(its, measure)
            torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [SAM, GSAM, partial(SAM, perturb="norms")])
def test_a_climb_on_a_fraction_of_the_batch(make: Callable[..., Objective]) -> None:
    eager, graph = pair(toy_models.convnet(), make)
    graph.settings["climb_fraction"] = 0.25
    step = graph.captured()
    for index in range(10):
        x, y = batch = eager.batch(index)
        eager.optimizer.zero_grad()
        eager.objective.backward(
            partial(eager.loss, *batch), climb=partial(eager.loss, x[:2], y[:2])
        )
        eager.optimizer.step()
        report = step(*batch)
    assert equality.same_bits(eager.state, graph.state)
    assert report.loss.isnan()
    assert report.value.isfinite()
    assert len(report.aux) == len(y)


@pytest.mark.parametrize("perturb", [None, "norms"])
@pytest.mark.parametrize("climbs_on_part", [False, True])
def test_alpha_may_leave_zero_only_if_g_is_kept(perturb: str | None, climbs_on_part: bool) -> None:
    objective = GSAM(toy_models.convnet(), perturb=perturb, alpha=0.0)
    before = objective._invariants(climbs_on_part=climbs_on_part)
    objective.alpha = 0.1
    is_same = objective._invariants(climbs_on_part=climbs_on_part) == before
    assert is_same == (perturb is None and not climbs_on_part)


@pytest.mark.gpu
def test_alpha_must_stay_zero_if_only_norms_climb() -> None:
    run = Run(toy_models.convnet(), partial(GSAM, perturb="norms", alpha=0.0))
    step = run.captured()
    step(*run.batch(0))
    run.objective.alpha = 0.1
    message = "Whether the direction contains g .not if alpha is 0. changed since the step was"
    with pytest.raises(RuntimeError, match=message):
        step(*run.batch(0))


@pytest.mark.gpu
def test_two_graphs_share_one_pool() -> None:
    run = Run(toy_models.mlp(), lambda model: Intermittent(GSAM(model), every=2))
    pools = [graph._graph.pool() for graph in run.captured()._graphs.values()]
    assert len(pools) == 2
    assert pools[0] == pools[1]


def wrong(**changes: Any) -> None:
    model = toy_models.mlp()
    arguments: dict[str, Any] = {
        "objective": Vanilla(model),
        "optimizer": SGD(model.parameters(), lr=0.1, fused=True),
        "loss_fn": model,
        "example_batch": toy_models.batch(),
    }
    capture(**(arguments | changes))


def optimizer(**settings: Any) -> SGD:
    return SGD(toy_models.mlp().parameters(), lr=0.1, **settings)


WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "objective must be an objective, got int", {"objective": 3}),
    (TypeError, "optimizer must be a torch optimizer, got list", {"optimizer": []}),
    (TypeError, "example_batch must be a tuple of tensors, got int", {"example_batch": 3}),
    (TypeError, "micro_batches must be an integer, got 2.0", {"micro_batches": 2.0}),
    (ValueError, "micro_batches must divide the batch, got 3 for", {"micro_batches": 3}),
    (ValueError, "micro_batches must be at least 1, got 0", {"micro_batches": 0}),
    (ValueError, "climb_fraction must be above 0 and at most 1, got 0", {"climb_fraction": 0}),
    (ValueError, "climb_fraction must be above 0 and at most 1, got 2", {"climb_fraction": 2}),
    (ValueError, "climb_fraction must be left out for Vanilla, got one", {"climb_fraction": 0.5}),
    (
        ValueError,
        "climb_fraction must be 1 with micro_batches, got 0.5 and micro_batches=2",
        {"objective": SAM(toy_models.mlp()), "climb_fraction": 0.5, "micro_batches": 2},
    ),
    (ValueError, "clip_norm must be above 0 and finite, got 0", {"clip_norm": 0}),
    (ValueError, "must be fused, got SGD with fused=None", {"optimizer": optimizer()}),
    (ValueError, "model must be on one CUDA device, got cpu", {}),
]


@pytest.mark.parametrize(("error", "message", "changes"), WRONG)
def test_wrong_arguments(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        wrong(**changes)
