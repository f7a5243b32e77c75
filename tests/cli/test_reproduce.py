"""`surrogap reproduce`: the paper's toy examples and theory."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from surrogap.cli import main
from surrogap.cli.studies import TITLES
from surrogap.experiments import run_queue
from surrogap.experiments.recipes import RECIPES, Recipe
from surrogap.experiments.trained import TrainedRun
from surrogap.paper import theory
from surrogap.paper.reproductions import REPRODUCTIONS
from surrogap.paper.toys import Descent, GapToy, Hills, trajectories
from tests.training import small_runs


def result_of(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *REPRODUCTIONS, *TITLES]


def test_the_first_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "fig-gap"]) == 0
    folder, toy = Path("runs") / "reproduce-fig-gap", GapToy()
    minima = result_of(folder, "fig-gap")["minima"]
    assert [m["gap"] for m in minima] == toy.gap(toy.minima).tolist()
    assert [m["perturbed_loss"] for m in minima] == toy.perturbed_loss(toy.minima).tolist()
    assert (folder / "fig-gap.png").read_bytes().startswith(b"\x89PNG")
    assert "w_3 = 4   1           1.5    1.625  0.125" in capsys.readouterr().out


def test_trajectories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fig-trajectory", "--steps", "16", "--frames", "2", "--out", str(tmp_path)]
    assert main(["reproduce", *words]) == 0
    found = result_of(tmp_path, "fig-trajectory")
    for method, one in trajectories(Hills(), Descent(num_steps=16)).items():
        assert found["methods"][method]["end"] == one.path[-1].tolist()
    assert found["num_starts"] == 650
    with Image.open(tmp_path / "fig-trajectory.gif") as animation:
        assert getattr(animation, "n_frames", 1) == 2
    assert (tmp_path / "fig-trajectory.png").exists()
    assert "chosen so that the three end apart" in capsys.readouterr().out


def test_theory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["theory", "--steps", "32", "--seeds", "1", "--out", str(tmp_path)]
    assert main(["reproduce", *words]) == 0
    found = result_of(tmp_path, "theory")
    run = theory.GSAMSettings(num_steps=32, num_seeds=1)
    assert found["theorem_5_1"] == [one.numbers for one in theory.theorem_5_1(run)]
    assert [estimate["sharpness"] for estimate in found["lemma_3_3"]] == pytest.approx(
        [one.numbers["sharpness"] for one in theory.lemma_3_3()]
    )
    assert found["theorem_5_3"][1]["spectrum"] == [2.0, 2.0, 2.0]
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0] for line in lines}
    assert {"Lemma 3.1", "Lemma 3.2", "Lemma 3.3", "Theorem 5.1", "Theorem 5.3"} <= rows
    # Where a statement fails, it is said.
    failing = [line for line in lines if "no: g_p is parallel to g" in line]
    assert len(failing) == 1
    assert "eigenvalues 2, 2, 2" in failing[0]
    assert (tmp_path / "theory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "fig-gpa",
            "name must be one of fig-gap, fig-trajectory, fig-rho-alpha, theory, fig-cost, ",
        ),
        ("table-1 --jobs 0", "jobs must be at least 1, got 0"),
        ("theory --steps 15", "steps must be at least 16, got 15"),
        ("theory --seeds 0", "seeds must be at least 1, got 0"),
        ("fig-trajectory --frames 0", "frames must be at least 1, got 0"),
        ("fig-gap --out {tmp}", "out must be a folder without fig-gap.png, got"),
        ("fig-rho-alpha --recipe fashion-mnist", "recipe must be one of"),
        ("fig-rho-alpha --rhos 0.1 0", "rhos must be above 0 and finite, got 0.0"),
        ("fig-rho-alpha --rhos", "rhos must be distinct, and at least one, got none"),
        ("fig-rho-alpha --alphas 0 -1", "alphas must be at least 0 and finite, got -1.0"),
        (
            "fig-rho-alpha --alphas 0 0.2 0",
            "alphas must be distinct, and at least one, got 0 0.2",
        ),
        ("fig-rho-alpha --alphas zero", "options of surrogap reproduce must be valid, got"),
        ("fig-rho-alpha --steps 15", "steps must be at least 16, got 15"),
    ],
)
def test_mistakes(
    words: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fig-gap.png").write_text("mine")
    assert main(["reproduce", *words.format(tmp=tmp_path).split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["fig-gap.png"]
    assert (tmp_path / "fig-gap.png").read_text() == "mine"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A recipe on grey noise, with epochs of 4 steps."""
    config = small_runs.config(tmp_path_factory.mktemp("images"))
    recipe = Recipe("tiny", config, reproduces="", expected="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "tiny", recipe)
        yield


def rho_alpha(folder: Path, *more: object, steps: int = 16) -> int:
    words = ["--recipe", "tiny", "--steps", steps, "--seeds", 1, "--out", folder]
    grid = ["--rhos", 0.2, 0.1, "--alphas", 0, 0.4]
    return main(["reproduce", "fig-rho-alpha", *map(str, (*words, *grid, *more))])


@pytest.fixture(scope="module")
def trained(tiny: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert rho_alpha(folder) == 0
    return folder


RUNS = [f"rho-{rho}-alpha-{alpha}-seed-0" for rho in (0.1, 0.2) for alpha in (0.0, 0.4)]


def test_rho_and_alpha(trained: Path) -> None:
    found = result_of(trained, "fig-rho-alpha")
    assert sorted(path.name for path in trained.iterdir() if path.is_dir()) == RUNS
    assert (found["rhos"], found["alphas"], found["num_seeds"]) == ([0.1, 0.2], [0.0, 0.4], 1)
    config = RECIPES["tiny"].config.override(steps=16, out=str(trained))
    assert found["configuration"] == config.to_dict()
    for run, name in zip(found["runs"], RUNS, strict=True):
        measured = json.loads((trained / name / "measurements.json").read_text())
        last = small_runs.timeless_records(trained / name)[-1]
        assert run["test_accuracy"] == last["test_accuracy"]
        assert {key: run[key] for key in measured} == measured
        objective = TrainedRun.read(trained / name).config.objective
        assert (run["rho"], run["alpha"]) == (objective.rho, objective.alpha)
    assert [cell["eigenvalue"]["mean"] for cell in found["summary"]] == [
        run["eigenvalue"] for run in found["runs"]
    ]
    assert [trend["at"] for trend in found["trends"]["along_alpha"]] == 3 * [0.1] + 3 * [0.2]
    assert (trained / "fig-rho-alpha.png").read_bytes().startswith(b"\x89PNG")


def test_finished_runs_are_not_trained_again(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(run_queue, "train", fail)
    monkeypatch.setattr(run_queue, "write_measurements", fail)
    assert rho_alpha(trained) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 runs are finished already.\nsmall_mlp on ")
    text = " ".join(out.split())
    for words in result_of(trained, "fig-rho-alpha")["words"]:
        assert words in text
    row = next(line for line in out.splitlines() if line.startswith("0.2  0.4 "))
    run = result_of(trained, "fig-rho-alpha")["runs"][-1]
    assert row.split()[2] == f"{100 * run['test_accuracy']:.2f}"
    assert row.split()[-1] == f"{run['eigenvalue']:.2f}"


def test_an_interrupted_figure_continues_to_the_same_result(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(self: object, step: int) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(run_queue.QueueProgress, "step", interrupt)
        assert rho_alpha(tmp_path) == 128 + signal.SIGTERM
    assert "SIGTERM stopped surrogap reproduce. Its progress is saved" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [RUNS[0]]
    assert rho_alpha(tmp_path) == 0
    here, there = (result_of(folder, "fig-rho-alpha") for folder in (tmp_path, trained))
    assert here["runs"] == there["runs"]


def test_other_runs_are_refused_before_training(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    assert rho_alpha(trained, "--rhos", 0.01, 0.1, steps=17) == 2
    error = capsys.readouterr().err
    assert f"got {trained / RUNS[0]}, whose run has steps=16 and not 17" in error
    assert rho_alpha(trained / RUNS[0]) == 2
    assert "out must be a folder for several runs, got" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def test_ctrl_c_prints_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    stopped = replace(REPRODUCTIONS["theory"], compute=interrupted)
    monkeypatch.setitem(REPRODUCTIONS, "theory", stopped)
    assert main(["reproduce", "theory", "--out", str(tmp_path)]) == 128 + signal.SIGINT
    assert capsys.readouterr().err.endswith("surrogap: stopped by SIGINT.\n")
    assert not list(tmp_path.iterdir())
