"""Optimizers by name, and the learning rate against its formula."""

import math
import sys

import pytest
from torch import nn

from surrogap.training.groups import OptimizerConfig, ScheduleConfig
from surrogap.training.optimizers import LearningRate, optimizer_of


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sgd", "SGD"), ("SGD", "SGD"), ("adamw", "AdamW"), ("rprop", "Rprop"), ("nadam", "NAdam")],
)
def test_names(name: str, kind: str) -> None:
    assert type(optimizer_of(OptimizerConfig(name=name), model())).__name__ == kind


def test_settings_reach_those_that_have_them() -> None:
    config = OptimizerConfig(lr=0.3, momentum=0.8, nesterov=True, weight_decay=0.01)
    (group,) = optimizer_of(config, model()).param_groups
    assert [group[k] for k in ("lr", "momentum", "nesterov", "weight_decay")] == [
        *(0.3, 0.8, True, 0.01)
    ]
    config = OptimizerConfig(name="adamw", lr=0.3, betas=(0.5, 0.6))
    assert optimizer_of(config, model()).param_groups[0]["betas"] == (0.5, 0.6)


def test_decay_on_matrices_spares_biases_and_norms() -> None:
    config = OptimizerConfig(weight_decay=0.1, decay_on="matrices")
    decaying, still = optimizer_of(config, model()).param_groups
    assert (decaying["weight_decay"], still["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decaying["params"]} == {2}
    assert {p.ndim for p in still["params"]} == {1}
    assert len(decaying["params"]) + len(still["params"]) == len(list(model().parameters()))


def test_decay_on_matrices_where_there_is_nothing_else() -> None:
    config = OptimizerConfig(weight_decay=0.1, decay_on="matrices")
    (group,) = optimizer_of(config, nn.Linear(3, 2, bias=False)).param_groups
    assert group["weight_decay"] == 0.1


def test_adabelief_where_its_package_is() -> None:
    optimizer = optimizer_of(OptimizerConfig(name="adabelief", lr=1e-3), model())
    assert type(optimizer).__name__ == "AdaBelief"


def test_adabelief_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("adabelief_pytorch", "pytorch_optimizer"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match="pytorch_optimizer must be installed for adabelief, got neither"
    ):
        optimizer_of(OptimizerConfig(name="adabelief"), model())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimizerConfig(name="lbfgs"), "optimizer must be one of .*, got 'lbfgs'"),
        (OptimizerConfig(name="adamx"), "got 'adamx'. The closest is 'adam"),
        (
            OptimizerConfig(name="sgd", momentum=0.0, nesterov=True),
            "optimizer must suit the model and the settings, got sgd: Nesterov",
        ),
    ],
)
def test_what_is_refused(config: OptimizerConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_of(config, model())


def test_weight_decay_where_there_is_none() -> None:
    optimizer_of(OptimizerConfig(name="rprop"), model())
    with pytest.raises(
        ValueError, match="weight_decay must be 0 for rprop, which does not support it, got 1"
    ):
        optimizer_of(OptimizerConfig(name="rprop", weight_decay=1.0), model())


def rates(num_steps: int = 10, steps_per_epoch: int = 5, **settings: object) -> list[float]:
    schedule = ScheduleConfig(**settings)  # type: ignore[arg-type]
    rate = LearningRate(schedule, 0.8, num_steps, steps_per_epoch)
    return [rate(step) for step in range(num_steps)]


def test_warm_up_rises_to_the_peak_and_decay_ends_at_the_minimum() -> None:
    for decay in ("linear", "cosine"):
        found = rates(warmup_steps=4, decay=decay, lr_min=0.1)
        assert found[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
        assert found[4] == pytest.approx(0.8)
        assert found[-1] == pytest.approx(0.1)
        assert max(found) <= 0.8 * (1 + 1e-9)


def test_formulas_between() -> None:
    for step, (linear, cosine) in enumerate(
        zip(rates(decay="linear", lr_min=0.1), rates(decay="cosine", lr_min=0.1), strict=True)
    ):
        assert linear == pytest.approx(0.8 - 0.7 * step / 9)
        assert cosine == pytest.approx(0.1 + 0.7 * (1 + math.cos(math.pi * step / 9)) / 2)


def test_constant_and_epochs_of_warm_up_and_a_single_step() -> None:
    assert rates(decay="constant") == [0.8] * 10
    assert rates(warmup_epochs=0.8) == rates(warmup_steps=4)
    assert rates(num_steps=1) == [0.8]


def test_warm_up_must_end() -> None:
    with pytest.raises(
        ValueError, match="warmup_steps must be fewer than the steps of the run, got 10"
    ):
        rates(warmup_steps=10)


def test_fused_where_it_is_asked_for() -> None:
    for fused in (False, True):
        (group,) = optimizer_of(OptimizerConfig(), model(), fused=fused).param_groups
        assert bool(group["fused"]) is fused


def test_all_groups_get_it() -> None:
    config = OptimizerConfig(weight_decay=0.1, decay_on="matrices")
    optimizer = optimizer_of(config, model())
    LearningRate(ScheduleConfig(), 0.8, 10, 10).set_(optimizer, 0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.8, 0.8]
