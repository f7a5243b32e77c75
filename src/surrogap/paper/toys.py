"""The paper's two toy figures, with functions of one and two weights.

The text gives neither function, so both are made here: the first so that its numbers are those that
the caption tells of, the second by a search through random surfaces for one where the methods end
in different places. Both are illustrations of what can happen. On this very surface SAM reaches the
flat region from the same start, too, if its radius is 0.34 instead of 0.3; and the search found
surfaces where GSAM reached it less often than SAM.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surrogap.core.objectives import GSAM, SAM, Vanilla
from surrogap.experiments.plotting import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Valley:
    """A parabola `loss + sharpness * (w - center)^2 / 2`."""

    center: float
    loss: float
    sharpness: float


@dataclass(frozen=True)
class GapToy:
    """The paper's first figure: three minima, `f`, `f_p` and `h`.

    `f` is the lowest of the three parabolas. From left to right they are flatter; the second and
    the third have the same loss, the first and the third the same perturbed loss.

    Attributes:
        valleys: The three.
        rho: The radius.

    >>> toy = GapToy()
    >>> [round(float(value), 3) for value in toy.perturbed_loss(toy.minima)]
    [1.625, 2.25, 1.625]
    >>> [round(float(value), 3) for value in toy.gap(toy.minima)]
    [1.5, 0.75, 0.125]
    """

    valleys: tuple[Valley, ...] = (
        Valley(center=-3.0, loss=0.125, sharpness=12.0),
        Valley(center=0.0, loss=1.5, sharpness=6.0),
        Valley(center=4.0, loss=1.5, sharpness=1.0),
    )
    rho: float = 0.5

    @property
    def minima(self) -> Tensor:
        """The positions of the minima."""
        return torch.tensor([valley.center for valley in self.valleys], dtype=torch.float64)

    def loss(self, w: Tensor) -> Tensor:
        """`f`."""
        parabolas = [v.loss + v.sharpness * (w - v.center) ** 2 / 2 for v in self.valleys]
        return torch.stack(parabolas).amin(0)

    def perturbed_loss(self, w: Tensor) -> Tensor:
        """`f_p = max f(w + delta)` over `|delta| <= rho`."""
        # A maximum is at an end of the interval, or at a ridge within it, where two valleys meet.
        candidates = [w - self.rho, w + self.rho]
        candidates += [torch.clamp(r, w - self.rho, w + self.rho) for r in self._ridges()]
        return torch.stack([self.loss(candidate) for candidate in candidates]).amax(0)

    def gap(self, w: Tensor) -> Tensor:
        """`h = f_p - f`."""
        return self.perturbed_loss(w) - self.loss(w)

    def _ridges(self) -> list[Tensor]:
        """The points where neighbouring parabolas cross, between their minima."""
        ridges = []
        for left, right in zip(self.valleys, self.valleys[1:], strict=False):
            low, high = left.center, right.center
            for _ in range(60):  # the left one rises and the right one falls on the way
                middle = (low + high) / 2
                here = torch.tensor(middle, dtype=torch.float64)
                values = [v.loss + v.sharpness * (here - v.center) ** 2 / 2 for v in (left, right)]
                low, high = (middle, high) if values[0] < values[1] else (low, middle)
            ridges.append(torch.tensor(middle, dtype=torch.float64))
        return ridges


def gap_figure(toy: GapToy | None = None) -> "Figure":
    """`f`, `f_p` and `h` of the toy, and their values at the minima."""
    toy = toy or GapToy()
    figure, (axes,) = new_figure(1, 1, "A low perturbed loss in a sharp and in a flat valley")
    w = torch.linspace(-4.2, 6.0, 2001, dtype=torch.float64)
    axes.plot(w, toy.loss(w), label="f")
    axes.plot(w, toy.perturbed_loss(w), linestyle="--", label=f"f_p, rho = {toy.rho:g}")
    axes.plot(w, toy.gap(w), linestyle=":", label="h = f_p - f")
    for index, (center, gap) in enumerate(zip(toy.minima, toy.gap(toy.minima), strict=True)):
        top = float(toy.perturbed_loss(center))
        words = f"w_{index + 1}: f_p = {top:.3g}, h = {gap:.3g}"
        axes.plot([float(center)], [top], f"k{'os^'[index]}", markersize=5, label=words)
    axes.set(xlabel="w (made up: three parabolas)", ylabel="loss", ylim=(0, 8))
    # Below the curves, which it would cover otherwise.
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    return figure


@dataclass(frozen=True)
class Well:
    """A Gaussian pit in a surface."""

    x: float
    y: float
    depth: float
    width: float


@dataclass(frozen=True)
class Hills:
    """A wide bowl, a ridge that leads down to it, and narrow wells on both sides of the ridge.

    Attributes:
        flat: Where the bowl is lowest, on `y = 0`.
        slopes: The bowl's coefficients of `(x - flat)^2` and `y^2`.
        ridge: Its height, width, and the `x` where it ends.
        wells: The sharp minima.
    """

    flat: float = 3.0
    slopes: tuple[float, float] = (0.063, 0.26)
    ridge: tuple[float, float, float] = (0.38, 0.42, 0.56)
    wells: tuple[Well, ...] = (
        Well(-0.33, 1.17, depth=0.52, width=0.46),
        Well(-2.38, 0.42, depth=0.86, width=0.46),
        Well(-1.52, -0.97, depth=1.06, width=0.25),
    )

    def __call__(self, points: Tensor) -> Tensor:
        """The loss at points whose last dimension is `(x, y)`."""
        x, y = points.unbind(-1)
        height, width, end = self.ridge
        loss = self.slopes[0] * (x - self.flat) ** 2 + self.slopes[1] * y**2
        loss = loss + height * torch.exp(-(y**2) / (2 * width**2)) * torch.sigmoid((end - x) / 0.4)
        for well in self.wells:
            distance = (x - well.x) ** 2 + (y - well.y) ** 2
            loss = loss - well.depth * torch.exp(-distance / (2 * well.width**2))
        return loss

    def place(self, points: Tensor) -> Tensor:
        """Return the region of each point: a well's number, -1 if flat, -2 elsewhere."""
        places = torch.full(points.shape[:-1], -2)
        for index, well in enumerate(self.wells):
            center = torch.tensor([well.x, well.y], dtype=points.dtype)
            places[(points - center).norm(dim=-1) < 2 * well.width] = index
        center = torch.tensor([self.flat, 0.0], dtype=points.dtype)
        places[(points - center).norm(dim=-1) < 1.2] = -1
        return places

    def sharpness(self, point: Tensor) -> float:
        """The dominant eigenvalue of the Hessian at a point."""
        point = point.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self(point), point, create_graph=True)
        rows = [torch.autograd.grad(part, point, retain_graph=True)[0] for part in gradient]
        values = torch.linalg.eigvalsh(torch.stack(rows))
        return float(values[values.abs().argmax()])


