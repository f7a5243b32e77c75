"""The paper's two toy figures, with functions of one and two weights.

The paper gives neither function, so both are invented here. The first has the values that the
caption states. The second was found by a search through random surfaces for one where the methods
end in different minima. Both illustrate what can happen, not what usually does: on this surface SAM
reaches the flat region from the same start with rho 0.34 instead of 0.3, and the search also found
surfaces where GSAM reached it less often than SAM.
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surrogap.analysis.surface import Progress
from surrogap.experiments.plotting import new_figure
from surrogap.experiments.text_table import Table
from surrogap.paper.reproductions import Reproduced, ReproductionSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Valley:
    """A parabola `loss + sharpness * (w - center)^2 / 2`."""

    center: float
    loss: float
    sharpness: float

    def __call__(self, w: Tensor) -> Tensor:
        """The parabola at `w`."""
        return self.loss + self.sharpness * (w - self.center) ** 2 / 2


@dataclass(frozen=True)
class GapToy:
    """The paper's first figure: three minima, `f`, `f_p` and `h`.

    `f` is the lowest of three parabolas, which get flatter from left to right. The second and the
    third have the same loss, the first and the third the same perturbed loss.

    Attributes:
        valleys: The three parabolas.
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
        return torch.stack([valley(w) for valley in self.valleys]).amin(0)

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
        """The points where neighbouring parabolas cross, between their minima, by bisection."""
        ridges = []
        for left, right in zip(self.valleys, self.valleys[1:], strict=False):
            low, high = self.minima.new_tensor([left.center, right.center])
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if left(middle) < right(middle) else (low, middle)
            ridges.append(middle)
        return ridges


def reproduce_gap(settings: ReproductionSettings, progress: Progress) -> Reproduced:
    """Return the table and the figure of the three minima."""
    toy = GapToy()
    names = ("loss", "perturbed_loss", "gap")
    columns = [getattr(toy, name)(toy.minima).tolist() for name in names]
    minima = [
        asdict(valley) | dict(zip(names, values, strict=True))
        for valley, *values in zip(toy.valleys, *columns, strict=True)
    ]
    rows = [
        (f"w_{i + 1} = {m['center']:g}", *(f"{m[name]:.4g}" for name in ("sharpness", *names)))
        for i, m in enumerate(minima)
    ]
    title = f"a toy loss: three parabolas; rho = {toy.rho:g}"
    table = Table(("minimum", "eigenvalue", "f", "f_p", "h"), rows, title)
    return Reproduced(
        table, {"rho": toy.rho, "minima": minima}, {"fig-gap.png": gap_figure(toy).savefig}
    )


def gap_figure(toy: GapToy) -> "Figure":
    """`f`, `f_p` and `h` of the toy, and their values at the minima."""
    figure, (axes,) = new_figure(1, 1, "A low perturbed loss in a sharp and in a flat valley")
    w = torch.linspace(-4.2, 6.0, 2001, dtype=torch.float64)
    axes.plot(w, toy.loss(w), label="f")
    axes.plot(w, toy.perturbed_loss(w), linestyle="--", label=f"f_p, rho = {toy.rho:g}")
    axes.plot(w, toy.gap(w), linestyle=":", label="h = f_p - f")
    for index, (center, gap) in enumerate(zip(toy.minima, toy.gap(toy.minima), strict=True)):
        top = float(toy.perturbed_loss(center))
        label = f"w_{index + 1}: f_p = {top:.4g}, h = {gap:.4g}"
        axes.plot([float(center)], [top], f"k{'os^'[index]}", markersize=5, label=label)
    axes.set(xlabel="w (a toy loss: three parabolas)", ylabel="loss", ylim=(0, 8))
    # Below the curves, which it would cover otherwise.
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    return figure


@dataclass(frozen=True)
class Well:
    """A sharp minimum: a Gaussian that is subtracted from the loss."""

    x: float
    y: float
    depth: float
    width: float


