"""The paper's lemmas and theorems, checked numerically.

Lemmas 3.1 and 3.3 are measured at minima constructed for them, Lemma 3.2 at random points. The
theorems are about expectations and limits: GSAM runs with `eta_0 / sqrt(t)` and `rho_0 / sqrt(t)`
on problems with known constants, and is compared with the bounds of the proofs. If a step of a
proof does not hold in general, the function's docstring says so, and one of the cases shows it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surrogap.analysis.bounds import Solution
from surrogap.analysis.gap import surrogate_gaps
from surrogap.analysis.surface import Progress, Surface
from surrogap.core.objectives import GSAM
from surrogap.core.rho import InverseSqrt
from surrogap.experiments.plotting import new_figure
from surrogap.experiments.text_table import Table
from surrogap.paper.reproductions import Reproduced, ReproductionSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from surrogap.core.report import Report

Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Statement:
    """A statement of the paper, measured in one case.

    Attributes:
        name: The lemma or theorem.
        where: The case.
        measured: The measured values, as text.
        stated: The paper's statement about them.
        holds: Whether it holds in this case; "yes", "no" or an explanation.
        numbers: The measured values.
    """

    name: str
    where: str
    measured: str
    stated: str
    holds: str
    numbers: Mapping[str, Any]


def reproduce_theory(settings: ReproductionSettings, progress: Progress) -> Reproduced:
    """Check all statements, in the paper's order."""
    run = GSAMSettings(num_seeds=settings.num_seeds)
    if settings.num_steps is not None:
        run = replace(run, num_steps=settings.num_steps)
    convergence = theorem_5_1(run)
    progress(1, 2)
    quadratic = replace(run, lr_0=0.2)
    statements = {
        "lemma_3_1": [lemma_3_1()],
        "lemma_3_2": lemma_3_2(),
        "lemma_3_3": lemma_3_3(),
        "theorem_5_1": convergence,
        "corollary_5_2_1": corollary_5_2_1(),
        "theorem_5_3": [
            theorem_5_3(quadratic),
            theorem_5_3(quadratic, spectrum=(2.0, 2.0, 2.0)),
        ],
    }
    rows = [
        (one.name, one.where, one.measured, one.stated, one.holds)
        for group in statements.values()
        for one in group
    ]
    numbers = {name: [one.numbers for one in group] for name, group in statements.items()}
    return Reproduced(
        Table(("statement", "where", "measured", "stated", "holds"), rows),
        {"gsam": asdict(run), **numbers},
        {"theory.png": convergence_figure(convergence).savefig},
    )


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


