"""Accuracy, top-5, loss and calibration against closed forms, a slow reference and scikit-learn."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from surrogap.evaluation import Scores, evaluate, label_sets
from tests.evaluation import reference

IDENTITY = nn.Identity()


def data(num: int = 157, num_classes: int = 12) -> tuple[Tensor, Tensor]:
    return 3 * torch.randn(num, num_classes, dtype=torch.float64), torch.randint(
        num_classes, (num,)
    )


def ragged(*tensors: Tensor, sizes: tuple[int, ...] = (64, 1, 50, 42)) -> list[Any]:
    return list(zip(*(tensor.split(sizes) for tensor in tensors), strict=True))


def close(a: Scores, b: Scores) -> None:
    assert asdict(a) == pytest.approx(asdict(b), rel=1e-12, abs=1e-14)


def test_labels_equal_the_slow_reference(device: torch.device) -> None:
    logits, labels = data()
    got = evaluate(IDENTITY, ragged(logits, labels), device=device)
    close(got, reference.scores(logits.tolist(), [{k} for k in labels.tolist()]))
    assert got.num_samples == 157


def test_sets_equal_the_slow_reference(device: torch.device) -> None:
    logits, _ = data()
    sets = torch.rand(157, 12) < 0.12
    lists = [row.nonzero().flatten().tolist() for row in sets]
    assert {len(ones) for ones in lists} >= {0, 1, 2, 3}
    assert torch.equal(label_sets(lists, 12), sets)
    got = evaluate(IDENTITY, ragged(logits, sets), truth="set", device=device)
    close(got, reference.scores(logits.tolist(), [set(ones) for ones in lists]))
    assert got.num_samples == sum(bool(ones) for ones in lists) < 157


def test_votes_equal_the_slow_reference(device: torch.device) -> None:
    logits, _ = data()
    votes = torch.randint(0, 6, (157, 12))
    votes[3] = 0
    rows = [{k: n for k, n in enumerate(row) if n} for row in votes.tolist()]
    majority = [{k for k, n in row.items() if n == max(row.values())} for row in rows]
    assert any(len(ones) > 1 for ones in majority)  # ties
    got = evaluate(IDENTITY, ragged(logits, votes), truth="votes", device=device)
    close(got, reference.scores(logits.tolist(), majority, votes=rows))
    assert got.num_samples == 156


@pytest.mark.parametrize("classes", [[0, 1, 2, 3, 4, 5, 6, 7], [9, 2, 11, 4, 7, 3]])
def test_a_subset_of_the_classes(classes: list[int], device: torch.device) -> None:
    logits, _ = data()
    labels = torch.tensor(classes)[torch.randint(len(classes), (157,))]
    got = evaluate(IDENTITY, ragged(logits, labels), classes=classes, device=device)
    close(got, reference.scores(logits.tolist(), [{k} for k in labels.tolist()], classes=classes))
    close(got, evaluate(IDENTITY, ragged(logits, labels), classes=np.array(classes)))
    # Logits of other classes do not count; masking them with -inf gives the same scores.
    masked = torch.full_like(logits, -math.inf)
    masked[:, classes] = logits[:, classes]
    close(got, evaluate(IDENTITY, ragged(masked, labels)))
    votes = torch.randint(0, 3, (157, 12))
    close(
        evaluate(IDENTITY, ragged(logits, votes), truth="votes", classes=classes),
        evaluate(IDENTITY, ragged(logits[:, classes], votes[:, classes]), truth="votes"),
    )


def test_one_right_label_is_a_set_of_one_and_all_votes_for_it() -> None:
    logits, labels = data()
    one_hot = nn.functional.one_hot(labels, 12)
    expected = evaluate(IDENTITY, ragged(logits, labels))
    close(evaluate(IDENTITY, ragged(logits, one_hot.bool()), truth="set"), expected)
    close(evaluate(IDENTITY, ragged(logits, 51 * one_hot), truth="votes"), expected)


def test_scikit_learn_agrees() -> None:
    logits, labels = data()
    got = evaluate(IDENTITY, ragged(logits, labels))
    p = logits.softmax(1).numpy()
    assert got.accuracy == pytest.approx(metrics.accuracy_score(labels, p.argmax(1)), rel=1e-12)
    assert got.top5 == pytest.approx(metrics.top_k_accuracy_score(labels, p, k=5), rel=1e-12)
    assert got.loss == pytest.approx(metrics.log_loss(labels, p), rel=1e-12)


def test_batches_do_not_matter() -> None:
    logits, labels = data()
    whole = evaluate(IDENTITY, [(logits, labels)])
    for sizes in ((157,), (1,) * 157, (100, 57), (0, 157)):
        close(evaluate(IDENTITY, ragged(logits, labels, sizes=sizes)), whole)


def test_equal_logits_know_nothing() -> None:
    # p = 1/K for each class: loss log K, confidence 1/K, and the first class wins.
    logits, labels = torch.zeros(40, 10), torch.arange(10).repeat(4)
    got = evaluate(IDENTITY, [(logits, labels)])
    close(got, Scores(0.1, 0.5, math.log(10), 0.0, 40))


def sure(*confidences: float) -> Tensor:
    """Logits of two classes, of which the first gets these probabilities."""
    return torch.tensor([[math.log(c / (1 - c)), 0.0] for c in confidences], dtype=torch.float64)


@pytest.mark.parametrize("num_right", [0, 3, 10])
def test_calibration_error_of_equally_sure_answers(num_right: int) -> None:
    # The gap is |accuracy - confidence|, whatever the bin.
    labels = (torch.arange(10) >= num_right).long()
    got = evaluate(IDENTITY, ragged(sure(*[0.8] * 10), labels, sizes=(7, 3)))
    assert got.calibration_error == pytest.approx(abs(num_right / 10 - 0.8), rel=1e-12)


@pytest.mark.parametrize(
    ("logits", "error"),
    [
        (sure(0.61, 0.66), abs(1 - 0.61 - 0.66) / 2),  # both in (9/15, 10/15]: gaps cancel
        (sure(0.66, 0.67), (0.34 + 0.67) / 2),  # on both sides of 10/15: gaps add up
        (torch.tensor([[1e4, 0.0], [4.0, 0.0]]), 1 / (1 + math.exp(-4)) / 2),  # 1 is in the last
    ],
)
def test_calibration_error_within_and_between_bins(logits: Tensor, error: float) -> None:
    got = evaluate(IDENTITY, [(logits, torch.tensor([0, 1]))])
    assert got.calibration_error == pytest.approx(error, rel=1e-12)


def test_a_confidence_on_an_edge_belongs_to_the_bin_below() -> None:
    # Confidences 3/15 and 1/4: in (2/15, 3/15] and (3/15, 4/15], so their gaps add up.
    logits = torch.zeros(2, 5, dtype=torch.float64)
    logits[1, 0] = math.log(4 / 3)
    got = evaluate(IDENTITY, [(logits, torch.tensor([0, 1]))])
    assert got.calibration_error == pytest.approx((1 - 3 / 15 + 1 / 4) / 2, rel=1e-12)


def test_fewer_classes_than_five() -> None:
    got = evaluate(IDENTITY, [(torch.randn(20, 3), torch.randint(3, (20,)))])
    assert got.top5 == 1.0


@pytest.mark.parametrize("num_classes", [3, 12])
def test_nan_is_never_right(num_classes: int) -> None:
    got = evaluate(IDENTITY, [(torch.full((4, num_classes), math.nan), torch.zeros(4).long())])
    assert (got.accuracy, got.top5) == (0.0, 0.0)
    assert math.isnan(got.loss)
    assert math.isnan(got.calibration_error)


def test_a_class_that_was_ruled_out_costs_infinity_only_if_it_is_right() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    votes = torch.tensor([[1, 1, 0]])
    assert evaluate(IDENTITY, [(logits, votes)], truth="votes").loss == pytest.approx(math.log(2))
    assert evaluate(IDENTITY, [(logits, torch.tensor([2]))]).loss == math.inf


class Modes(nn.Module):
    """Records its mode in the forward pass, and whether gradients are enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.frozen.eval()
        self.seen: list[tuple[bool, bool, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.seen.append((self.linear.training, torch.is_grad_enabled(), out.dtype))
        if x.isnan().any():
            raise RuntimeError("a broken image")
        return self.frozen(out)


@pytest.mark.parametrize("raises", [False, True])
def test_modes_gradients_and_statistics_stay(raises: bool) -> None:
    model = Modes()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.full((5, 4), math.nan) if raises else torch.randn(5, 4)
    batches = [(x, torch.zeros(5).long())]
    if raises:
        with pytest.raises(RuntimeError, match="a broken image"):
            evaluate(model, batches)
    else:
        evaluate(model, batches)
    assert model.seen == [(False, False, torch.float32)]
    assert torch.is_grad_enabled()
    assert [m.training for m in (model, model.linear, model.frozen)] == [True, True, False]
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())


def test_autocast_and_the_models_device(device: torch.device) -> None:
    model = Modes().to(device)
    scores = evaluate(model, [(torch.randn(5, 4), torch.zeros(5).long())], autocast=torch.bfloat16)
    assert [seen[2] for seen in model.seen] == [torch.bfloat16]
    assert scores.num_samples == 5


def test_logits_of_low_precision_are_scored_in_float64() -> None:
    logits, labels = data()
    low = logits.bfloat16()
    close(evaluate(IDENTITY, ragged(low, labels)), evaluate(IDENTITY, ragged(low.double(), labels)))


class NoReads(TorchDispatchMode):
    """Raises when a value is copied to the host, or when a shape depends on a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("truth", ["label", "set", "votes"])
def test_no_batch_is_waited_for(truth: Any) -> None:
    logits, labels = data()
    if truth != "label":
        labels = nn.functional.one_hot(labels, 12)
    labels = labels.bool() if truth == "set" else labels
    with NoReads():
        evaluate(IDENTITY, ragged(logits, labels), truth=truth, classes=range(12))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("truth", ["label", "set", "votes"])
def test_no_batch_is_waited_for_on_a_gpu(truth: Any) -> None:
    logits, labels = data()
    if truth != "label":
        labels = nn.functional.one_hot(labels, 12)
    labels = labels.bool() if truth == "set" else labels

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        torch.cuda.set_sync_debug_mode("error")
        yield from ragged(logits, labels)
        torch.cuda.set_sync_debug_mode("default")

    try:
        got = evaluate(IDENTITY, batches(), truth=truth, classes=range(12), device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    close(got, evaluate(IDENTITY, ragged(logits, labels), truth=truth))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"truth": "labels"}, "truth must be one of label, set, votes, got 'labels'. The closest"),
        ({"autocast": torch.int8}, "autocast must be torch.bfloat16, .*, got torch.int8. Pass"),
        ({"classes": []}, r"classes must be distinct, .*, got \[\]. Pass None"),
        ({"classes": [1, 1]}, r"classes must be distinct, .*, got \[1, 1\]. Pass None"),
        ({"classes": [-1, 1]}, r"classes must be distinct, .*, got \[-1, 1\]. Pass None"),
        (
            {"classes": [0] * 20},
            r"classes must be distinct, .*, got \[(0, ){8}\.\.\.\]. Pass None",
        ),
        (
            {"classes": [3, 12]},
            "classes must be below 12, the number of the model's classes, got 12. ",
        ),
        ({"truth": "set"}, r"labels must have shape \(8, 12\) for truth='set', got \(8,\). Pass"),
        (
            {"classes": range(6)},
            "labels must be classes of the model, and among `classes` if those are given, got "
            "2 of 8 that are not. Use the",
        ),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    batches = [(torch.randn(8, 12), torch.arange(8))]
    with pytest.raises(ValueError, match=message):
        evaluate(IDENTITY, batches, **change)


@pytest.mark.parametrize("label", [-1, 12, -100])
def test_a_label_that_is_no_class(label: int, device: torch.device) -> None:
    batches = [(torch.randn(1, 12), torch.tensor([label])), (torch.randn(1, 12), torch.tensor([0]))]
    with pytest.raises(ValueError, match=r"labels must be classes of the model.* 1 of 2 that are"):
        evaluate(IDENTITY, batches, device=device)


@pytest.mark.parametrize(
    ("truth", "labels", "message"),
    [
        ("label", torch.zeros(2), "labels must be integers for truth='label', got torch.float32"),
        ("label", torch.zeros(2).bool(), "labels must be integers for truth='label', got torch.bo"),
        ("set", torch.zeros(2, 3), "labels must be bools for truth='set', got torch.float32. Pass"),
        ("votes", torch.zeros(2, 3).bool(), "labels must be numbers for truth='votes', got torch."),
    ],
)
def test_wrong_dtypes(truth: Any, labels: Tensor, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        evaluate(IDENTITY, [(torch.randn(2, 3), labels)], truth=truth)


@pytest.mark.parametrize("vote", [-1.0, math.nan])
def test_votes_below_zero(vote: float) -> None:
    votes = torch.tensor([[vote, 2.0], [1.0, 0.0]])
    with pytest.raises(
        ValueError, match=r"votes must be at least 0, got negative ones for 1 images\."
    ):
        evaluate(IDENTITY, [(torch.randn(2, 2), votes)], truth="votes")


@pytest.mark.parametrize(
    ("model", "got"),
    [
        (nn.Flatten(0), r"\(24,\)"),
        (nn.Unflatten(1, (3, 4)), r"\(2, 3, 4\)"),
        (nn.LSTM(12, 12), "tuple"),
    ],
)
def test_no_logits(model: nn.Module, got: str) -> None:
    with pytest.raises(ValueError, match=f"model must return logits of .*, got {got} for 2 images"):
        evaluate(model, [(torch.randn(2, 12), torch.tensor([0, 1]))])


@pytest.mark.parametrize(
    ("batches", "truth"),
    [([], "label"), ([(torch.zeros(2, 3), torch.zeros(2, 3).bool())], "set")],
)
def test_nothing_to_score(batches: list[Any], truth: Any) -> None:
    with pytest.raises(
        ValueError, match="batches must hold at least one image with a correct label"
    ):
        evaluate(IDENTITY, batches, truth=truth)


@pytest.mark.parametrize("label", [-1, 3])
def test_a_set_with_a_label_that_is_no_class(label: int) -> None:
    message = f"labels must be from 0 to 2, got {label} for image 1. Pass the number of"
    with pytest.raises(ValueError, match=message):
        label_sets([[0], [1, label]], 3)
