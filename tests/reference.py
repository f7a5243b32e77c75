"""A slow reference: the paper's equations in float64, on one flat weight vector.

Nothing here is shared with `src`: a loss is a function of a vector, a gradient is
`torch.autograd.grad`, and each direction is its formula.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor], Tensor]

EPS = 1e-12


def loss_of(model: nn.Module, compute: Callable[[nn.Module], Tensor]) -> tuple[Loss, Tensor]:
    """`compute(model)` as a function of one flat vector of its trainable parameters.

        Returns:
    The function, and the vector of the model's current weights. Both in float64.
    """
    model = model.double()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ends = [0, *torch.tensor([p.numel() for p in named.values()]).cumsum(0).tolist()]

    def loss(w: Tensor) -> Tensor:
        pieces = {
            name: w[start:end].view(p.shape)
            for (name, p), (start, end) in zip(named.items(), pairwise(ends), strict=True)
        }
        return compute(lambda *x: torch.func.functional_call(model, pieces, x))

    return loss, torch.cat([p.detach().reshape(-1) for p in named.values()])


def selected(model: nn.Module, select: Callable[[str, nn.Parameter], bool]) -> Tensor:
    """A mask of the weights whose parameters `select` selects."""
    named = model.named_parameters()
    return torch.cat([torch.full((p.numel(),), select(name, p)) for name, p in named])


def is_not_bias(name: str, _: nn.Parameter) -> bool:
    return not name.endswith("bias")


def gradient(f: Loss, w: Tensor) -> Tensor:
    w = w.detach().clone().requires_grad_()
    return torch.autograd.grad(f(w), w)[0]


def climb(f: Loss, w: Tensor, rho: float, *, mask: Tensor | None = None) -> Tensor:
    """`rho g / (||g|| + eps)`; with `mask`, only for the weights that it selects."""
    g = gradient(f, w)
    g = g if mask is None else g * mask
    return rho * g / (g.norm() + EPS)


def adaptive_climb(f: Loss, w: Tensor, rho: float, eta: float, scaled: Tensor) -> Tensor:
    """`rho T^2 g / (||T g|| + eps)`, with `T = |w| + eta` if `scaled`, else 1."""
    g = gradient(f, w)
    scaling = torch.where(scaled, w.abs() + eta, 1.0)
    return rho * scaling**2 * g / ((scaling * g).norm() + EPS)


def orthogonal_part(of: Tensor, to: Tensor) -> Tensor:
    return of - (of @ to) / (to @ to) * to


def vanilla(f: Loss, w: Tensor) -> Tensor:
    return gradient(f, w)


def sam(f: Loss, w: Tensor, delta: Tensor) -> Tensor:
    return gradient(f, w + delta)


def gsam(f: Loss, w: Tensor, delta: Tensor, alpha: float) -> Tensor:
    g, g_p = gradient(f, w), gradient(f, w + delta)
    return g_p - alpha * orthogonal_part(g, g_p)


def gsam_plain(f: Loss, w: Tensor, delta: Tensor, alpha: float) -> Tensor:
    g, g_p = gradient(f, w), gradient(f, w + delta)
    return g + alpha * orthogonal_part(g_p, g)


def momentum_sam(f: Loss, w: Tensor, v: Tensor, rho: float) -> Tensor:
    """The gradient at `w - rho v / (||v|| + eps)`."""
    return gradient(f, w - rho * v / (v.norm() + EPS))


def gap_penalty(f: Loss, w: Tensor, delta: Tensor, lam: float) -> Tensor:
    g, g_p = gradient(f, w), gradient(f, w + delta)
    return g_p + lam * (g_p - g)


def entropy_sgd(
    losses: Sequence[Loss],
    w: Tensor,
    *,
    gamma: float,
    inner_lr: float,
    averaging: float,
    noise: float = 0.0,
    normals: Sequence[Tensor] | None = None,
) -> Tensor:
    """EntropySGD's direction, from one loss and one draw of N(0, I) per inner step."""
    v, mu = w.clone(), w.clone()
    for step, f in enumerate(losses):
        normal = normals[step] if normals else torch.zeros_like(w)
        drift = gradient(f, v) + gamma * (v - w)
        v = v - (inner_lr * drift - inner_lr**0.5 * noise * normal)
        mu = averaging * mu + (1 - averaging) * v
    return gamma * (w - mu)
