"""`surrogap compare`."""

import dataclasses
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from surrogap.cli import main
from surrogap.experiments import comparison, run_queue
from surrogap.experiments.columns import PlannedRun
from surrogap.experiments.plotting import new_figure
from surrogap.experiments.recipes import RECIPES
from surrogap.experiments.trained import TrainedRun
from surrogap.training.objective_configs import CONFIGS
from surrogap.training.records import read_records
from tests.training.small_runs import archive

METHODS = ("vanilla", "vanilla-2x", "sam", "asam")
SAMS = METHODS[2:]


def arguments(folder: Path, *more: object, seeds: int = 2) -> list[str]:
    """Epochs of 4 steps on grey noise."""
    data = folder / "images.npz"
    if not data.exists():
        archive(data)
    words = ("--data", data, "--batch-size", 8, "--epochs", 2, "--augmentation", "none")
    words += ("--device", "cpu", "--seeds", seeds, "--out", folder / "out", "--no-tensorboard")
    return ["compare", *map(str, (*words, "--objectives", *METHODS, *more))]


def only(folder: Path, *columns: str) -> list[str]:
    """One seed of these columns."""
    words = arguments(folder, seeds=1)
    return [*words[: words.index("--objectives") + 1], *columns]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    assert main(arguments(folder)) == 0
    return folder / "out"


def last_epoch(folder: Path) -> dict[str, Any]:
    return [record for record in read_records(folder) if record["kind"] == "epoch"][-1]