@dataclass(frozen=True)
class Hills:
    """A loss of two weights: a wide bowl, a ridge that leads down to it, and narrow wells.

    Attributes:
        flat: The x of the bowl's minimum, which is on `y = 0`.
        slopes: The bowl's coefficients of `(x - flat)^2` and `y^2`.
        ridge: Its height, width, and the x where it ends.
        wells: The sharp minima, on both sides of the ridge.
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

    def region(self, points: Tensor) -> Tensor:
        """The region of each point: the index of a well, -1 for the flat region, -2 elsewhere."""
        regions = torch.full(points.shape[:-1], -2)
        for index, well in enumerate(self.wells):
            center = points.new_tensor([well.x, well.y])
            regions[(points - center).norm(dim=-1) < 2 * well.width] = index
        regions[(points - points.new_tensor([self.flat, 0.0])).norm(dim=-1) < 1.2] = -1
        return regions

    def sharpness(self, point: Tensor) -> float:
        """The dominant eigenvalue of the Hessian at a point."""
        hessian = torch.autograd.functional.hessian(self, point)  # type: ignore[no-untyped-call]
        values = torch.linalg.eigvalsh(hessian)
        return float(values[values.abs().argmax()])


TOY_METHODS = ("SGD", "SAM", "GSAM")
START = (-4.0, -1.25)  # chosen, like the surface, so that the methods end in different minima


@dataclass(frozen=True)
class Descent:
    """The settings of gradient descent, with full gradients and without momentum."""

    lr: float = 0.05
    rho: float = 0.3
    alpha: float = 1.0
    num_steps: int = 600


def descend(method: str, hills: Hills, descent: Descent, starts: Tensor) -> Tensor:
    """Gradient descent from many starts at once, by the equations of the paper.

    Returns:
        The points of all steps, of shape (steps + 1, starts, 2).
    """

    def gradient(points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()
        (result,) = torch.autograd.grad(hills(points).sum(), points)
        return result

    path = [starts]
    for _ in range(descent.num_steps):
        d = g = gradient(path[-1])
        if method != "SGD":
            norm = g.norm(dim=-1, keepdim=True)
            d = g_p = gradient(path[-1] + descent.rho * g / (norm + 1e-12))
        if method == "GSAM":
            projection = (g * g_p).sum(-1, keepdim=True) / (g_p * g_p).sum(-1, keepdim=True)
            d = g_p - descent.alpha * (g - projection * g_p)
        path.append(path[-1] - descent.lr * d)
    return torch.stack(path)


@dataclass(frozen=True)
class Trajectory:
    """The descent of one method.

    Attributes:
        path: The points of the descent from `START`.
        end: The region where it ends.
        sharpness: The dominant eigenvalue there.
        reached_flat: The fraction of a grid of starts from which the method ends in the flat
            region.
    """

    path: Tensor
    end: str
    sharpness: float
    reached_flat: float


NUM_STARTS = 26 * 25
Trajectories = dict[str, Trajectory]  # by method


def trajectories(hills: Hills, descent: Descent) -> Trajectories:
    """SGD, SAM and GSAM from `START`, and from a grid of starts on the surface's left side."""
    x, y = torch.linspace(-4, 1, 26), torch.linspace(-1.5, 1.5, 25)
    starts = torch.cat([torch.tensor([START]), torch.cartesian_prod(x, y)]).double()
    found = {}
    for method in TOY_METHODS:
        paths = descend(method, hills, descent, starts)
        regions = hills.region(paths[-1])
        names = {-1: "flat region", -2: "elsewhere"}
        end = names.get(int(regions[0]), f"sharp minimum {int(regions[0]) + 1}")
        reached_flat = float((regions[1:] == -1).double().mean())
        found[method] = Trajectory(paths[:, 0], end, hills.sharpness(paths[-1, 0]), reached_flat)
    return found


