"""Losses against their definitions."""

import pytest
import torch
from torch.nn import functional

from surrogap.training.losses import accuracy, loss_of
from surrogap.training.objective_configs import VanillaConfig


def test_cross_entropy_is_torchs() -> None:
    logits, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    f = loss_of(VanillaConfig(label_smoothing=0.1))
    smooth = functional.one_hot(labels, 5) * 0.9 + 0.1 / 5
    expected = -(smooth * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(f(logits, labels), expected)
    torch.testing.assert_close(loss_of(VanillaConfig())(logits, smooth), expected)


def test_sigmoid_loss_is_a_sum_over_classes() -> None:
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4, 0])
    f = loss_of(VanillaConfig(loss="sigmoid"))
    p, y = logits.sigmoid(), functional.one_hot(labels, 5).double()
    expected = -(y * p.log() + (1 - y) * (1 - p).log()).sum(1).mean()
    torch.testing.assert_close(f(logits, labels), expected)
    torch.testing.assert_close(f(logits, y), expected)


@pytest.mark.parametrize("soft", [False, True])
def test_accuracy(soft: bool) -> None:
    labels = torch.tensor([0, 1, 2, 0])
    targets = functional.one_hot(labels, 3).float() * 0.7 + 0.1 if soft else labels
    logits = functional.one_hot(torch.tensor([0, 1, 1, 0]), 3).float()
    assert float(accuracy(logits, targets)) == 0.75
