"""Measurements beside the runs: when they are made, find-rho's line, and its table on the page."""

import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surrogap.cli import main
from surrogap.cli.find_rho import FindRho
from surrogap.paper import workers
from surrogap.paper.ledger import Ledger, LedgerLine
from surrogap.paper.measuring import measure
from surrogap.paper.plan import (
    MEASUREMENT,
    Measurement,
    Stage,
    missing_measurements,
    radius_suggestions,
    step_timing,
)
from surrogap.paper.running import Environment, Stopped
from surrogap.paper.scales import GPU, LAPTOP
from surrogap.paper.study import Cell, Scale
from surrogap.paper.study_page import write_page
from surrogap.paper.tuning import chosen, trials
from surrogap.paper.workers import train_study
from tests.paper import synthetic_study

KINDS = ("timing", "find-rho")
STAGES = [Stage([Cell("A", "vanilla"), Cell("A", "sam")], max_seeds=1)]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "study.jsonl")


def tune(ledger: Ledger, scale: Scale, method: str, setup: str = "A") -> None:
    for one in dict.fromkeys(("vanilla", method)):
        while left := [run for run in trials(scale, setup, one, ledger) if run.key not in ledger]:
            ledger.append(synthetic_study.line(left[0], scale))


def line_of(
    measurement: Measurement, scale: Scale, ledger: Ledger, low: Any = 0.05, high: Any = 0.4
) -> LedgerLine:
    # Radii with the gaps at the ends of the range, or one without a gap.
    losses = [(rho, loss) for rho, loss in ((low, 1.05), (high, 1.5)) if rho is not None]
    radii = [
        {"rho": rho, "loss": 1.0, "perturbed_loss": perturbed_loss, "cosine": 0.9}
        for rho, perturbed_loss in losses or [(10.0, 1.0)]
    ]
    suggestion = {"words": "Try rho.", "num_batches": 1, "radii": radii}
    return {
        "kind": measurement.kind,
        "key": measurement.key(scale, ledger),
        "scale": scale.name,
        "setup": measurement.setup,
        "date": "2026-01-01",
        "seconds": 17.0,
        "compile": False,
        "seconds_per_step": dict.fromkeys(measurement.methods, 1.0),
        "suggestions": dict.fromkeys(measurement.methods, suggestion),
    }


def test_find_rho_measures_the_methods_that_are_tuned_over_the_radius(ledger: Ledger) -> None:
    found = {one.setup: list(one.methods) for one in radius_suggestions(GPU, ledger)}
    four, two = ["sam", "sam-norms", "momentum-sam", "asam"], ["sam", "sam-norms"]
    three = four[:3]
    assert found == {"A": four, "B": two, "C": three, "D": three, "E": two}  # not fine-tuning


def test_measurements_of_the_ledger_are_not_missing(ledger: Ledger) -> None:
    missing = missing_measurements(LAPTOP, KINDS, ledger)
    assert [(one.kind, one.setup) for one in missing] == [
        ("timing", "A"),
        *(("find-rho", setup) for setup in "ACDES"),
    ]
    assert all(one.seconds == len(one.methods) * MEASUREMENT for one in missing)
    for one in missing[:2]:
        ledger.append(line_of(one, LAPTOP, ledger))
    missing = missing_measurements(LAPTOP, KINDS, ledger)
    assert [(one.kind, one.setup, one.seconds) for one in missing] == [
        ("find-rho", setup, number * 17.0 / 4)  # 17 s for the four methods of A
        for setup, number in zip("CDES", (3, 3, 2, 2), strict=True)
    ]
    assert missing_measurements(LAPTOP, (), ledger) == []


