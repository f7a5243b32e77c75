"""`surrogap reproduce`: figures and numbers of the paper's toys and theory."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from surrogap.cli import main
from surrogap.experiments import theory
from surrogap.experiments.reproductions import REPRODUCTIONS
from surrogap.experiments.statements import statements
from surrogap.experiments.toys import Descent, GapToy, Hills, path


def result_of(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *REPRODUCTIONS]


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
    start = (-4.0, -1.25)
    for method, numbers in found["methods"].items():
        end = path(method, Hills(), Descent(num_steps=16), start)[-1]
        assert numbers["end"] == pytest.approx(end.tolist())
    assert found["num_starts"] == 650
    with Image.open(tmp_path / "fig-trajectory.gif") as animation:
        assert getattr(animation, "n_frames", 1) == 2
    assert (tmp_path / "fig-trajectory.png").exists()
    assert "chosen so that the three end apart" in capsys.readouterr().out


def test_theory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["theory", "--steps", "32", "--seeds", "1", "--out", str(tmp_path)]
    assert main(["reproduce", *words]) == 0
    found = result_of(tmp_path, "theory")
    run = theory.Run(num_steps=32, num_seeds=1)
    assert found["theorem_5_1"]["loss"] == pytest.approx(list(theory.theorem_5_1(run).loss))
    assert [estimate["sharpness"] for estimate in found["lemma_3_3"]] == pytest.approx(
        [estimate.sharpness for estimate in theory.lemma_3_3()]
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


def holds(**changes: Any) -> dict[str, list[str]]:
    """The last column for made-up findings, by statement."""
    short = theory.Run(num_steps=16, num_seeds=1)
    found: dict[str, Any] = {
        "lemma_3_1": theory.lemma_3_1(),
        "lemma_3_2": [theory.Signs(0.1, 1.0)],
        "lemma_3_3": [theory.Estimate(0.1, 1.03, 0.03)],
        "theorem_5_1": theory.Convergence(short, (16,), (0.1,), (0.2,), (0.3,)),
        "theorem_5_3": [theory.Decrease(short, (1.0, 2.0), total=0.5, lower=0.1, upper=0.9)],
    }
    rows = statements(**(found | changes)).rows
    return {row[0]: [r[-1] for r in rows if r[0] == row[0]] for row in rows}


def test_what_does_not_hold_is_told() -> None:
    assert all(answer == "yes" for answers in holds().values() for answer in answers)
    short = theory.Run(num_steps=16, num_seeds=1)
    failing: dict[str, Any] = {
        "lemma_3_1": theory.lemma_3_1(rho=0.5),
        "lemma_3_2": [theory.Signs(3.0, 0.9)],
        "lemma_3_3": [theory.Estimate(0.1, 1.2, 0.2)],
        "theorem_5_1": theory.Convergence(short, (16,), (0.1,), (0.4,), (0.3,)),
        "theorem_5_3": [theory.Decrease(short, (1.0, 2.0), total=1.5, lower=0.1, upper=0.9)],
    }
    answers = holds(**failing)
    for name in ("Lemma 3.1", "Lemma 3.3", "Theorem 5.1", "Theorem 5.3"):
        assert answers[name] == ["no"]
    assert answers["Lemma 3.2"] == ["this rho is not small"]
    assert answers["Corollary 5.2.1"] == ["yes", "yes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "fig-gpa",
            "name must be one of fig-gap, fig-trajectory, theory, got 'fig-gpa'. The close",
        ),
        ("theory --steps 15", "steps must be at least 16, got 15"),
        ("theory --seeds 0", "seeds must be at least 1, got 0"),
        ("fig-trajectory --frames 0", "frames must be at least 1, got 0"),
        ("fig-gap --out {tmp}", "may write fig-gap.png, got"),
    ],
)
def test_mistakes(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fig-gap.png").write_text("mine")
    assert main(["reproduce", *words.format(tmp=tmp_path).split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["fig-gap.png"]
    assert (tmp_path / "fig-gap.png").read_text() == "mine"
