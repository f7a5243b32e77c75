"""Runs in this process or in workers: the same lines, in order, until time is up."""

import fcntl
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surrogap.paper import workers
from surrogap.paper.ledger import Ledger, LedgerLine
from surrogap.paper.plan import Stage, Todo
from surrogap.paper.running import Environment
from surrogap.paper.study import Cell, Scale
from surrogap.paper.workers import train_all
from surrogap.training.failure import RunFailedError
from tests.paper import synthetic_study

STAGES = [Stage([Cell("A", "vanilla"), Cell("A", "sam")], max_seeds=1)]
TIMES = {"seconds", "seconds_per_step", "date", "jobs"}


@pytest.fixture(scope="module")
def scale(tmp_path_factory: pytest.TempPathFactory) -> Scale:
    return synthetic_study.tiny(tmp_path_factory.mktemp("study"))


def lines(ledger: Ledger) -> dict[str, dict[str, Any]]:
    found = {}
    for line in ledger:
        found[line["key"]] = {name: value for name, value in line.items() if name not in TIMES}
    return found


def test_several_processes_write_the_same_lines(scale: Scale, tmp_path: Path) -> None:
    numbers: list[int] = []

    def after_run(line: LedgerLine, left: Sequence[Todo]) -> None:
        numbers.append(len(left))

    ledgers = {jobs: Ledger(tmp_path / f"{jobs}.jsonl") for jobs in (1, 2)}
    for jobs, ledger in ledgers.items():
        environment = Environment(scale, jobs=jobs, weights=str(tmp_path / f"weights-{jobs}"))
        assert train_all(STAGES, ledger, environment, after_run=after_run) == []
    assert numbers == 2 * [5, 4, 3, 2, 1, 0]
    assert lines(ledgers[1]) == lines(ledgers[2])
    assert {line["jobs"] for line in ledgers[2]} == {2}
    assert lines(Ledger(ledgers[2].path)) == lines(ledgers[2])


def synthetic_line(run: Any, environment: Environment) -> LedgerLine:
    return synthetic_study.line(run, environment.scale)


