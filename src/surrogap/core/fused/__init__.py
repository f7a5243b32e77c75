"""Triton kernels for the arithmetic of a step, where they can run.

`choose` is all that the rest of the core sees of this folder. Triton takes a second to import, so
that happens only for parameters on a CUDA device.
"""

from importlib.util import find_spec

from surrogap.core.arithmetic import Arithmetic, Flat, Task


def choose(task: Task, *, last: Arithmetic | None = None) -> Arithmetic:
    """Return the fastest arithmetic for a task: the `last` one, if it still fits."""
    if last is not None and last.adopts(task):
        return last
    if task.parameters[0].device.type == "cuda" and find_spec("triton"):
        from surrogap.core.fused.arithmetic import Fused

        if Fused.takes(task.parameters):
            return Fused(task)
    return Flat(task)
