"""`surrogap find-rho`: the sweep of the library, on training batches."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surrogap.analysis import Surface, find_rho
from surrogap.cli import main
from surrogap.data import loader
from surrogap.experiments.recipes import RECIPES
from surrogap.experiments.trained import TrainedRun
from surrogap.training.run import train
from surrogap.training.step import EagerStep
from tests.training.small_runs import config

RHOS = ("--rhos", "0.1", "0.4", "6.4")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config(tmp_path_factory.mktemp("run"), objective="sam", rho=0.7)).folder


def run_find_rho(*words: str | Path) -> int:
    return main(["find-rho", *map(str, words), "--device", "cpu"])


def flags(folder: Path, **changes: Any) -> list[str]:
    """Return the flags of a small configuration."""
    settings = config(folder, **changes).flat()
    names = ("model", "data", "augmentation", "batch_size", "out", *changes)
    return [
        word
        for name in dict.fromkeys(names)
        for word in (f"--{name.replace('_', '-')}", str(settings[name]))
    ]


def result_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "find-rho.json").read_text())
    return found


def test_the_sweep_of_a_run_matches_the_library(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_find_rho(run, *RHOS, "--batches", "2") == 0
    trained = TrainedRun.read(run)
    splits = trained.splits()
    batches = list(loader(splits, batch_size=8, seed=0))[:2]
    expected = find_rho(Surface(trained.model(splits).train(), batches), [0.1, 0.4, 6.4])
    found, out = result_of(run), capsys.readouterr().out
    for mine, radius in zip(found["radii"], expected.radii, strict=True):
        assert mine == pytest.approx(asdict(radius) | {"gap": radius.gap}, rel=1e-4)
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high), rel=1e-3)
    assert found["words"] == expected.explain(0.7)
    assert found["words"] in out
    assert out.startswith("At most 12 gradient evaluations of 8 images each.\n")
    assert (run / "find-rho.png").read_bytes().startswith(b"\x89PNG")


def test_the_unit_scales_the_range(run: Path) -> None:
    """At a unit of 1000, no ascent step of the sweep raises the loss enough."""
    assert run_find_rho(run, *RHOS, "--unit", "1000") == 0
    found = result_of(run)
    assert (found["unit"], found["low"]) == (1000.0, None)
    assert "raises the loss by less than 50: sweep larger radii." in found["words"]


@pytest.mark.parametrize(
    ("schedule", "radius"),
    [
        # The learning rate ends at lr_min, so the radius ends at rho_min.
        ({"rho_min": 0.06, "lr_min": 0.001}, "0.06"),
        ({"rho_inverse_sqrt": True, "steps": 9}, "0.1"),  # 0.3 / sqrt(9)
    ],
)
def test_the_radius_at_the_checkpoint_is_judged(
    schedule: dict[str, Any], radius: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = train(config(tmp_path, objective="gsam", rho=0.3, **schedule)).folder
    assert run_find_rho(trained, *RHOS) == 0
    words = result_of(trained)["words"]
    assert f" {radius} {'was not swept' if radius == '0.06' else 'is within this range'}. " in words
    assert words.endswith("It is the radius at this checkpoint; the schedule's largest is 0.3.")
    assert run_find_rho(trained, *RHOS, "--rho", "0.3") == 0
    assert "0.3 is " in result_of(trained)["words"]


def test_without_a_run_the_model_is_trained_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With full batches, the result is that of training a run and then measuring it."""
    words = flags(tmp_path, batch_size=32, objective="sam", rho=0.2, warmup_steps=4)
    assert run_find_rho(*words, *RHOS, "--batches", "1", "--train-steps", "12") == 0
    assert (
        "At most 18 gradient evaluations of 32 images each, 12 of them" in capsys.readouterr().out
    )
    plain = {"objective": "vanilla", "steps": 12, "decay": "constant", "warmup_steps": 3}
    other = train(config(tmp_path / "other", batch_size=32, **plain)).folder
    assert run_find_rho(other, *RHOS, "--batches", "1", "--out", tmp_path / "swept") == 0
    mine, theirs = result_of(tmp_path / "run"), result_of(tmp_path / "swept")
    for one, two in zip(mine["radii"], theirs["radii"], strict=True):
        assert one == pytest.approx(two, rel=1e-3)
    assert (mine["train_steps"], theirs["train_steps"]) == (12, None)
    assert "0.2 is" in mine["words"]
    assert " is " not in theirs["words"]  # vanilla has no radius


