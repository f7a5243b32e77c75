"""Communication between processes: the counts of `benchmarks/communication.py`."""

import json
import math
import os
import runpy
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import communication
from benchmarks.communication import LINKS, REDUCTIONS, Links, Variant, bytes_of, count, project
from tests.distributed.processes import Processes

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "communication.py"
# A forward-backward pass of 100 ms (60 ms for backward), whose gradients fill one message.
COMPUTE = {"vanilla_ms": 110.0, "gsam_ms": 215.0, "backward_ms": 60.0, "parameter_bytes": 24e6}


def counted(processes: Processes, variant: Variant) -> dict[str, Any]:
    """The counts, which are the same in all processes."""
    first, *others = processes.run(count, variant, "tiny")
    assert all(other == first for other in others)
    return first


def test_the_counter_counts_the_messages_of_ddp(two: Processes) -> None:
    record = counted(two, Variant())
    assert bytes_of(record, "all_reduce") == record["parameter_bytes"] > 0
    assert bytes_of(record, "broadcast") == record["buffer_bytes"] > 0
    assert bytes_of(record) == record["parameter_bytes"] + record["buffer_bytes"]


@pytest.mark.parametrize("objective", ["SAM", "GSAM"])
def test_replica_moves_as_many_bytes_as_ddp_and_global_moves_gradients_twice(
    objective: str, two: Processes
) -> None:
    vanilla = counted(two, Variant())
    replica = counted(two, Variant(objective=objective, scope="replica"))
    assert replica == vanilla  # calls, too: the model fits into one bucket
    everywhere = counted(two, Variant(objective=objective, scope="global"))
    assert bytes_of(everywhere, "all_reduce") == 2 * vanilla["parameter_bytes"]
    assert bytes_of(everywhere, "broadcast") == vanilla["buffer_bytes"]


def test_a_group_averages_twice_within_and_once_everywhere(four: Processes) -> None:
    record = counted(four, Variant(objective="GSAM", scope=2))
    reductions = {r["group_size"]: r["bytes"] for r in record["calls"] if r["kind"] == "all_reduce"}
    inner, outer = REDUCTIONS["node"]
    size = record["parameter_bytes"]
    assert reductions == {2: inner * size, 4: outer * size}


@pytest.mark.parametrize("objective", ["SAM", "GSAM"])
def test_sharded_weights_move_twice_and_two_sums_once(objective: str, two: Processes) -> None:
    vanilla = counted(two, Variant(is_sharded=True))
    record = counted(two, Variant(is_sharded=True, objective=objective))
    for kind in ("all_gather", "reduce_scatter"):
        assert bytes_of(record, kind) == 2 * bytes_of(vanilla, kind) > 0
    # Before the climb and after it: two numbers each in float32.
    assert bytes_of(record, "all_reduce") == 2 * 2 * 4


def reported_by_gloo(variant: Variant) -> Counter[tuple[str, int]]:
    """In each process: names and sizes of the collectives that gloo reports for a step."""
    step, _ = communication.trainer(variant, "tiny")
    for _ in range(communication.NUM_WARM_UP):
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
        time.sleep(0.1)  # in torch 2.11, gloo's thread may report its work after the step has ended
    events = [event for event in profiler.events() if event.name.startswith("gloo:")]
    return Counter((event.name, math.prod(event.input_shapes[0])) for event in events)


@pytest.mark.parametrize("scope", [None, "replica", "global"])
def test_gloo_reports_the_same(scope: str | None, two: Processes) -> None:
    variant = Variant(objective=scope and "GSAM", scope=scope)
    record = counted(two, variant)
    for events in two.run(reported_by_gloo, variant):
        elements = Counter[str]()
        for (name, number), times in events.items():
            elements[name] += number * times
        assert elements["gloo:all_reduce"] * 4 == bytes_of(record, "all_reduce")
        # Sixteen statistics in float32, and a count of batches in int64.
        assert elements["gloo:broadcast"] == 16 + 1
        assert bytes_of(record, "broadcast") == 16 * 4 + 8
        assert set(elements) == {"gloo:all_reduce", "gloo:broadcast"}


def test_an_unknown_collective_is_not_left_out() -> None:
    with pytest.raises(RuntimeError, match=r"must be one of .* got alltoall_\.default"):
        communication.call("alltoall_.default", ())


def test_a_ring_within_a_node_matches_the_formula() -> None:
    links = Links(inner_rate=1e9, outer_rate=1e8, inner_latency=1e-3, outer_latency=1e-2)
    assert links.all_reduce_s(1e6, 8) == pytest.approx(14 * 1e-3 + 2 * 7 / 8 * 1e6 / 1e9)
    # Between 4 nodes: two steps up a tree and two down, each with an eighth of the data.
    between = 4 * 1e-2 + 2 * 3 / 4 * 1e6 / 8 / 1e8
    assert links.all_reduce_s(1e6, 32) == pytest.approx(links.all_reduce_s(1e6, 8) + between)
    # Each 25 MiB are one message, which waits for each step.
    one, two = (links.all_reduce_s(number * 25 * 2**20, 32) for number in (1, 2))
    assert two == pytest.approx(2 * one)


