"""Runs on a GPU: captured and resumed."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from surrogap.experiments.probes import sharpness_probe
from surrogap.training.components import components_of
from surrogap.training.failure import RunFailedError
from surrogap.training.processes import World, device_of
from surrogap.training.records import read_records
from surrogap.training.run import train
from surrogap.training.step import METRICS, CUDAGraphStep
from tests.training import small_runs

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.gpu
GPU: dict[str, Any] = {"device": "cuda", "objective": "gsam", "rho": 0.1, "rho_min": 0.01}
KINDS: list[dict[str, Any]] = [
    {},
    {"objective": "vanilla"},
    {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1, "decay_on": "matrices"},
    {"micro_batches": 2, "perturbation": "each", "clip_norm": 1.0},
    {"augmentation": "medium", "rho_min": None, "rho_inverse_sqrt": True},
    {"objective": "momentum-sam", "rho": 0.5, "rho_min": None},
    {"climb_fraction": 0.5},
    {"every": 3, "start_epoch": 1},
    {"model": "small_resnet18_narrow", "objective": "sam", "perturb": "norms", "lr": 0.01},
]


def assert_close_runs(one: Path, other: Path) -> None:
    """Compare weights by norm: rounding can flip a ReLU, which moves one row by a few per mille."""
    mine, theirs = (small_runs.leaves(small_runs.state(folder)["model"]) for folder in (one, other))
    for name, weight in mine.items():
        weight = weight.double()  # also counters, such as BatchNorm's
        error = (weight - theirs[name]).norm()
        assert error <= 1e-3 * weight.norm() + 1e-5 * weight.numel() ** 0.5, name
    for a, b in zip(*map(small_runs.timeless_records, (one, other)), strict=True):
        assert a.pop("kind") == b.pop("kind")
        known = {k: v for k, v in a.items() if v is not None and "calibration" not in k}
        assert {k: b[k] for k in known} == pytest.approx(known, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_a_captured_run_is_the_eager_one(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = ({"device": "cuda"} if changes.get("objective") == "vanilla" else GPU) | changes
    for name, capture in (("eager", False), ("captured", True)):
        train(small_runs.config(tmp_path / name, **settings, capture=capture))
    assert_close_runs(tmp_path / "eager" / "run", tmp_path / "captured" / "run")


def test_a_probe_leaves_a_captured_run_as_it_is(tmp_path: Path) -> None:
    changes = GPU | {"capture": True}
    train(small_runs.config(tmp_path / "plain", **changes))
    probed = small_runs.config(
        tmp_path / "probed", **changes, sharpness_every=5, sharpness_images=8
    )
    train(probed, probe=sharpness_probe)
    found = [r for r in read_records(probed.folder) if r["kind"] == "sharpness"]
    assert [record["step"] for record in found] == [5, 10]
    assert all(record["eigenvalue"] > 0 for record in found)
    mine, theirs = (
        small_runs.leaves(small_runs.state(tmp_path / name / "run")["model"])
        for name in ("plain", "probed")
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("capture", [False, True])
def test_a_run_is_resumed(capture: bool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"capture": capture, "augmentation": "medium"}
    train(small_runs.config(tmp_path / "whole", **GPU, **changes))
    halves = small_runs.config(tmp_path / "halves", **GPU, **changes)
    assert train(halves, resume=True, progress=small_runs.Interrupting(5)).step == 5
    assert train(halves, resume=True).step == 12
    assert_close_runs(tmp_path / "whole" / "run", tmp_path / "halves" / "run")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_is_resumed_captured_or_not_and_on_another_device(
    optimizer: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"optimizer": optimizer, "lr": 1e-2}
    train(small_runs.config(tmp_path / "whole", **GPU, **changes))
    config = small_runs.config(tmp_path / "parts", **GPU, **changes)
    for step, change in ((3, {}), (5, {"capture": True}), (7, {}), (9, {"device": "cpu"})):
        train(config.override(**change), resume=True, progress=small_runs.Interrupting(step))
    train(config.override(capture=True), resume=True)
    assert_close_runs(tmp_path / "whole" / "run", tmp_path / "parts" / "run")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_statistics_dropout_and_low_precision(precision: str, tmp_path: Path) -> None:
    config = small_runs.config(
        tmp_path, model="small_resnet18_narrow", precision=precision, drop=0.2,
        channels_last=True, capture=precision == "bf16", **GPU,
    )  # fmt: skip
    outcome = train(config)
    assert outcome.record is not None
    assert 0 < outcome.record["loss"] < 5


def test_a_captured_loss_that_is_not_finite_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stops before a checkpoint is saved, for any interval of the records."""
    whole = CUDAGraphStep.__call__
    steps = 0

    def call(self: CUDAGraphStep, images: Any, targets: Any) -> Any:
        nonlocal steps
        steps += 1
        return whole(self, images * (math.nan if steps == 6 else 1.0), targets)

    monkeypatch.setattr(CUDAGraphStep, "__call__", call)
    config = small_runs.config(tmp_path, capture=True, checkpoint_every=2, record_every=100, **GPU)
    with pytest.raises(RunFailedError, match="got infinity or NaN since the last record, up to"):
        train(config)
    assert small_runs.state(config.folder)["step"] == 4
    assert read_records(config.folder)[-1]["kind"] == "failure"


def test_the_device_of_a_process() -> None:
    assert device_of("auto") == device_of("cuda") == torch.device("cuda", 0)


def test_the_benchmark_of_the_loop(tmp_path: Path) -> None:
    path = tmp_path / "new" / "loop.json"
    command = [sys.executable, "benchmarks/training_loop.py", "--model", "small_mlp"]
    command += ["--data", "embedded", "--epochs", "3", "--bare-steps", "5", "--batch-sizes", "64"]
    subprocess.run([*command, "--json", str(path)], cwd=ROOT, check=True)
    row = json.loads(path.read_text())["batch_sizes"]["64"]
    assert len(row["epochs_images_per_second"]) == 2
    assert row["loop_over_bare"] > 0


@pytest.mark.parametrize("capture", [False, True])
def test_a_vit_whose_scores_are_low_has_a_finite_gradient(capture: bool, tmp_path: Path) -> None:
    """The gradient of cuDNN's attention is NaN if all scores of a row are below -93."""
    changes = {"model": "small_vit_narrow", "image_size": 32, "precision": "bf16"}
    config = small_runs.config(tmp_path, **GPU, **changes, capture=capture)
    components = components_of(config, World(torch.device("cuda", 0)))
    components.model.head.weight.data.normal_()  # its initial zeros would stop the gradient
    for block in components.model.blocks:
        weights, biases = (p.data.unflatten(0, (3, -1)) for p in block.attn.qkv.parameters())
        weights[:2] = biases[:2] = 0.0  # those of queries and keys
        biases[0], biases[1] = 1.0, -120 * block.attn.head_dim**-0.5
    measures = components.step(*next(iter(components.images)))
    grad_norm = dict(zip(METRICS, measures.tolist(), strict=True))["grad_norm"]
    assert 0 < grad_norm < math.inf