METHODS = ("SGD", "SAM", "GSAM")


@dataclass(frozen=True)
class Descent:
    """The settings of the descents, all with full gradients and without momentum."""

    lr: float = 0.05
    rho: float = 0.3
    alpha: float = 1.0
    num_steps: int = 600


@dataclass(frozen=True)
class Trajectories:
    """The paths of the methods from one start, and their ends from many.

    Attributes:
        hills: The surface.
        descent: The methods' settings.
        paths: From the start, a point for each step, by method.
        reached_flat: The part of a grid of starts from which each method ends in the flat region.
        num_starts: How many starts the grid has.
    """

    hills: Hills
    descent: Descent
    paths: dict[str, Tensor]
    reached_flat: dict[str, float]
    num_starts: int

    def ends(self) -> dict[str, tuple[str, float]]:
        """Return the end of each path, in words, and the sharpness there."""
        result = {}
        for method, path in self.paths.items():
            place = int(self.hills.place(path[-1]))
            words = {-1: "flat region", -2: "elsewhere"}.get(place, f"sharp minimum {place + 1}")
            result[method] = words, self.hills.sharpness(path[-1])
        return result


# Chosen, like the surface, so that all three end in different places.
START = (-4.0, -1.25)


def trajectories(
    hills: Hills | None = None,
    descent: Descent | None = None,
    start: tuple[float, float] = START,
) -> Trajectories:
    """SGD, SAM and GSAM from one start, and from a grid of starts on the surface's left side."""
    hills, descent = hills or Hills(), descent or Descent()
    x, y = torch.linspace(-4, 1, 26), torch.linspace(-1.5, 1.5, 25)
    starts = torch.cartesian_prod(x, y).double()
    paths, reached_flat = {}, {}
    for method in METHODS:
        paths[method] = path(method, hills, descent, start)
        ends = ends_from(method, hills, descent, starts)
        reached_flat[method] = float((hills.place(ends) == -1).double().mean())
    return Trajectories(hills, descent, paths, reached_flat, len(starts))


