"""The examples and benchmarks run, as a user would run them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    # Beside other work, threads that wait for each other can take minutes.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_quickstart_compares_three_objectives() -> None:
    result = run("examples/quickstart.py", "--seeds", 1, "--epochs", 2)
    assert result.returncode == 0, result.stderr
    for word in ("Vanilla", "SAM", "GSAM", "train loss", "gap h", "cosine", "test accuracy"):
        assert word in result.stdout


def test_step_cost_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cost.json"
    arguments = ("--device", "cpu", "--cases", "vit_tiny_cpu", "--seconds", 0, "--steps", 1)
    result = run("benchmarks/step_cost.py", *arguments, "--peers", "--json", path)
    assert result.returncode == 0, result.stderr
    record = json.loads(path.read_text())
    assert {"hardware", "versions", "arguments", "date"} <= set(record)
    variants = record["cases"]["vit_tiny_cpu"]["variants"]
    assert 0.5 < variants["floor"]["over_floor"] < 2.0  # it is compared with itself
    for name in ("vanilla", "SAM", "GSAM", "ASAM", "GapPenalty", "pytorch_optimizer.GSAM"):
        assert f"| {name} " in result.stdout
        assert len(variants[name]["turns_ms"]) == 5
    # Two passes cost more than one: the least that a benchmark must see.
    assert variants["GSAM"]["over_vanilla"] > 1.3 > variants["forward_backward"]["over_vanilla"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("benchmarks/step_cost.py", "--device", "cpu", "--cases", "vit_tny_cpu"),
            "the closest is",
        ),
        (
            ("benchmarks/step_cost.py", "--device", "cpu", "--steps", 0),
            "--steps must be at least 1",
        ),
        (("examples/quickstart.py", "--seeds", 0), "--seeds and --epochs must be at least 1"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments: tuple[object, ...], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
