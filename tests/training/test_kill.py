"""SIGKILL at random moments, 100 times: the run always ends with the same weights.

The run is forked from a process that has loaded torch, since a new interpreter takes seconds to
start. No other test uses that process, since threads do not survive a fork. The moments are uniform
in four times the duration of a start, so that some kills come during the start, and most during
training and saving, which happens after every step.
"""

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from surrogap.training.config import Config
from surrogap.training.run import train
from tests.training import small_runs

NUM_KILLS = 100
SEED = int(os.environ.get("KILL_SEED", "0"))


def fork(config: Config) -> int:
    """Resume a run in a forked process, and return its process ID."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        train(config, resume=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def life(config: Config, seconds: float) -> bool:
    """Return True if SIGKILL ended the process; otherwise it must have succeeded."""
    child = fork(config)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


class Unfinished:
    """The unfinished file of a checkpoint that is being written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "checkpoints" / "unfinished"
        self.seen = 0

    def is_new(self) -> bool:
        """Return True if it is another file than at the last call."""
        before = self.seen
        self.seen = self.path.stat().st_mtime_ns if self.path.exists() else 0
        return self.seen not in (0, before)


def hundred_kills(tmp_path: Path) -> None:
    settings = {"epochs": 10, "checkpoint_every": 1, "augmentation": "medium", "record_every": 1}
    undisturbed = small_runs.config(tmp_path / "undisturbed", **settings)
    train(undisturbed)
    start = time.perf_counter()
    train(undisturbed, resume=True)  # starts the run, without a checkpoint
    longest = 4 * (time.perf_counter() - start)
    expected = small_runs.state(undisturbed.folder)
    records = small_runs.timeless_records(undisturbed.folder)

    print(f"To draw the same moments: KILL_SEED={SEED}")
    moments, num_kills, num_runs, num_unfinished = random.Random(SEED), 0, 0, 0
    while num_kills < NUM_KILLS:
        config = small_runs.config(tmp_path / f"run_{num_runs}", **settings)
        num_runs += 1
        unfinished = Unfinished(config.folder)
        while num_kills < NUM_KILLS and life(config, moments.uniform(0, longest)):
            num_kills += 1
            num_unfinished += unfinished.is_new()
        assert os.waitpid(fork(config), 0)[1] == 0
        small_runs.assert_same(small_runs.state(config.folder), expected)
        assert small_runs.timeless_records(config.folder) == records
    during = f"{num_unfinished} of them while a checkpoint was written"
    print(f"{num_kills} kills, {during}; {num_runs} runs")
    assert num_unfinished > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_hundred_kills(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "tests.training.test_kill", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{NUM_KILLS} kills" in result.stdout


if __name__ == "__main__":
    hundred_kills(Path(sys.argv[1]))