def test_micro_batches_with_their_own_perturbation_are_measured_separately(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(tmp_path, micro_batches=2, perturbation="each", objective="asam")
    assert run_find_rho(*words, *RHOS, "--train-steps", "1") == 0
    assert "gradient evaluations of 4 images each" in capsys.readouterr().out
    assert "0.5 is " in result_of(tmp_path / "run")["words"]  # the default radius of ASAM


def test_flags_choose_the_ascent_step(run: Path, tmp_path: Path) -> None:
    """The gradient of normalisation layers, and the momentum of the run's optimizer."""
    words = (*RHOS, "--batches", "2", "--out", tmp_path)
    cosines = []
    for more in ((), ("--perturb", "norms"), ("--objective", "momentum-sam")):
        status = run_find_rho(run, *words, *more)
        assert status == (2 if "norms" in more else 0)  # an MLP has no normalisation layers
        if not status:
            found = result_of(tmp_path)
            cosines.append([radius["cosine"] for radius in found["radii"]])
            assert f"{found['configuration']['objective']['rho']:g} is " in found["words"]
    assert cosines[0] != pytest.approx(cosines[1], rel=1e-2)


def test_a_recipe_gives_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--recipe", "fashion-mnist-sam", "--train-steps", "1", "--batches", "1", *RHOS]
    assert run_find_rho(*words) == 0
    found = result_of(tmp_path / "runs" / "find-rho-fashion-mnist-sam")
    assert found["configuration"]["model"]["name"] == "small_mlp"
    assert len(found["radii"]) == 3
    # After one step the predictions are almost uniform.
    assert found["radii"][0]["perturbed_loss"] == pytest.approx(math.log(10), rel=0.1)
    assert 0.1 <= found["low"] < found["high"] < 6.4


def test_the_folder_of_a_recipe_is_left_to_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = RECIPES["fashion-mnist-sam"]
    changed = replace(recipe, config=recipe.config.override(out="runs/mine"))
    monkeypatch.setitem(RECIPES, "fashion-mnist-sam", changed)
    words = ["--recipe", "fashion-mnist-sam", "--train-steps", "1", "--batches", "1", *RHOS]
    assert run_find_rho(*words) == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["find-rho-fashion-mnist-sam"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{tmp}", "run must be a folder with a readable config.json, got"),
        ("--batches 3 {run}", "run must come before all options, got"),
        ("{run} --recipe fashion-mnist-sam", "recipe must be left out with a run"),
        (
            "{run} --model small_vit",
            "model must be left out with a run, got small_vit",
        ),
        ("{run} --data embedded", "data must be left out with a run, got embedded"),
        (
            "{run} --optimizer adamw",
            "optimizer must be left out with a run, got adamw",
        ),
        ("--recipe nonsense", "recipe must be "),
        ("--recipe", "options of surrogap find-rho must be valid, got: Missing value"),
        ("{run} --batches 0", "batches must be at least 1, got 0"),
        ("--train-steps 0", "train_steps must be at least 1, got 0"),
        ("{run} --rhos -0.1", "rhos must be above 0 and finite, got -0.1"),
        ("{run} --rho -1", "rho must be at least 0 and finite, got -1.0"),
        ("{run} --alpha 1", "alpha has no effect on sam"),
        ("--objective vanilla --rho 1", "rho has no effect on vanilla"),
    ],
)
def test_mistakes(
    words: str, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = words.format(run=run, tmp=tmp_path).split()
    assert main(["find-rho", *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
    assert not output.out


def test_an_optimizer_without_momentum_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(EagerStep, "__call__", None)  # a step would raise TypeError
    words = ("--objective", "momentum-sam", "--momentum", "0", "--train-steps", "3")
    assert run_find_rho(*flags(tmp_path), *RHOS, *words) == 2
    assert "optimizer must have momentum, got SGD without it" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(self: EagerStep, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        weight = next(p for p in self.model.parameters() if isinstance(p, nn.Parameter))
        return weight.sum() * torch.nan, y.float().mean()

    monkeypatch.setattr(EagerStep, "_loss_and_accuracy", lost)
    assert run_find_rho(*flags(tmp_path), *RHOS, "--train-steps", "3") == 1
    error = capsys.readouterr().err
    assert "The loss is not finite in step 1 of training without" in error
