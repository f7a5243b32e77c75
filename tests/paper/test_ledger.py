"""The ledger survives interruption, merging and repetition."""

import json
import math
import os
from pathlib import Path

import pytest

from surrogap.paper.ledger import Ledger


def line(key: str, **more: object) -> dict[str, object]:
    return {"kind": "run", "key": key, **more}


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "new" / "study.jsonl")
    lines = [line("a", seed=0, settings={"rho": 0.1}), line("b", seed=1, curves=[1.0, None])]
    for one in lines:
        ledger.append(one)
    assert list(ledger) == list(Ledger(ledger.path)) == lines
    assert (len(ledger), "a" in ledger, "c" in ledger) == (2, True, False)
    assert Ledger(ledger.path).remarks == []


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "study.jsonl")
    ledger.append(line("a", eigenvalue=math.nan))
    assert ledger["a"]["eigenvalue"] is None


@pytest.mark.parametrize("cut", range(1, 24, 4))
def test_half_a_line_is_skipped_and_said(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "study.jsonl"
    ledger = Ledger(path)
    ledger.append(line("a"))
    ledger.append(line("b"))
    path.write_bytes(path.read_bytes()[:-cut])
    torn = Ledger(path)
    # A line that lacks only its newline is complete.
    assert [one["key"] for one in torn] == (["a", "b"] if cut == 1 else ["a"])
    assert torn.num_torn == (cut > 1)
    torn.append(line("c"))
    keys = [one["key"] for one in Ledger(path)]
    assert keys == (["a", "b", "c"] if cut == 1 else ["a", "c"])
    if cut > 1:
        assert Ledger(path).remarks == [f"{path}: skipped 1 incomplete line."]


def test_ledgers_are_merged_by_concatenation(tmp_path: Path) -> None:
    one, other = Ledger(tmp_path / "one.jsonl"), Ledger(tmp_path / "other.jsonl")
    one.append(line("a", machine=1))
    one.append(line("b", machine=1))
    other.append(line("b", machine=2))
    other.append(line("c", machine=2))
    both = tmp_path / "both.jsonl"
    both.write_bytes(one.path.read_bytes() + other.path.read_bytes())
    merged = Ledger(both)
    assert [(found["key"], found["machine"]) for found in merged] == [("a", 1), ("b", 1), ("c", 2)]
    assert merged.num_repeated == 1
    assert merged.remarks == [f"{both}: skipped 1 repeated line."]


def test_lines_of_something_else_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "study.jsonl"
    path.write_text(json.dumps([1, 2]) + "\n" + json.dumps({"kind": "run"}) + "\n\n")
    assert (len(Ledger(path)), Ledger(path).num_torn) == (0, 2)


def test_kinds(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "study.jsonl")
    ledger.append({"kind": "failure", "key": "a"})
    ledger.append(line("b"))
    assert [one["key"] for one in ledger.of_kind("run")] == ["b"]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, write = Ledger(tmp_path / "study.jsonl"), os.write
    ledger.append(line("a"))
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:5]))
    with pytest.raises(ValueError, match=r"writable file, got .*No space left on device"):
        ledger.append(line("b"))
    monkeypatch.undo()
    ledger.append(line("c"))
    again = Ledger(ledger.path)
    assert ([one["key"] for one in again], again.num_torn) == (["a", "c"], 0)


def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ledger must be a readable file, got"):
        Ledger(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="ledger must be a writable file, got"):
        Ledger(tmp_path / "file" / "study.jsonl").append(line("a"))
