"""The paper's lemmas and theorems, looked at in numbers.

The lemmas are measured on minima that are made for them. The theorems are about expectations and
limits, so they are run: GSAM with `eta_0 / sqrt(t)` and `rho_0 / sqrt(t)` on problems whose
constants are known, beside the bounds that the proofs give. Where a proof takes a step that does
not hold in general, the function says so, and a case that shows it is at hand.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from surrogap.analysis.bounds import Solution
from surrogap.analysis.gap import surrogate_gaps
from surrogap.analysis.surface import Surface
from surrogap.core.objectives import GSAM
from surrogap.core.rho import InverseSqrt
from surrogap.experiments.plotting import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from surrogap.core.report import Report

Loss = Callable[[Tensor], Tensor]


class _Point(nn.Module):
    """Weights that are nothing but a vector."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.clone())


def _surface(loss: Loss, w: Tensor) -> Surface:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(model, _Point)
        return loss(model.w)

    return Surface(_Point(w), [torch.ones(1)], loss_fn)


@dataclass(frozen=True)
class Disagreement:
    """Lemma 3.1: of two minima, the one with the lower perturbed loss may be the sharper one.

    Attributes:
        rho: The radius.
        sharp: The loss and the sharpness of one minimum.
        flat: Those of the other.
        sharp_perturbed_loss: The worst loss measured in the ball around the one.
        flat_perturbed_loss: The worst measured around the other.
    """

    rho: float
    sharp: Solution
    flat: Solution
    sharp_perturbed_loss: float
    flat_perturbed_loss: float

    @property
    def is_shown(self) -> bool:
        """True if `f_p` prefers the sharper minimum."""
        return (
            self.sharp_perturbed_loss <= self.flat_perturbed_loss
            and self.sharp.sharpness > self.flat.sharpness
        )


def lemma_3_1(rho: float = 0.1) -> Disagreement:
    """Two minima of quadratics, as the proof has them: `f_p = C + sigma * rho^2 / 2`.

    >>> lemma_3_1().is_shown
    True
    """
    sharp, flat = Solution(loss=0.1, sharpness=20.0), Solution(loss=0.4, sharpness=2.0)
    worst = []
    for solution in (sharp, flat):
        curvatures = torch.tensor([solution.sharpness, solution.sharpness / 2]).double()
        surface = _surface(
            lambda w, s=solution, c=curvatures: s.loss + (c * w * w).sum() / 2,  # type: ignore[misc]
            torch.zeros(2, dtype=torch.float64),
        )
        (gap,) = surrogate_gaps(surface, [rho], num_ascent_steps=50).gaps
        worst.append(gap.worst_loss)
    return Disagreement(rho, sharp, flat, *worst)


def wavy(w: Tensor) -> Tensor:
    """A surface with minima, maxima and saddles, where the gradient has many directions."""
    return (torch.sin(2 * w) + 0.1 * w**2).sum() + 0.3 * torch.cos(w.sum())


@dataclass(frozen=True)
class Signs:
    """Lemma 3.2 at one radius: how often the one-step gap is not negative.

    Attributes:
        rho: The radius.
        part: The part of random points where `h >= 0`.
    """

    rho: float
    part: float


def lemma_3_2(
    rhos: Sequence[float] = (0.001, 0.01, 0.1, 1.0, 3.0), *, num_points: int = 200, seed: int = 0
) -> list[Signs]:
    """The sign of `h` at random points: the lemma says never negative for small `rho`.

    What is small depends on the point: `h = rho * ||g|| + O(rho^2)`, so close to a maximum even a
    small step overshoots it.
    """
    generator = torch.Generator().manual_seed(seed)
    points = 3 * torch.randn(num_points, 5, generator=generator, dtype=torch.float64)
    gaps = [surrogate_gaps(_surface(wavy, point), rhos).gaps for point in points]
    parts = [sum(gap.gap >= 0 for gap in column) / num_points for column in zip(*gaps, strict=True)]
    return [Signs(gap.rho, part) for gap, part in zip(gaps[0], parts, strict=True)]


@dataclass(frozen=True)
class Estimate:
    """Lemma 3.3 at one radius: the eigenvalue that the gap estimates.

    Attributes:
        rho: The radius.
        sharpness: `2 h / rho^2`, of the worst case in the ball.
        error: How far that is from the dominant eigenvalue, as a part of it.
    """

    rho: float
    sharpness: float
    error: float


def lemma_3_3(rhos: Sequence[float] = (0.4, 0.2, 0.1, 0.05, 0.025)) -> list[Estimate]:
    """`2 h / rho^2` at a minimum of `e^x - x + y^2 / 4` with eigenvalues 1 and 1/2: off by O(rho).

    There the worst is at `x = rho`: `2 h / rho^2 = 2 (e^rho - rho - 1) / rho^2 = 1 + rho / 3 + ...`
    """
    surface = _surface(
        lambda w: w[0].exp() - w[0] + w[1] ** 2 / 4, torch.zeros(2, dtype=torch.float64)
    )
    gaps = surrogate_gaps(surface, rhos, num_ascent_steps=50).gaps
    return [Estimate(g.rho, g.worst_sharpness, abs(g.worst_sharpness - 1.0)) for g in gaps]


