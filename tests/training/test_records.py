"""Records: in JSON, for TensorBoard and on the display."""

import errno
import io
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from surrogap.evaluation import Scores
from surrogap.training import progress
from surrogap.training.failure import RunFailedError
from surrogap.training.processes import World
from surrogap.training.records import Meter, Records, read_records
from surrogap.training.run import train
from surrogap.training.step import METRICS
from tests.training import small_runs

WORLD = World(torch.device("cpu"))


def test_lines_of_a_run(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, objective="gsam", rho=0.2, rho_min=0.1, eval_every=2)
    train(config)
    records = read_records(config.folder)
    steps = [record for record in records if record["kind"] == "step"]
    epochs = [record for record in records if record["kind"] == "epoch"]
    assert [record["step"] for record in steps] == [2, 4, 6, 8, 10, 12]
    assert [(record["step"], record["epoch"]) for record in epochs] == [(4, 1), (8, 2), (12, 3)]
    assert ["test_accuracy" in record for record in epochs] == [False, True, True]
    for record in records:
        assert not {"value", "overflow", "overflows"} & set(record)
        assert set(METRICS[:7]) | {"lr", "rho", "images_per_second", "seconds"} <= set(record)
        assert record["gap"] == pytest.approx(record["perturbed_loss"] - record["loss"], abs=1e-5)
        assert record["rho"] == pytest.approx(0.1 + record["lr"])  # from 0.2 at 0.1 to 0.1 at 0
        assert record["images_per_second"] > 0
    for quantity in METRICS[:7]:  # an epoch has two intervals
        means = [
            (a[quantity] + b[quantity]) / 2 for a, b in zip(steps[::2], steps[1::2], strict=True)
        ]
        assert [epoch[quantity] for epoch in epochs] == pytest.approx(means, rel=1e-4)


def test_evaluation_does_not_count_as_training_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: object, **__: object) -> Scores:
        time.sleep(0.5)
        return Scores(0.5, 0.5, 1.0, 0.1, 16)

    monkeypatch.setattr("surrogap.training.run.evaluate", slow)
    config = small_runs.config(tmp_path)
    start = time.perf_counter()
    train(config)
    whole = time.perf_counter() - start
    last = read_records(config.folder)[-1]
    assert 0 < last["seconds"] < whole - 1.5  # the three evaluations
    assert 32 / last["images_per_second"] < whole - 1.5


def test_what_is_not_measured_is_null(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, objective="vanilla", steps=2)
    train(config)
    record = read_records(config.folder)[0]
    assert record["gap"] is record["rho"] is record["cosine"] is None
    assert record["loss"] > 0


def test_the_falling_radius_is_that_of_the_step(tmp_path: Path) -> None:
    config = small_runs.config(
        tmp_path, objective="sam", rho=0.3, rho_inverse_sqrt=True, record_every=1, steps=4
    )
    train(config)
    radii = [r["rho"] for r in read_records(config.folder) if r["kind"] == "step"]
    assert radii == pytest.approx([0.3 / math.sqrt(t) for t in (1, 2, 3, 4)])


def test_tensorboard_beside_it(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = small_runs.config(tmp_path, tensorboard=True)
    train(config, resume=True, progress=small_runs.Interrupting(5))
    train(config, resume=True)
    events = EventAccumulator(str(config.folder / "tensorboard"))
    events.Reload()
    written = {e.step: e.value for e in events.Scalars("step/loss")}
    expected = {r["step"]: r["loss"] for r in read_records(config.folder) if r["kind"] == "step"}
    assert written == pytest.approx(expected)


def test_tensorboard_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="tensorboard must be installed, got"):
        Records(tmp_path, tensorboard=True)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    first = Records(tmp_path)
    first.write({"kind": "step", "step": 1})
    with pytest.raises(ValueError, match="out must not be in use by another process"):
        Records(tmp_path)
    assert read_records(tmp_path) == [{"kind": "step", "step": 1}]
    first.close()
    Records(tmp_path).close()


def test_half_a_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    assert read_records(tmp_path) == [{"kind": "step", "step": 1}]
    assert read_records(tmp_path / "nothing") == []


