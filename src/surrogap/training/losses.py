"""The loss f of logits and targets, which are class indices or probabilities."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

from surrogap.training.objective_configs import ObjectiveConfig

Criterion = Callable[[Tensor, Tensor], Tensor]


def loss_of(config: ObjectiveConfig) -> Criterion:
    """Return the loss of a configuration.

    >>> import torch
    >>> from surrogap.training.objective_configs import VanillaConfig
    >>> f = loss_of(VanillaConfig(loss="sigmoid"))
    >>> f(torch.zeros(4, 10), torch.arange(4)) / 10  # log 2 for each class
    tensor(0.6931)
    """
    if config.loss == "sigmoid":
        return sigmoid_cross_entropy
    return partial(functional.cross_entropy, label_smoothing=config.label_smoothing)


def sigmoid_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sigmoid cross-entropy summed over classes: the authors' loss on ImageNet."""
    if targets.ndim == 1:
        targets = functional.one_hot(targets, logits.shape[1])
    losses = functional.binary_cross_entropy_with_logits(
        logits, targets.to(logits.dtype), reduction="none"
    )
    return losses.sum(1).mean()


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the fraction of images whose largest logit is that of the most probable class.

    >>> import torch
    >>> accuracy(torch.eye(4), torch.tensor([0, 1, 0, 0]))
    tensor(0.5000)
    """
    labels = targets if targets.ndim == 1 else targets.argmax(1)
    return (logits.argmax(1) == labels).float().mean()
