"""A run in two processes equals a run in one; the first process writes the files."""

import os
import sys
from pathlib import Path
from socket import socket
from subprocess import PIPE, Popen
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from surrogap.training.components import components_of
from surrogap.training.processes import joined
from surrogap.training.records import Records, read_records
from surrogap.training.run import train
from surrogap.training.step import EagerStep
from tests.distributed.processes import Processes, is_failure
from tests.training import small_runs

ROOT = Path(__file__).parent.parent.parent
# One perturbation for the whole batch: with one per process, two processes differ from one.
SETTINGS: dict[str, Any] = {"objective": "gsam", "rho": 0.1, "rho_min": 0.01, "scope": "global"}
every_kind = pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
Ending = tuple[int, str | None]


def run(folder: Path, changes: dict[str, Any], at: int | None = None) -> Ending:
    """Continue a run; only the first process gets a signal, after the step `at`."""
    config = small_runs.config(folder, **(SETTINGS | changes))
    outcome = train(
        config, resume=True, progress=None if at is None else small_runs.Interrupting(at)
    )
    return outcome.step, None if outcome.signal is None else outcome.signal.name


def assert_close(one: object, other: object) -> None:
    mine, theirs = small_runs.leaves(one), small_runs.leaves(other)
    assert mine.keys() == theirs.keys()
    for path, value in mine.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, theirs[path], rtol=1e-4, atol=1e-6, msg=path)


def assert_close_runs(one: Path, other: Path) -> None:
    for name in ("model", "optimizer"):
        assert_close(small_runs.state(one)[name], small_runs.state(other)[name])
    mine, theirs = small_runs.timeless_records(one), small_runs.timeless_records(other)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.pop("kind") == b.pop("kind")
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


@every_kind
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_two_processes_equal_one(
    parallel: str, momentum: float, tmp_path: Path, two: Processes
) -> None:
    changes = {"parallel": parallel, "momentum": momentum}
    run(tmp_path / "one", changes)
    small_runs.config(tmp_path / "two")  # creates the images before both processes need them
    assert two.run(run, tmp_path / "two", changes) == [(12, None)] * 2
    assert_close_runs(tmp_path / "one" / "run", tmp_path / "two" / "run")


@every_kind
def test_an_interrupted_run_resumes_bit_for_bit(
    parallel: str, tmp_path: Path, two: Processes
) -> None:
    """With dropout and BatchNorm; only one process gets the signal."""
    changes = {"parallel": parallel, "scope": None, "model": "small_resnet18_narrow"}
    changes |= {"augmentation": "medium", "drop": 0.3, "epochs": 2}
    for name in ("whole", "halves"):
        small_runs.config(tmp_path / name)
    assert two.run(run, tmp_path / "whole", changes) == [(8, None)] * 2
    assert two.run(run, tmp_path / "halves", changes, 3) == [(3, "SIGTERM")] * 2
    assert two.run(run, tmp_path / "halves", changes) == [(8, None)] * 2
    one, other = (tmp_path / name / "run" for name in ("whole", "halves"))
    small_runs.assert_same(small_runs.state(one), small_runs.state(other))
    assert small_runs.timeless_records(one) == small_runs.timeless_records(other)


@every_kind
def test_the_number_of_processes_may_change(parallel: str, tmp_path: Path, two: Processes) -> None:
    changes = {"parallel": parallel, "optimizer": "adamw", "lr": 0.01}
    run(tmp_path / "one", changes)
    small_runs.config(tmp_path / "more")
    assert run(tmp_path / "more", changes, 3) == (3, "SIGTERM")
    assert two.run(run, tmp_path / "more", changes, 9) == [(9, "SIGTERM")] * 2
    assert run(tmp_path / "more", changes) == (12, None)
    assert_close_runs(tmp_path / "one" / "run", tmp_path / "more" / "run")


def drawn(folder: Path) -> tuple[Tensor, Tensor]:
    """Some initial weights, and the random numbers that the process draws next."""
    with joined("cpu") as world:
        components = components_of(small_runs.config(folder), world)
        return next(components.model.parameters()).detach().clone(), torch.rand(4)


def test_initial_weights_are_the_same_and_dropout_masks_are_not(
    tmp_path: Path, two: Processes
) -> None:
    small_runs.config(tmp_path)
    (weights, numbers), (same_weights, other_numbers) = two.run(drawn, tmp_path)
    assert torch.equal(weights, same_weights)
    assert not torch.equal(numbers, other_numbers)