def reproduce_trajectory(settings: ReproductionSettings, progress: Progress) -> Reproduced:
    """Return the table, the figure and the animation of the three descents."""
    descent = Descent() if settings.num_steps is None else Descent(num_steps=settings.num_steps)
    hills = Hills()
    found = trajectories(hills, descent)
    numbers = {
        method: {
            "end": one.path[-1].tolist(),
            "region": one.end,
            "eigenvalue": one.sharpness,
            "reached_flat": one.reached_flat,
        }
        for method, one in found.items()
    }
    rows = [
        (method, one.end, f"{one.sharpness:.3g}", f"{one.reached_flat:.1%}")
        for method, one in found.items()
    ]
    columns = ("method", "ends in", "eigenvalue there", f"flat from {NUM_STARTS} starts")
    title = "a surface and a start chosen so that the three end apart; other starts in the last"
    figure = trajectory_figure(hills, descent, found)
    animate = partial(
        save_animation, figure, found, num_frames=settings.num_frames, progress=progress
    )
    return Reproduced(
        Table(columns, rows, f"{title} column"),
        {"descent": asdict(descent), "num_starts": NUM_STARTS, "methods": numbers},
        {"fig-trajectory.png": figure.savefig, "fig-trajectory.gif": animate},
    )


def trajectory_figure(hills: Hills, descent: Descent, found: Trajectories) -> "Figure":
    """The paths on the surface; the title says what was chosen."""
    title = "A surface and a start chosen so that the three end apart; rho "
    title += f"{descent.rho:g}, alpha {descent.alpha:g}"
    figure, (axes,) = new_figure(1, 1, title, size=(7.5, 4.2))
    x, y = torch.linspace(-4.6, 4.6, 231), torch.linspace(-2.2, 2.2, 111)
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).double()
    shown = axes.contourf(x, y, hills(grid), levels=30, cmap="Greys_r", alpha=0.6)
    figure.colorbar(shown, ax=axes, label="loss")
    for number, well in enumerate(hills.wells, start=1):
        y_label = well.y + (well.width if well.y > 0 else -2.4 * well.width)  # clear of the paths
        axes.text(well.x, y_label, f"sharp {number}", ha="center", fontsize="small")
    axes.text(hills.flat, 0.15, "flat region", ha="center", fontsize="small")
    for index, (method, one) in enumerate(found.items()):
        label = f"{method}: {one.end}, eigenvalue {one.sharpness:.2g}; "
        label += f"flat from {one.reached_flat:.0%} of {NUM_STARTS} starts"
        x, y = one.path.T
        axes.plot(x, y, color=f"C{index}", label=label, linewidth=2)
        axes.plot(x[-1:], y[-1:], "o", color=f"C{index}", markersize=6)
    axes.plot(*START, "kx")
    axes.text(START[0], START[1] - 0.3, "start", ha="center", fontsize="small")
    axes.set(xlabel="w_1", ylabel="w_2")
    figure.legend(loc="outside lower center", frameon=False, fontsize="small")
    return figure


def save_animation(
    figure: "Figure", found: Trajectories, path: Path, *, num_frames: int, progress: Progress
) -> None:
    """Write the descents as an animated GIF, by shortening the lines of their figure.

    `progress` is called with the number of frames drawn so far and the total.
    """
    from matplotlib.animation import PillowWriter

    # For each method a line and the point at its end; the cross at the start is last.
    lines = figure.axes[0].lines
    num_steps = len(next(iter(found.values())).path) - 1
    writer = PillowWriter(fps=15)
    with writer.saving(figure, str(path), dpi=100):
        for frame in range(1, num_frames + 1):
            # Most of the distance is covered in the first steps, so later frames skip more steps.
            end = 1 + round(num_steps * (frame / num_frames) ** 2)
            for index, one in enumerate(found.values()):
                x, y = one.path[:end].T
                lines[2 * index].set_data(x, y)
                lines[2 * index + 1].set_data(x[-1:], y[-1:])
            writer.grab_frame()
            progress(frame, num_frames)