@pytest.mark.parametrize("left", [b"", b'{"kind": "step", "step": 1}\n{"ste'])
def test_missing_records_are_a_warning(left: bytes, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(left)
    with pytest.warns(UserWarning, match=f"got {len(left)} of 80 bytes"):
        records = Records(tmp_path, position=80)
    records.write({"kind": "step", "step": 4})
    records.close()
    assert [record["step"] for record in read_records(tmp_path)] == [1, 4][not left :]


@pytest.mark.parametrize("line", [b"garbage", b"\0\0", b"\xff", b"[1, 2]", b"{}"])
def test_damaged_records_are_found_before_a_run_is_resumed(line: bytes, tmp_path: Path) -> None:
    content = b'{"kind": "step", "step": 1}\n' + line + b"\n"
    (tmp_path / "records.jsonl").write_bytes(content)
    message = "records must be JSON objects with kind and step, got something else in line 2 of"
    with pytest.raises(ValueError, match=message):
        Records(tmp_path, position=len(content))
    with pytest.raises(ValueError, match=message):
        read_records(tmp_path)


def test_a_folder_that_became_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    records = Records(tmp_path)
    monkeypatch.setattr(os, "fsync", fail)
    message = "Read-only file system. Make the folder writable, then pass --resume."
    with pytest.raises(RunFailedError, match=message):
        records.position()
    records.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records._file.close()
    records._file = open("/dev/full", "r+b")  # noqa: SIM115
    with pytest.raises(
        RunFailedError, match=r"No space left on device. Free some disk space, then pass"
    ):
        records.write({"kind": "step", "step": 1})
    records.close()


def test_a_disk_that_is_full_for_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("surrogap.training.records._summary_writer", lambda: full)
    with pytest.raises(
        RunFailedError, match=r"No space left on device. Free some disk space, then pass"
    ):
        Records(tmp_path, tensorboard=True)


def test_meters_skip_pauses_and_are_resumed() -> None:
    meter, row = Meter(WORLD), torch.arange(float(len(METRICS)))
    assert math.isnan(meter.means()["loss"])
    meter.add(row)
    meter.leave_out(-100.0)
    other = Meter(WORLD)
    other.load_state_dict(meter.state_dict())
    other.add(row + 2)
    assert other.means() == dict(zip(METRICS, range(1, len(METRICS) + 1), strict=True))
    assert 100 < other.seconds < 110


def test_a_mean_is_over_the_steps_that_measured_it() -> None:
    """Plain steps have no second pass, and steps with an overflow no finite norm."""
    meter = Meter(WORLD)
    plain = {"loss": 3.0, "grad_norm": 4.0, "value": 3.0, "overflow": 0.0}
    perturbed = {"perturbed_loss": 7.0, "perturbed_grad_norm": 2.0, "value": 7.0, "overflow": 0.0}
    overflow = {"loss": 2.0, "grad_norm": math.inf, "value": 2.0, "overflow": 1.0}
    for step in (plain, perturbed, overflow, perturbed):
        meter.add(torch.tensor([step.get(name, math.nan) for name in METRICS]))
    means = meter.means()
    assert (means["loss"], means["perturbed_loss"]) == (2.5, 7.0)
    assert (means["grad_norm"], means["perturbed_grad_norm"]) == (4.0, 2.0)
    assert (means["value"], means["overflow"]) == (4.75, 0.25)
    assert math.isnan(means["gap"])


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_lost_value_is_not_left_out(lost: float) -> None:
    """It stops captured runs."""
    meter = Meter(WORLD)
    for value in (1.0, lost, 1.0):
        meter.add(torch.full((len(METRICS),), value))
    assert not math.isfinite(meter.means()["value"])


@pytest.mark.parametrize(
    "changes",
    [{"objective": "momentum-sam"}, {"objective": "sam", "climb_fraction": 0.5}],
    ids=str,
)
def test_a_run_without_its_loss_records_the_perturbed_one(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_runs.config(tmp_path, rho=0.1, **changes)
    train(config, progress=progress.LineDisplay())
    for record in read_records(config.folder):
        assert record["loss"] is record["gap"] is record["grad_norm"] is None
        assert 0 < record["perturbed_loss"] < 5
        assert record["accuracy"] is not None
        assert record["rho"] == 0.1
        shown = f"loss {record['perturbed_loss']:.4f}"
    assert shown in capsys.readouterr().out


def test_plain_steps_spare_the_means(tmp_path: Path) -> None:
    """The mean gap is over the steps that use the objective."""
    changes: dict[str, Any] = {"objective": "sam", "rho": 0.1, "steps": 4, "momentum": 0.0}
    every = small_runs.config(tmp_path / "every", **changes, every=2, record_every=1)
    together = small_runs.config(tmp_path / "together", **changes, every=2, record_every=4)
    train(every)
    train(together)
    gaps = [r["gap"] for r in read_records(every.folder) if r["kind"] == "step"]
    assert [gap is None for gap in gaps] == [False, True, False, True]
    (record,) = (r for r in read_records(together.folder) if r["kind"] == "step")
    assert record["gap"] == pytest.approx((gaps[0] + gaps[2]) / 2, rel=1e-4)
    assert record["rho"] == 0.1


RECORDS: list[dict[str, Any]] = [
    {"kind": "step", "step": 1, "loss": 1.0},
    {"kind": "epoch", "step": 2, "epoch": 1, "loss": 0.5, "gap": math.nan, "test_accuracy": 0.75},
    {"kind": "skip", "step": 3, "in_a_row": 2},
    {"kind": "failure", "step": 3, "reason": "the disk is full"},
]


def test_a_line_for_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    lines = progress.display_for_stdout()
    assert isinstance(lines, progress.LineDisplay)
    lines.start("net gsam", 0, 4)
    for record in RECORDS:
        lines.step(record["step"])
        lines.record(record)
    lines.stop()
    first, epoch, skip = capsys.readouterr().out.splitlines()
    assert first == "net gsam: 4 steps"
    assert epoch.startswith("2/4  epoch 1  loss 0.5000  test 75.00%  0:00 left")
    assert "skipped a step: its loss is not finite (2 in a row)" in skip


def test_lines_within_long_epochs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    lines = progress.LineDisplay()
    lines.start("net", 10, 7210)
    now = 40.0
    lines.record({"kind": "step", "step": 20, "loss": 1.0})
    now = 41.0
    lines.record({"kind": "step", "step": 21, "loss": 1.0})
    assert capsys.readouterr().out.splitlines() == [
        "net: 7210 steps, from step 10",
        "20/7210  loss 1.0000  7:59:20 left",
    ]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        progress, "Console", lambda: Console(file=screen, force_terminal=True, width=120)
    )
    screen = io.StringIO()
    bar = progress.display_for_stdout()
    assert isinstance(bar, progress.BarDisplay)
    bar.start("net gsam", 0, 4)
    for record in RECORDS:
        bar.step(record["step"])
        bar.record(record)
    bar.stop()
    assert "epoch 1  loss 0.5000  test 75.00%" in screen.getvalue()
    assert "3/4" in screen.getvalue()


@pytest.mark.parametrize("width", [70, 80])
def test_a_narrow_terminal_shows_bar_and_time(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    monkeypatch.setattr(progress, "Console", lambda: screen)
    bar = progress.BarDisplay()
    bar.start("small_resnet18 gsam", 0, 10_000)
    bar.record({"kind": "step", "step": 5000, "loss": 1.0, "gap": 0.1, "images_per_second": 9e6})
    bar.record({"kind": "epoch", "step": 5000, "epoch": 3, "loss": 1.0, "test_accuracy": 0.5})
    bar.stop()
    with screen.capture() as capture:
        screen.print(bar._bar.get_renderable())
    (line,) = capture.get().splitlines()
    assert line.startswith(f"small_resnet18 gsam {4 * '━'}")
    assert "loss 1.0000  gap 0.1000" in line or width < 80
    assert "5000/10000 -:--:-- loss" in line
    assert "epoch" not in line


def test_every_line_is_json(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.write({"kind": "step", "step": 1, "loss": math.inf, "in_a_row": None})
    records.close()
    line = (tmp_path / "records.jsonl").read_text()
    assert json.loads(line) == {"kind": "step", "step": 1, "loss": None, "in_a_row": None}


def test_lines_of_long_runs_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    measures = dict.fromkeys(("loss", "gap", "accuracy", "test_loss", "images_per_second"), 0.1)
    lines = progress.LineDisplay()
    lines.start("small_resnet18_narrow gsam", 0, 900_000)
    lines._start -= 90_000
    epoch = {"kind": "epoch", "step": 100_000, "epoch": 100, "test_accuracy": 0.8123}
    lines.record(measures | epoch)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith("test 81.23%  200:00:00 left")
    assert len(line) <= 80