class _Position(nn.Module):
    def __init__(self, start: Sequence[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))


def path(method: str, hills: Hills, descent: Descent, start: Sequence[float]) -> Tensor:
    """The points of one descent, with the library's own objectives."""
    model = _Position(start)
    objectives: dict[str, Callable[[], Vanilla | SAM | GSAM]] = {
        "SGD": lambda: Vanilla(model),
        "SAM": lambda: SAM(model, rho=descent.rho),
        "GSAM": lambda: GSAM(model, rho=descent.rho, alpha=descent.alpha),
    }
    objective = objectives[method]()
    optimizer = torch.optim.SGD(model.parameters(), lr=descent.lr)
    points = [model.w.detach().clone()]
    for _ in range(descent.num_steps):
        optimizer.zero_grad()
        objective.backward(lambda: hills(model.w))
        optimizer.step()
        points.append(model.w.detach().clone())
    return torch.stack(points)


def ends_from(method: str, hills: Hills, descent: Descent, starts: Tensor) -> Tensor:
    """Return the ends of descents from many starts: the arithmetic of `path`, all at once."""

    def gradient(points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()
        (result,) = torch.autograd.grad(hills(points).sum(), points)
        return result

    points = starts
    for _ in range(descent.num_steps):
        d = g = gradient(points)
        if method != "SGD":
            norm = g.norm(dim=-1, keepdim=True)
            d = g_p = gradient(points + descent.rho * g / (norm + 1e-12))
        if method == "GSAM":
            part = (g * g_p).sum(-1, keepdim=True) / (g_p * g_p).sum(-1, keepdim=True)
            d = g_p - descent.alpha * (g - part * g_p)
        points = points - descent.lr * d
    return points


def trajectory_figure(result: Trajectories, num_points: int | None = None) -> "Figure":
    """The paths on the surface, or their first points; the title says what was chosen."""
    title = "A surface and a start chosen so that the three end apart; rho "
    title += f"{result.descent.rho:g}, alpha {result.descent.alpha:g}"
    figure, (axes,) = new_figure(1, 1, title)
    figure.set_size_inches(7.5, 4.2)
    x, y = torch.linspace(-4.6, 4.6, 231), torch.linspace(-2.2, 2.2, 111)
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).double()
    axes.contourf(x, y, result.hills(grid), levels=30, cmap="Greys_r")
    ends = result.ends()
    for index, (method, points) in enumerate(result.paths.items()):
        shown = points[:num_points]
        where, sharpness = ends[method]
        label = f"{method}: {where}, eigenvalue {sharpness:.2g}; "
        label += f"flat from {result.reached_flat[method]:.0%} of {result.num_starts} starts"
        axes.plot(shown[:, 0], shown[:, 1], color=f"C{index}", label=label, linewidth=1.5)
        axes.plot(shown[-1:, 0], shown[-1:, 1], "o", color=f"C{index}", markersize=4)
    start = next(iter(result.paths.values()))[0]
    axes.plot(start[:1], start[1:], "kx")
    axes.set(xlabel="w_1", ylabel="w_2")
    figure.legend(loc="outside lower center", frameon=False, fontsize="small")
    return figure


def save_animation(
    result: Trajectories,
    path: str | Path,
    *,
    num_frames: int = 60,
    progress: Callable[[int, int], Any] | None = None,
) -> None:
    """Writes the descents as an animated GIF.

    Args:
        result: The descents.
        path: Where to; ends in .gif.
        num_frames: How many pictures.
        progress: Called with the number of pictures drawn, and all.
    """
    from matplotlib.animation import PillowWriter

    figure = trajectory_figure(result, 1)
    axes = figure.axes[0]
    # Of each method a line and its end; the cross at the start comes last.
    lines = [axes.lines[2 * index : 2 * index + 2] for index in range(len(result.paths))]
    num_points = result.descent.num_steps + 1
    writer = PillowWriter(fps=15)
    with writer.saving(figure, str(path), dpi=100):
        for frame in range(num_frames):
            # Most of the way is done in the first steps, so the pictures go on ever faster.
            end = 1 + round((num_points - 1) * ((frame + 1) / num_frames) ** 2)
            for (line, dot), points in zip(lines, result.paths.values(), strict=True):
                line.set_data(points[:end, 0].numpy(), points[:end, 1].numpy())
                dot.set_data(points[end - 1 : end, 0].numpy(), points[end - 1 : end, 1].numpy())
            writer.grab_frame()
            if progress is not None:
                progress(frame + 1, num_frames)