class _Point(nn.Module):
    """A model whose only parameter is a vector."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.clone())


def _surface(loss: Loss, w: Tensor) -> Surface:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(model, _Point)
        return loss(model.w)

    return Surface(_Point(w), [torch.ones(1)], loss_fn)


def lemma_3_1(rho: float = 0.1) -> Statement:
    """Of two minima, the one with the lower perturbed loss may be the sharper one.

    The minima are those of quadratics, as in the proof: `f_p = C + sigma * rho^2 / 2`.
    """
    minima = Solution(loss=0.1, sharpness=20.0), Solution(loss=0.4, sharpness=2.0)
    worst = []
    for minimum in minima:
        curvatures = torch.tensor([minimum.sharpness, minimum.sharpness / 2]).double()
        surface = _surface(
            lambda w, m=minimum, c=curvatures: m.loss + (c * w * w).sum() / 2,  # type: ignore[misc]
            torch.zeros(2, dtype=torch.float64),
        )
        (gap,) = surrogate_gaps(surface, [rho], num_ascent_steps=50).gaps
        worst.append(gap.worst_loss)
    return Statement(
        "Lemma 3.1",
        f"rho {rho:g}, eigenvalues {', '.join(f'{m.sharpness:g}' for m in minima)}",
        f"f_p {worst[0]:.3g}, {worst[1]:.3g}",
        "the lower f_p may be the sharper one's",
        _yes(worst[0] <= worst[1]),
        {"rho": rho, "minima": [asdict(m) for m in minima], "perturbed_loss": worst},
    )


def wavy(w: Tensor) -> Tensor:
    """A surface with minima, maxima and saddles, where the gradient has many directions."""
    return (torch.sin(2 * w) + 0.1 * w**2).sum() + 0.3 * torch.cos(w.sum())


def lemma_3_2(
    rhos: Sequence[float] = (0.001, 0.01, 0.1, 1.0, 3.0), *, num_points: int = 200, seed: int = 0
) -> list[Statement]:
    """The gap is not negative for small `rho`; measured at random points of `wavy`.

    How small depends on the point: `h = rho * ||g|| + O(rho^2)`, so close to a maximum even a small
    step overshoots it.
    """
    generator = torch.Generator().manual_seed(seed)
    points = 3 * torch.randn(num_points, 5, generator=generator, dtype=torch.float64)
    gaps = [surrogate_gaps(_surface(wavy, point), rhos).gaps for point in points]
    found = []
    for column in zip(*gaps, strict=True):
        rho, fraction = column[0].rho, sum(gap.gap >= 0 for gap in column) / num_points
        words = (f"at {fraction:.1%} of points", "h >= 0 for small rho")
        holds = "yes" if fraction == 1.0 else "this rho is not small"
        numbers = {"rho": rho, "fraction": fraction}
        found.append(Statement("Lemma 3.2", f"rho {rho:g}", *words, holds, numbers))
    return found


def lemma_3_3(rhos: Sequence[float] = (0.4, 0.2, 0.1, 0.05, 0.025)) -> list[Statement]:
    """`2 h / rho^2` estimates the dominant eigenvalue, with an error of O(rho).

    Measured at a minimum of `e^x - x + y^2 / 4`, which has eigenvalues 1 and 1/2. The worst case is
    `x = rho`, so `2 h / rho^2 = 2 (e^rho - rho - 1) / rho^2 = 1 + rho / 3 + ...`
    """
    surface = _surface(
        lambda w: w[0].exp() - w[0] + w[1] ** 2 / 4, torch.zeros(2, dtype=torch.float64)
    )
    found = []
    for gap in surrogate_gaps(surface, rhos, num_ascent_steps=50).gaps:
        error = abs(gap.worst_sharpness - 1.0)
        words = (f"2h/rho^2 = {gap.worst_sharpness:.4f}", "1, the eigenvalue, up to O(rho)")
        numbers = {"rho": gap.rho, "sharpness": gap.worst_sharpness, "error": error}
        holds = _yes(error < gap.rho)  # by the series above
        found.append(Statement("Lemma 3.3", f"rho {gap.rho:g}", *words, holds, numbers))
    return found


@dataclass(frozen=True)
class GSAMSettings:
    """The settings of GSAM for the theorems.

    Attributes:
        lr_0: `eta_0` of `eta_t = eta_0 / sqrt(t)`.
        rho_0: `rho_0` of `rho_t = rho_0 / sqrt(t)`.
        alpha: The weight of the ascent.
        noise: The norm of the noise in every gradient, drawn from a sphere at each step.
        num_steps: `T`.
        num_seeds: The number of runs to average.
    """

    lr_0: float = 0.5
    rho_0: float = 0.2
    alpha: float = 0.4
    noise: float = 0.5
    num_steps: int = 2000
    num_seeds: int = 3


def descend_with_gsam(
    loss: Loss,
    start: Tensor,
    settings: GSAMSettings,
    after_step: Callable[[int, Tensor, "Report"], None],
) -> None:
    """Run the library's GSAM on `loss(w) + <noise, w>`, once for each seed.

    `after_step` is called with the number of each step from 1, the weights that it starts from,
    and its report.
    """
    for seed in range(settings.num_seeds):
        generator = torch.Generator().manual_seed(seed)
        model = _Point(start)
        objective = GSAM(model, rho=InverseSqrt(settings.rho_0), alpha=settings.alpha)
        optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr_0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / math.sqrt(t + 1))
        for step in range(1, settings.num_steps + 1):
            noise = torch.randn(start.shape, generator=generator, dtype=start.dtype)
            noise *= settings.noise / noise.norm()
            before = model.w.detach().clone()
            optimizer.zero_grad()
            report = objective.backward(
                lambda model=model, noise=noise: loss(model.w) + noise @ model.w  # type: ignore[misc]
            )
            after_step(step, before, report)
            optimizer.step()
            schedule.step()


# The non-convex problem of Theorem 5.1 is `sum(a * w^2 / (1 + w^2))`, with these weights `a`.
_A = torch.linspace(0.2, 1.0, 10, dtype=torch.float64)
_START = torch.full((10,), 1.5, dtype=torch.float64)  # the loss is concave beyond 3^-1/2
SMOOTHNESS = 2.0  # L: the largest second derivative of u^2 / (1 + u^2), at 0
MAX_SLOPE = 3 * math.sqrt(3) / 8  # the largest first derivative, at 3^-1/2


def bowl(w: Tensor) -> Tensor:
    """A non-convex loss with a minimum of 0, and known constants."""
    return (_A * w**2 / (1 + w**2)).sum()


def _slope(w: Tensor) -> Tensor:
    return 2 * _A * w / (1 + w**2) ** 2


def _rate(num_steps: int) -> float:
    return (1 + math.log(num_steps)) / math.sqrt(num_steps)


def theorem_5_1(settings: GSAMSettings) -> list[Statement]:
    """The averages of `||grad f||^2` and `||grad f_p||^2` over `T` steps are O(log T / sqrt(T)).

    Measured with GSAM on a non-convex problem with noise, for `T` = 16, 32, ... `f_p` is the true
    one, `f` at `w + rho_t * grad f / ||grad f||`. The bound is the appendix's, with
    `sum(1/t) <= 1 + log T`, for which the appendix writes `log T`.
    """
    squares = torch.zeros(2, settings.num_steps, dtype=torch.float64)

    def after_step(step: int, w: Tensor, report: "Report") -> None:
        slope = _slope(w)
        perturbed = _slope(w + settings.rho_0 / math.sqrt(step) * slope / slope.norm())
        squares[:, step - 1] += torch.stack([slope @ slope, perturbed @ perturbed])

    descend_with_gsam(bowl, _START, settings, after_step)
    averages = squares.cumsum(1) / torch.arange(1, settings.num_steps + 1) / settings.num_seeds
    found = []
    for step in (2**k for k in range(4, settings.num_steps.bit_length())):
        loss, perturbed_loss = averages[:, step - 1].tolist()
        bound = convergence_bound(settings, step)
        statement = Statement(
            "Theorem 5.1",
            f"T = {step}",
            f"mean |grad f|^2 {loss:.3g}, |grad f_p|^2 {perturbed_loss:.3g}",
            f"the second below {bound:.3g}; it is {perturbed_loss / _rate(step):.2g} of the rate",
            _yes(perturbed_loss <= bound),
            {"num_steps": step, "loss": loss, "perturbed_loss": perturbed_loss, "bound": bound},
        )
        found.append(statement)
    return found


def convergence_bound(settings: GSAMSettings, num_steps: int) -> float:
    """The proof's bound on the average of `||grad f_p||^2` on `bowl` from its start."""
    slope, lr_0, rho_0 = _slope(_START), settings.lr_0, settings.rho_0
    f_p = float(bowl(_START + rho_0 * slope / slope.norm()))
    largest = MAX_SLOPE * float(_A.norm()) + settings.noise  # G
    up = 1 + settings.alpha
    d = SMOOTHNESS * up * largest * lr_0 * (up * largest * lr_0 + rho_0)
    e = SMOOTHNESS**3 * (up * lr_0 * rho_0) ** 2
    total = f_p + d * (1 + math.log(num_steps)) + math.pi**2 * e / 6
    return total / (lr_0 * math.sqrt(num_steps))


