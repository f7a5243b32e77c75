"""Buffers end as the first pass leaves them: BatchNorm's statistics and all others."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from surrogap import SAM
from tests import equality
from tests.objective_cases import OBJECTIVES, every_objective, every_two_pass


class Averaging(nn.Module):
    """A running mean that is replaced by a new tensor, not written in place; and a constant."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("constant", torch.ones(1).expand(size))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, *range(2, x.ndim)))
        return x * self.constant.sum()


NORMS = {
    "BatchNorm1d": (1, nn.BatchNorm1d),
    "BatchNorm2d": (2, nn.BatchNorm2d),
    "BatchNorm3d": (3, nn.BatchNorm3d),
    "BatchNorm2d, cumulative": (2, partial(nn.BatchNorm2d, momentum=None)),
    "SyncBatchNorm": (2, nn.SyncBatchNorm),
    "SyncBatchNorm, cumulative": (2, partial(nn.SyncBatchNorm, momentum=None)),
    "InstanceNorm1d": (1, partial(nn.InstanceNorm1d, track_running_stats=True)),
    "InstanceNorm2d": (2, partial(nn.InstanceNorm2d, track_running_stats=True)),
    "InstanceNorm3d": (3, partial(nn.InstanceNorm3d, track_running_stats=True)),
    "assigned": (2, Averaging),
}


def normalised(norm: str) -> tuple[nn.Module, Tensor]:
    dims, make = NORMS[norm]
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    return nn.Sequential(conv(3, 6, 2), make(6), nn.Tanh()), torch.randn(5, 3, *[4] * dims)


@every_objective
@pytest.mark.parametrize("norm", NORMS)
def test_statistics_move_once(name: str, norm: str, device: torch.device) -> None:
    model, x = (part.to(device) for part in normalised(norm))
    plain, before = copy.deepcopy(model), equality.bits(model)
    plain(x).square().mean().backward()
    OBJECTIVES[name].make(model, **at_w(name)).backward(lambda: model(x).square().mean())
    assert equality.same_bits(list(plain.buffers()), list(model.buffers()))
    assert not equality.same_bits(before, equality.bits(model))


def at_w(name: str) -> dict[str, float]:
    """MomentumSAM has no pass at the weights, so its statistics are those of the perturbed ones."""
    return {"rho": 0.0} if name == "MomentumSAM" else {}


@every_two_pass
@pytest.mark.parametrize("norm", ["BatchNorm2d", "BatchNorm2d, cumulative", "assigned"])
@pytest.mark.parametrize("number", [1, 2])
def test_statistics_are_restored_when_the_closure_raises(name: str, norm: str, number: int) -> None:
    model, x = normalised(norm)
    model(x)
    before, numbers = equality.bits(model), iter([1, 2])

    def closure() -> Tensor:
        loss = model(x).square().mean()
        if next(numbers) == number:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        OBJECTIVES[name].make(model).backward(closure)
    assert equality.same_bits(before, equality.bits(model))
    assert model.training
    assert getattr(model[1], "track_running_stats", True)
    OBJECTIVES[name].make(model).backward(lambda: model(x).square().mean())
    assert not equality.same_bits(before, equality.bits(model))


@pytest.mark.parametrize("change", ["cast", "replaced"])
def test_buffers_may_change_between_steps(change: str) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(4, 3)
    objective = SAM(model)
    objective.backward(lambda: model(x).square().mean())
    if change == "cast":
        model, x = model.double(), x.double()
    else:
        model[1] = nn.BatchNorm1d(3)
    plain = copy.deepcopy(model)
    plain(x)
    objective.backward(lambda: model(x).square().mean())
    assert equality.same_bits(list(plain.buffers()), list(model.buffers()))


def test_a_buffer_registered_in_the_first_pass_moves_once() -> None:
    class Growing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "count"):
                self.register_buffer("count", torch.zeros(()))
            self.count += 1
            return super().forward(x)

    model = Growing(3, 1)
    SAM(model).backward(lambda: model(torch.ones(2, 3)).sum())
    assert float(model.count) == 1