def diverging(folder: Path, parallel: str) -> int:
    """Train; the loss of the second process is not finite in step 3."""
    whole, num_calls = EagerStep._loss_and_accuracy, 0

    def loss_and_accuracy(self: EagerStep, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal num_calls
        num_calls += 1
        loss, right = whole(self, x, y)
        is_wrong = num_calls == 5 and dist.get_rank() == 1  # after two passes for each step
        return loss * (torch.nan if is_wrong else 1.0), right

    changes = {"model": "small_resnet18_narrow", "objective": "gsam", "rho_inverse_sqrt": True}
    with mock.patch.object(EagerStep, "_loss_and_accuracy", loss_and_accuracy):
        return train(small_runs.config(folder, parallel=parallel, steps=4, **changes)).step


@every_kind
def test_a_loss_that_is_not_finite_in_one_process_is_skipped_in_all(
    parallel: str, tmp_path: Path, two: Processes
) -> None:
    small_runs.config(tmp_path)
    assert two.run(diverging, tmp_path, parallel) == [4, 4]
    records = read_records(tmp_path / "run")
    assert [r["step"] for r in records if r["kind"] == "skip"] == [3]
    state = small_runs.state(tmp_path / "run")
    assert all(bool(w.isfinite().all()) for w in state["model"].values())  # statistics too
    batches_seen = [v for k, v in state["model"].items() if k.endswith("num_batches_tracked")]
    assert set(map(int, batches_seen)) == {3}
    assert state["objective"] == {"rho": {"num_steps": 3}}


def mistaken(folder: Path, changes: dict[str, Any]) -> None:
    train(small_runs.config(folder, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_size": 7, "out": None},
            "batch_size must be a multiple of processes times micro-batches, got 7",
        ),
        ({"seed": 5}, "out must be a folder of this configuration"),
        ({"capture": True, "out": None}, "capture must be used with one process on a CUDA device"),
    ],
)
def test_an_error_is_raised_in_all_processes(
    changes: dict[str, Any], message: str, tmp_path: Path, two: Processes
) -> None:
    train(small_runs.config(tmp_path, steps=1))
    for result in two.try_run(mistaken, tmp_path, {"steps": 1} | changes):
        assert is_failure(result)
        assert message in result


def test_two_runs_in_one_folder(tmp_path: Path, two: Processes) -> None:
    config = small_runs.config(tmp_path, **SETTINGS)
    config.folder.mkdir()
    records = Records(config.folder)
    (config.folder / "config.json").write_text(config.to_json())
    for result in two.try_run(run, tmp_path, {}):
        assert is_failure(result)
        assert "out must not be in use by another process" in result
    records.close()
    assert two.run(run, tmp_path, {}) == [(12, None)] * 2


def test_the_command_under_torchrun(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = train_command(tmp_path, launch, {})
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert_two_processes_trained(tmp_path, output)


def test_the_command_under_another_launcher(tmp_path: Path) -> None:
    """As started by srun and mpirun: with the variables of env://, but not torchrun's."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        train_command(tmp_path, [sys.executable], both | {"RANK": str(rank)}) for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert_two_processes_trained(tmp_path, "".join(output for output, _ in outputs))


def train_command(folder: Path, launch: list[str], variables: dict[str, str]) -> Popen[str]:
    config = small_runs.config(folder)
    command = ["-m", "surrogap.cli", "train", "--data", config.data.name, "--batch-size", "8"]
    command += ["--model", "small_mlp", "--steps", "3", "--no-tensorboard", "--device", "cpu"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | variables
    return Popen(
        [*launch, *command, "--out", str(config.folder)],
        cwd=ROOT,
        env=environment,
        stdout=PIPE,
        stderr=PIPE,
        text=True,
    )


def assert_two_processes_trained(folder: Path, output: str) -> None:
    assert output.count("finished, step 3 of 3") == 1
    assert read_records(folder / "run")[-1]["step"] == 3
    assert '"processes": 2' in (folder / "run" / "versions.json").read_text()


def test_processes_that_cannot_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    message = "WORLD_SIZE must come with .*, got 2 without MASTER_ADDR, MASTER_PORT"
    with pytest.raises(ValueError, match=message), joined("cpu"):
        pass
