"""The examples and benchmarks run, as a user would run them."""

import gc
import json
import os
import runpy
import statistics
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import step_cost
from workloads import CASES

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


def test_tabular_compares_three_objectives() -> None:
    result = run("examples/tabular.py", "--seeds", 1, "--epochs", 1)
    assert result.returncode == 0, result.stderr
    for name in ("Vanilla", "SAM", "GSAM"):
        assert f"\n{name:8} train " in result.stdout


def test_huggingface_lora_logs_the_gap() -> None:
    # transformers and peft warn by themselves.
    result = run("-W", "default", "examples/huggingface_lora.py", "--epochs", 1)
    assert result.returncode == 0, result.stderr
    for word in ("gap", "perturbed_loss", "rho", "eval_loss"):
        assert f"'{word}'" in result.stdout


def test_lightning_cifar_logs_the_gap() -> None:
    # Lightning warns by itself.
    result = run("-W", "default", "examples/lightning_cifar.py")
    assert result.returncode == 0, result.stderr
    assert {"accuracy", "gap", "perturbed_loss", "rho"} <= set(result.stdout.split())


def test_step_cost_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "cost.json"
    arguments = ("--device", "cpu", "--cases", "vit_tiny_cpu", "--seconds", 0, "--peers")
    monkeypatch.setattr(sys, "argv", ["step_cost.py", *map(str, (*arguments, "--json", path))])
    # Two images: what is timed is of no interest here.
    monkeypatch.setitem(CASES, "vit_tiny_cpu", replace(CASES["vit_tiny_cpu"], batch_size=2))
    try:
        step_cost.main()
    finally:
        gc.enable()  # which it leaves off
    output = capsys.readouterr().out
    record = json.loads(path.read_text())
    assert {"hardware", "versions", "arguments", "date"} <= set(record)
    variants = record["cases"]["vit_tiny_cpu"]["sections"]["eager"]
    assert 0.2 < variants["floor"]["over_floor"] < 5.0  # it is compared with itself
    for name in ("vanilla", "SAM", "GSAM", "ASAM", "GapPenalty", "pytorch_optimizer.GSAM"):
        assert f"| {name} " in output
        assert len(variants[name]["turns_ms"]) == 3
    alike = ("SAM", "GSAM", "GSAM_plain", "ASAM", "ASAM_ascent", "GapPenalty")  # no peers
    turns = [ratio for name in alike for ratio in variants[name]["turns_over_floor"]]
    together = record["cases"]["vit_tiny_cpu"]["together"]["eager"]
    assert together["over_floor"] == statistics.median(turns)
    # Two passes cost more than one: the least that a benchmark must see.
    best = {name: variant["best_ms"] for name, variant in variants.items()}
    assert best["GSAM"] > best["forward_backward"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("benchmarks/step_cost.py", "--device", "cpu", "--cases", "vit_tny_cpu"),
            "The closest is 'vit_tiny_cpu'",
        ),
        (
            ("benchmarks/step_cost.py", "--device", "cpu", "--sections", "captured"),
            "--sections must name some of eager, got captured",
        ),
        (
            ("benchmarks/step_cost.py", "--device", "cpu", "--cores", 0),
            "--cores: must be from 1 to the",
        ),
        (("benchmarks/step_profile.py", "--out", "x"), "A profile requires a CUDA GPU"),
        (
            ("benchmarks/recipes.py", "cifar10-resnet-gsam"),
            "The closest is 'cifar10-resnet18-gsam'",
        ),
        (("examples/quickstart.py", "--seeds", 0), "--seeds and --epochs must be at least 1"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments: tuple[object, ...], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr


def write_images(path: Path, **changes: object) -> Path:
    """Noise in the format that `benchmarks/m_sharpness.py` reads, 24 of 3 classes in each split."""
    images = np.random.default_rng(0).integers(256, size=(24, 8, 8, 1), dtype=np.uint8)
    labels = np.arange(24) % 3
    arrays = {f"{split}_images": images for split in ("train", "test")}
    arrays |= {f"{split}_labels": labels for split in ("train", "test")}
    np.savez(path, **{name: a for name, a in (arrays | changes).items() if a is not None})
    return path


M_SHARPNESS = ("benchmarks/m_sharpness.py", "--batch", 6, "--smallest", 3, "--epochs", 2)
M_SHARPNESS += ("--images", 12, "--seeds", 2)


def test_m_sharpness_without_a_radius_is_vanilla_for_every_m(tmp_path: Path) -> None:
    data, path = write_images(tmp_path / "noise.npz"), tmp_path / "new" / "m.json"
    result = run(*M_SHARPNESS, "--rho", 0, "--data", data, "--json", path)
    assert result.returncode == 0, result.stderr
    runs = json.loads(path.read_text())["runs"]
    found = {(run["method"], run["m"], run["seed"]): run["test_loss"] for run in runs}
    assert len(found) == len(runs) == 2 * (1 + 2 + 2)
    for (_, _, seed), loss in found.items():
        assert loss == pytest.approx(found["Vanilla", 6, seed], rel=1e-4)
    assert found["Vanilla", 6, 0] != pytest.approx(found["Vanilla", 6, 1], rel=1e-4)


def test_m_sharpness_finds_a_radius_prints_a_table_and_draws(tmp_path: Path) -> None:
    data, path, png = write_images(tmp_path / "noise.npz"), tmp_path / "m.json", tmp_path / "m.png"
    result = run(*M_SHARPNESS, "--data", data, "--json", path, "--figure", png)
    assert result.returncode == 0, result.stderr
    assert png.read_bytes().startswith(b"\x89PNG")
    record = json.loads(path.read_text())
    assert {"hardware", "versions", "arguments", "date"} <= set(record)
    losses = record["rho"]["mean_loss"]
    assert losses[str(record["rho"]["chosen"])] == min(losses.values())
    # The differences are those of the runs, seed by seed.
    loss = {(run["method"], run["m"], run["seed"]): run["test_loss"] for run in record["runs"]}
    row = next(r for r in record["summary"] if (r["method"], r["m"]) == ("GSAM", 3))
    differences = [loss["GSAM", 3, seed] - loss["GSAM", 6, seed] for seed in (0, 1)]
    assert row["test_loss_minus_B"]["mean"] == pytest.approx(np.mean(differences))
    assert row["test_loss_minus_B"]["standard_error"] == pytest.approx(
        abs(differences[0] - differences[1]) / 2
    )
    for variant in ("| Vanilla | any |", "| SAM     |   6 |", "| GSAM    |   3 |"):
        assert variant in result.stdout


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        (None, (), "--data must be a readable .npz file, got"),
        ({"test_labels": None}, (), "without test_labels"),
        ({"train_images": np.zeros((24, 64))}, (), "train_images must be uint8 with four"),
        ({"test_labels": np.zeros(3, int)}, (), "test_labels must hold an integer for each of"),
        ({"test_labels": np.full(24, -1)}, (), "test_labels must be 0 or above, got -1"),
        ({}, ("--images", 24), "--images must be a multiple of the 3 classes, at least --batch"),
        ({}, ("--smallest", 4), "--batch must be --smallest times a power of two"),
        ({}, ("--seeds", 1), "--seeds must be at least 2, got 1"),
        ({}, ("--rho", "nan"), "--rho must be finite and at least 0, got nan"),
        ({}, ("--figure", "m.txt"), "--figure must end in .png, .svg or .pdf, got m.txt"),
    ],
)
def test_m_sharpness_refuses_in_a_sentence(
    changes: dict[str, object] | None,
    arguments: tuple[object, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "noise.npz"
    if changes is not None:
        write_images(data, **changes)
    # In this process: the start of ten others would take longer than all else here.
    monkeypatch.setattr(sys, "argv", [*map(str, (*M_SHARPNESS, "--data", data, *arguments))])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "benchmarks" / "m_sharpness.py"), run_name="__main__")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