def test_a_buffer_registered_in_mid_call_is_gone_if_the_call_raises() -> None:
    class Growing(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            self.register_buffer("seen", x.mean())
            return super().forward(x)

    model = Growing(3)
    before = equality.bits(model)

    def closure() -> Tensor:
        model(torch.ones(2, 3))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SAM(model).backward(closure)
    assert equality.same_bits(before, equality.bits(model))
    SAM(model).backward(lambda: model(torch.ones(2, 3)).sum())
    assert float(model.seen) == 1.0


def test_buffers_of_all_kinds() -> None:
    """Buffers that are sparse, complex, boolean, empty, zero-dimensional or in half precision."""

    class Sorts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.register_buffer("graph", torch.eye(3).to_sparse())
            self.register_buffer("waves", torch.ones(2, dtype=torch.complex64))
            self.register_buffer("mask", torch.ones(5, dtype=torch.bool))
            self.register_buffer("bytes", torch.ones(3, dtype=torch.uint8))
            self.register_buffer("nothing", torch.ones(0, 4))
            self.register_buffer("narrow", torch.ones(3, dtype=torch.bfloat16))
            self.register_buffer("columns", torch.ones(4, 6)[:, ::2])

        def forward(self, x: Tensor) -> Tensor:
            for buffer in (self.waves, self.bytes, self.narrow, self.columns):
                buffer += 1
            self.mask.logical_not_()
            return super().forward(x)

    model = Sorts()
    objective = SAM(model)
    for step in (2, 3):
        objective.backward(lambda: model(torch.ones(2, 3)).sum())
        for buffer in (model.waves, model.bytes, model.narrow, model.columns):
            assert bool((buffer == step).all())
        assert bool(model.mask.all()) == (step == 3)


def test_a_buffer_whose_storage_is_swapped_is_followed() -> None:
    model = nn.BatchNorm1d(3)
    objective, x = SAM(model), torch.randn(8, 3)
    objective.backward(lambda: model(x).square().mean())
    model.running_mean.data = torch.zeros(3)
    plain = copy.deepcopy(model)
    plain(x)
    objective.backward(lambda: model(x).square().mean())
    assert torch.equal(model.running_mean, plain.running_mean)


class Assigning(nn.Linear):
    """A running mean that each pass both writes to and replaces."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(3, 3)
        self.register_buffer("mean", torch.zeros(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mean.add_(1.0)
        self.mean.data = (0.9 * self.mean.data + 0.1 * y.detach().mean(0)).to(self.mean.dtype)
        return y


@every_objective
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_buffer_whose_storage_a_pass_swaps_moves_once(
    dtype: torch.dtype, name: str, device: torch.device
) -> None:
    model, x = Assigning(dtype).to(device), torch.randn(8, 3, device=device)
    plain, objective = copy.deepcopy(model), OBJECTIVES[name].make(model, **at_w(name))
    for _ in range(3):
        plain(x)
        objective.backward(lambda: model(x).square().mean())
        assert equality.same_bits([plain.mean], [model.mean])
    before, losses = model.mean.clone(), iter([1.0])
    with pytest.raises(StopIteration):
        objective.backward([lambda: model(x).square().mean() * next(losses)] * 2)
    assert torch.equal(model.mean, before)


def shift(module: nn.Module, *_: object) -> None:
    module.num_batches_tracked.add_(1)


def shifted(module: nn.Module) -> None:
    """Replace the forward method of a module, as some libraries do."""

    def forward(x: Tensor) -> Tensor:
        shift(module)
        return type(module).forward(module, x)

    module.forward = forward


@pytest.mark.parametrize(
    "alter",
    [
        lambda norm: norm.register_forward_hook(shift),
        lambda norm: norm.register_forward_pre_hook(shift),
        shifted,
    ],
    ids=["hook", "pre-hook", "forward"],
)
def test_other_effects_of_a_norm_layer_are_undone(alter: Callable[[nn.Module], object]) -> None:
    models = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    (plain, model), x = models, torch.randn(4, 3)
    objective = SAM(model)
    objective.backward(lambda: model(x).square().mean())
    plain(x)
    for each in models:
        alter(each[1])
    plain(x)
    objective.backward(lambda: model(x).square().mean())
    assert equality.same_bits(list(plain.buffers()), list(model.buffers()))


class Bypassed(nn.Module):
    """A BatchNorm whose statistics another module writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        statistics = (norm.running_mean, norm.running_var)
        return nn.functional.batch_norm(self.linear(x), *statistics, training=self.training)


class Counted(nn.Sequential):
    """A BatchNorm whose parent counts batches too."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def forward(self, x: Tensor) -> Tensor:
        shift(self[1])
        return super().forward(x)


@pytest.mark.parametrize("kind", [Bypassed, Counted])
def test_statistics_that_others_write_move_once(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(4, 3)
    plain, objective = copy.deepcopy(model), SAM(model)
    for _ in range(3):
        plain(x)
        objective.backward(lambda: model(x).square().mean())
    assert equality.same_bits(list(plain.buffers()), list(model.buffers()))


def test_statistics_that_others_write_from_some_step_on_move_once() -> None:
    model, x = Bypassed().eval(), torch.randn(4, 3)
    objective = SAM(model)
    objective.backward(lambda: model(x).square().mean())
    plain = copy.deepcopy(model.train())
    plain(x)
    objective.backward(lambda: model(x).square().mean())
    assert equality.same_bits(list(plain.buffers()), list(model.buffers()))


def test_buffers_written_by_a_global_hook_move_once() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(4, 3)
    plain, objective = copy.deepcopy(model), SAM(model)
    objective.backward(lambda: model(x).square().mean())
    plain(x)
    hook = register_module_forward_hook(
        lambda module, *_: shift(module) if isinstance(module, nn.BatchNorm1d) else None
    )
    try:
        plain(x)
        objective.backward(lambda: model(x).square().mean())
    finally:
        hook.remove()
    assert equality.same_bits(list(plain.buffers()), list(model.buffers()))


def test_a_buffer_may_grow_in_place() -> None:
    """As the scale of torch's FakeQuantize does in its first forward pass."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("counts", torch.zeros(1))

        def forward(self, label: int) -> Tensor:
            size = self.counts.numel()
            if label >= size:
                self.counts.resize_(label + 1)[size:] = 0
            self.counts[label] += 1
            return self.linear(torch.ones(3))

    def failing() -> Tensor:
        model(9)
        raise ZeroDivisionError

    model = Counts()
    objective = SAM(model)
    for label in (0, 2, 2, 1):
        objective.backward(lambda label=label: model(label))
    with pytest.raises(ZeroDivisionError):
        objective.backward(failing)
    assert model.counts.tolist() == [1, 1, 2]


@pytest.mark.parametrize("view", [Tensor.conj, lambda t: t.conj().imag], ids=["conj", "neg"])
def test_buffers_may_be_views_of_complex_ones(view: Callable[[Tensor], Tensor]) -> None:
    model = nn.Linear(3, 1)
    buffer = view(torch.randn(3, dtype=torch.complex64))
    model.register_buffer("table", buffer)
    SAM(model).backward(lambda: model(torch.randn(4, 3)).square().mean())
    assert model.table is buffer


def test_statistics_are_used_in_evaluation() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(), torch.randn(4, 3)
    with torch.no_grad():
        model[1].running_var.fill_(4.0)
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    SAM(model, rho=0.0).backward(lambda: model(x).square().mean())
    assert equality.same_bits(
        [p.grad for p in plain.parameters()], [p.grad for p in model.parameters()]
    )


def test_a_compiled_model_is_not_compiled_twice() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        compiled.append(inputs)
        return graph

    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(4, 3)
    torch.compiler.reset()
    network = torch.compile(model, backend=backend)
    objective = SAM(model)
    for _ in range(2):
        objective.backward(lambda: network(x).square().mean())
    assert len(compiled) == 1


def test_spectral_norm_iterates_once() -> None:
    """Its vectors are buffers of a parametrization, which a forward pass updates."""
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4))
    plain, x = copy.deepcopy(model), torch.randn(3, 5)
    plain(x).square().mean().backward()
    SAM(model).backward(lambda: model(x).square().mean())
    assert equality.same_bits(list(plain.buffers()), list(model.buffers()))