def test_other_settings_of_a_set_up_are_measured_again(ledger: Ledger) -> None:
    def key(scale: Scale) -> str:
        return radius_suggestions(scale, ledger)[0].key(scale, ledger)

    before, setup = key(LAPTOP), LAPTOP.setups["A"]
    other = replace(setup, changes={**setup.changes, "lr": 0.3})
    assert key(replace(LAPTOP, setups={"A": other})) != before
    assert key(replace(LAPTOP, find_rho=(7, 1))) != before
    assert key(LAPTOP) == before
    tune(ledger, LAPTOP, "vanilla")
    assert chosen(LAPTOP, "A", "vanilla", ledger) == {"lr": 0.05, "weight_decay": 4e-3}
    assert setup.changes["lr"] == 0.1
    assert key(LAPTOP) != before


def test_the_measurements_of_the_recorded_ledger_are_not_missing() -> None:
    recorded = Ledger(Path(__file__).parents[2] / GPU.ledger)
    setups = {line["setup"] for line in recorded.of_kind("find-rho")}
    assert {"A", "E"} <= setups
    assert not setups & {one.setup for one in missing_measurements(GPU, ["find-rho"], recorded)}


def test_find_rho_waits_for_the_tuning_of_one_radius(ledger: Ledger) -> None:
    suggestion = radius_suggestions(GPU, ledger)[0]
    tune(ledger, GPU, "vanilla")
    tune(ledger, GPU, "gsam")
    assert not suggestion.is_ready(GPU, ledger)
    tune(ledger, GPU, "sam")
    assert suggestion.is_ready(GPU, ledger)
    assert step_timing(GPU, ledger).is_ready(GPU, ledger)


def test_the_study_uses_the_defaults_of_the_command() -> None:
    assert (FindRho.train_steps, FindRho.batches) == GPU.find_rho


