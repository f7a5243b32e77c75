"""Labels for the points of a figure, positioned so that none covers another."""

import math
from collections.abc import Sequence
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

_DISTANCES = (8, 18, 30, 44, 60, 78)  # points of 1/72 inch
_DIRECTIONS = ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))
_HORIZONTAL = {1: "left", 0: "center", -1: "right"}
_VERTICAL = {1: "bottom", 0: "center", -1: "top"}


def place_labels(
    figure: "Figure",
    axis: "Axes",
    points: Sequence[tuple[float, float]],
    errors: Sequence[float],
    names: Sequence[str],
) -> None:
    """Write a name near each point, with a thin line to it if they are not adjacent.

    Each name takes the nearest position within the axes where it covers no other name, point or
    error bar, is closer to its own point than to others, and its line crosses no other error bar.
    If there is none, it takes the position that violates the fewest of these conditions.

    The points are in data coordinates, and the errors are half the lengths of their vertical bars.
    The limits and error bars of the axes must be final.
    """
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # positions depend on the layout
    inside, pixels = axis.get_window_extent().padded(-10.0), figure.dpi / 72
    centres = axis.transData.transform(points)
    bars = [
        Bbox(axis.transData.transform([(x, y - error), (x, y + error)])).padded(4.0)
        for (x, y), error in zip(points, errors, strict=True)
    ]
    taken = [*bars]
    # From the right, where names can still go outwards.
    for index in sorted(range(len(points)), key=lambda i: -points[i][0]):
        x, y = centres[index]
        size = Text(text=names[index], fontsize="small", figure=figure).get_window_extent()
        candidates = []
        for distance, (right, up) in product(_DISTANCES, _DIRECTIONS):
            left = x + right * distance * pixels + (right - 1) / 2 * size.width
            bottom = y + up * distance * pixels + (up - 1) / 2 * size.height
            box = Bbox.from_bounds(left, bottom, size.width, size.height)
            is_outside = not all(inside.contains(*corner) for corner in box.corners())
            gaps = [_distance(box, *centre) for centre in centres]
            end = x + right * distance * pixels, y + up * distance * pixels
            crosses = any(_crosses(bar, (x, y), end) for bar in bars if bar is not bars[index])
            is_nearer_to_another = gaps[index] > min(gaps)
            faults = (is_outside, is_nearer_to_another, crosses)
            num_faults = sum(map(box.overlaps, taken)) + sum(faults)
            candidates.append((num_faults, distance, right, up, box))
        _, distance, right, up, box = min(candidates, key=itemgetter(0))
        taken.append(box)
        label = axis.annotate(
            names[index],
            points[index],
            xytext=(right * distance, up * distance),
            textcoords="offset points",
            fontsize="small",
            ha=_HORIZONTAL[right],
            va=_VERTICAL[up],
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "alpha": 0.6}
            if distance > _DISTANCES[0]
            else None,
        )
        label.set_in_layout(False)  # the layout is final, and positions depend on it


def _crosses(box: "Bbox", start: Sequence[float], end: Sequence[float]) -> bool:
    """True if one of eleven points along a line is inside a box."""
    points = ([a + k / 10 * (b - a) for a, b in zip(start, end, strict=True)] for k in range(11))
    return any(box.contains(*point) for point in points)


def _distance(box: "Bbox", x: float, y: float) -> float:
    """The distance of a point from a box; 0 inside."""
    return math.hypot(max(box.x0 - x, 0.0, x - box.x1), max(box.y0 - y, 0.0, y - box.y1))