class Queue(nn.Module):
    """A contrastive loss whose negatives are the outputs for the last batch, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4).double()
        self.register_buffer("negatives", torch.randn(4, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        keys = nn.functional.normalize(self.linear(x), dim=1)
        loss = (keys @ self.negatives.clone()).exp().sum().log()
        self.negatives.copy_(keys.detach().T)
        return loss


@pytest.mark.parametrize("is_queue", [True, False])
def test_all_passes_read_the_same_buffers(is_queue: bool) -> None:
    """So a radius of 0 gives the plain gradient, and a gap of 0."""
    x = torch.randn(3, 5, dtype=torch.float64)
    model = Queue() if is_queue else nn.utils.spectral_norm(nn.Linear(5, 4).double())
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    objective = SAM(model, rho=0.0)
    report = objective.backward(lambda: model(x).square().mean())
    assert float(report.gap) == 0.0
    assert equality.same_bits(*([p.grad for p in m.parameters()] for m in (plain, model)))
    assert equality.same_bits(list(plain.buffers()), list(model.buffers()))


@every_objective
@pytest.mark.parametrize("training", [True, False])
def test_graphs_from_before_the_call_stay_valid(name: str, training: bool) -> None:
    """Although they hold buffers: running statistics, or the constants of a penalty."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double().train(training)
    model.register_buffer("anchor", torch.randn(3, 3, dtype=torch.float64))
    x = torch.randn(4, 3, dtype=torch.float64)

    def other(net: nn.Module) -> Tensor:
        return net(x).square().mean() + (net.anchor * net[0].weight).square().sum()

    plain = copy.deepcopy(model)
    other(plain).backward()
    loss = other(model)
    OBJECTIVES[name].make(model).backward(lambda: model(x).sin().mean())
    model.zero_grad()
    loss.backward()
    assert equality.same_bits(*([p.grad for p in m.parameters()] for m in (plain, model)))


