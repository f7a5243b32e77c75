"""`surrogap sharpness`: the numbers of the library, for a run and for any model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from surrogap.analysis import Plan, Surface, density, sharpness
from surrogap.analysis.hessian import Hessian
from surrogap.cli import main, terminal
from surrogap.data import TensorSet
from surrogap.experiments.trained import TrainedRun
from surrogap.training.run import train
from tests.data.synthetic import folder as image_folder
from tests.training.small_runs import config

# A quick measurement, the same for the command and the library.
FEW = "--eigenvalues 2 --max-products 6 --trace-products 6 --ascent-steps 2 --rhos 0.1 0.05"
PLAN = Plan(
    num_eigenvalues=2, max_products=6, num_trace_products=6, num_ascent_steps=2, rhos=(0.1, 0.05)
)
FEWEST = "--eigenvalues 1 --max-products 1 --trace-products 6 --ascent-steps 0 --density-steps 0"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MLP on 32 images of grey noise, trained with label smoothing."""
    return train(config(tmp_path_factory.mktemp("run"), label_smoothing=0.1)).folder


def run_sharpness(*words: str | Path) -> int:
    return main(["sharpness", *map(str, words), "--device", "cpu"])


def result_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "sharpness.json").read_text())
    return found


def surface_of(run: Path) -> Surface:
    """Return the loss over all training images, without the code under test."""
    trained = TrainedRun.read(run)
    splits = trained.splits()
    assert isinstance(splits.train, TensorSet)
    images = (splits.train.images.float() / 255 - splits.mean[0]) / splits.std[0]

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    return Surface(trained.model(splits), [(images, splits.train.labels)], loss)


