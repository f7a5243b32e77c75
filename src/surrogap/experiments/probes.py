"""The sharpness of a run during training: the dominant eigenvalue and the surrogate gap."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import nn

from surrogap.analysis.batches import LossFn
from surrogap.analysis.eigen import eigenvalues
from surrogap.analysis.gap import DERIVED, surrogate_gaps
from surrogap.analysis.hessian import PRODUCT_METHODS, Hessian
from surrogap.analysis.lanczos import NotFiniteError
from surrogap.analysis.surface import Surface
from surrogap.data import Batch
from surrogap.evaluation.metrics import in_evaluation_mode
from surrogap.experiments.comparison import NUM_ASCENT_STEPS
from surrogap.experiments.surfaces import loss_fn_of, random_subset, unaugmented_loader
from surrogap.training.components import Components
from surrogap.training.config import Config
from surrogap.training.images import images_of
from surrogap.training.probe import Probe
from surrogap.training.processes import World

MAX_PRODUCTS = 30


def sharpness_probe(config: Config, components: Components, world: World) -> Probe:
    """Return a probe that measures the sharpness of a model in training.

    The probe uses a random subset of the training images, in evaluation mode. It returns
    `eigenvalue` (the dominant one), `residual`, `loss`, `grad_norm`, `rho`, and at that radius
    `gap`, `sharpness = 2 * gap / rho^2`, `worst_gap` (the largest found in the ball) and
    `worst_sharpness`.

    Every measurement starts from random vectors. Starting from the last eigenvector would save
    little (on a small MLP and a ResNet, Lanczos took 8 to 10 products, power iteration from that
    vector 2 to 19), and checkpoints would have to store it.
    """
    num_images = max(config.output.sharpness_images // world.size, 1) * world.size
    splits = random_subset(images_of(config.data), num_images)
    batches = list(unaugmented_loader(config, splits, world))
    loss_fn, rho = loss_fn_of(config.objective), config.objective.gap_rho
    return partial(sharpness_at, components.model, batches, loss_fn, rho)


def sharpness_at(
    model: nn.Module, batches: Sequence[Batch], loss_fn: LossFn, rho: float
) -> dict[str, float]:
    """Return the values of the probe; only `loss` and `rho` if loss or Hessian is not finite."""
    with evaluating(model):
        surface = Surface(model, batches, loss_fn, is_checked=False)
        loss = float(surface.loss())
        if not math.isfinite(loss):
            return {"loss": loss, "rho": rho}
        # The other methods do not support sharded weights, and would warn at each call.
        method = PRODUCT_METHODS[-1] if surface.weights.are_sharded else PRODUCT_METHODS[0]
        hessian = Hessian(surface, method)
        try:
            top = eigenvalues(hessian, 1, "dominant", max_products=MAX_PRODUCTS)
        except NotFiniteError:
            return {"loss": loss, "rho": rho}
        start = top.vectors[0]
        found = surrogate_gaps(surface, [rho], num_ascent_steps=NUM_ASCENT_STEPS, start=start)
    (gap,) = found.gaps
    return {
        "eigenvalue": float(top.values[0]),
        "residual": float(top.residuals[0]),
        "loss": gap.loss,
        "grad_norm": found.grad_norm,
        "rho": rho,
        **{name: getattr(gap, name) for name in DERIVED},
    }


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager that puts a model in evaluation mode, without `model.compile`.

    At exit, every module returns to its mode. Compiled forward passes do not support forward-mode
    derivatives, and evaluation mode would be compiled only for the probe.
    """
    compiled = [(module, module._compiled_call_impl) for module in model.modules()]
    try:
        for module in model.modules():
            module._compiled_call_impl = None
        with in_evaluation_mode(model):
            yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
