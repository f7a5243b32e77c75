"""A probe does not change training, and its numbers match the library."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surrogap.analysis import Hessian, Surface, eigenvalues, surrogate_gaps
from surrogap.cli import main
from surrogap.data import TensorSet
from surrogap.experiments import probes
from surrogap.experiments.probes import evaluating, sharpness_at, sharpness_probe
from surrogap.experiments.trained import TrainedRun
from surrogap.training.components import components_of
from surrogap.training.config import Config
from surrogap.training.processes import World
from surrogap.training.records import read_records
from surrogap.training.run import train
from tests.data.synthetic import folder as image_folder
from tests.training import small_runs

CPU = World(torch.device("cpu"))
PROBED = {"sharpness_every": 3, "sharpness_images": 8}
# All random numbers and state: mixup, RandAugment, dropout, BatchNorm, noise, a decaying radius.
HARD: dict[str, Any] = {"augmentation": "medium", "drop": 0.3, "model": "small_resnet18_narrow"}
RUNS: dict[str, dict[str, Any]] = {
    "gsam": {"objective": "gsam", "rho": 0.1, "rho_min": 0.02, **HARD},
    "sam in micro-batches": {"objective": "sam", "micro_batches": 2, "rho_inverse_sqrt": True},
    "entropy-sgd": {"objective": "entropy-sgd", "inner_steps": 2, "noise": 0.1, "scoping": 0.01},
    "fp16": {"objective": "asam", "precision": "fp16", "optimizer": "adamw", "lr": 1e-3},
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MAX_PRODUCTS", 2)


def without_sharpness(folder: Path) -> list[dict[str, Any]]:
    return [r for r in small_runs.timeless_records(folder) if r["kind"] != "sharpness"]


def sharpness_of(folder: Path) -> list[dict[str, Any]]:
    return [r for r in small_runs.timeless_records(folder) if r["kind"] == "sharpness"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", RUNS)
def test_a_probe_does_not_change_training(name: str, tmp_path: Path) -> None:
    changes = {"epochs": 2, **RUNS[name]}
    plain = train(small_runs.config(tmp_path / "plain", **changes)).folder
    probed = train(
        small_runs.config(tmp_path / "probed", **changes, **PROBED), probe=sharpness_probe
    ).folder
    small_runs.assert_same(small_runs.state(plain), small_runs.state(probed))
    assert without_sharpness(plain) == without_sharpness(probed)
    assert [record["step"] for record in sharpness_of(probed)] == [3, 6]


@pytest.mark.usefixtures("quick")
def test_an_interrupted_run_has_the_same_records(tmp_path: Path) -> None:
    """Interrupted right after a measurement, and before one."""
    settings = {**HARD, **PROBED, "steps": 7}
    whole = train(small_runs.config(tmp_path / "a", **settings), probe=sharpness_probe).folder
    config = small_runs.config(tmp_path / "b", **settings)
    for step in (3, 5):
        progress = small_runs.Interrupting(step)
        train(config, resume=True, progress=progress, probe=sharpness_probe)
    train(config, resume=True, probe=sharpness_probe)
    assert small_runs.timeless_records(whole) == small_runs.timeless_records(config.folder)
    assert len(sharpness_of(whole)) == 2
    small_runs.assert_same(small_runs.state(whole), small_runs.state(config.folder))


def surface_of(run: Path) -> Surface:
    """Return the loss over all training images at the last weights."""
    trained = TrainedRun.read(run)
    splits = trained.splits()
    assert isinstance(splits.train, TensorSet)
    images = (splits.train.images.float() / 255 - splits.mean[0]) / splits.std[0]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    return Surface(trained.model(splits), [(images, splits.train.labels)], loss)


def test_the_numbers_of_the_command_line_match_the_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_runs.config(tmp_path)
    words = ["train", "--data", config.data.name, "--model", "small_mlp", "--batch-size", "8"]
    words += ["--steps", "4", "--sharpness-every", "2", "--rho", "0.2", "--label-smoothing", "0.1"]
    assert main([*words, "--device", "cpu", "--out", str(config.folder)]) == 0
    last = sharpness_of(config.folder)[-1]
    surface = surface_of(config.folder)
    top = eigenvalues(Hessian(surface), 1, "dominant", max_products=probes.MAX_PRODUCTS)
    (gap,) = surrogate_gaps(surface, [0.2], num_ascent_steps=5, start=top.vectors[0]).gaps
    expected = {
        "eigenvalue": float(top.values[0]),
        "loss": gap.loss,
        "gap": gap.gap,
        "sharpness": gap.sharpness,
        "worst_gap": gap.worst_gap,
        "worst_sharpness": gap.worst_sharpness,
        "rho": 0.2,
    }
    assert {name: last[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert last["step"] == 4
    assert f"eigenvalue {last['eigenvalue']:.4g}" in capsys.readouterr().out
    assert tags(config.folder) >= {"sharpness/eigenvalue", "sharpness/gap", "epoch/loss"}
    # A resumed run keeps the flag, which may be changed.
    words = ["train", "--resume", "--out", str(config.folder), "--print-config"]
    assert main(words) == 0
    assert '"sharpness_every": 2' in capsys.readouterr().out
    assert main([*words[:-1], "--sharpness-every", "1"]) == 0


def tags(folder: Path) -> set[str]:
    """Return the names of the curves in TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return set(events.Tags()["scalars"])


