"""`surrogap reproduce` for tables and figures of the study, on a tiny one."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from surrogap.cli import main
from surrogap.experiments.recipes import RECIPES, Recipe
from surrogap.paper import imagenet_runs, plan, workers
from surrogap.paper.artifacts import ARTIFACTS, stages
from surrogap.paper.ledger import Ledger, LedgerLine
from surrogap.paper.methods import METHODS
from surrogap.paper.plan import todo
from surrogap.paper.scales import SCALES
from surrogap.paper.study import Scale
from surrogap.paper.tuning import trials
from surrogap.training.config import Config
from surrogap.training.records import read_records
from tests.paper import synthetic_study
from tests.training import small_runs


@pytest.fixture
def scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scale:
    """The laptop's study with one trial and one seed, on noise; its ledger is in the folder."""
    found = synthetic_study.tiny(tmp_path)
    found = replace(found, num_trials=1, num_seeds={"A": 1, "G": 1}, num_ablation_seeds=1)
    monkeypatch.setitem(SCALES, "laptop", found)
    monkeypatch.chdir(tmp_path)
    return found


def reproduce(*words: object) -> int:
    return main(["reproduce", *map(str, words)])


def test_a_table_is_trained_and_drawn(
    scale: Scale, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce("table-epochs", "--out", tmp_path / "out") == 0
    out = capsys.readouterr().out
    ledger = Ledger(Path(scale.ledger))
    assert [(line["method"], line["purpose"]) for line in ledger] == [
        # SAM is tuned for GSAM's radii only.
        *((method, "tuning") for method in ("vanilla", "vanilla-2x", "sam", "gsam")),
        *((method, "final") for method in ("vanilla", "vanilla-2x", "gsam")),
    ]
    assert "A gsam, rho 0.05, alpha 0.1, seed 0: validation" in out
    assert "All runs are finished." in out
    found = json.loads((tmp_path / "out" / "table-epochs.json").read_text())
    accuracy = next(line for line in ledger if line["seed"] == 0)["scores"]["test"]["accuracy"]
    assert found["cells"][0]["scores"]["test"]["mean"] == pytest.approx(100 * accuracy)
    assert found["scale"] == "laptop"
    # Runs in the ledger are not trained again.
    assert reproduce("table-epochs", "--out", tmp_path / "out") == 0
    assert len(Ledger(ledger.path)) == 7


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace training, and return the list of titles of the requested runs."""
    asked = []

    def train_and_score(run: Any, environment: Any) -> LedgerLine:
        asked.append(run.title)
        return synthetic_study.line(run, environment.scale)

    monkeypatch.setattr(workers, "train_and_score", train_and_score)
    return asked


@pytest.mark.parametrize("name", ARTIFACTS)
def test_every_name_is_trained_and_drawn(
    name: str, scale: Scale, instant: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "fig-cost":
        Ledger(Path(scale.ledger)).append(synthetic_study.timing(scale))
    assert reproduce(name) == 0
    assert instant
    folder = Path("runs") / f"reproduce-{name}"
    draws = ARTIFACTS[name].draw is not None
    assert (folder / f"{name}.png").exists() == draws
    assert f"Numbers: {folder / name}.json." in capsys.readouterr().out


def test_a_dry_run_lists_the_missing_runs(
    scale: Scale, instant: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    left = todo(scale, stages("table-1"), Ledger(Path(scale.ledger)))
    assert reproduce("table-1", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["purpose", "run", "expected"]
    assert lines[1].startswith("tuning   A vanilla, lr 0.05, weight_decay 0.001, seed 1000")
    assert lines[1].endswith(" 9 s")
    assert lines[5].startswith("final    A vanilla, as tuned, seed 0")
    minutes = sum(item.seconds for item in left) / 60
    assert lines[-1] == f"{len(left)} runs left, about {minutes:.0f} min."
    assert reproduce("table-1", "--dry-run", "--jobs", 4) == 0
    assert capsys.readouterr().out.endswith("about 1 min, 4 at once.\n")
    assert not instant
    assert not Path(scale.ledger).exists()


def test_the_time_limit_leaves_runs_out(
    scale: Scale, instant: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce("table-epochs", "--time-limit", 0) == 0
    assert not instant
    assert "7 runs left, about 1 min." in capsys.readouterr().out


def test_finished_runs_can_be_drawn_without_training(
    scale: Scale, instant: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce("all", "--no-train", "--page", tmp_path / "page.md") == 2
    assert f"got {scale.ledger}, which does not exist. Pass another" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
    Path(scale.ledger).touch()
    assert reproduce("all", "--no-train", "--page", tmp_path / "page.md") == 0
    assert not instant
    assert (
        "* `fig-cost`: Test accuracy against the cost of training"
        in (tmp_path / "page.md").read_text()
    )
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        f"reproduce-{name}" for name in ARTIFACTS
    }


def test_training_without_drawing(scale: Scale, instant: list[str], tmp_path: Path) -> None:
    assert reproduce("table-epochs", "--no-draw") == 0
    assert len(instant) == 7
    assert not (tmp_path / "runs").exists()


def test_steps_are_timed_by_name(
    scale: Scale, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "METHODS", {name: METHODS[name] for name in ("vanilla", "sam")})
    assert reproduce("timing") == 0
    assert [line["kind"] for line in Ledger(Path(scale.ledger))] == ["timing"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 measurement left, about ")
    assert lines[1].split("  ")[0] == "method"
    assert [line.split()[0] for line in lines[2:]] == ["vanilla", "sam"]
    assert lines[2].split()[-1] == "1.00"


def test_radii_are_suggested_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scale = synthetic_study.tiny(tmp_path, model="small_resnet18_narrow")  # has norm layers
    monkeypatch.setitem(SCALES, "laptop", scale)
    monkeypatch.chdir(tmp_path)
    assert reproduce("find-rho") == 0
    *left, why = capsys.readouterr().out.splitlines()
    assert left == 2 * ["1 measurement left, about 1 min."]  # before and after
    assert why.endswith("To tune some, run surrogap reproduce table-1.")
    ledger = Ledger(Path(scale.ledger))
    for method in ("vanilla", "sam"):
        for run in trials(scale, "A", method, ledger):
            ledger.append(synthetic_study.line(run, scale))
    assert reproduce("find-rho", "--dry-run") == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert " ".join(row.split()) == "find-rho A, 4 methods 60 s"
    assert reproduce("find-rho", "--page", tmp_path / "page.md") == 0
    *_, line = Ledger(ledger.path)
    assert line["kind"] == "find-rho"
    _, *printed = capsys.readouterr().out.splitlines()
    for words in ([], ["--dry-run"]):
        assert reproduce("find-rho", *words) == 0
        assert capsys.readouterr().out == "All runs are finished.\n"
    for method, text in zip(line["suggestions"], printed, strict=False):
        assert text == f"A, {METHODS[method].title}: {line['suggestions'][method]['words']}"
    assert "## Radii: find-rho against the study" in (tmp_path / "page.md").read_text()


def test_after_a_signal_finished_runs_are_kept(
    scale: Scale, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[str] = []

    def train_and_score(run: Any, environment: Any) -> LedgerLine:
        if trained:
            os.kill(os.getpid(), signal.SIGTERM)
        trained.append(run.key)
        return synthetic_study.line(run, environment.scale)

    monkeypatch.setattr(workers, "train_and_score", train_and_score)
    assert reproduce("table-epochs") == 128 + signal.SIGTERM
    assert "SIGTERM stopped surrogap reproduce. Finished runs are in" in capsys.readouterr().err
    assert [line["key"] for line in Ledger(Path(scale.ledger))] == trained


def test_incomplete_lines_of_the_ledger_are_reported(
    scale: Scale, instant: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(scale.ledger).write_text('{"kind": "ru')
    assert reproduce("table-epochs", "--dry-run") == 0
    assert "skipped 1 incomplete line." in capsys.readouterr().out


def test_the_paper_scale_lists_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("table-epochs", "--scale", "paper") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("--recipe ")[2].split(" --out")[0] for line in lines] == [
        "vit-b32-vanilla",
        "vit-b32-vanilla --epochs 600",
        "vit-b32-gsam",
    ]
    assert all(line.startswith("torchrun --nproc-per-node 8 -m surrogap.cli") for line in lines)
    assert reproduce("fig-cost", "--scale", "paper") == 2
    assert "scale must be laptop or gpu for fig-cost" in capsys.readouterr().err


def test_the_paper_scale_trains_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_runs.config(tmp_path)
    for objective in ("vanilla", "gsam"):
        recipe = Recipe(f"vit-b32-{objective}", config.override(out=f"runs/{objective}"), "", "")
        monkeypatch.setitem(RECIPES, f"vit-b32-{objective}", recipe)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        imagenet_runs,
        "PAPER_RUNS",
        {"fig-cosine": [imagenet_runs.PaperRun("vit-b32-gsam", {"epochs": 1})]},
    )
    assert reproduce("fig-cosine", "--scale", "paper") == 0
    folder = tmp_path / "runs" / "vit-b32-gsam-epochs-1"
    assert [r["epoch"] for r in read_records(folder) if r["kind"] == "epoch"] == [1]


@pytest.mark.parametrize("run", imagenet_runs.paper_runs("all"), ids=lambda run: run.out)
def test_the_commands_of_the_paper_scale_match_its_runs(
    run: imagenet_runs.PaperRun, capsys: pytest.CaptureFixture[str]
) -> None:
    words = run.command.partition("train ")[2].split()
    assert main(["train", *words, "--print-config", "--data-root", "images"]) == 0
    found = Config.from_dict(json.loads(capsys.readouterr().out))
    assert found == run.config("images")


def test_options_without_effect_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["fig-gap", "--dry-run"],
        ["fig-gap", "--no-train"],
        ["theory", "--time-limit", 9],
        ["table-1", "--seeds", 5],
        ["table-1", "--seeds", 3],  # the default of fig-rho-alpha
    ):
        assert reproduce(*words) == 2
        error = capsys.readouterr().err
        assert f"{words[1]} has no effect on {words[0]}. Leave it out." in error


def test_what_cannot_end_well_is_refused_before_training(
    instant: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce("table-epochs", "--time-limit", "nan") == 2
    assert "time_limit must be" in capsys.readouterr().err
    assert reproduce("table-epochs", "--ledger", "/proc/study.jsonl") == 2
    assert "ledger must be a writable file" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert reproduce("table-epochs", "--scale", "gpu", "--ledger", tmp_path / "new.jsonl") == 2
        assert "scale must be laptop without a CUDA device" in capsys.readouterr().err
    assert not instant


def test_ctrl_c_between_runs_says_how_to_go_on(
    scale: Scale, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "train_all", interrupted)
    assert reproduce("table-epochs") == 130
    assert f"Finished runs are in {scale.ledger}. Run the same" in capsys.readouterr().err
