"""Mixup: convex combinations of images and of labels (Zhang et al. 2018)."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def mixup(
    images: Tensor,
    labels: Tensor,
    num_classes: int,
    generator: torch.Generator,
    *,
    probability: float = 0.2,
    alpha: float = 0.2,
) -> tuple[Tensor, Tensor]:
    """Mix some images of a batch with others, and return probabilities as targets.

    `x_i <- lam * x_i + (1 - lam) * x_j`, and the same for the one-hot targets. Whether an image is
    mixed is drawn for each image, and so is lam from Beta(alpha, alpha); the partners j are a
    permutation of the batch. An image that is not mixed is unchanged, bit for bit.

    Args:
        images: Floating point, NCHW.
        labels: int64, one for each image.
        num_classes: The number of classes.
        generator: A generator on the CPU, for images on any device.
        probability: The probability that an image is mixed.
        alpha: The parameter of the Beta distribution. Small values stay close to one of the two
            images.

    >>> images, labels = torch.rand(4, 1, 2, 2), torch.tensor([0, 1, 2, 0])
    >>> _, targets = mixup(images, labels, 3, torch.Generator(), probability=1.0)
    >>> targets.shape, torch.allclose(targets.sum(1), torch.ones(4))
    (torch.Size([4, 3]), True)
    """
    number = len(images)
    # With a dtype: the drawn numbers would otherwise depend on the default dtype.
    is_mixed = torch.rand(number, generator=generator, dtype=torch.float32) < probability
    partner = torch.randperm(number, generator=generator).to(images.device)
    # torch samples Beta from its global generator only.
    seed = int(torch.randint(2**62, (), generator=generator))
    drawn = torch.from_numpy(np.random.default_rng(seed).beta(alpha, alpha, number))
    lam = torch.where(is_mixed, drawn, 1.0).to(images.device, torch.float32)
    targets = functional.one_hot(labels, num_classes).to(torch.float32)
    # lerp is exact at lam = 1.
    mixed = torch.lerp(images[partner], images, lam.to(images.dtype)[:, None, None, None])
    return mixed, torch.lerp(targets[partner], targets, lam[:, None])