@pytest.mark.usefixtures("quick")
def test_files_on_disk_are_read_once(tmp_path: Path) -> None:
    images = image_folder(tmp_path / "images", per_class=4)
    changes = {"data": str(images), "image_size": 8, "num_workers": 0, "batch_size": 4, "steps": 2}
    config = small_runs.config(tmp_path, **changes, sharpness_every=1, sharpness_images=5)
    components = components_of(config, CPU)
    probe = sharpness_probe(config, components, CPU)
    before = probe()
    for path in images.rglob("*.png"):
        path.unlink()
    assert probe() == before


@pytest.mark.usefixtures("quick")
def test_without_a_finite_loss_there_is_no_curvature(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, **PROBED)
    components = components_of(config, CPU)
    with torch.no_grad():
        next(components.model.parameters()).fill_(torch.nan)
    found = sharpness_probe(config, components, CPU)()
    assert math.isnan(found.pop("loss"))
    assert found == {"rho": 0.1}


def test_without_a_finite_hessian_there_is_no_curvature() -> None:
    """f = |0 w|^1.5 has a second derivative of infinity times 0."""

    def loss_fn(model: nn.Module, batch: object) -> Tensor:
        return (0 * model.weight).abs().pow(1.5).sum()  # type: ignore[operator]

    batches = [(torch.ones(1, 2), torch.zeros(1))]
    assert sharpness_at(nn.Linear(2, 1), batches, loss_fn, 0.1) == {"loss": 0.0, "rho": 0.1}


def test_modes_and_compiled_calls_are_restored() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model.compile(backend="eager")
    model.train()
    model[1].eval()  # frozen
    modes = [module.training for module in model.modules()]
    compiled = model._compiled_call_impl
    assert compiled is not None
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        assert model._compiled_call_impl is None
    assert [module.training for module in model.modules()] == modes
    assert model._compiled_call_impl is compiled
    with pytest.raises(KeyError, match="in the body"), evaluating(model):
        raise KeyError("in the body")
    assert [module.training for module in model.modules()] == modes
    assert model._compiled_call_impl is compiled


def test_the_default_radius_of_the_gap() -> None:
    def radius(**changes: Any) -> float:
        return Config().override(**changes).objective.gap_rho

    assert radius(objective="sam", rho=0.3) == 0.3
    assert radius(objective="gsam") == 0.1
    assert radius(objective="sam", rho=0.0) == 0.1
    assert radius(objective="vanilla") == 0.1
    assert radius(objective="asam", rho=0.5) == 0.1


def test_sharpness_every_needs_a_probe(tmp_path: Path) -> None:
    message = "sharpness_every must come with a probe, got 3 without one. Pass probe=surrogap.exp"
    config = small_runs.config(tmp_path, **PROBED)
    with pytest.raises(ValueError, match=message):
        train(config)
    assert not read_records(config.folder)
    assert not config.folder.exists()


@pytest.mark.parametrize("name", ["sharpness_every", "sharpness_images"])
def test_numbers_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0. Pass a number"):
        Config().override(**{name: 0})
