"""`surrogap landscape`: the losses match those at weights that the tests compute."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from surrogap.analysis import Hessian, eigenvalues, figures, random_direction
from surrogap.cli import main
from surrogap.experiments.trained import TrainedRun
from surrogap.training.run import train
from tests.cli.test_sharpness import surface_of
from tests.training.small_runs import config


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two seeds of a small MLP, on the same images."""
    root = tmp_path_factory.mktemp("runs")
    settings = {"label_smoothing": 0.1, "data": config(root).data.name}
    return tuple(  # type: ignore[return-value]
        train(config(root, seed=seed, out=str(root / f"{seed}"), **settings)).folder
        for seed in (0, 1)
    )


def drawn(*words: str | Path) -> int:
    return main(["landscape", *map(str, words), "--device", "cpu"])


def result_of(folder: Path, stem: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"landscape-{stem}.json").read_text())
    return found


def loss_at(run: Path, weights: dict[str, Tensor]) -> float:
    surface = surface_of(run)
    surface.model.load_state_dict(weights)
    return float(surface.loss())


def weights_of(run: Path) -> dict[str, Tensor]:
    trained = TrainedRun.read(run)
    return trained.model(trained.splits()).state_dict()


def test_the_line_between_two_runs(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--points", "3", "--radius", "0.5", "--out", tmp_path]
    assert drawn(*runs, *words) == 0
    found = result_of(tmp_path, "to-1")
    assert found["steps"] == [-0.5, 0.0, 0.5, 1.0, 1.5]
    one, other = map(weights_of, runs)
    for step, loss in zip(found["steps"], found["losses"], strict=True):
        mixed = {name: (1 - step) * one[name] + step * other[name] for name in one}
        assert loss == pytest.approx(loss_at(runs[0], mixed), rel=1e-5)
    assert found["other"] == str(runs[1])
    assert capsys.readouterr().out.startswith("At most 2 gradient evaluations over 32 images.\n")
    assert (tmp_path / "landscape-to-1.png").read_bytes().startswith(b"\x89PNG")


def test_a_random_direction_matches_the_library(runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert drawn(runs[0], "--points", "3", "--out", tmp_path) == 0
    found = result_of(tmp_path, "random")
    surface = surface_of(runs[0])
    assert found["steps"] == [-1.0, 0.0, 1.0]
    assert found["losses"][1] == pytest.approx(float(surface.loss()), rel=1e-5)
    with surface.moved(random_direction(surface, 0)):
        assert found["losses"][2] == pytest.approx(float(surface.loss()), rel=1e-4)


def test_the_gradient_and_an_eigenvector(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The slope along the gradient, and the losses along the library's eigenvector."""
    words = ["--directions", "gradient", "eigenvector", "--points", "3", "--radius", "0.02"]
    assert drawn(runs[0], *words, "--out", tmp_path) == 0
    found = result_of(tmp_path, "gradient-eigenvector")
    rows, step = found["losses"], 0.02
    surface = surface_of(runs[0])
    norm = float(surface.space.norm(surface.gradient()[1]))
    assert (rows[1][2] - rows[1][0]) / (2 * step) == pytest.approx(norm, rel=1e-2)
    top = eigenvalues(Hessian(surface))
    assert found["labels"][1] == f"eigenvector ({float(top.values[0]):.4g})"
    for sign, row in ((-1, rows[0]), (1, rows[2])):
        with surface.moved(sign * step * top.vectors[0]):
            assert row[1] == pytest.approx(float(surface.loss()), rel=1e-5)
    # 9 losses, 1 gradient, and at most 50 products.
    assert "At most 104 gradient evaluations" in capsys.readouterr().out
    for name in ("contour", "surface"):
        path = tmp_path / f"landscape-gradient-eigenvector-{name}.png"
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_same_name_twice_gives_two_directions(runs: tuple[Path, Path], tmp_path: Path) -> None:
    words = ["--points", "3", "--out", str(tmp_path), "--directions"]
    assert drawn(runs[0], *words, "random", "random") == 0
    found = result_of(tmp_path, "random-random")
    assert found["labels"][0] != found["labels"][1]
    surface = surface_of(runs[0])
    with surface.moved(random_direction(surface, 1)):
        assert found["losses"][2][1] == pytest.approx(float(surface.loss()), rel=1e-4)
    assert drawn(runs[0], *words, "eigenvector", "eigenvector") == 0
    first, second = (
        float(label.split("(")[1].rstrip(")"))
        for label in result_of(tmp_path, "eigenvector-eigenvector")["labels"]
    )
    assert first > second > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{a} {b} --directions random", "directions must be left out between two runs, got random"),
        (
            "{a} --directions gradient gradient",
            "directions must be one or two different ones, got gr",
        ),
        ("{a} --directions random random random", "directions must be one or two different ones"),
        ("{a} --directions up", "invalid choice 'up' for argument '--directions'"),
        ("{a} --points 2", "points must be at least 3, got 2"),
        ("{a} --radius 0", "radius must be above 0 and finite, got 0.0"),
        ("{a} {b} --radius -1", "radius must be at least 0 and finite, got -1.0"),
        ("{a} {tmp}", "run must be a folder with a readable config.json, got"),
        ("{tmp}", "run must be a folder with a readable config.json, got"),
        ("--model small_mlp --data embedded --directions random random gradient", "one or two"),
    ],
)
def test_mistakes(
    words: str,
    message: str,
    runs: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    filled = words.format(a=runs[0], b=runs[1], tmp=tmp_path).split()
    assert drawn(*filled, "--out", out) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_run_of_another_model_is_refused(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = TrainedRun.read(runs[0]).config.data.name
    other = train(config(tmp_path, data=data, model="small_mixer_narrow", image_size=8, steps=1))
    assert drawn(runs[0], other.folder, "--out", tmp_path) == 2
    assert "other must have the same parameters and buffers, got" in capsys.readouterr().err


def test_batchnorm_uses_its_running_statistics(tmp_path: Path) -> None:
    """In evaluation mode, the loss at the centre is that of the model."""
    settings = {"model": "small_resnet18_narrow", "steps": 2}
    run = train(config(tmp_path, label_smoothing=0.1, **settings)).folder
    assert drawn(run, "--points", "3") == 0
    surface = surface_of(run)
    assert any(isinstance(module, nn.BatchNorm2d) for module in surface.model.modules())
    middle = result_of(run, "random")["losses"][1]
    assert middle == pytest.approx(float(surface.loss()), rel=1e-5)


def test_the_line_between_two_runs_is_labelled(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    curves = figures.curves

    def watched(*lines: Any, **words: Any) -> Any:
        made.append(curves(*lines, **words))
        return made[-1]

    monkeypatch.setattr(figures, "curves", watched)
    assert drawn(*runs, "--points", "3", "--images", "20", "--out", tmp_path) == 0
    axes = made[0].axes[0]
    assert axes.get_xlabel() == "fraction of the way from 0 to 1"
    assert axes.get_ylabel() == "cross-entropy, 20 images"
    assert axes.get_title() == "from one run to another"