def test_it_goes_on_where_it_was(
    scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def train_and_score(run: Any, environment: Environment) -> LedgerLine:
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(run.key)
        return synthetic_line(run, environment)

    monkeypatch.setattr(workers, "train_and_score", train_and_score)
    ledger = Ledger(tmp_path / "study.jsonl")
    with pytest.raises(KeyboardInterrupt):
        train_all(STAGES, ledger, Environment(scale))
    assert [line["key"] for line in Ledger(ledger.path)] == trained
    monkeypatch.setattr(workers, "train_and_score", synthetic_line)
    again = Ledger(ledger.path)
    assert train_all(STAGES, again, Environment(scale)) == []
    assert (len(again), again.num_repeated) == (6, 0)


def test_a_run_that_does_not_fit_is_not_started(
    scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(workers.time, "monotonic", lambda: now[0])

    def train_and_score(run: Any, environment: Environment) -> LedgerLine:
        line = synthetic_line(run, environment)
        now[0] += line["seconds"]
        return line

    monkeypatch.setattr(workers, "train_and_score", train_and_score)
    # Plain runs take 10 s and those of SAM 20 s; the plan learns it from finished runs.
    ledger = Ledger(tmp_path / "study.jsonl")
    left = train_all(STAGES, ledger, Environment(scale), deadline=55.0)
    assert now[0] <= 55.0
    assert len(left) + len(ledger) == 6
    assert left
    assert all(now[0] + item.seconds > 55.0 for item in left if item.is_ready)


def test_without_time_nothing_is_started(scale: Scale, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "study.jsonl")
    assert len(train_all(STAGES, ledger, Environment(scale), deadline=time.monotonic())) == 6
    assert not ledger.path.exists()


def test_an_error_in_a_worker_is_raised(scale: Scale, tmp_path: Path) -> None:
    setup = scale.setups["A"]
    gone = replace(setup, changes={**setup.changes, "data": str(tmp_path / "gone.npz")})
    environment = Environment(replace(scale, setups={"A": gone}, num_trials=1), jobs=2)
    ledger = Ledger(tmp_path / "study.jsonl")
    with pytest.raises(ValueError, match=r"name_or_path must .*gone\.npz.* how to get the images"):
        train_all([Stage([Cell("A", "vanilla")])], ledger, environment)
    assert len(ledger) == 0


def with_folders(run: Any, environment: Environment) -> LedgerLine:
    """Uses a folder for the run and one for its source, each of which must be free."""
    folders = [Path(environment.weights) / key for key in sorted(run.keys)]
    for folder in folders:
        folder.mkdir(parents=True)
    time.sleep(0.2)
    for folder in folders:
        folder.rmdir()
    return synthetic_line(run, environment)


def test_two_runs_with_the_same_source_are_not_trained_at_once(
    scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setups = {**scale.setups, "H": replace(scale.setups["G"], title="another")}
    setups["H"] = replace(setups["H"], changes={**setups["H"].changes, "lr": 0.02})
    wider = replace(scale, setups=setups, num_seeds={**scale.num_seeds, "H": 1})
    monkeypatch.setattr(workers, "train_and_score", with_folders)
    stage = Stage([Cell(setup, "vanilla") for setup in "GH"])
    ledger = Ledger(tmp_path / "study.jsonl")
    assert train_all([stage], ledger, Environment(wider, jobs=2, weights=str(tmp_path))) == []
    first, second = ledger.of_kind("run", purpose="final")
    assert first["key"] != second["key"]


def die(run: Any, environment: Environment) -> LedgerLine:
    os._exit(1)


def test_a_worker_that_dies_is_an_error(
    scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "train_and_score", die)
    ledger = Ledger(tmp_path / "study.jsonl")
    message = r"A vanilla.* or A vanilla.* failed:\n.*terminated abruptly"
    with pytest.raises(RunFailedError, match=message):  # either of the two runs
        train_all(STAGES, ledger, Environment(scale, jobs=2))


def first_or_die(run: Any, environment: Environment) -> LedgerLine:
    if run.settings != environment.scale.setups["A"].trials[0]:
        while not Path(environment.weights).exists():
            time.sleep(0.01)
        os._exit(1)
    return synthetic_line(run, environment)


def test_a_worker_that_dies_between_two_runs_is_an_error(
    scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after_run(line: LedgerLine, left: Sequence[Todo]) -> None:
        (tmp_path / "weights").mkdir()
        while multiprocessing.active_children():
            time.sleep(0.01)

    monkeypatch.setattr(workers, "train_and_score", first_or_die)
    ledger = Ledger(tmp_path / "study.jsonl")
    environment = Environment(scale, jobs=2, weights=str(tmp_path / "weights"))
    with pytest.raises(RunFailedError, match=r"A vanilla.* failed:\n.*terminated abruptly"):
        train_all(STAGES, ledger, environment, after_run=after_run)
    assert len(Ledger(ledger.path)) == 1


def first_or_endless(run: Any, environment: Environment) -> LedgerLine:
    """Finishes the first trial of plain training; other runs do not end by themselves."""
    if run.settings != environment.scale.setups["A"].trials[0]:
        time.sleep(600)
    return synthetic_line(run, environment)


def test_an_interrupt_ends_the_workers(
    scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(line: LedgerLine, left: Sequence[Todo]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "train_and_score", first_or_endless)
    environment = Environment(scale, jobs=2)
    ledger = Ledger(tmp_path / "study.jsonl")
    with pytest.raises(KeyboardInterrupt):
        train_all(STAGES, ledger, environment, after_run=interrupt)
    assert len(Ledger(ledger.path)) == 1
    assert not multiprocessing.active_children()


def locked(run: Any, environment: Environment) -> LedgerLine:
    """Locks a file for as long as this process lives."""
    with (Path(environment.weights) / run.key).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("locked")
        file.flush()
        time.sleep(600)
    return synthetic_line(run, environment)


def train_locked(scale: Scale, folder: str) -> None:
    workers.train_and_score = locked
    ledger = Ledger(Path(folder) / "study.jsonl")
    train_all(STAGES, ledger, Environment(scale, jobs=2, weights=f"{folder}/locks"))


def test_workers_end_with_a_killed_parent(scale: Scale, tmp_path: Path) -> None:
    locks = tmp_path / "locks"
    locks.mkdir()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=train_locked, args=(scale, str(tmp_path)))
    process.start()
    while len([path for path in locks.iterdir() if path.read_text()]) < 2:
        assert process.is_alive()
        time.sleep(0.05)
    process.kill()
    process.join()
    end = time.monotonic() + 60
    for path in locks.iterdir():
        with path.open() as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    assert time.monotonic() < end, "a worker is still alive"
                    time.sleep(0.05)
