"""The cost of methods relative to plain training, and the timing of steps."""

import time
from pathlib import Path

import pytest
import torch

from surrogap.paper import measuring
from surrogap.paper.ledger import Ledger
from surrogap.paper.measuring import measure
from surrogap.paper.plan import Measurement, missing_measurements, relative_cost
from surrogap.paper.running import Environment
from surrogap.paper.scales import GPU
from tests.paper import synthetic_study


def test_cost_is_the_time_of_a_step_times_the_steps() -> None:
    line = {"seconds_per_step": {"vanilla": 2.0, "sam": 5.0, "entropy-sgd": 10.0}}
    costs = {
        "vanilla": 1.0,
        "vanilla-2x": 2.0,
        "sam": 2.5,
        "entropy-sgd": 0.4 * 5.0,
        "sam-late": 2 / 3 + 2.5 / 3,
    }
    assert {name: relative_cost(line, name) for name in costs} == pytest.approx(costs)


def test_the_newest_timing_of_a_step_counts(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "study.jsonl")
    assert ledger.newest_timing("gpu", "A", "sam") is None
    line = synthetic_study.timing(GPU)
    for key, date in (("a", "2026-01-02"), ("b", "2026-01-03"), ("c", "2026-01-01")):
        ledger.append(line | {"key": key, "date": date})
    ledger.append(line | {"key": "d", "date": "2027-01-01", "scale": "laptop"})
    some = {"vanilla": 1.0, "gsam": 2.0}
    ledger.append(line | {"key": "e", "date": "2026-01-04", "seconds_per_step": some})
    found = {step: ledger.newest_timing("gpu", "A", step) for step in ("sam", "gsam", "none")}
    assert [line and line["key"] for line in found.values()] == ["b", "e", None]


def test_steps_are_timed(tmp_path: Path) -> None:
    scale = synthetic_study.tiny(tmp_path)
    methods = ("vanilla-2x", "sam", "sam-late")
    measurement = Measurement("timing", "A", methods, seconds=1.0)
    ledger = Ledger(tmp_path / "study.jsonl")
    line = measure(measurement, Environment(scale), ledger)
    assert set(line["seconds_per_step"]) == {"vanilla", "sam"}  # SAM's step is timed once
    assert line["compile"] is False
    assert all(0 < seconds < 10 for seconds in line["seconds_per_step"].values())
    assert (line["kind"], line["setup"], line["scale"]) == ("timing", "A", "laptop")
    ledger.append(line)
    assert Ledger(ledger.path).newest_timing("laptop", "A", "sam") == line


def test_no_model_is_left_uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process compiles eight models between two resets, and runs others uncompiled."""
    events: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: events.append("compile"))
    monkeypatch.setattr(torch.compiler, "reset", lambda: events.append("reset"))
    environment = Environment(synthetic_study.tiny(tmp_path), compile=True)
    found = measuring.timing("A", ("sam", "gsam"), environment)
    assert events == 3 * ["reset", "compile"]
    assert found["compile"] is True


def test_only_steps_without_a_timing_are_timed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "study.jsonl")
    (whole,) = missing_measurements(GPU, ["timing"], ledger)
    line = synthetic_study.timing(GPU) | {"seconds": 28.0}
    times = dict(line["seconds_per_step"])
    assert list(whole.methods) == list(times)
    del times["asam"], times["sam-quarter"]
    ledger.append(line | {"seconds_per_step": times})
    (some,) = missing_measurements(GPU, ["timing"], ledger)
    assert some.methods == ["asam", "sam-quarter"]
    assert some.seconds == pytest.approx(2 * 28.0 / len(times))
    ledger.append(line | {"key": "some", "seconds_per_step": dict.fromkeys(("asam", *times), 1.0)})
    (last,) = missing_measurements(GPU, ["timing"], ledger)
    assert last.methods == ["sam-quarter"]


def test_the_best_of_several_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, took = [0.0], iter([9.0, 2.0, 1.0, 4.0])

    def step() -> None:
        now[0] += next(took)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    device = torch.device("cpu")
    assert measuring._best_times({"a": step, "b": step}, device, 2, 1) == {"a": 1.0, "b": 2.0}