KERNELS = [
    *("convolution", "gemm", "save_kernel", "copy_kernel", "climb_kernel"),
    *("convolution", "gemm", "products_kernel", "combine_kernel", "restore_kernel", "sgd"),
]


@pytest.fixture
def step_profile() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "step_profile.py"))


def trace(names: list[str]) -> dict[str, Any]:
    """As the profiler writes it: microseconds, in no order, beside other events."""
    events = [
        {"cat": "kernel", "name": name, "ts": 100.0 * index, "dur": 60.0}
        for index, name in enumerate(names)
    ]
    return {"traceEvents": [{"cat": "cpu_op", "name": "aten::mm"}, {"name": "x"}, *events[::-1]]}


def test_step_profile_tells_what_a_kernel_works_for(step_profile: dict[str, Any]) -> None:
    kernels = step_profile["timeline"](trace(KERNELS))
    expected = ["first pass"] * 2 + ["statistics"] + ["climb"] * 2 + ["second pass"] * 2
    expected += ["combination"] * 2 + ["statistics", "update"]
    assert [phase for _, _, phase in kernels] == expected
    assert kernels[1][:2] == (pytest.approx(0.1), pytest.approx(0.06))
    with pytest.raises(ValueError, match="trace must hold a two-pass step"):
        step_profile["timeline"](trace(["gemm"]))


