"""Accuracy, top-5 accuracy, loss and calibration error of a model over batches.

Every kind of truth (a label, a set of labels, human votes) is turned into the correct classes of an
image. The scores follow from these and from the probabilities `p = softmax(logits)`: the rank of
the best correct class gives accuracy and top-5 accuracy. The loss depends on the kind of truth; see
`evaluate`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from surrogap.checks import one_of
from surrogap.errors import InvalidTypeError, InvalidValueError

NUM_BINS = 15

Truth = Literal["label", "set", "votes"]


@dataclass(frozen=True)
class Scores:
    """The scores of a model on a test set.

    Attributes:
        accuracy: The fraction of images whose most probable class is correct.
        top5: The fraction of images with a correct class among the five most probable ones; equal
            probabilities are ranked in the order of the classes.
        loss: The mean cross-entropy; see `evaluate` for each kind of truth.
        calibration_error: The expected calibration error (Guo et al. 2017) of the most probable
            class: `sum_b (n_b / n) * |accuracy_b - confidence_b|` over 15 bins of the confidence
            `max(p)`, the intervals `(b / 15, (b + 1) / 15]`.
        num_samples: The number of scored images.

    >>> Scores(accuracy=0.5, top5=1.0, loss=0.7, calibration_error=0.1, num_samples=2).accuracy
    0.5
    """

    accuracy: float
    top5: float
    loss: float
    calibration_error: float
    num_samples: int


class _Judged(NamedTuple):
    """Images compared with the truth, over the classes that take part."""

    is_correct: Tensor  # (images, classes): true for the correct classes
    loss: Tensor  # (images,)
    is_valid: Tensor  # (images,): false for a label that is not a class, or negative votes


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
    """Return the scores of a model over batches of images, which may differ in size.

    The model runs in evaluation mode and without gradients, and every module's mode is restored.
    The sums stay on the device, in float64, and are read once at the end.

    Under torch.distributed, each process passes its share of the test set and gets the scores of
    the whole. Processes may have different numbers of batches, unless the model communicates in its
    forward pass (FSDP). For DistributedDataParallel the inner module runs, with the buffers of the
    first process. Images that a sampler repeats, so that all processes have equally many, are
    counted repeatedly.

    Args:
        model: Maps a batch of images to logits of shape (images, classes).
        batches: Pairs of images and their truth.
        truth: The kind of truth in the batches. "label": a class for each image, and the loss is
            `-log p[label]`. "set": a bool for each image and class, as in ImageNet-ReaL (see
            `label_sets`); any class of the set is correct, and the loss is `-log` of the set's
            probability. "votes": a count for each image and class, as in CIFAR-10H; the class with
            the most votes is correct (all of them in a tie), and the loss is `-sum(q * log p)` with
            `q = votes / sum(votes)`. Images without a correct label or a vote are left out.
        classes: The classes that take part, for test sets with a subset of the model's classes
            (ImageNet-R): `p` is a softmax over these. The truth still refers to all of the model's
            classes.
        autocast: The dtype for autocast, torch.bfloat16 or torch.float16; None for no autocast.
        device: The device for the batches; None for that of the model's first parameter.
        across_processes: Whether to sum over all processes if torch.distributed is initialized.
            Pass False to score in a single process.

    Raises:
        TypeError: The dtype of the labels does not fit `truth`.
        ValueError: An argument is out of bounds, shapes do not fit, labels are not classes of the
            model, or there are no images to score.

    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 1.0, 0.0]])
    >>> batches = [(logits[:2], torch.tensor([0, 1])), (logits[2:], torch.tensor([0]))]
    >>> scores = evaluate(nn.Identity(), batches)
    >>> scores.num_samples, round(scores.accuracy, 3)
    (3, 0.667)
    """
    classes = None if classes is None else [int(k) for k in classes]  # may be an array
    _check_arguments(truth, classes, autocast)
    where = _device_of(model) if device is None else torch.device(device)
    group_sums = across_processes and dist.is_available() and dist.is_initialized()
    subset = None if classes is None else torch.tensor(classes, device=where)
    sums = torch.zeros(5 + NUM_BINS, dtype=torch.float64, device=where)
    cast: AbstractContextManager[object] = (
        nullcontext() if autocast is None else torch.autocast(where.type, autocast)
    )
    with torch.no_grad(), in_evaluation_mode(model):
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
    """Convert a list of labels for each image to the truth "set" of `evaluate`.

    Args:
        labels: The correct labels of each image; empty if they are unknown.
        num_classes: The number of classes.

    Returns:
        Bools of shape (images, classes).

    Raises:
        ValueError: A label is not a class.

    >>> label_sets([[0, 2], []], num_classes=3)
    tensor([[ True, False,  True],
            [False, False, False]])
    """
    sets = torch.zeros(len(labels), num_classes, dtype=torch.bool)
    for i, ones in enumerate(labels):
        wrong = [label for label in ones if not 0 <= label < num_classes]
        if wrong:
            raise InvalidValueError(
                f"labels must be from 0 to {num_classes - 1}, got {wrong[0]} for image {i}. "
                "Pass the number of the model's classes as num_classes."
            )
        sets[i, list(ones)] = True
    return sets


def _sums(logits: Tensor, labels: Tensor, truth: Truth, subset: Tensor | None) -> Tensor:
    """Sums over a batch: images, correct, correct in top 5, loss, invalid; then a gap per bin."""
    present = torch.arange(logits.shape[1], device=logits.device) if subset is None else subset
    logits = logits if subset is None else logits[:, subset]
    log_p = logits.log_softmax(1)
    judged = _votes(log_p, labels, present) if truth == "votes" else _sets(log_p, labels, present)
    counted = judged.is_correct.any(1)
    rank = _rank(logits, judged.is_correct)
    is_correct = (counted & (rank < 1)).double()
    confidence = log_p.amax(1).exp()
    edges = torch.arange(1, NUM_BINS, device=logits.device, dtype=torch.float64) / NUM_BINS
    bins = torch.bucketize(confidence, edges)
    in_bin = (bins[:, None] == torch.arange(NUM_BINS, device=logits.device)).double()
    gaps = in_bin.T @ torch.where(counted, is_correct - confidence, 0.0)
    five = counted & (rank < min(5, logits.shape[1]))
    loss = torch.where(counted, judged.loss, 0.0).sum()
    heads = (counted.sum(), is_correct.sum(), five.sum(), loss, (~judged.is_valid).sum())
    return torch.cat([torch.stack([head.double() for head in heads]), gaps])


def _sets(log_p: Tensor, labels: Tensor, present: Tensor) -> _Judged:
    """Labels and sets of labels: the loss is `-log` of the probability of all correct classes."""
    # Compared, not indexed: a label that is not a class would be a fatal error on a GPU.
    correct = labels[:, None] == present if labels.ndim == 1 else labels[:, present]
    loss = -torch.where(correct, log_p, -torch.inf).logsumexp(1)
    return _Judged(correct, loss, correct.any(1) | (labels.ndim > 1))


def _votes(log_p: Tensor, labels: Tensor, present: Tensor) -> _Judged:
    votes = labels[:, present].double()
    most = votes.amax(1, keepdim=True)
    q = votes / votes.sum(1, keepdim=True)
    loss = -torch.where(q > 0, q * log_p, 0.0).sum(1)  # not 0 * -inf
    return _Judged((votes == most) & (most > 0), loss, (votes >= 0).all(1))


def _rank(logits: Tensor, correct: Tensor) -> Tensor:
    """The number of classes ranked before the best correct one; comparisons with NaN are lost."""
    best = torch.where(correct, logits, -torch.inf).argmax(1, keepdim=True)
    score = logits.gather(1, best)
    index = torch.arange(logits.shape[1], device=logits.device)
    # Comparisons with NaN are false, so count the classes behind: NaN must not count as correct.
    behind = (logits < score) | ((logits == score) & (index >= best))
    return logits.shape[1] - behind.sum(1)


def _scores(sums: list[float], truth: Truth) -> Scores:
    num_samples, correct, five, loss, num_invalid, *gaps = sums
    if num_invalid and truth == "label":
        raise InvalidValueError(
            f"labels must be classes of the model, and among `classes` if those are given, got "
            f"{num_invalid:.0f} of {num_samples + num_invalid:.0f} that are not. Use the model's "
            "numbering of the classes."
        )
    if num_invalid:
        raise InvalidValueError(
            f"votes must be at least 0, got negative ones for {num_invalid:.0f} images. "
            "Pass the number of votes for each class."
        )
    if not num_samples:
        raise InvalidValueError(
            "batches must hold at least one image with a correct label, got none. "
            "A generator can be read only once: pass a list or a loader."
        )
    return Scores(
        accuracy=correct / num_samples,
        top5=five / num_samples,
        loss=loss / num_samples,
        calibration_error=sum(abs(gap) for gap in gaps) / num_samples,
        num_samples=int(num_samples),
    )


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context manager that puts a model in evaluation mode, and restores every module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # one by one: some may be in evaluation mode already
            module.training = training


def _unwrapped(model: nn.Module, shares_buffers: bool) -> nn.Module:
    """The module inside DDP, whose forward pass would wait for processes without a batch."""
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
    one_of("truth", truth, get_args(Truth), remedy="Pass label for one class per image.")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise InvalidValueError(
            f"autocast must be torch.bfloat16, torch.float16 or None, got {autocast!r}. "
            "Pass None for no autocast."
        )
    if classes is not None and (
        not classes or min(classes) < 0 or len(set(classes)) < len(classes)
    ):
        raise InvalidValueError(
            f"classes must be distinct, non-negative and not empty, got {_shortened(classes)}. "
            "Pass None for all classes."
        )


def _check_shapes(
    images: Tensor, labels: Tensor, logits: object, truth: Truth, classes: Sequence[int] | None
) -> None:
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(images):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InvalidValueError(
            f"model must return logits of shape (images, classes), got {got} for {len(images)} "
            "images. Wrap the model in one that returns its logits."
        )
    if classes is not None and max(classes) >= logits.shape[1]:
        raise InvalidValueError(
            f"classes must be below {logits.shape[1]}, the number of the model's classes, got "
            f"{max(classes)}. Use the model's numbering of the classes."
        )
    shape = logits.shape[:1] if truth == "label" else logits.shape
    if labels.shape != shape:
        raise InvalidValueError(
            f"labels must have shape {tuple(shape)} for truth={truth!r}, got "
            f"{tuple(labels.shape)}. Pass the kind of truth that is in the batches."
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
            "Pass the kind of truth that is in the batches."
        )


def _shortened(values: Sequence[int]) -> str:
    return str(values) if len(values) <= 8 else f"{str(values[:8])[:-1]}, ...]"
