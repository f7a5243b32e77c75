"""Capture of a whole training step as a CUDA graph: zero_grad, the passes, clipping, the update.

A step launches thousands of kernels, and with a small model the GPU waits for the CPU to launch
them. A graph launches them all at once. It repeats the captured kernels on the same memory, so
whatever changes from step to step is copied there first: the batch, and the settings, which are the
learning rates and the numbers that the objective's `_numbers` returns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from surrogap.checks import integer, number
from surrogap.core.captured_step import CapturedStep
from surrogap.core.objective import Objective
from surrogap.core.static_batch import BatchLoss, StaticBatch
from surrogap.errors import InvalidTypeError, InvalidValueError


def capture(
    objective: Objective,
    optimizer: Optimizer,
    loss_fn: BatchLoss,
    example_batch: Sequence[Tensor],
    *,
    micro_batches: int = 1,
    shares_perturbation: bool = True,
    climb_fraction: float = 1.0,
    clip_norm: float | None = None,
) -> CapturedStep:
    """Capture a training step as a CUDA graph, and return a function that replays it.

    Capturing leaves weights, buffers, the optimizer's state, `.grad` and the random generators
    unchanged. Afterwards, learning rates, `rho`, `alpha`, `lam` and `gamma` may change from step to
    step, and schedules and schedulers work as usual. Everything else that the step depends on must
    not change, and each step checks it: the model's parameters, buffers and mode, the optimizer's
    state and its other settings. So load checkpoints before capturing. The graph has its own
    gradients and does not touch `.grad`. Its memory stays allocated until the returned function is
    deleted. `Intermittent` has two graphs, which share memory.

    Args:
        objective: Any objective whose model is on one CUDA device.
        optimizer: SGD, Adam or AdamW, built with `fused=True`.
        loss_fn: Takes a batch, runs the forward pass, under autocast if you use it, and returns the
            loss or `(loss, aux)`. It is called only during the capture; later steps replay its
            kernels.
        example_batch: Tensors with the shapes and dtypes of every batch.
        micro_batches: The number of micro-batches of equal size to split each batch into, along the
            first dimension. The loss is the mean of their losses.
        shares_perturbation: True if all micro-batches share one perturbation, False if each has its
            own (m-sharpness). With False, the report averages over the micro-batches; see
            `Report.mean`.
        climb_fraction: The fraction of the batch that the first pass runs on: the first rows, at
            least one. Cannot be combined with `micro_batches`.
        clip_norm: The maximum norm of the direction; None for no clipping.

    Returns:
        A function `step(*batch) -> Report`. Later steps do not overwrite a report or its `aux`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, the model is not on one CUDA device or is trained
            by several processes, or the optimizer is not fused. From `step`: a batch has another
            shape or dtype.
        RuntimeError: The step cannot be captured, for example because it synchronises with the GPU.
            From `step`: something that must not change has changed.
    """
    if not isinstance(objective, Objective):
        raise InvalidTypeError(
            f"objective must be an objective, got {type(objective).__name__}. "
            "Pass one such as GSAM(model)."
        )
    if not isinstance(optimizer, Optimizer):
        raise InvalidTypeError(
            f"optimizer must be a torch optimizer, got {type(optimizer).__name__}. "
            "Pass the one that trains the model."
        )
    if clip_norm is not None:
        number("clip_norm", clip_norm, above=0, remedy="Leave it out for no clipping.")
    _check_optimizer(optimizer)
    _check_batch(example_batch, micro_batches)
    _check_climb(objective, climb_fraction, micro_batches)
    device = _device(objective)
    batch = StaticBatch(
        example_batch,
        device,
        loss_fn,
        micro_batches=micro_batches,
        shares_perturbation=shares_perturbation,
        climb_fraction=climb_fraction,
    )
    return CapturedStep(objective, optimizer, batch, device, clip_norm)


def _device(objective: Objective) -> torch.device:
    weights = objective._refresh()
    if weights.wrappers or weights.are_sharded:
        raise InvalidValueError(
            "model must be trained by one process, got one that several processes train. "
            "Train it with objective.backward."
        )
    devices = weights.devices
    if len(devices) > 1 or next(iter(devices)).type != "cuda":
        names = ", ".join(sorted(map(str, devices)))
        raise InvalidValueError(
            f"model must be on one CUDA device, got {names}. Train it with objective.backward."
        )
    return devices.pop()


def _check_optimizer(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if not group.get("fused"):
            raise InvalidValueError(
                f"optimizer must be fused, got {type(optimizer).__name__} with "
                f"fused={group.get('fused')}. Build SGD, Adam or AdamW with fused=True; train "
                "others with objective.backward."
            )


def _check_climb(objective: Objective, climb_fraction: float, micro_batches: int) -> None:
    remedy = "Pass a fraction such as 0.25."
    number("climb_fraction", climb_fraction, above=0, at_most=1, remedy=remedy)
    if climb_fraction == 1:
        return
    objective._check_climb("climb_fraction")
    if micro_batches > 1:
        raise InvalidValueError(
            f"climb_fraction must be 1 with micro_batches, got {climb_fraction} and "
            f"micro_batches={micro_batches}. Pass one of the two."
        )


def _check_batch(batch: Sequence[Tensor], micro_batches: int) -> None:
    if not isinstance(batch, list | tuple) or not all(isinstance(t, Tensor) for t in batch):
        raise InvalidTypeError(
            f"example_batch must be a tuple of tensors, got {type(batch).__name__}. "
            "Pass what the step will get, such as (x, y)."
        )
    integer("micro_batches", micro_batches, at_least=1, remedy="Leave it out for one.")
    if any(not t.ndim or len(t) % micro_batches for t in batch if micro_batches != 1):
        sizes = [tuple(tensor.shape) for tensor in batch]
        raise InvalidValueError(
            f"micro_batches must divide the batch, got {micro_batches} for shapes {sizes}. "
            "Pass a divisor of the batch size."
        )