def test_step_profile_finds_what_is_beyond_two_passes(step_profile: dict[str, Any]) -> None:
    ways = {"GSAM": trace(KERNELS), "vanilla": trace(["convolution", "gemm", "sgd"])}
    kernels = {way: step_profile["by_kernel"](some) for way, some in ways.items()}
    assert kernels["GSAM"]["gemm"] == pytest.approx(0.12)
    more = {line.split()[2]: line.split()[0] for line in step_profile["beyond_two_passes"](kernels)}
    assert more.pop("sgd") == "-0.060"  # one update instead of two
    assert more.pop("gemm") == more.pop("convolution") == "+0.000"
    assert set(more.values()) == {"+0.060"}


def test_step_profile_draws_from_a_record(step_profile: dict[str, Any], tmp_path: Path) -> None:
    kernels = step_profile["timeline"](trace(KERNELS))
    cost = {"over_floor": 1.02, "over_floor_95": (1.01, 1.03), "parameter_bytes": 4e6}
    growth = {name: {"16": cost, "64": cost} for name in ("eager", "captured")}
    record = {
        "case": "resnet18_cifar_128",
        "hardware": {"gpu": "a GPU"},
        "timelines": {"eager": kernels, "captured": kernels},
        "widths": growth,
        "batches": growth,
    }
    (tmp_path / "record.json").write_text(json.dumps(record))
    arguments = ("--draw", tmp_path / "record.json", "--out", tmp_path / "new")
    result = run("benchmarks/step_profile.py", *arguments)
    assert result.returncode == 0, result.stderr
    for name in ("step-timeline.png", "step-growth.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")


def test_find_rho_sweeps_and_judges(tmp_path: Path) -> None:
    arguments = ("--networks", "mlp", "--rhos", 0.1, 5, "--seeds", 2, "--epochs", 1)
    path, png = tmp_path / "new" / "rho.json", tmp_path / "new" / "rho.png"
    command = ("benchmarks/find_rho.py", *arguments, "--out", tmp_path / "runs")
    result = run(*command, "--json", path, "--figure", png)
    assert result.returncode == 0, result.stderr
    assert png.read_bytes().startswith(b"\x89PNG")
    record = json.loads(path.read_text())
    assert {"hardware", "versions", "arguments", "date"} <= set(record)
    found = record["set_ups"]["mlp"]
    assert found["suggestion"]["low"] < 0.1 < found["suggestion"]["high"] < 5
    assert found["best"] == found["best_within"] == 0.1
    assert found["accuracies"]["0"][0] > 0.5 > found["accuracies"]["5"][0]
    # From the record, without training.
    again = run("benchmarks/find_rho.py", *arguments, "--out", tmp_path / "other", "--record", path)
    assert again.returncode == 0, again.stderr
    assert again.stdout == result.stdout


@pytest.mark.parametrize(
    ("low", "high", "best_within", "is_right"),
    [(0.05, 0.2, 0.1, True), (0.15, None, 0.2, False), (None, None, None, False)],
)
def test_find_rho_is_judged_by_the_best_of_the_sweep(
    low: float | None, high: float | None, best_within: float | None, is_right: bool
) -> None:
    found = {0.0: [0.80, 0.81], 0.1: [0.85, 0.86], 0.2: [0.82, 0.83]}
    judged = runpy.run_path(str(ROOT / "benchmarks" / "find_rho.py"))["judged"]
    result = judged({"low": low, "high": high}, found)
    assert result["best"] == 0.1
    assert (result["best_within"], result["is_right"]) == (best_within, is_right)
    assert result["noise"] == pytest.approx(0.01 / 2**0.5)


