"""A write that fails leaves no files behind."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from surrogap.atomic import atomic_write

# Files are limited to 1,000 bytes, which fails like a full disk.
LIMITED = """
import resource, signal, sys
from surrogap import cli
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_body_that_raises_leaves_what_was_there(is_folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "numbers.txt"
    path.write_text("before")

    def write() -> None:
        with atomic_write(path) as temporary:
            if is_folder:
                temporary.mkdir()
            (temporary / "part" if is_folder else temporary).write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space"):
        write()
    assert os.listdir(tmp_path) == ["numbers.txt"]
    assert path.read_text() == "before"


def test_processes_that_write_the_same_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "numbers.txt"
    other = "import sys; from pathlib import Path; from surrogap.atomic import atomic_write\n"
    other += "with atomic_write(Path(sys.argv[1])) as t: t.write_text('theirs')"
    with atomic_write(path) as temporary:
        temporary.write_text("mine")
        subprocess.run([sys.executable, "-c", other, str(path)], check=True)
        assert path.read_text() == "theirs"
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["numbers.txt"]


@pytest.mark.parametrize("command", ["show", "evaluate", "export", "sharpness", "find-rho"])
def test_commands_leave_nothing_behind_on_a_full_disk(command: str, tmp_path: Path) -> None:
    from surrogap.training.run import train
    from tests.training.small_runs import config

    run = train(config(tmp_path, epochs=1)).folder
    before = sorted(path for path in run.rglob("*"))
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, command, str(run)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert "must be a writable f" in result.stderr  # file or folder
    assert "Traceback" not in result.stderr
    assert sorted(path for path in run.rglob("*")) == before