def test_a_line_has_the_results_of_the_command_at_the_tuned_learning_rate(
    ledger: Ledger, tmp_path: Path
) -> None:
    scale = synthetic_study.tiny(tmp_path)
    tune(ledger, scale, "vanilla")
    measurement = replace(
        radius_suggestions(scale, ledger)[0],
        methods=["sam", "momentum-sam"],  # the model has no norm layers
    )
    line = measure(measurement, Environment(scale), ledger)
    key = measurement.key(scale, ledger)
    assert (line["kind"], line["key"], line["setup"]) == ("find-rho", key, "A")
    assert {"date", "commit", "hardware", "versions", "seconds"} <= line.keys()
    num_steps, num_batches = scale.find_rho
    assert line["train_steps"] == num_steps
    for method in measurement.methods:
        words = ["--train-steps", str(num_steps), "--batches", str(num_batches)]
        changes = {**trials(scale, "A", method)[0].changes, "lr": 0.05, "weight_decay": 4e-3}
        for name, value in changes.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                words += [f"--{flag}", str(value)]
        assert main(["find-rho", *words, "--out", str(tmp_path / method)]) == 0
        found = json.loads((tmp_path / method / "find-rho.json").read_text())
        suggested = line["suggestions"][method]
        for name in ("low", "center", "radii", "num_batches"):
            assert suggested[name] == found[name]
        assert suggested["high"] == (math.inf if found["high"] is None else found["high"])
        assert found["words"].startswith(suggested["words"])


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace runs and measurements, and return the list of those that were asked for."""
    asked: list[str] = []

    def train_and_score(run: Any, environment: Environment) -> LedgerLine:
        asked.append(f"{run.purpose} {run.method}")
        return synthetic_study.line(run, environment.scale)

    def fake(measurement: Measurement, environment: Environment, ledger: Ledger) -> LedgerLine:
        asked.append(measurement.kind)
        return line_of(measurement, environment.scale, ledger)

    monkeypatch.setattr(workers, "train_and_score", train_and_score)
    monkeypatch.setattr(workers, "measure", fake)
    return asked


def work(ledger: Ledger, scale: Scale, **settings: Any) -> tuple[int, int]:
    """Work on the study, and return the numbers of measurements and of runs that are left."""
    missing = missing_measurements(scale, KINDS, ledger)
    settings = {"after_measurement": lambda line: None, **settings}
    found = train_study(
        STAGES,
        ledger,
        Environment(scale),
        measurements=missing,
        after_run=lambda line, left: None,
        **settings,
    )
    return len(found[0]), len(found[1])


def test_measurements_come_before_runs(ledger: Ledger, tmp_path: Path, done: list[str]) -> None:
    scale = synthetic_study.tiny(tmp_path)
    tune(ledger, scale, "sam")
    assert work(ledger, scale) == (0, 0)
    assert done == [*KINDS, "final vanilla", "final sam"]
    assert work(ledger, scale) == (0, 0)
    assert len(done) == 4


def test_find_rho_comes_last_if_the_radius_was_not_tuned(
    ledger: Ledger, tmp_path: Path, done: list[str]
) -> None:
    scale = synthetic_study.tiny(tmp_path)
    assert work(ledger, scale) == (0, 0)
    assert (done[0], done[-1], len(done)) == ("timing", "find-rho", 8)
    assert work(ledger, scale) == (0, 0)
    assert len(done) == 8


def test_a_measurement_that_does_not_fit_is_not_started(
    ledger: Ledger, tmp_path: Path, done: list[str]
) -> None:
    scale = synthetic_study.tiny(tmp_path)
    tune(ledger, scale, "sam")
    measurements, _ = work(ledger, scale, time_limit=MEASUREMENT - 1)
    assert measurements == 2
    assert not {*KINDS} & {*done}


def test_an_interrupted_measurement_starts_again(
    ledger: Ledger, tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scale, real = synthetic_study.tiny(tmp_path), workers.measure

    def stopped(measurement: Measurement, *rest: Any) -> LedgerLine:
        if measurement.kind == "find-rho":
            signal.raise_signal(signal.SIGTERM)
        return real(measurement, *rest)

    tune(ledger, scale, "sam")
    monkeypatch.setattr(workers, "measure", stopped)
    with pytest.raises(Stopped):
        work(ledger, scale)
    monkeypatch.setattr(workers, "measure", real)
    assert work(Ledger(ledger.path), scale) == (0, 0)
    assert done[:2] == ["timing", "find-rho"]


@pytest.mark.parametrize(
    ("low", "high", "suggested", "verdict"),
    [
        (0.05, 0.4, "0.05 to 0.4", "yes"),
        (0.1, 0.1, "0.1 to 0.1", "yes"),
        (0.12, 0.4, "0.12 to 0.4", "no, smaller"),
        (0.01, 0.095, "0.01 to 0.095", "no, larger"),
        (0.05, None, "from 0.05", "yes"),  # infinite
        (None, None, "from 10", "no, smaller"),
    ],
)
def test_the_page_compares_find_rho_with_the_best_radius(
    low: Any, high: Any, suggested: str, verdict: str, ledger: Ledger, tmp_path: Path
) -> None:
    tune(ledger, GPU, "sam")
    assert chosen(GPU, "A", "sam", ledger) == {"rho": 0.1}
    page = tmp_path / "page.md"
    write_page(page, GPU, ledger)
    before = page.read_text()
    ledger.append(line_of(radius_suggestions(GPU, ledger)[0], GPU, ledger, low, high))
    write_page(page, GPU, ledger)
    start, _, section = page.read_text().partition("\n## Radii: find-rho against the study\n")
    assert start == before  # without a line, the section is left out
    (row,) = [line for line in section.splitlines() if line.startswith("| A |")]
    # Only SAM is tuned.
    _, method, *rest = row.strip("| ").split(" | ")
    assert (method, rest) == ("SAM", ["0.1", suggested, verdict])
    limits = (10.0 if low is None else low, math.inf if high is None else high)
    inside = sum(limits[0] <= rho <= limits[1] for rho in (0.05, 0.1, 0.2, 0.4))
    assert f"contain {inside} of the 4 radii tried." in " ".join(section.split())
    assert ("span a factor of" in section) == (high is not None)
