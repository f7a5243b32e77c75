"""Accuracy, top-5, loss and calibration of a model over batches.

Whatever the truth is (a label, a set of labels, the votes of people), it becomes the classes that
are right for an image. All else follows from them and from the probabilities `p = softmax(logits)`:
the rank of the best right class gives accuracy and top-5, and the probability of the right classes
gives the loss.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from surrogap.errors import InvalidTypeError, InvalidValueError

NUM_BINS = 15

Truth = Literal["label", "set", "votes"]


@dataclass(frozen=True)
class Scores:
    """How a model did on a set of images.

    Attributes:
        accuracy: The fraction of images whose most probable class is right.
        top5: The fraction of images with a right class among the five most probable ones; equal
            probabilities rank in the order of the classes.
        loss: The mean cross-entropy; see `evaluate` for each kind of truth.
        calibration_error: The expected calibration error (Guo et al. 2017) of the most probable
            class: `sum_b (n_b / n) * |accuracy_b - confidence_b|` over 15 bins of the confidence
            `max(p)`, the intervals `(b / 15, (b + 1) / 15]`.
        num_samples: How many images were scored.

    >>> Scores(accuracy=0.5, top5=1.0, loss=0.7, calibration_error=0.1, num_samples=2).accuracy
    0.5
    """

    accuracy: float
    top5: float
    loss: float
    calibration_error: float
    num_samples: int


class _Judged(NamedTuple):
    """Images against the truth, over the classes that take part."""

    right: Tensor  # (images, classes): which classes are right
    loss: Tensor  # (images,)
    is_valid: Tensor  # (images,): whether the truth makes sense


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    truth: Truth = "label",
    classes: Sequence[int] | None = None,
    autocast: torch.dtype | None = None,
    device: torch.device | str | None = None,
    across_processes: bool = True,
) -> Scores:
    """The scores of a model over batches of images, which may differ in size.

    It runs in evaluation mode and without gradients, and leaves each module's mode as it was. The
    sums stay on the device, in float64, and are read once at the end.

    Under torch.distributed, each process passes its part of the set and gets the scores of the
    whole; a process may have fewer batches than another, unless the model itself communicates in
    its forward pass (FSDP). Of a DistributedDataParallel the module inside runs, with the buffers
    of its first process. A sampler that repeats images to give all processes as many counts them
    as often as it repeats them.

    Args:
        model: Maps a batch of images to logits of shape (images, classes).
        batches: Pairs of images and their truth.
        truth: What the second of each pair is. "label": a class for each image, and the loss is
            `-log p[label]`. "set": a bool for each image and class, as ImageNet-ReaL has it (see
            `label_sets`); any class of the set is right, and the loss is `-log` of the set's
            probability. "votes": a count for each image and class, as CIFAR-10H has it; the class
            with the most votes is right (each of them, if they tie), and the loss is
            `-sum(q * log p)` with `q = votes / sum(votes)`. Images without a right label or a vote
            are left out.
        classes: The classes that take part, for sets that have some of the model's classes alone
            (ImageNet-R and -A): `p` is a softmax over these. The truth is given in the model's
            classes all the same.
        autocast: The dtype to run the model in under autocast, torch.bfloat16 or torch.float16.
            None changes nothing.
        device: Where the batches go. None: where the model's first parameter is.
        across_processes: Whether to sum over all processes, where torch.distributed is initialised.
            Pass False to score in one process alone.

    Raises:
        TypeError: The labels have another dtype than `truth` tells.
        ValueError: An argument is out of bounds, shapes do not fit, labels are no classes of the
            model, or there is nothing to score.

    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 1.0, 0.0]])
    >>> batches = [(logits[:2], torch.tensor([0, 1])), (logits[2:], torch.tensor([0]))]
    >>> scores = evaluate(nn.Identity(), batches)
    >>> scores.num_samples, round(scores.accuracy, 3)
    (3, 0.667)
    """
    classes = None if classes is None else [int(k) for k in classes]  # also of an array
    _check_arguments(truth, classes, autocast)
    where = _device_of(model) if device is None else torch.device(device)
    group_sums = across_processes and dist.is_available() and dist.is_initialized()
    subset = None if classes is None else torch.tensor(classes, device=where)
    sums = torch.zeros(5 + NUM_BINS, dtype=torch.float64, device=where)
    cast: AbstractContextManager[object] = (
        nullcontext() if autocast is None else torch.autocast(where.type, autocast)
    )
    with torch.no_grad(), _in_evaluation_mode(model):
        forward = _unwrapped(model, group_sums)
        for images, labels in batches:
            images = images.to(where, non_blocking=True)
            labels = labels.to(where, non_blocking=True)
            with cast:
                logits = forward(images)
            _check_shapes(images, labels, logits, truth, classes)
            sums += _sums(logits.double(), labels, truth, subset)
        if group_sums:
            dist.all_reduce(sums)
    return _scores(sums.tolist(), truth)


def label_sets(labels: Sequence[Sequence[int]], num_classes: int) -> Tensor:
    """The truth "set" of `evaluate` from a list of labels for each image.

    Args:
        labels: For each image its right labels; none if nobody knows.
        num_classes: How many classes there are.

    Returns:
        Bools of shape (images, classes).

    Raises:
        ValueError: A label is no class.

    >>> label_sets([[0, 2], []], num_classes=3)
    tensor([[ True, False,  True],
            [False, False, False]])
    """
    sets = torch.zeros(len(labels), num_classes, dtype=torch.bool)
    for i, ones in enumerate(labels):
        wrong = [label for label in ones if not 0 <= label < num_classes]
        if wrong:
            raise InvalidValueError(
                f"labels must lie within 0 and {num_classes - 1}, got {wrong[0]} for image {i}. "
                "Pass the number of the model's classes as num_classes."
            )
        sets[i, list(ones)] = True
    return sets


def _sums(logits: Tensor, labels: Tensor, truth: Truth, subset: Tensor | None) -> Tensor:
    """Of a batch: images, right, right within five, loss, invalid; then each bin's gap."""
    present = torch.arange(logits.shape[1], device=logits.device) if subset is None else subset
    logits = logits if subset is None else logits[:, subset]
    log_p = logits.log_softmax(1)
    judged = _votes(log_p, labels, present) if truth == "votes" else _sets(log_p, labels, present)
    counted = judged.right.any(1)
    rank = _rank(logits, judged.right)
    is_right = (counted & (rank < 1)).double()
    confidence = log_p.amax(1).exp()
    edges = torch.arange(1, NUM_BINS, device=logits.device, dtype=torch.float64) / NUM_BINS
    bins = torch.bucketize(confidence, edges)
    in_bin = (bins[:, None] == torch.arange(NUM_BINS, device=logits.device)).double()
    gaps = in_bin.T @ torch.where(counted, is_right - confidence, 0.0)
    five = counted & (rank < min(5, logits.shape[1]))
    loss = torch.where(counted, judged.loss, 0.0).sum()
    heads = (counted.sum(), is_right.sum(), five.sum(), loss, (~judged.is_valid).sum())
    return torch.cat([torch.stack([head.double() for head in heads]), gaps])


