"""The training step: autocast, micro-batches, clipping and the update."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surrogap import GSAM, SAM, EntropySGD
from surrogap.training.components import components_of
from surrogap.training.config import Config
from surrogap.training.processes import World
from surrogap.training.step import METRICS, EagerStep, NonFiniteLossError
from tests import equality, toy_models
from tests.training import small_runs

WORLD = World(torch.device("cpu"))
# With lr = 1 the change of the weights is the direction.
PLAIN: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "batch_size": 8}


def batch() -> tuple[Tensor, Tensor]:
    x, y = toy_models.batch()
    return x.float(), y


def direction(model: nn.Module, **changes: Any) -> tuple[Tensor, dict[str, float]]:
    """Return the weights of a copy of a model after a step, and the metrics."""
    config = Config().override(**(PLAIN | changes))
    model = copy.deepcopy(model)
    step, before = eager(config, model), nn.utils.parameters_to_vector(model.parameters())
    measures = step(*batch())
    moved = before - nn.utils.parameters_to_vector(model.parameters())
    return moved.detach(), dict(zip(METRICS, measures.tolist(), strict=True))


def eager(config: Config, model: nn.Module) -> EagerStep:
    from surrogap.training.losses import loss_of
    from surrogap.training.objectives import objective_of

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=config.optimizer.momentum)
    objective = objective_of(config, model, optimizer, steps_per_epoch=1)
    return EagerStep(config, model, objective, optimizer, loss_of(config.objective), WORLD)


def grad(make: Any, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return toy_models.direction(make, model, data)


def test_a_step_is_the_objectives_direction() -> None:
    model = toy_models.mlp()
    moved, measures = direction(model, objective="gsam", rho=0.1, alpha=0.3)
    expected = grad(lambda m: GSAM(m, rho=0.1, alpha=0.3), model, batch())
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)
    loss = toy_models.cross_entropy(model, batch()).item()
    assert measures["loss"] == pytest.approx(loss, rel=1e-5)
    assert measures["gap"] == pytest.approx(measures["perturbed_loss"] - measures["loss"], abs=1e-6)
    assert measures["accuracy"] == float((model(batch()[0]).argmax(1) == batch()[1]).float().mean())


def test_micro_batches_that_share_a_perturbation_change_nothing() -> None:
    model = toy_models.mlp()
    whole, seen = direction(model, objective="sam", rho=0.1)
    parts, seen_in_parts = direction(model, objective="sam", rho=0.1, micro_batches=4)
    torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-6)
    assert seen_in_parts == pytest.approx(seen, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_micro_batches_with_a_perturbation_each(precision: str) -> None:
    """The means of the directions of the micro-batches (m-sharpness) and of their metrics."""
    model, (x, y) = toy_models.mlp(), batch()
    changes = {"micro_batches": 2, "perturbation": "each", "precision": precision}
    moved, measures = direction(model, objective="sam", rho=0.1, **changes)
    parts = [(x[:4], y[:4]), (x[4:], y[4:])]
    expected = sum(grad(lambda m: SAM(m, rho=0.1), model, part) for part in parts) / 2
    tolerance = {"fp32": 1e-4, "fp16": 2e-2}[precision]
    assert equality.relative_error(moved, torch.as_tensor(expected)) < tolerance
    norms, losses = [], []
    for part in parts:
        report = SAM(copied := copy.deepcopy(model), rho=0.1).backward(
            toy_models.closure_of(copied, part)
        )
        norms.append(float(report.grad_norm))
        losses.append(float(report.loss))
    assert measures["loss"] == pytest.approx(sum(losses) / 2, rel=tolerance)
    assert measures["grad_norm"] == pytest.approx(math.hypot(*norms) / 2**0.5, rel=tolerance)


def test_walks_of_micro_batches_are_averaged() -> None:
    model, (x, y) = toy_models.mlp(), batch()
    settings: dict[str, Any] = {"gamma": 0.5, "inner_steps": 2, "noise": 0.0}
    moved, measures = direction(
        model, objective="entropy-sgd", micro_batches=2, perturbation="each", **settings
    )
    walks = [
        grad(lambda m: EntropySGD(m, **settings), model, part)
        for part in [(x[:4], y[:4]), (x[4:], y[4:])]
    ]
    torch.testing.assert_close(moved, torch.stack(walks).mean(0), rtol=1e-3, atol=1e-6)
    assert measures["loss"] == pytest.approx(
        toy_models.cross_entropy(model, (x, y)).item(), rel=1e-5
    )


def test_a_resumed_step_has_the_scale_of_the_saved_one() -> None:
    config = Config().override(**PLAIN, precision="fp16")
    step, resumed = eager(config, toy_models.mlp()), eager(config, toy_models.mlp())
    step(*batch())
    step.scaler.update(new_scale=8.0)
    resumed.load_state_dict(step.state_dict())
    assert resumed.scaler.get_scale() == 8.0
    assert resumed.state_dict() == step.state_dict()
    plain = eager(Config().override(**PLAIN), toy_models.mlp())
    assert plain.state_dict() == {}
    plain.load_state_dict({})


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clipping_shortens_the_direction(precision: str) -> None:
    """With fp16, clipping uses the norm of the unscaled direction."""
    moved, _ = direction(toy_models.mlp(), clip_norm=0.01, precision=precision)
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_is_close(precision: str) -> None:
    model = toy_models.mlp()
    whole, _ = direction(model, objective="gsam", rho=0.1)
    lower, _ = direction(model, objective="gsam", rho=0.1, precision=precision)
    assert 0 < equality.relative_error(lower, whole) < 0.05


def test_attention_is_not_cudnns() -> None:
    seen = []

    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.cuda.cudnn_sdp_enabled())
            return super().forward(x)

    images, _ = batch()
    direction(nn.Sequential(nn.Flatten(), Looking(images[0].numel(), 3)))
    assert seen == [False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_channels_last_is_the_same(tmp_path: Path) -> None:
    model = toy_models.convnet()
    torch.testing.assert_close(
        direction(model)[0], direction(model, channels_last=True)[0], rtol=1e-4, atol=1e-6
    )


def test_a_climb_on_a_fraction_of_the_batch() -> None:
    model, (x, y) = toy_models.mlp(), batch()
    moved, measures = direction(model, objective="sam", rho=0.1, climb_fraction=0.25)
    copied = copy.deepcopy(model)

    def closure(num_images: int) -> tuple[Tensor, Tensor]:
        logits = copied(x[:num_images])
        right = (logits.argmax(1) == y[:num_images]).float().mean()
        return nn.functional.cross_entropy(logits, y[:num_images]), right

    report = SAM(copied, rho=0.1).backward(lambda: closure(8), climb=lambda: closure(2))
    expected = torch.cat([p.grad.flatten() for p in copied.parameters() if p.grad is not None])
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)
    assert measures["value"] == pytest.approx(float(report.perturbed_loss), rel=1e-5)
    assert math.isnan(measures["loss"])
    assert measures["accuracy"] == float(report.aux)


LOST: list[dict[str, Any]] = [
    {"objective": "vanilla"},
    {"objective": "gsam"},
    {"objective": "sam", "rho_inverse_sqrt": True, "every": 3},
    {"objective": "entropy-sgd", "scoping": 0.1},
    {"objective": "momentum-sam", "momentum": 0.9},
]


@pytest.mark.parametrize("perturbation", ["shared", "each"])
@pytest.mark.parametrize("changes", LOST, ids=lambda c: c["objective"])
def test_a_loss_that_is_not_finite_leaves_everything_as_it_was(
    changes: dict[str, Any], perturbation: str
) -> None:
    """Weights, buffers, momentum and counters are unchanged, for a loss of either pass."""
    model = toy_models.convnet()  # with BatchNorm statistics, which such a batch would make NaN
    changes = PLAIN | changes | {"perturbation": perturbation, "micro_batches": 2}
    step = eager(Config().override(**changes), model)
    x, y = batch()
    step(x, y)
    before, state = equality.bits(model), step.objective.state_dict()
    momenta = copy.deepcopy(step.optimizer.state_dict()["state"])
    lost = x.clone()
    lost[-1] = torch.nan  # in the second micro-batch
    with pytest.raises(NonFiniteLossError):
        step(lost, y)
    assert equality.same_bits(before, equality.bits(model))
    assert step.objective.state_dict() == state
    small_runs.assert_same(step.optimizer.state_dict()["state"], momenta)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_loss_of_every_pass_is_checked(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN in one pass of two micro-batches is found, by one check for all passes."""
    step = eager(Config().override(**PLAIN, objective="sam", micro_batches=2), toy_models.convnet())
    before, whole, num_passes, asked = equality.bits(step.model), step._loss_and_accuracy, 0, 0

    def loss_and_accuracy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal num_passes
        num_passes += 1
        loss, right = whole(x, y)
        return loss * (math.inf if num_passes == number else 1.0), right

    def largest(self: World, value: int) -> int:
        nonlocal asked
        asked += 1
        return value

    monkeypatch.setattr(step, "_loss_and_accuracy", loss_and_accuracy)
    monkeypatch.setattr(World, "largest", largest)
    with pytest.raises(NonFiniteLossError):
        step(*batch())
    assert (num_passes, asked) == (4, 1)
    assert equality.same_bits(before, equality.bits(step.model))
    step(*batch())
    assert asked == 2


def test_compiled_is_close(tmp_path: Path) -> None:
    """With the backend "eager", since others need a C++ compiler."""
    config = small_runs.config(tmp_path, compile=True)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        whole = nn.Module.compile
        seen: list[tuple[nn.Module, bool]] = []

        def compile_eagerly(self: nn.Module, *, dynamic: bool) -> None:
            seen.append((self, dynamic))
            whole(self, backend="eager", dynamic=dynamic)

        patch.setattr(nn.Module, "compile", compile_eagerly)
        compiled = components_of(config, WORLD)
    plain = components_of(small_runs.config(tmp_path), WORLD)
    images, targets = next(iter(plain.images))
    torch.testing.assert_close(compiled.step(images, targets), plain.step(images, targets))
    assert seen == [(compiled.model, False)]  # for each size that it sees, not for any
