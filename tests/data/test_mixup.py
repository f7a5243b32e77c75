"""Mixup: images, targets and the distribution of lam."""

import math

import torch
from torch.nn import functional

from surrogap.data import mixup


def mixed(probability: float, number: int = 4000, seed: int = 0, alpha: float = 0.2):
    """Return images that are the one-hot vectors of their numbers, so that lam can be read."""
    images = torch.eye(number)[:, None, None, :]
    labels = torch.arange(number) % 7
    generator = torch.Generator().manual_seed(seed)
    return (
        images,
        labels,
        *mixup(images, labels, 7, generator, probability=probability, alpha=alpha),
    )


def test_images_and_targets_are_mixed_with_the_same_lam() -> None:
    _, labels, found, targets = mixed(probability=0.7, number=300)
    weights = found[:, 0, 0]  # row i has lam at i, and 1 - lam at its partner
    assert torch.allclose(weights.sum(1), torch.ones(300))
    assert (weights > 0).sum(1).max() == 2
    assert torch.allclose(targets, weights @ functional.one_hot(labels, 7).float(), atol=1e-6)
    # The partners are a permutation.
    partners = (weights - weights.diagonal().diag() > 0).sum(0)
    assert partners.max() == 1


def test_images_that_are_not_mixed_are_unchanged() -> None:
    images = torch.randn(256, 3, 4, 4)
    labels = torch.randint(5, (256,))
    found, targets = mixup(images, labels, 5, torch.Generator().manual_seed(0), probability=0.2)
    is_same = torch.tensor([torch.equal(a, b) for a, b in zip(found, images, strict=True)])
    one_hot = functional.one_hot(labels, 5).float()
    assert torch.equal(targets[is_same], one_hot[is_same])
    assert 0 < (~is_same).sum() < 128
    none, targets = mixup(images, labels, 5, torch.Generator(), probability=0.0)
    assert torch.equal(none, images)
    assert torch.equal(targets, one_hot)
    assert targets.dtype == torch.float32


def test_probability_and_distribution() -> None:
    # lam is Beta(a, a): mean 1/2 and variance 1 / (4 * (2a + 1)). An image is not mixed with
    # probability 1 - p; then lam is 1. Five standard errors of 4,000 images.
    number, alpha = 4000, 2.0
    *_, found, _ = mixed(probability=0.2, number=number, alpha=alpha)
    lam = found[:, 0, 0].diagonal()
    share = (lam < 1).float().mean()
    assert abs(share - 0.2) < 5 * math.sqrt(0.2 * 0.8 / number)
    drawn = lam[lam < 1]
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(drawn.mean() - 0.5) < 5 * math.sqrt(variance / len(drawn))
    assert abs(drawn.var() - variance) < 0.2 * variance


def test_the_generator_decides_and_the_global_one_is_left_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = (mixed(0.5, number=40, seed=seed)[2] for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())
