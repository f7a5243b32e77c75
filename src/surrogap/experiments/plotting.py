"""Figures with matplotlib, without a display."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]


def new_figure(
    num_rows: int, num_columns: int, title: str, *, size: tuple[float, float] | None = None
) -> "tuple[Figure, list[Axes]]":
    """Return a figure and its panels, row by row.

    The size is in inches, by default 5 x 3.5 per panel.
    """
    # Not pyplot, which needs a display and keeps all figures in memory.
    from matplotlib.figure import Figure

    size = size or (5.0 * num_columns, 3.5 * num_rows)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    figure.suptitle(title)
    axes = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, axes


def banded(num_seeds: int) -> str:
    """Return the part of a title that explains `curves_with_bands` of some seeds."""
    return (
        f"{num_seeds} seeds: mean, and band from lowest to highest" if num_seeds > 1 else "1 seed"
    )


def curves_with_bands(
    axis: "Axes",
    label: str,
    curves: Sequence[Points],
    factor: float = 1.0,
    colour: str | None = None,
) -> None:
    """Plot `factor` times the mean of curves with the same x, and a band from lowest to highest."""
    x = [point[0] for point in curves[0]]
    columns = list(zip(*([factor * y for _, y in curve] for curve in curves), strict=False))
    x = x[: len(columns)]
    (line,) = axis.plot(x, [statistics.fmean(ys) for ys in columns], label=label, color=colour)
    low, high = [min(ys) for ys in columns], [max(ys) for ys in columns]
    axis.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