def test_low_memory_compares_the_two_modes(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--model", "small_mlp", "--epochs", 1, "--seeds", 1)
    path = tmp_path / "new" / "low.json"
    result = run("benchmarks/low_memory.py", *arguments, "--json", path)
    assert result.returncode == 0, result.stderr
    record = json.loads(path.read_text())
    assert {"hardware", "versions", "arguments", "date"} <= set(record)
    # On a CPU both are the exact mode, so that even trainings are the same.
    assert [entry["error"] for entry in record["errors"]] == [0.0] * 4
    assert record["accuracies"]["low"] == record["accuracies"]["exact"]
    assert record["accuracies"]["low"][0] > 0.5


def test_step_cost_ends_early_where_both_ratios_are_known() -> None:
    known, unknown = [1.020, 1.021, 1.022, 1.020], [0.98, 1.02, 1.06, 1.10]
    vanilla = [0.50, 0.51, 0.52, 0.50]
    is_resolved = partial(step_cost.is_resolved, section=step_cost.Section({}, "floor"))
    assert is_resolved({"GSAM": known, "vanilla": vanilla, "authors' GSAM": unknown})
    assert not is_resolved({"GSAM": known, "SAM": unknown, "vanilla": vanilla})
    assert not is_resolved({"GSAM": known, "vanilla": [0.4, 0.5, 0.6, 0.5]})
    own = step_cost.Section({}, "floor", floors={"a": "floor of a", "b": "floor"})
    assert step_cost.is_resolved({"a": known, "b": known, "vanilla": vanilla}, own)
    assert not step_cost.is_resolved({"a": known, "b": unknown, "vanilla": vanilla}, own)


def test_step_cost_of_a_variant_with_a_floor_of_its_own() -> None:
    """1.1 of a floor that takes 1.5 references is 1.65 references, or 3.3 vanilla steps."""
    section = step_cost.Section({}, "graph", floors={"mine": "floor"})
    turns = {"vanilla": [1.0], "graph": [2.0], "floor": [3.0], "mine": [3.3]}
    ratios = {"vanilla": [0.5], "graph": [1.0], "floor": [1.5], "mine": [1.1]}
    record = step_cost.compare(turns, ratios, section)["mine"]
    assert record["over_floor"] == 1.1
    assert record["over_reference"] == pytest.approx(1.65)
    assert record["over_vanilla"] == pytest.approx(3.3)
    assert set(step_cost.FLOORS) | set(step_cost.FLOORS.values()) < set(step_cost.CHEAPER)


def test_recipes_tells_what_a_recipe_took_and_gave(tmp_path: Path) -> None:
    path = tmp_path / "recipes.json"
    names = ("fashion-mnist-vanilla", "--pace", "fashion-mnist-gsam")
    result = run("benchmarks/recipes.py", *names, "--json", path)
    assert result.returncode == 0, result.stderr
    rows = json.loads(path.read_text())["recipes"]
    whole, pace = rows["fashion-mnist-vanilla"], rows["fashion-mnist-gsam"]
    assert 0.8 < whole["test_accuracy"] < 0.9
    assert whole["seconds"] > whole["epochs"] * whole["seconds_per_epoch"] / 2
    assert pace["trained_epochs"] == 3
    assert pace["estimated_seconds"] > 22 * pace["seconds_per_epoch"]
    assert "| fashion-mnist-gsam | 25 |" in result.stdout


@pytest.mark.parametrize("num_processes", [1, 2])
def test_finite_check_times_both_ways(num_processes: int, tmp_path: Path) -> None:
    path = tmp_path / "finite.json"
    arguments = ("--model", "small_mlp", "--batch-size", 8, "--device", "cpu", "--json", path)
    arguments += ("--turns", 2, "--steps", 2, "--processes", num_processes)
    result = run("benchmarks/finite_check.py", *arguments)
    assert result.returncode == 0, result.stderr
    record = json.loads(path.read_text())
    assert {"hardware", "versions", "arguments", "date"} <= set(record)
    assert list(record["milliseconds"]) == ["1", "4"]
    for best in record["milliseconds"].values():
        assert all(0 < best[way] < 1000 for way in ("every pass", "once per step"))
    assert "micro-batches  every pass  once per step  ratio" in result.stdout
