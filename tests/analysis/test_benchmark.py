"""The benchmark runs, as a user would run it."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.test_scripts import ROOT, run


def test_it_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "curvature.json"
    result = run("benchmarks/curvature.py", "--device", "cpu", "--smoke", "--json", path)
    assert result.returncode == 0, result.stderr
    record = json.loads(path.read_text())
    assert {"hardware", "versions", "arguments", "date", "num_weights"} <= set(record)
    for name in ("lanczos", "lanczos, double-backward", "power iteration"):
        (turn,) = record["variants"][name]
        assert turn["value"] == pytest.approx(record["eigenvalue"], rel=0.01)
        assert f"| {name} " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rounds", "0"), "--rounds must be at least 1, got 0"),
        (("--data", "cifar10", "--root", "nowhere"), "--data: "),
    ],
)
def test_it_refuses_in_a_sentence(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["curvature.py", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "benchmarks" / "curvature.py"), run_name="__main__")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