class Masked(nn.Linear):
    """A causal mask and a scale, both computed for the largest number of tokens so far."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.num_tokens = 0
        self.register_buffer("scale", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.num_tokens:
            self.num_tokens = len(x)
            self.register_buffer("mask", torch.ones(len(x), len(x)).tril().bool())
            self.scale = torch.full_like(self.scale, 1 / len(x))  # as dynamic RoPE's frequencies
            self.register_buffer("offset", torch.full((3,), float(len(x))), persistent=False)
        y = super().forward(x * self.scale + self.offset.to(x))
        return (y @ y.T).masked_fill(~self.mask[: len(x), : len(x)], 0.0)


@every_objective
def test_buffers_that_grow_with_the_batch(name: str) -> None:
    """The second pass reads those of the first, whose size the model remembers."""
    model, first = Masked().double(), torch.randn(4, 3, dtype=torch.float64)
    known = copy.deepcopy(model)
    objective, other = (OBJECTIVES[name].make(m) for m in (model, known))
    for x in (first, torch.cat([first, first])):
        known(x)  # so this model grows outside of a call
        torch.manual_seed(0)
        other.backward(lambda x=x: known(x).square().mean())
        torch.manual_seed(0)
        objective.backward(lambda x=x: model(x).square().mean())
        assert equality.same_bits(*([p.grad for p in m.parameters()] for m in (model, known)))
        assert model.mask.shape == known.mask.shape


@every_objective
def test_a_buffer_created_in_inference_mode(name: str) -> None:
    """For example in an evaluation before training."""
    model, x = Masked(), torch.randn(4, 3)
    plain, objective = copy.deepcopy(model), OBJECTIVES[name].make(model)
    with torch.inference_mode():
        model(x)
    mask = model.mask
    OBJECTIVES[name].make(plain).backward(lambda: plain(x).square().mean())
    objective.backward(lambda: model(x).square().mean())
    assert equality.same_bits(*([p.grad for p in m.parameters()] for m in (plain, model)))
    assert model.mask is mask
