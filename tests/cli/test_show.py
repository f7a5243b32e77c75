"""`surrogap show`."""

import io
import json
import sys
from pathlib import Path

import pytest

from surrogap.cli import main
from surrogap.experiments import run_summary
from surrogap.training.records import read_records
from surrogap.training.run import train
from tests.training.small_runs import Interrupting, config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = config(tmp_path_factory.mktemp("gsam"), rho=0.2, rho_min=0.1, alpha=0.3)
    return train(settings).folder


def test_the_summary_matches_the_last_record(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run)]) == 0
    out = capsys.readouterr().out
    last = [record for record in read_records(run) if record["kind"] == "epoch"][-1]
    lines = {
        line.split("  ")[0].strip(): line.split("  ", 1)[-1].strip() for line in out.split("\n")
    }
    assert lines["model"] == "small_mlp"
    assert lines["objective"] == "gsam (rho 0.2, rho_min 0.1, alpha 0.3)"
    assert lines["steps"] == "12"
    assert lines["epochs"] == "3"
    assert lines["test accuracy"] == f"{100 * last['test_accuracy']:.2f} %"
    assert lines["test loss"] == f"{last['test_loss']:.4f}"
    assert "skipped steps" not in lines
    for label in ("training loss", "test loss", "gap h", "cosine of g and g_p", "radius rho"):
        assert label in out
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert f"Curves: {run / 'curves.png'}" in out


def test_sharpness_is_drawn_over_the_same_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, sharpness_every=6)
    values = iter([3.0, 2.0])
    probe = {"eigenvalue": 1.0, "worst_sharpness": 1.0}
    folder = train(settings, probe=lambda *_: lambda: probe | {"eigenvalue": next(values)}).folder
    curves: dict[str, object] = {}
    monkeypatch.setattr(run_summary, "draw_curves", lambda path, drawn, *_: curves.update(drawn))
    assert main(["show", str(folder)]) == 0
    # Twelve steps are three epochs.
    assert curves["dominant eigenvalue"] == [(1.5, 3.0), (3.0, 2.0)]
    assert [epoch for epoch, _ in curves["training loss"]] == [1.0, 2.0, 3.0]
    assert "worst 2h/rho^2" in capsys.readouterr().out


def test_scores_that_are_not_finite(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "versions.json"):
        (tmp_path / name).write_text((run / name).read_text())
    records = read_records(run)
    records[-1] |= {"test_loss": None, "test_calibration_error": None}
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert main(["show", str(tmp_path)]) == 0
    assert "test loss          not finite" in capsys.readouterr().out


def test_without_unicode_curves_are_described(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", plain)
    png = tmp_path / "other.png"
    assert main(["show", str(run), "--png", str(png)]) == 0
    plain.seek(0)
    losses = [record["loss"] for record in read_records(run) if record["kind"] == "epoch"]
    assert f"training loss: from {losses[0]:.4g} to {losses[-1]:.4g}\n" in plain.read()
    assert png.exists()


def test_before_the_end_of_an_epoch_steps_are_drawn(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "versions.json"):
        (tmp_path / name).write_text((run / name).read_text())
    steps = [record for record in read_records(run) if record["kind"] == "step"][:1]
    skip = {"kind": "skip", "step": 3, "in_a_row": 1}
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*steps, skip]))
    assert main(["show", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "1, whose loss was not finite" in out
    assert "training loss" in out
    assert "test accuracy" not in out


def test_the_reason_of_a_failure_is_shown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "versions.json"):
        (tmp_path / name).write_text((run / name).read_text())
    records = [
        {"kind": "skip", "step": 1, "in_a_row": 1},
        {"kind": "failure", "step": 1, "reason": "the reason"},
    ]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert main(["show", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "1, whose loss was not finite" in out
    assert "the reason" in out


def test_a_narrow_terminal_has_one_chart_per_row(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["show", str(run)]) == 0
    assert all(
        len(line) <= 40
        for line in capsys.readouterr().out.split("training loss")[1].splitlines()[:-1]
    )


def test_refusals(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path / "none")]) == 2
    assert "run must be a folder with a readable config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    assert main(["show", str(tmp_path)]) == 2
    assert f"run must have records, got none yet in {tmp_path}" in capsys.readouterr().err
    png = tmp_path / "no" / "such.png"
    assert main(["show", str(run), "--png", str(png)]) == 2
    text = f"png must be a writable file, got {png} (No such file or directory). Pass another --png"
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "stop", "steps"),
    [
        ({"steps": 10}, 3, "3 of 10, unfinished (surrogap train --resume --out {} continues)"),
        ({"epochs": 3}, 5, "5 of 12, unfinished (surrogap train --resume --out {} continues)"),
        (
            {"epochs": 3},
            2,
            "2 of 3 epochs, unfinished (surrogap train --resume --out {} continues)",
        ),
        ({"steps": 10}, None, "10"),
    ],
)
def test_an_unfinished_run_is_shown_as_unfinished(
    changes: dict[str, int],
    stop: int | None,
    steps: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = None if stop is None else Interrupting(stop)
    own = config(tmp_path / "my runs", record_every=1, **changes)
    folder = train(own, progress=progress).folder
    assert main(["show", str(folder)]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines()[1:6])
    assert lines["steps"].strip() == steps.format(f"'{folder}'")
    assert lines["objective"].strip() == "gsam (rho 0.1, alpha 0.1)"  # the defaults


def test_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "--objectives", "vanilla", "gsam", "--seeds", "2", "--epochs", "1"]
    words += ["--device", "cpu", "--no-tensorboard", "--out", str(tmp_path / "both")]
    assert main(words) == 0
    compared = capsys.readouterr().out
    assert main(["show", str(tmp_path / "both")]) == 0
    shown = capsys.readouterr().out.splitlines()[1:]
    assert shown
    assert set(shown) <= set(compared.splitlines())
    (tmp_path / "both" / "comparison.json").write_text("[1, 2]")
    assert main(["show", str(tmp_path / "both")]) == 2
    assert "comparison must be a file that surrogap compare wrote" in capsys.readouterr().err