@dataclass(frozen=True)
class Run:
    """GSAM's settings for the theorems.

    Attributes:
        lr_0: `eta_0` of `eta_t = eta_0 / sqrt(t)`.
        rho_0: Of `rho_t = rho_0 / sqrt(t)`.
        alpha: The weight of the ascent.
        noise: The norm of the noise in every gradient, drawn from a sphere at each step.
        num_steps: `T`.
        num_seeds: How many runs to average.
    """

    lr_0: float = 0.5
    rho_0: float = 0.2
    alpha: float = 0.4
    noise: float = 0.5
    num_steps: int = 2000
    num_seeds: int = 3


def descend(
    loss: Loss, start: Tensor, run: Run, seed: int, see: Callable[[int, Tensor, "Report"], None]
) -> None:
    """A run of the library's GSAM on `loss(w) + <noise, w>`.

    Args:
        loss: The loss.
        start: The first weights.
        run: The settings.
        seed: For the noise.
        see: Called with each step from 1, the weights that it starts from, and its report.
    """
    generator = torch.Generator().manual_seed(seed)
    model = _Point(start)
    objective = GSAM(model, rho=InverseSqrt(run.rho_0), alpha=run.alpha)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr_0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / math.sqrt(t + 1))
    for step in range(1, run.num_steps + 1):
        noise = torch.randn(start.shape, generator=generator, dtype=start.dtype)
        noise *= run.noise / noise.norm()
        before = model.w.detach().clone()
        optimizer.zero_grad()
        report = objective.backward(lambda noise=noise: loss(model.w) + noise @ model.w)  # type: ignore[misc]
        see(step, before, report)
        optimizer.step()
        schedule.step()


# Of the non-convex problem `sum(a * w^2 / (1 + w^2))`: the weights `a`, and what follows for it.
_A = torch.linspace(0.2, 1.0, 10, dtype=torch.float64)
_START = torch.full((10,), 1.5, dtype=torch.float64)  # beyond where it turns concave, at 3^-1/2
SMOOTHNESS = 2.0  # L: the second derivative of u^2 / (1 + u^2) is largest at 0
MAX_SLOPE = 3 * math.sqrt(3) / 8  # and the first at 3^-1/2


def bowl(w: Tensor) -> Tensor:
    """A non-convex loss with a minimum of 0, and known constants."""
    return (_A * w**2 / (1 + w**2)).sum()


def _slope(w: Tensor) -> Tensor:
    return 2 * _A * w / (1 + w**2) ** 2


@dataclass(frozen=True)
class Convergence:
    """Theorem 5.1: the averages of squared gradient norms over the first `T` steps.

    Attributes:
        run: The settings.
        steps: `T`.
        loss: The averages of `||grad f||^2`, over steps and seeds.
        perturbed_loss: Those of `||grad f_p||^2`.
        bound: What the proof gives for the second, with the problem's constants.
    """

    run: Run
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    perturbed_loss: tuple[float, ...]
    bound: tuple[float, ...]

    def scaled(self) -> list[tuple[float, float]]:
        """Both averages as multiples of the rate `(1 + log T) / sqrt(T)`: bounded, says 5.1."""
        rates = [(1 + math.log(step)) / math.sqrt(step) for step in self.steps]
        pairs = zip(self.loss, self.perturbed_loss, rates, strict=True)
        return [(f / rate, f_p / rate) for f, f_p, rate in pairs]


def theorem_5_1(
    run: Run | None = None, *, progress: Callable[[int, int], object] | None = None
) -> Convergence:
    """GSAM on a non-convex problem with noise.

    `f_p` is the true one, `f` at `w + rho_t * grad f / ||grad f||`. The bound is the appendix's,
    with `sum(1/t) <= 1 + log T`, for which the appendix writes `log T`.
    """
    run = run or Run()
    squares = torch.zeros(2, run.num_steps, dtype=torch.float64)

    def see(step: int, w: Tensor, report: "Report") -> None:
        slope = _slope(w)
        perturbed = _slope(w + run.rho_0 / math.sqrt(step) * slope / slope.norm())
        squares[:, step - 1] += torch.stack([slope @ slope, perturbed @ perturbed])

    for seed in range(run.num_seeds):
        descend(bowl, _START, run, seed, see)
        if progress is not None:
            progress(seed + 1, run.num_seeds)
    steps = torch.arange(1, run.num_steps + 1)
    averages = squares.cumsum(1) / steps / run.num_seeds
    shown = [2**k for k in range(4, run.num_steps.bit_length()) if 2**k <= run.num_steps]
    index = torch.tensor(shown) - 1
    return Convergence(
        run,
        tuple(shown),
        tuple(averages[0, index].tolist()),
        tuple(averages[1, index].tolist()),
        tuple(convergence_bound(run, step) for step in shown),
    )


