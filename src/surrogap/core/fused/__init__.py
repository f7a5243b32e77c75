"""The arithmetic of a step in Triton kernels, for CUDA devices.

The rest of the core uses only `choose`. Importing Triton takes a second, so it happens only for
parameters on a CUDA device.
"""

from importlib.util import find_spec

from surrogap.core.arithmetic import Arithmetic, Flat, Task


def choose(task: Task, *, last: Arithmetic | None = None) -> Arithmetic:
    """Return the fastest arithmetic for a task: the `last` one if it is compatible."""
    if last is not None and last.adopts(task):
        return last
    if task.parameters[0].device.type == "cuda" and find_spec("triton"):
        from surrogap.core.fused.arithmetic import Fused

        if Fused.takes(task.parameters):
            return Fused(task)
    return Flat(task)