def test_the_numbers_match_the_library(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{FEW} --density-steps 4 --density-vectors 1 --batch-size 20".split()
    assert run_sharpness(run, *words, "--out", tmp_path) == 0
    surface = surface_of(run)
    expected = sharpness(surface, PLAN)
    found, out = result_of(tmp_path), capsys.readouterr().out
    close: Any = {"rel": 1e-3, "abs": 1e-5}
    assert found["largest"]["values"] == pytest.approx(expected.largest.values.tolist(), **close)
    assert found["smallest"]["values"] == pytest.approx(expected.smallest.values.tolist(), **close)
    assert found["dominant"] == pytest.approx(expected.dominant, **close)
    assert found["trace"]["value"] == pytest.approx(expected.trace.value, **close)
    assert [gap["rho"] for gap in found["gaps"]] == [0.05, 0.1]
    for mine, gap in zip(found["gaps"], expected.gaps.gaps, strict=True):
        assert mine["gap"] == pytest.approx(gap.gap, **close)
        assert mine["worst_sharpness"] == pytest.approx(
            2 * (mine["worst_loss"] - mine["loss"]) / mine["rho"] ** 2
        )
    nodes = density(Hessian(surface), num_vectors=1, num_steps=4).nodes
    assert found["density"]["nodes"][0] == pytest.approx(nodes[0].tolist(), **close)
    assert (found["num_images"], found["num_weights"]) == (32, surface.space.size)

    cost = PLAN.cost + 2 * 4
    assert out.startswith(f"At most {-(-cost // 1):.0f} gradient evaluations over 32 images.\n")
    for name in ("dominant eigenvalue", "largest eigenvalues", "smallest eigenvalue", "trace"):
        assert f"\n{name}" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("0.05 "))
    assert row[2] == f"{found['gaps'][0]['sharpness']:.4g}"
    assert row[-1] == f"{found['dominant']:.4g}"
    for name in ("sharpness.png", "spectrum.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_model_by_name_with_weights_and_a_few_images(tmp_path: Path) -> None:
    """The weights and the data of a run give the numbers of the run, on the same subset."""
    run = train(config(tmp_path / "plain")).folder
    trained = TrainedRun.read(run)
    weights = tmp_path / "weights.safetensors"
    save_file(trained.model(trained.splits()).state_dict(), weights)
    few = [*FEWEST.split(), "--images", "8", "--rhos", "0.1"]
    named = ["--model", "small_mlp", "--data", trained.config.data.name, "--weights", weights]
    assert run_sharpness(*named, *few, "--out", tmp_path / "named") == 0
    assert run_sharpness(run, *few, "--out", tmp_path / "run") == 0
    assert run_sharpness(run, *few, "--out", tmp_path / "other", "--seed", "1") == 0
    one, two, other = (result_of(tmp_path / name) for name in ("named", "run", "other"))
    assert one["num_images"] == two["num_images"] == 8
    assert other["loss"] != two["loss"]  # other images
    for name in ("gaps", "largest", "smallest", "trace", "loss"):
        assert one[name] == two[name]
    assert one["gaps"][0]["worst_gap"] is None
    assert one["density"] is None
    assert not (tmp_path / "named" / "spectrum.png").exists()


def test_a_model_of_timm_on_a_folder_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images = image_folder(tmp_path / "images", per_class=4)
    monkeypatch.chdir(tmp_path)
    words = ["--model", "test_resnet", "--data", images, "--image-size", "32", "--num-workers", "0"]
    assert run_sharpness(*words, *FEWEST.split(), "--rhos", "0.1") == 0
    found = result_of(tmp_path / "runs" / "sharpness-images-test_resnet")
    assert found["subject"] == "test_resnet, random weights"
    assert found["num_images"] == found["num_images"] // 4 * 4 > 0
    assert "test_resnet, random weights" in capsys.readouterr().out


def test_only_its_own_results_are_replaced(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [run, *FEWEST.split(), "--rhos", "0.1", "--out", tmp_path]
    assert run_sharpness(*few) == 0
    assert run_sharpness(*few[:-4], "--rhos", "0.2", "--out", tmp_path) == 0
    assert [gap["rho"] for gap in result_of(tmp_path)["gaps"]] == [0.2]
    for name in ("sharpness.json", "sharpness.png"):
        other = tmp_path / name.replace(".", "-")
        other.mkdir()
        (other / name).write_text("{}")
        assert run_sharpness(*few[:-1], other) == 2
        assert f"out must be a folder without {name}, got {other}, whose" in capsys.readouterr().err
        assert [path.name for path in other.iterdir()] == [name]
        assert (other / name).read_text() == "{}"


def test_without_a_terminal_lines_show_the_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "LINE_INTERVAL", 0.0)
    with terminal.progress_bar("sharpness") as progress:
        progress(1, 4)
        progress(4, 4)
    assert capsys.readouterr().err == "sharpness: 25%\nsharpness: 100%\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "",
            "run must be the folder of a run, got neither a run nor a model with data (model=None",
        ),
        ("--model small_mlp", "run must be the folder of a run, got neither"),
        (
            "{run} --model small_mlp",
            "model must be left out with a run, got small_mlp",
        ),
        ("{run} --image-size 8", "image_size must be left out with a run, got 8"),
        ("{tmp}", "run must be a folder with a readable config.json, got"),
        ("--model resnet5 --data embedded", "name must be a known model, got 'resnet5'"),
        ("--model small_mlp --data {tmp}/no.npz", "name_or_path must be one of"),
        (
            "--model small_mlp --data embedded --weights {run}",
            "weights must fit the model, got",
        ),
        ("{run} --images 0", "images must be at least 1, got 0"),
        ("{run} --batch-size 0", "batch_size must be at least 1, got 0"),
        ("{run} --seed -1", "seed must be at least 0, got -1"),
        ("{run} --seed 99999999999999999999", "seed must be below 2**63, got 99999999999999999999"),
        ("{run} --eigenvalues 0", "eigenvalues must be at least 1, got 0"),
        ("{run} --eigenvalues 9 --max-products 8", "max_products must be at least 9, got 8"),
        ("{run} --tolerance 0", "tolerance must be above 0 and finite, got 0.0"),
        ("{run} --trace-products 5", "trace_products must be at least 6, got 5"),
        ("{run} --ascent-steps -1", "ascent_steps must be at least 0, got -1"),
        ("{run} --density-steps -1", "density_steps must be at least 0, got -1"),
        ("{run} --density-vectors 0", "density_vectors must be at least 1, got 0"),
        ("{run} --rhos", "the number of rhos must be at least 1, got 0"),
        ("{run} --rhos 0.1 0", "rhos must be above 0 and finite, got 0.0"),
        ("{run} --out {tmp}/file/a", "out must be a writable folder, got"),
    ],
)
def test_mistakes(
    words: str, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    before = sorted(path.name for path in run.iterdir())
    assert run_sharpness(*words.format(run=run, tmp=tmp_path).split()) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
    assert not output.out
    assert sorted(path.name for path in run.iterdir()) == before


@pytest.mark.parametrize("command", ["sharpness", "landscape", "find-rho", "reproduce"])
def test_help_does_not_import_torch(command: str) -> None:
    code = (
        "import contextlib, sys; from surrogap.cli import main\n"
        f"with contextlib.suppress(SystemExit): main([{command!r}, '--help'])\n"
        "print(*sys.modules)"
    )
    env = os.environ | {"PYTHONIOENCODING": "utf-8"}
    output = subprocess.check_output([sys.executable, "-c", code], env=env, encoding="utf-8")
    assert f"usage: surrogap {command}" in output
    assert "╭─ options" in output  # tyro's borders, if the output is UTF-8
    loaded = {name.split(".")[0] for name in output.splitlines()[-1].split()}
    assert not loaded & {"torch", "numpy", "timm", "torchvision", "matplotlib"}