def corollary_5_2_1() -> list[Statement]:
    """Of two solutions with equal `f_p` at `rho_train`, the data's radius decides which is better.

    The numbers of the two solutions are invented.
    """
    sharp, flat = Solution(loss=0.1, sharpness=40.0), Solution(loss=0.2, sharpness=20.0)
    rho_train = sharp.radius_of_equal_loss(flat)
    assert rho_train is not None
    found = []
    for rho, better in ((rho_train / 2, "sharper"), (1.5 * rho_train, "flatter")):
        bounds = sharp.perturbed_loss(rho), flat.perturbed_loss(rho)
        statement = Statement(
            "Corollary 5.2.1",
            f"rho_true {rho:.2g}, rho_train {rho_train:.2g}",
            f"bounds {bounds[0]:.3g} (sharp), {bounds[1]:.3g} (flat)",
            f"the {better} one's is lower",
            _yes((bounds[1] < bounds[0]) == (better == "flatter")),
            {"rho_true": rho, "rho_train": rho_train, "sharp": bounds[0], "flat": bounds[1]},
        )
        found.append(statement)
    return found


def theorem_5_3(
    settings: GSAMSettings, spectrum: Sequence[float] = (0.5, 1.0, 2.0, 3.0, 4.0)
) -> Statement:
    """The ascent steps lower the gap by a total that has a lower and an upper bound.

    The total is `sum(alpha * eta_t * ||g_perp||^2)`, the mean over seeds, along runs on
    `w^T H w / 2` with noise. The bounds are `alpha * c^2 * rho_0^2 * eta_0 * sigma_min^2 / G^2` and
    `2.7 * alpha * L^2 * eta_0 * rho_0^2`, with `G` and `c` the largest and the smallest gradient
    norm of the runs. The upper bound always holds. The lower one rests on
    `|tan(theta)| >= rho_t * sigma_min / G`, where the proof takes the length of `g_p - g` for that
    of its component orthogonal to `g`. If all eigenvalues of `H` are equal, `g_p` is parallel to
    `g`, that component is 0, and the decrease of 0 is below the bound:

    >>> theorem_5_3(GSAMSettings(num_steps=20, num_seeds=1), spectrum=(2.0, 2.0)).holds
    'no: g_p is parallel to g, which the proof of the lower bound leaves out'
    """
    eigenvalues = torch.tensor(spectrum, dtype=torch.float64)
    norms: list[float] = []
    decreases: list[float] = []

    def after_step(step: int, w: Tensor, report: "Report") -> None:
        norms.append(float(report.grad_norm))
        orthogonal = norms[-1] ** 2 * (1 - float(report.cosine) ** 2)
        decreases.append(settings.alpha * settings.lr_0 / math.sqrt(step) * orthogonal)

    def loss(w: Tensor) -> Tensor:
        return (eigenvalues * w * w).sum() / 2

    descend_with_gsam(loss, torch.ones_like(eigenvalues), settings, after_step)
    total = sum(decreases) / settings.num_seeds
    scale = settings.alpha * settings.lr_0 * settings.rho_0**2
    smallest, largest = float(eigenvalues.abs().min()), float(eigenvalues.abs().max())
    lower, upper = scale * (min(norms) * smallest / max(norms)) ** 2, 2.7 * scale * largest**2
    holds = _yes(lower <= total <= upper)
    if total < lower and len(set(spectrum)) == 1:
        holds += ": g_p is parallel to g, which the proof of the lower bound leaves out"
    return Statement(
        "Theorem 5.3",
        f"eigenvalues {', '.join(f'{value:g}' for value in spectrum)}",
        f"sum of decreases {total:.3g}",
        f"from {lower:.3g} to {upper:.3g}",
        holds,
        {"spectrum": list(spectrum), "total": total, "lower": lower, "upper": upper},
    )


def convergence_figure(statements: Sequence[Statement]) -> "Figure":
    """The averages of Theorem 5.1 and the proof's bound, with the rate for comparison."""
    figure, (axes,) = new_figure(1, 1, "GSAM on a non-convex problem with noise (Theorem 5.1)")
    names = ("num_steps", "loss", "perturbed_loss", "bound")
    steps, loss, perturbed_loss, bound = (
        [one.numbers[name] for one in statements] for name in names
    )
    axes.loglog(steps, loss, marker=".", label="mean of ||grad f||^2")
    axes.loglog(steps, perturbed_loss, marker=".", label="mean of ||grad f_p||^2")
    axes.loglog(steps, bound, linestyle="--", label="the proof's bound of mean ||grad f_p||^2")
    rates = [perturbed_loss[0] * _rate(step) / _rate(steps[0]) for step in steps]
    axes.loglog(steps, rates, color="grey", linestyle=":", label="rate (1 + log T) / sqrt(T)")
    axes.set(xlabel="T", ylabel="average over the first T steps")
    axes.set_xticks(steps, [f"{step:g}" for step in steps], fontsize="small")
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize="small")
    return figure