def _sets(log_p: Tensor, labels: Tensor, present: Tensor) -> _Judged:
    """Labels, and sets of labels: the loss is minus the log of what all right classes get."""
    # A comparison, since a label that is no class would make an index fail on the device.
    right = labels[:, None] == present if labels.ndim == 1 else labels[:, present]
    loss = -torch.where(right, log_p, -torch.inf).logsumexp(1)
    return _Judged(right, loss, right.any(1) | (labels.ndim > 1))


def _votes(log_p: Tensor, labels: Tensor, present: Tensor) -> _Judged:
    votes = labels[:, present].double()
    most = votes.amax(1, keepdim=True)
    q = votes / votes.sum(1, keepdim=True)
    loss = -torch.where(q > 0, q * log_p, 0.0).sum(1)  # not 0 * -inf
    return _Judged((votes == most) & (most > 0), loss, (votes >= 0).all(1))


def _rank(logits: Tensor, right: Tensor) -> Tensor:
    """How many classes come before the best right one; all of them where a logit is NaN."""
    best = torch.where(right, logits, -torch.inf).argmax(1, keepdim=True)
    score = logits.gather(1, best)
    index = torch.arange(logits.shape[1], device=logits.device)
    # What does not come before, for a comparison with NaN is false: no NaN may count as right.
    behind = (logits < score) | ((logits == score) & (index >= best))
    return logits.shape[1] - behind.sum(1)


