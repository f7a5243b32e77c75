"""`torchrun`, as a user would call it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def torchrun(
    num_processes: int,
    *arguments: object,
    undo: Callable[[], object] = lambda: None,
    **environment: str,
) -> str:
    """The output of a script, which can import what this process can.

    `undo` removes the files of an attempt that is repeated.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    path = os.pathsep.join(filter(None, sys.path))
    for _ in range(5):
        result = subprocess.run(
            [*command, str(num_processes), *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        # torch sometimes aborts at exit, with or without surrogap, if gloo's threads outlive
        # Python: https://github.com/pytorch/pytorch/pull/179291. Then the script starts again.
        if "terminate called without an active exception" not in result.stderr:
            break
        undo()
    assert result.returncode == 0, result.stderr
    return result.stdout