def test_the_projection_exposes_messages_sent_after_backward() -> None:
    rows = {(row["links"], row["num_gpus"], row["scope"]): row for row in project(COMPUTE)}
    for name, links in LINKS.items():
        assert (name, 8, "node") not in rows
        for num_gpus in (8, 64, 1024):
            everywhere = 1e3 * links.all_reduce_s(24e6, num_gpus)
            assert everywhere < 60
            assert rows[name, num_gpus, "vanilla"]["total_ms"] == 110  # hidden by backward
            assert rows[name, num_gpus, "replica"]["exposed_ms"] == pytest.approx(everywhere)
            row = rows[name, num_gpus, "global"]
            assert row["total_ms"] == pytest.approx(215 + 2 * everywhere)
            assert row["over_vanilla"] == pytest.approx(row["total_ms"] / 110)
            assert row["over_twice_vanilla"] == pytest.approx(row["total_ms"] / 220)
        exposed = rows[name, 64, "node"]["exposed_ms"] - rows[name, 64, "replica"]["exposed_ms"]
        assert exposed == pytest.approx(2 * rows[name, 8, "replica"]["exposed_ms"])


def test_the_projection_exposes_what_backward_cannot_hide_in_ddp() -> None:
    compute = COMPUTE | {"parameter_bytes": 24e9}
    for row in project(compute):
        if row["scope"] == "vanilla":
            everywhere = 1e3 * LINKS[row["links"]].all_reduce_s(24e9, row["num_gpus"])
            assert row["exposed_ms"] == pytest.approx(everywhere - 60)


def test_measured_compute_can_be_projected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, path = communication.measure_compute, tmp_path / "compute.json"

    def on_the_cpu(*args: object, **settings: object) -> dict[str, Any]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        # On a busy machine, the difference of two short times may be negative.
        return measure(communication.tiny(), 32, 2, "cpu", num_rounds=1) | {"backward_ms": 1.0}

    monkeypatch.setattr(communication, "measure_compute", on_the_cpu)
    monkeypatch.setattr(communication, "vit_b16", communication.tiny)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(sys, "argv", ["communication.py", "--measure-compute", "--json", str(path)])
    communication.main()
    assert "gsam_ms" in capsys.readouterr().out
    compute = communication.read_compute(path)
    assert compute["hardware"]["gpu"] == "a GPU"
    assert compute["parameter_bytes"] == sum(p.nbytes for p in communication.tiny().parameters())
    assert len(project(compute)) == 2 * (3 + 4 + 4)


def test_the_command_counts_projects_prints_and_draws(tmp_path: Path) -> None:
    compute, path, png = (tmp_path / name for name in ("compute.json", "new/all.json", "all.png"))
    compute.write_text(json.dumps({"compute": COMPUTE | {"hardware": {"gpu": "a GPU"}}}))
    options = ("--processes", 2, "--models", "tiny", "--compute", compute)
    command = (sys.executable, "-W", "error", SCRIPT, *options, "--json", path, "--figure", png)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    record = json.loads(path.read_text())
    assert {"hardware", "versions", "arguments", "date", "links"} <= set(record)
    names = ["DDP", "DDP, GSAM, replica", "DDP, GSAM, global", "FSDP2", "FSDP2, GSAM"]
    assert list(record["counted"]["tiny"]["variants"]) == names
    assert record["projected"] == project(record["compute"])
    for words in (*names, "Projected, not measured", "| 1,024 | global", "measured on a GPU"):
        assert words in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--processes", 3), "--processes must be even and at least 2, got 3."),
        (("--models", "resnet18"), "got 'resnet18'. The closest is 'resnet18_cifar'."),
        (("--objectives", "GSM"), "--objectives must be one of SAM, GSAM, got 'GSM'."),
        (("--figure", "a.txt"), "--figure must end in .png, .svg or .pdf, got a.txt."),
        (("--measure-compute", "--figure", "a.png"), "cannot be combined with --compute"),
        (("--measure-compute",), "requires a CUDA GPU"),
        (("--compute", "absent.json"), "got absent.json (No such file or directory)."),
        (("--compute", "words.json"), "got words.json (not JSON)."),
        (("--compute", "times.json"), "got times.json without positive vanilla_ms, gsam_ms"),
        (("--json", "words.json/a.json"), "must be writable, got words.json/a.json"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(
    arguments: tuple[object, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "words.json").write_text("words")
    (tmp_path / "times.json").write_text(json.dumps({"compute": None}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["communication.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