def _scores(sums: list[float], truth: Truth) -> Scores:
    num_samples, right, five, loss, num_invalid, *gaps = sums
    if num_invalid and truth == "label":
        raise InvalidValueError(
            f"labels must be classes of the model, and among `classes` where those are given, got "
            f"{num_invalid:.0f} of {num_samples + num_invalid:.0f} that are not. Number the "
            "classes of the data as the model does."
        )
    if num_invalid:
        raise InvalidValueError(
            f"votes must be at least 0, got others for {num_invalid:.0f} images. "
            "Pass how many people chose each class."
        )
    if not num_samples:
        raise InvalidValueError(
            "batches must hold at least one image with a right label, got none. "
            "A generator is empty once it has been read: pass a list or a loader."
        )
    return Scores(
        accuracy=right / num_samples,
        top5=five / num_samples,
        loss=loss / num_samples,
        calibration_error=sum(abs(gap) for gap in gaps) / num_samples,
        num_samples=int(num_samples),
    )


@contextmanager
def _in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # one by one: some may be frozen while others train
            module.training = training


def _unwrapped(model: nn.Module, shares_buffers: bool) -> nn.Module:
    """What to run: DDP's forward pass would wait for processes that have no batch left."""
    if not isinstance(model, DistributedDataParallel):
        return model
    module: nn.Module = model.module
    if shares_buffers and model.broadcast_buffers:  # as DDP does before each forward pass
        for buffer in module.buffers():
            dist.broadcast(buffer, group=model.process_group, group_src=0)
    return module


def _device_of(model: nn.Module) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def _check_arguments(
    truth: str, classes: Sequence[int] | None, autocast: torch.dtype | None
) -> None:
    if truth not in get_args(Truth):
        raise InvalidValueError(
            f"truth must be 'label', 'set' or 'votes', got {truth!r}. "
            "Pass 'label' for one class for each image."
        )
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise InvalidValueError(
            f"autocast must be torch.bfloat16, torch.float16 or None, got {autocast!r}. "
            "Pass None to run the model as it is."
        )
    if classes is not None and (
        not classes or min(classes) < 0 or len(set(classes)) < len(classes)
    ):
        raise InvalidValueError(
            f"classes must be different numbers of at least 0, and one or more, got "
            f"{_shortened(classes)}. Pass None to let all classes take part."
        )


def _check_shapes(
    images: Tensor, labels: Tensor, logits: object, truth: Truth, classes: Sequence[int] | None
) -> None:
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(images):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InvalidValueError(
            f"model must return logits of shape (images, classes), got {got} for {len(images)} "
            "images. Wrap a model that returns something else."
        )
    if classes is not None and max(classes) >= logits.shape[1]:
        raise InvalidValueError(
            f"classes must be below the number of the model's classes, got {max(classes)} and "
            f"{logits.shape[1]} classes. Number them as the model does."
        )
    shape = logits.shape[:1] if truth == "label" else logits.shape
    if labels.shape != shape:
        raise InvalidValueError(
            f"labels must have shape {tuple(shape)} for truth={truth!r}, got "
            f"{tuple(labels.shape)}. Pass the truth that the batches hold."
        )
    is_number = labels.dtype != torch.bool and not labels.is_complex()
    fits = {
        "label": is_number and not labels.is_floating_point(),
        "set": labels.dtype == torch.bool,
        "votes": is_number,
    }
    if not fits[truth]:
        wanted = {"label": "integers", "set": "bools", "votes": "numbers"}[truth]
        raise InvalidTypeError(
            f"labels must be {wanted} for truth={truth!r}, got {labels.dtype}. "
            "Pass the truth that the batches hold."
        )


def _shortened(values: Sequence[int]) -> str:
    return str(values) if len(values) <= 8 else f"{str(values[:8])[:-1]}, ...]"
