"""Checkpoints are atomic, and reading one runs no code."""

import hashlib
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from surrogap.training.checkpoints import Checkpoints, read
from surrogap.training.failure import RunFailedError
from surrogap.training.run import train
from tests.training import small_runs

STATE = {"weights": torch.arange(5.0), "step": 3, "lists": [{"a": None, "b": (1, 2.5)}, "text"]}


def saved(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save({**STATE, "step": step}, step)
    return checkpoints


def steps(checkpoints: Checkpoints) -> list[int]:
    return [int(path.name.split("-")[1]) for path in checkpoints.paths()]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    found = saved(tmp_path, 3).newest()
    assert found is not None
    assert torch.equal(found.pop("weights"), STATE["weights"])
    assert found == {name: value for name, value in STATE.items() if name != "weights"}


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    assert steps(saved(tmp_path, 1, 2, 10, 9_999_999)) == [10, 9_999_999]


def test_none_where_there_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nothing").newest() is None
    (tmp_path / "unfinished").write_bytes(b"half")
    assert Checkpoints(tmp_path).newest() is None


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "appended"])
def test_a_damaged_one_falls_back_with_a_warning(damage: str, tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    newest = checkpoints.paths()[-1]
    content = bytearray(newest.read_bytes())
    middle = len(content) // 2
    newest.write_bytes(
        {
            "truncated": content[:-1],
            "empty": b"",
            "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "appended": content + b"\0",
        }[damage]
    )
    with pytest.warns(UserWarning, match="which is damaged. Delete it. The previous one is used."):
        found = checkpoints.newest()
    assert found is not None
    assert found["step"] == 1


def test_a_damaged_one_ahead_gives_way_to_new_ones(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 9)
    checkpoints.paths()[-1].write_bytes(b"damaged")
    checkpoints.save(STATE, 2)
    assert steps(checkpoints) == [1, 2]
    checkpoints.save(STATE, 9)
    assert steps(checkpoints) == [2, 9]
    assert checkpoints.newest() is not None


def test_where_all_are_damaged(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    for path in checkpoints.paths():
        path.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="is damaged") as warned,
        pytest.raises(ValueError, match="checkpoints must include an intact one, got 2 damaged"),
    ):
        checkpoints.newest()
    is_used = ["The previous one is used" in str(warning.message) for warning in warned]
    assert is_used == [True, False]


class Malicious:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def disguised(content: bytes, folder: Path) -> Path:
    """Write a file that looks like a checkpoint of step 7, with a valid hash."""
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    path = folder / f"step-000000007-{digest}.pt"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("form", ["torch.save", "pickle"])
def test_reading_executes_no_code(form: str, tmp_path: Path) -> None:
    state = {"step": 7, "model": Malicious(tmp_path / "pwned")}
    buffer = io.BytesIO()
    torch.save(state, buffer) if form == "torch.save" else pickle.dump(state, buffer, 2)
    content = buffer.getvalue()
    # Unpickling without checks does run the code.
    buffer.seek(0)
    torch.load(buffer, weights_only=False) if form == "torch.save" else pickle.load(buffer)
    (tmp_path / "pwned").rmdir()
    path = disguised(content, tmp_path)
    with pytest.raises(
        ValueError, match="checkpoint must contain only tensors and numbers, got"
    ) as raised:
        read(path)
    assert "weights_only" not in str(raised.value)  # torch's advice is to unpickle it anyway
    assert not (tmp_path / "pwned").exists()
    with pytest.warns(UserWarning, match="only tensors and numbers"), pytest.raises(ValueError):  # noqa: PT011
        Checkpoints(tmp_path).newest()
    assert not (tmp_path / "pwned").exists()


FULL_DISK = """
import resource, signal, sys, torch
from pathlib import Path
from surrogap.training.checkpoints import Checkpoints
from surrogap.training.failure import RunFailedError
from surrogap.training.model import load_weights
from surrogap.training.run import train
from tests.training import small_runs
folder = Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
try:
    Checkpoints(folder).save({"weights": torch.zeros(100_000)}, 2)
except RunFailedError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_last_one_intact(tmp_path: Path) -> None:
    """A limit on the size of files fails like a full disk."""
    checkpoints = saved(tmp_path, 1)
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.startswith(f"Cannot write a checkpoint to {tmp_path}: File too large; step-0000")
    assert "is intact. Free some disk space, then pass --resume." in output
    assert [path.name for path in tmp_path.iterdir()] == [checkpoints.paths()[0].name]
    assert checkpoints.newest() is not None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = r"Not a directory; there is no previous one. Make the folder writable, then"
    with pytest.raises(RunFailedError, match=message):
        Checkpoints(tmp_path / "file" / "checkpoints").save(STATE, 1)


def test_an_error_of_torchs_own_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        Checkpoints(tmp_path).save(STATE, 1)


@pytest.mark.parametrize("state", [[1, 2], {"step": 7}, {"model": {}, "optimizer": [1]}])
def test_a_state_of_something_else(state: Any, tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, steps=1)
    train(config)
    folder = config.folder / "checkpoints"
    for path in folder.iterdir():
        path.unlink()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    disguised(buffer.getvalue(), folder)
    with pytest.raises(ValueError, match="checkpoint must have the state of a run"):
        train(config, resume=True)
