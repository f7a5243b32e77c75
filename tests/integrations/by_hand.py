"""Loops written by hand from the paper's equations, without surrogap, to compare trainers with."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Closure = Callable[[], Tensor]

EPS = 1e-12


def gradients(parameters: Sequence[nn.Parameter], closures: Sequence[Closure]) -> list[Tensor]:
    """The gradients of the sum of losses. `.grad` is empty before and after."""
    for closure in closures:
        closure().backward()
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    for p in parameters:
        p.grad = None
    return found


def dot(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(some, others, strict=True)]).sum()


def gsam_backward(
    model: nn.Module, *closures: Closure, rho: float = 0.05, alpha: float = 0.4
) -> dict[str, float]:
    """Add GSAM's direction to `.grad`, with one perturbation for all closures.

    The second pass draws the first one's random numbers, and moves no statistics.

    Returns:
        The sums of losses, `loss` and `perturbed_loss`.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    losses: list[float] = []

    def noted(closure: Closure) -> Closure:
        def run() -> Tensor:
            loss = closure()
            losses.append(float(loss.detach()))
            return loss

        return run

    random_state = torch.get_rng_state()
    g = gradients(parameters, [noted(closure) for closure in closures])
    random_state_after = torch.get_rng_state()
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    norm = dot(g, g).sqrt()
    w = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, slope in zip(parameters, g, strict=True):
            p.add_(rho * slope / (norm + EPS))
    torch.set_rng_state(random_state)
    g_p = gradients(parameters, [noted(closure) for closure in closures])
    torch.set_rng_state(random_state_after)
    for name, buffer in model.named_buffers():
        buffer.copy_(statistics[name])
    onto = dot(g, g_p) / dot(g_p, g_p)
    with torch.no_grad():
        for p, old, a, b, kept in zip(parameters, w, g, g_p, before, strict=True):
            p.copy_(old)
            direction = b - alpha * (a - onto * b)
            p.grad = direction if kept is None else kept + direction
    half = len(closures)
    return {"loss": sum(losses[:half]), "perturbed_loss": sum(losses[half:])}