def test_numbers_match_the_records(compared: Path) -> None:
    found = json.loads((compared / "comparison.json").read_text())
    assert found["versions"]["torch"] == torch.__version__
    assert [(run["method"], run["seed"]) for run in found["runs"]] == [
        (method, seed) for seed in (0, 1) for method in METHODS
    ]
    for run in found["runs"]:
        last = last_epoch(compared / f"{run['method']}-{run['seed']}")
        for name in ("test_accuracy", "test_loss", "test_calibration_error", "seconds"):
            assert run[name] == last[name]
        assert run["num_epochs"] == last["epoch"] == (4 if run["method"] == "vanilla-2x" else 2)
    losses = [run["test_loss"] for run in found["runs"] if run["method"] == "sam"]
    summary = found["summary"]["sam"]["test_loss"]
    assert summary["mean"] == pytest.approx(sum(losses) / 2)
    assert summary["deviation"] == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)
    assert (compared / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_explains_its_band_and_the_number_of_seeds(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []

    def watched(*arguments: Any) -> Any:
        figures.append(new_figure(*arguments))
        return figures[-1]

    monkeypatch.setattr(comparison, "new_figure", watched)
    results, _ = comparison.read_comparison(compared / "comparison.json")
    comparison.draw(results, tmp_path / "drawn.png", "small_mlp on Fashion-MNIST")
    ((figure, axes),) = figures
    title = "small_mlp on Fashion-MNIST (2 seeds: mean, and band from lowest to highest)"
    assert figure.get_suptitle() == title
    assert axes[0].get_xlabel() == "epochs x passes per step (sam: 2, asam: 2)"
    for line in axes[0].lines:
        own = [run for run in results if run.method == line.get_label()]
        mean = 100 * sum(run.test_accuracy for run in own) / len(own)
        assert line.get_xydata()[-1] == pytest.approx((own[0].num_epochs * own[0].num_passes, mean))


def test_each_objective_uses_its_own_radius(compared: Path) -> None:
    radius = {
        method: TrainedRun.read(compared / f"{method}-0").config.objective for method in METHODS
    }
    recipe = "fashion-mnist"
    assert radius["sam"].rho == RECIPES[f"{recipe}-sam"].config.objective.rho
    assert radius["asam"] == CONFIGS["asam"]()  # its default


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--rho 0.3", "rho", 0.3),
        ("--rho=0.3", "rho", 0.3),
        ("--rho 0.31", "rho", 0.31),
        ("--weight_decay 0.0", "weight_decay", 0.0),
        ("--no-compile", "compile", False),
    ],
)
def test_given_settings_hold_for_all_columns(
    words: str, name: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a value equal to the recipe's, if the recipe for SAM has another."""
    planned: list[PlannedRun] = []

    def keep(runs: list[PlannedRun], *_: object, **__: object) -> signal.Signals:
        planned.extend(runs)
        return signal.SIGTERM

    monkeypatch.setattr(run_queue, "train_missing", keep)
    recipe = RECIPES["fashion-mnist-sam"]
    changed = recipe.config.override(weight_decay=0.1, compile=True)
    sibling = dataclasses.replace(recipe, config=changed)
    monkeypatch.setitem(RECIPES, "fashion-mnist-sam", sibling)
    assert main([*arguments(tmp_path, seeds=1), *words.split()]) == 128 + signal.SIGTERM
    methods = SAMS if name == "rho" else METHODS
    assert [r.config.flat()[name] for r in planned if r.method in methods] == [value] * len(methods)


def test_the_gap_is_over_all_training_images_at_the_last_weights(compared: Path) -> None:
    found = json.loads((compared / "comparison.json").read_text())
    run = TrainedRun.read(compared / "sam-1")
    splits = run.splits()
    model: nn.Module = run.model(splits).double()
    (mean,), (std,) = splits.mean, splits.std
    images = (splits.train.images.double() / 255 - mean) / std  # type: ignore[union-attr]
    labels = torch.as_tensor(splits.train.labels)
    loss = cross_entropy(model(images), labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    with torch.no_grad():
        for p, g in zip(model.parameters(), gradients, strict=True):
            p += found["rho"] * g / norm
        gap = float(cross_entropy(model(images), labels) - loss)
    (compared_run,) = (r for r in found["runs"] if (r["method"], r["seed"]) == ("sam", 1))
    assert compared_run["gap"] == pytest.approx(gap, rel=1e-3)
    assert compared_run["sharpness"] == pytest.approx(2 * compared_run["gap"] / found["rho"] ** 2)
    assert compared_run["worst_gap"] >= compared_run["gap"]


def test_table_and_differences(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(compared.parent)) == 0
    out = capsys.readouterr().out
    found = json.loads((compared / "comparison.json").read_text())
    runs = {(run["method"], run["seed"]): run for run in found["runs"]}
    lines = out.splitlines()
    assert lines[0] == "8 runs are finished already."
    assert lines[1].startswith("small_mlp on ")
    assert lines[2].split() == list(METHODS)
    rows = {line[:20].strip(): re.split("  +", line[20:].strip()) for line in lines[3:12]}
    assert "Mean ± standard deviation over 2 seeds" in out
    assert rows["epochs"] == ["2", "4", "2", "2"]
    for label, name, factor in (("test accuracy %", "test_accuracy", 50), ("gap h", "gap", 0.5)):
        for cell, method in zip(rows[label], METHODS, strict=True):
            mean = factor * sum(runs[method, seed][name] for seed in (0, 1))
            assert float(cell.split(" ± ")[0]) == pytest.approx(mean, abs=0.006)
    time = {}
    for m in METHODS:
        epochs = [record for seed in (0, 1) for record in runs[m, seed]["epochs"]]
        pace = np.median([record["images_per_second"] for record in epochs])
        time[m] = runs[m, 0]["num_epochs"] / pace
    assert rows["time"] == [f"{time[m] / time['vanilla']:.2f}" for m in METHODS]
    points = [
        100 * (runs["sam", seed]["test_accuracy"] - runs["vanilla", seed]["test_accuracy"])
        for seed in (0, 1)
    ]
    assert f"sam minus vanilla, seed by seed: {sum(points) / 2:+.2f} ± " in out


def test_finished_runs_are_not_trained_again(
    compared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(run_queue, "train", fail)
    monkeypatch.setattr(run_queue, "write_measurements", fail)
    assert main(arguments(compared.parent)) == 0


def test_changed_settings_are_refused_before_training(
    compared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in compared.rglob("*")}
    assert main(arguments(compared.parent, "--lr", 0.01, seeds=3)) == 2
    error = capsys.readouterr().err
    assert f"got {compared / 'vanilla-0'}, whose run has lr=0.1 and not 0.01" in error
    assert {path: path.stat().st_mtime_ns for path in compared.rglob("*")} == before


def test_an_interrupted_comparison_continues_to_the_same_result(
    compared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(self: object, step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(run_queue.QueueProgress, "step", interrupt)
        assert main(arguments(tmp_path)) == 128 + signal.SIGTERM
    assert "SIGTERM stopped surrogap compare" in capsys.readouterr().err
    assert not (tmp_path / "out" / "comparison.json").exists()
    assert main(arguments(tmp_path)) == 0
    for name in ("vanilla-0", "asam-1"):
        here, there = (last_epoch(folder / name) for folder in (tmp_path / "out", compared))
        assert here["test_loss"] == there["test_loss"]


def test_one_seed_and_no_vanilla(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = arguments(tmp_path, seeds=1)
    words = [*words[: words.index("--objectives")], "--objectives", "gsam", "--gap-rho", "0.3"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "One seed" in out
    assert "rho = 0.3" in out
    assert "±" not in out
    seconds = last_epoch(tmp_path / "out" / "gsam-0")["seconds"]
    assert f"  {seconds:.1f} s\n" in out
    # Another radius is measured again, without training.
    assert main([*words[:-1], "0.1"]) == 0
    assert "rho = 0.1" in capsys.readouterr().out


def test_columns_with_their_own_settings(tmp_path: Path) -> None:
    """Methods with one and two passes, in all and in some steps, on all and on some weights."""
    columns = ("vanilla", "momentum-sam", "sam@every=3", "sam@climb-fraction=0.5", "gsam-norms")
    words = arguments(tmp_path, "--model", "small_resnet18_narrow", "--alpha", 0.3, seeds=1)
    at = words.index("--objectives")
    assert main([*words[: at + 1], *columns, *words[at + 1 + len(METHODS) :]]) == 0
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [run["method"] for run in found["runs"]] == list(columns)
    assert [run["num_passes"] for run in found["runs"]] == pytest.approx([1, 1, 4 / 3, 1.5, 2])
    own = {name: c["objective"] for name, c in found["configurations"].items()}
    assert (own["sam@every=3"]["every"], own["gsam-norms"]["perturb"]) == (3, "norms")
    assert own["gsam-norms"]["alpha"] == 0.3
    assert (tmp_path / "out" / "momentum-sam-0" / "config.json").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--objectives", "vanila"), "The closest is 'vanilla'"),
        (
            ("--objectives", "sam", "sam"),
            "objectives must be one or more different columns, got sam",
        ),
        (
            ("--objective", "sam"),
            "Unrecognized options: --objective, sam. The closest is --objecti",
        ),
        (
            ("--objectives", "vanilla", "sam", "--alpha", 0.1),
            "alpha has no effect on vanilla or sam",
        ),
        (("--objectives", "sam@alpha=0.1"), "alpha has no effect on sam"),
        (
            ("--objectives", "sam@every"),
            "objectives must have settings of the form FIELD=VALUE, got",
        ),
        (("--seeds", 0), "seeds must be at least 1, got 0"),
        (("--gap-rho", 0), "gap_rho must be above 0 and finite, got 0.0"),
        (("--recipe", "fashion-mnist"), "recipe must be one of"),
        (("--recipe",), "options of surrogap compare must be valid, got"),
        (("--data", "none.npz"), "name_or_path must be one of"),
        (("--eval-on", "val"), "eval_on must be test or both in a comparison, got val"),
        (("--checkpoint-every", 0), "checkpoint_every must be above 0 in a comparison, got 0"),
        (("--objectives", "sam@decay=constant,rho_min=0.01"), "rho_min must be left out"),
    ],
)
def test_refusals(
    more: tuple[object, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--out", str(tmp_path / "out"), *map(str, more)]
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_constant_learning_rate_suits_a_recipe_whose_radius_follows_it(tmp_path: Path) -> None:
    words = ["--recipe", "cifar10-resnet18-gsam", "--model", "small_mlp", "--decay", "constant"]
    settings = ["--precision", "fp32", "--no-capture"]
    assert main([*only(tmp_path, "vanilla"), *words, *settings]) == 0


def test_a_column_that_diverges_does_not_keep_the_others_from_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(only(tmp_path, "sam@lr=1e30", "gsam@lr=1e30", "vanilla")) == 1
    error = capsys.readouterr().err
    assert "loss" in error
    assert error.endswith(" 2 runs failed in all.\n")
    assert (tmp_path / "out" / "vanilla-0" / "measurements.json").exists()


def test_a_column_with_steps_has_the_passes_that_it_ran(tmp_path: Path) -> None:
    """Eight steps are two epochs, of which the second one has two passes."""
    assert main(only(tmp_path, "sam@steps=8,start_epoch=1,epochs=9")) == 0
    (run,) = json.loads((tmp_path / "out" / "comparison.json").read_text())["runs"]
    assert run["num_passes"] == 1.5


def test_the_folder_of_a_recipe_is_left_to_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = RECIPES["fashion-mnist-gsam"]
    changed = dataclasses.replace(recipe, config=recipe.config.override(out="runs/mine"))
    monkeypatch.setitem(RECIPES, "fashion-mnist-gsam", changed)
    words = only(tmp_path, "vanilla")
    out = words.index("--out")
    assert main(words[:out] + words[out + 2 :]) == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["compare-fashion-mnist-gsam"]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("sam-norms", 'perturb="norms" must find a trainable parameter of a normalisation layer'),
        ("momentum-sam@momentum=0", "optimizer must have momentum, got SGD without it"),
        ("sam@start-epoch=2", "start_epoch must be before the end of the run, got 2"),
        ("sam@model=small_resnet", "name must be a known model, got"),
    ],
)
def test_columns_that_cannot_be_trained_are_refused_before_the_first_one_trains(
    column: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(tmp_path), column]) == 2
    assert f"surrogap: {column}: {message}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--data", "none.npz"), "name_or_path must be one of"),
        (("--data", "cifar10", "--data-root", "none"), "root must hold CIFAR-10, got none/cifar"),
        (("--model", "small_resnet"), "name must be a known model, got"),
        (("--device", "cuda:99"), "device must be"),
    ],
)
def test_an_error_that_all_columns_have_names_none_of_them(
    more: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(tmp_path), *more]) == 2
    assert capsys.readouterr().err.startswith(f"surrogap: {message}")


def test_an_error_names_all_columns_that_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(tmp_path), "sam-norms", "gsam-norms"]) == 2
    message = 'surrogap: sam-norms, gsam-norms: perturb="norms" must find'
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("name", ["comparison.json", "comparison.png"])
def test_a_foreign_file_is_refused_before_training(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("years of work")
    assert main(arguments(tmp_path)) == 2
    message = f"out must be a folder without {name}, got {out}"
    assert message in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == [name]


def test_the_folder_of_one_run_is_refused(
    compared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(compared.parent)
    words[words.index("--out") + 1] = str(compared / "sam-0")
    assert main(words) == 2
    assert "out must be a folder for several runs, got" in capsys.readouterr().err


def test_several_processes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    assert main(arguments(tmp_path)) == 2
    assert (
        "Several runs must be trained in one process, got several processes"
        in capsys.readouterr().err
    )