def convergence_bound(run: Run, num_steps: int) -> float:
    """The proof's bound of the average of `||grad f_p||^2` on `bowl` from its start."""
    slope = _slope(_START)
    f_p = float(bowl(_START + run.rho_0 * slope / slope.norm()))
    largest = MAX_SLOPE * float(_A.norm()) + run.noise  # G
    up = 1 + run.alpha
    d = SMOOTHNESS * up * largest * run.lr_0 * (up * largest * run.lr_0 + run.rho_0)
    e = SMOOTHNESS**3 * (up * run.lr_0 * run.rho_0) ** 2
    total = f_p + d * (1 + math.log(num_steps)) + math.pi**2 * e / 6
    return total / (run.lr_0 * math.sqrt(num_steps))


@dataclass(frozen=True)
class Decrease:
    """Theorem 5.3: by how much the ascent steps lower the gap in all, and its two bounds.

    Attributes:
        run: The settings.
        spectrum: The eigenvalues of the quadratic problem.
        total: `sum(alpha * eta_t * ||g_perp||^2)`, the mean over seeds.
        lower: `alpha * c^2 * rho_0^2 * eta_0 * sigma_min^2 / G^2`.
        upper: `2.7 * alpha * L^2 * eta_0 * rho_0^2`.
    """

    run: Run
    spectrum: tuple[float, ...]
    total: float
    lower: float
    upper: float

    @property
    def is_between(self) -> bool:
        """True if both bounds hold."""
        return self.lower <= self.total <= self.upper


def theorem_5_3(
    spectrum: Sequence[float] = (0.5, 1.0, 2.0, 3.0, 4.0),
    run: Run | None = None,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> Decrease:
    """The gap's decreases along runs on `w^T H w / 2` with noise, up to `T` steps.

    `G` and `c` are the largest and the smallest norm of a gradient that the runs saw. The upper
    bound holds always. The lower one rests on `|tan(theta)| >= rho_t * sigma_min / G`, where the
    proof takes the length of `g_p - g` for that of its part across `g`. If `H` has one eigenvalue
    alone, `g_p` is parallel to `g`, nothing is across, and the decrease is 0, below the bound:

    >>> theorem_5_3((2.0, 2.0), Run(num_steps=20, num_seeds=1)).is_between
    False
    """
    run = run or Run(lr_0=0.2)
    eigenvalues = torch.tensor(spectrum, dtype=torch.float64)
    norms: list[float] = []
    total = 0.0

    def see(step: int, w: Tensor, report: "Report") -> None:
        nonlocal total
        norms.append(float(report.grad_norm))
        across = norms[-1] ** 2 * (1 - float(report.cosine) ** 2)
        total += run.alpha * run.lr_0 / math.sqrt(step) * across / run.num_seeds

    for seed in range(run.num_seeds):
        descend(
            lambda w: (eigenvalues * w * w).sum() / 2,
            torch.ones(len(spectrum), dtype=torch.float64),
            run,
            seed,
            see,
        )
        if progress is not None:
            progress(seed + 1, run.num_seeds)
    scale = run.alpha * run.lr_0 * run.rho_0**2
    smallest, largest = float(eigenvalues.abs().min()), float(eigenvalues.abs().max())
    lower = scale * (min(norms) * smallest / max(norms)) ** 2
    return Decrease(run, tuple(spectrum), total, lower, 2.7 * scale * largest**2)


def convergence_figure(result: Convergence) -> "Figure":
    """The averages of Theorem 5.1 and the proof's bound, against the rate."""
    figure, (axes,) = new_figure(1, 1, "GSAM on a non-convex problem with noise (Theorem 5.1)")
    axes.loglog(result.steps, result.loss, marker=".", label="mean of ||grad f||^2")
    axes.loglog(result.steps, result.perturbed_loss, marker=".", label="mean of ||grad f_p||^2")
    axes.loglog(result.steps, result.bound, linestyle="--", label="the proof's bound of the second")
    first = result.perturbed_loss[0] / ((1 + math.log(result.steps[0])) / result.steps[0] ** 0.5)
    rates = [first * (1 + math.log(step)) / math.sqrt(step) for step in result.steps]
    axes.loglog(result.steps, rates, color="grey", linestyle=":", label="(1 + log T) / sqrt(T)")
    axes.set(xlabel="T", ylabel="average over the first T steps")
    axes.set_xticks(result.steps, [f"{step:g}" for step in result.steps], fontsize="small")
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize="small")
    return figure
