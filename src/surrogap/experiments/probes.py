"""The sharpness of a run during training: the dominant eigenvalue and the surrogate gap."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from surrogap.analysis.eigen import eigenvalues
from surrogap.analysis.gap import surrogate_gaps
from surrogap.analysis.hessian import METHODS, Hessian
from surrogap.analysis.surface import Surface
from surrogap.experiments.comparison import NUM_ASCENT_STEPS
from surrogap.experiments.surfaces import loss_fn_of, part_of, still_batches
from surrogap.training.components import Components
from surrogap.training.config import Config
from surrogap.training.images import images_of
from surrogap.training.probe import Probe
from surrogap.training.processes import World

MAX_PRODUCTS = 30


def sharpness_probe(config: Config, parts: Components, world: World) -> Probe:
    """Measures the network of a run on some of its training images, in evaluation mode.

    It returns eigenvalue (the dominant one), residual, loss, grad_norm, and for rho, the radius of
    the run's configuration: gap, sharpness = 2 gap / rho^2, and the same of the worst place found
    in the ball, worst_gap and worst_sharpness.

    Every measurement starts from random vectors. A search from the last eigenvector would hardly be
    shorter (on a small MLP and a ResNet, Lanczos took 8 to 10 products, and power iteration from
    there 2 to 19), and a run that was interrupted would have to keep that vector.

    Args:
        config: The run's.
        parts: Its network.
        world: Its processes, which share the images.
    """
    num_images = max(config.output.sharpness_images // world.size, 1) * world.size
    splits = part_of(images_of(config.data), num_images)
    batch_size = config.data.eval_batch_size or 4 * config.data.batch_size // world.size
    batches = still_batches(config, splits, world, max(batch_size, 2))
    loss_fn, rho = loss_fn_of(config.objective), radius_of(config)

    def measured() -> dict[str, float]:
        with evaluating(parts.model):
            surface = Surface(parts.model, batches, loss_fn, is_checked=False)
            return measured_at(surface, rho)

    return measured


def radius_of(config: Config) -> float:
    """The radius at which a run's gap is measured."""
    return config.objective.gap_rho


def measured_at(surface: Surface, rho: float) -> dict[str, float]:
    """Return what the probe measures on a surface; only loss and rho if its loss is not finite."""
    loss = float(surface.loss())
    if not math.isfinite(loss):
        return {"loss": loss, "rho": rho}  # there is no curvature; the records say why
    # The others have no rule for sharded weights, and would warn of it each time.
    method = METHODS[-1] if surface.weights.are_sharded else METHODS[0]
    hessian = Hessian(surface, method)
    top = eigenvalues(hessian, 1, "dominant", max_products=MAX_PRODUCTS)
    start = top.vectors[0]
    found = surrogate_gaps(surface, [rho], num_ascent_steps=NUM_ASCENT_STEPS, start=start)
    (gap,) = found.gaps
    return {
        "eigenvalue": float(top.values[0]),
        "residual": float(top.residuals[0]),
        "loss": gap.loss,
        "grad_norm": found.grad_norm,
        "rho": rho,
        "gap": gap.gap,
        "sharpness": gap.sharpness,
        "worst_gap": gap.worst_gap,
        "worst_sharpness": gap.worst_sharpness,
    }


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The body sees the network in evaluation mode, and as it is written, not compiled.

    Afterwards every module is in the mode it was in. A compiled forward pass has no forward-mode
    derivatives, and the evaluation mode would be compiled for the probe alone.
    """
    modes = [(module, module.training) for module in model.modules()]
    compiled = [(module, module._compiled_call_impl) for module in model.modules()]
    try:
        for module in model.modules():
            module._compiled_call_impl = None
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, call in compiled:
            module._compiled_call_impl = call
