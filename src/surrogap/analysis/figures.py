"""Figures of the measurements, to write with `figure.savefig(path)`. No display is needed.

They need matplotlib, from the extra `train`; without it, they raise ImportError.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from surrogap.analysis.find_rho import GAP_FROM, GAP_TO, Sweep
from surrogap.analysis.gap import Gaps
from surrogap.analysis.landscape import Line, Plane
from surrogap.analysis.spectrum import Density
from surrogap.errors import MissingPackageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_CHARACTERS = 44  # in a line of text above a panel


def brief(text: str) -> str:
    """Shorten long lines in the middle, since names of folders may be long."""
    head = _MAX_CHARACTERS // 4
    return "\n".join(
        line
        if len(line) <= _MAX_CHARACTERS
        else f"{line[:head]}…{line[head + 1 - _MAX_CHARACTERS :]}"
        for line in text.split("\n")
    )


def _new(num_columns: int = 1, **settings: Any) -> "tuple[Figure, list[Axes]]":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            f"Figures need matplotlib ({error}). Run pip install 'surrogap[train]'."
        ) from error
    figure = Figure(figsize=(5.2 * num_columns, 3.8), dpi=150, layout="constrained")
    axes = figure.subplots(1, num_columns, squeeze=False, subplot_kw=settings)
    return figure, list(axes[0])


def curves(
    lines: Sequence[Line],
    *,
    title: str = "",
    loss: str = "loss",
    xlabel: str = "step along the direction",
) -> "Figure":
    """Curves of the loss along directions.

    Args:
        lines: The losses, one curve each.
        title: The title.
        loss: The label of the loss axis.
        xlabel: The label of the step axis.
    """
    figure, (axes,) = _new()
    for line in lines:
        axes.plot(line.steps, line.losses, marker=".", label=brief(line.label))
    axes.set(title=brief(title), xlabel=xlabel, ylabel=loss)
    if any(line.label for line in lines):
        axes.legend(frameon=False)
    return figure


def contour(plane: Plane, *, title: str = "", loss: str = "loss") -> "Figure":
    """Contour plot of the loss over two directions; the cross marks the model."""
    figure, (axes,) = _new()
    shown = axes.contourf(plane.x_steps, plane.y_steps, plane.losses, levels=20, cmap="viridis")
    axes.contour(shown, colors="white", linewidths=0.3)
    axes.plot(0.0, 0.0, "r+", markersize=10)
    axes.set(title=brief(title), xlabel=plane.labels[0], ylabel=plane.labels[1])
    axes.locator_params(axis="x", nbins=5)  # more labels would overlap
    figure.colorbar(shown, ax=axes, label=loss)
    return figure


def relief(plane: Plane, *, title: str = "", loss: str = "loss") -> "Figure":
    """Surface plot of the loss over two directions."""
    figure, axes = _new(projection="3d")
    x, y = torch.meshgrid(torch.tensor(plane.x_steps), torch.tensor(plane.y_steps), indexing="xy")
    solid: Any = axes[0]  # an Axes3D
    solid.plot_surface(x.numpy(), y.numpy(), torch.tensor(plane.losses).numpy(), cmap="viridis")
    solid.set_title(brief(title))
    for axis, label in (("x", plane.labels[0]), ("y", plane.labels[1]), ("z", loss)):
        getattr(solid, f"set_{axis}label")(label, labelpad=10)  # beyond the tick labels
        solid.locator_params(axis=axis, nbins=5)
    solid.set_box_aspect(None, zoom=0.8)  # constrained layout ignores the labels of an Axes3D
    return figure


def spectrum(density: Density, *, title: str = "") -> "Figure":
    """The density of the eigenvalues, on a logarithmic scale."""
    figure, (axes,) = _new()
    low, high = float(density.nodes.min()), float(density.nodes.max())
    width = max(high - low, 1e-12) / 100  # the resolution of the figure
    values = torch.linspace(low - 5 * width, high + 5 * width, 1000, dtype=torch.float64)
    axes.semilogy(values.tolist(), density.at(values, width).tolist())
    # Below 1e-7 of the weights there are only the tails of the Gaussians.
    axes.set_ylim(bottom=1e-7 / width)
    axes.set(title=brief(title), xlabel="eigenvalue", ylabel="density")
    return figure


def gap_curves(
    runs: dict[str, Gaps], *, eigenvalues: dict[str, float] | None = None, title: str = ""
) -> "Figure":
    """The gap against the radius, and `2 h / rho^2` with the measured eigenvalue.

    Args:
        runs: The gaps of each run, by its name.
        eigenvalues: The dominant eigenvalues of some runs, drawn as dotted lines.
        title: The title.
    """
    figure, (left, right) = _new(2)
    for index, (name, result) in enumerate(runs.items()):
        label = brief(name)
        rhos = [gap.rho for gap in result.gaps]
        style: Any = {"color": f"C{index}", "marker": "."}
        left.loglog(rhos, [gap.gap for gap in result.gaps], label=f"{label}, one step", **style)
        right.loglog(rhos, [gap.sharpness for gap in result.gaps], **style)
        if not any(math.isnan(gap.worst_gap) for gap in result.gaps):
            style["linestyle"] = "--"
            worst = [gap.worst_gap for gap in result.gaps]
            left.loglog(rhos, worst, label=f"{label}, worst found", **style)
            right.loglog(rhos, [gap.worst_sharpness for gap in result.gaps], **style)
        if eigenvalues and name in eigenvalues:
            right.axhline(eigenvalues[name], color=f"C{index}", linestyle=":")
    figure.suptitle(brief(title))
    left.set(ylabel="gap h")
    right.set(ylabel="2 h / rho^2 (dotted: dominant eigenvalue)")
    radii = sorted({gap.rho for result in runs.values() for gap in result.gaps})
    for axes in (left, right):
        axes.set_xlabel("rho")
        axes.set_xticks(radii, [f"{rho:g}" for rho in radii])
        axes.xaxis.minorticks_off()
    left.legend(frameon=False)
    return figure


def sweep_curves(sweep: Sweep, *, rho: float | None = None, title: str = "") -> "Figure":
    """The measurements of `find_rho`, with the suggested range shaded.

    Args:
        sweep: The sweep.
        rho: A radius to mark.
        title: The title.
    """
    figure, (left, right) = _new(2)
    rhos = [radius.rho for radius in sweep.radii]
    left.plot(rhos, [radius.gap for radius in sweep.radii], marker=".")
    low, high = (sweep.unit * gap for gap in (GAP_FROM, GAP_TO))
    left.axhline(low, color="grey", linestyle=":", linewidth=1, label=f"{low:g} and {high:g}")
    left.axhline(high, color="grey", linestyle=":", linewidth=1)
    if all(radius.gap > 0.0 for radius in sweep.radii):
        left.set_yscale("log")
    else:  # along the momentum, small steps lower the loss
        left.set_yscale("symlog", linthresh=low)
        left.autoscale_view()  # the limits of the linear scale would leave half of it empty
    right.plot(rhos, [radius.cosine for radius in sweep.radii], marker=".")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="rho")
        if sweep.low is not None and sweep.low < sweep.high:
            axes.axvspan(
                sweep.low,
                min(sweep.high, rhos[-1]),
                color="C2",
                alpha=0.15,
                label="suggested range",
            )
        if rho is not None:
            axes.axvline(rho, color="C3", linewidth=1, label=f"rho = {rho:g}")
        # In the corners left free by a rising gap and a falling cosine.
        axes.legend(
            frameon=False, fontsize="small", loc="upper left" if axes is left else "lower left"
        )
    figure.suptitle(brief(title))
    left.set(ylabel="surrogate gap h")
    right.set(ylabel="cosine of g and g_p")
    return figure
