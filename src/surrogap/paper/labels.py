"""Names beside the points of a figure, placed so that none covers another."""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

_DISTANCES = (8, 18, 30, 44, 60, 78)  # points of 1/72 inch
_LINE: "dict[str, Any]" = {"arrowstyle": "-", "linewidth": 0.5, "alpha": 0.6}
_DIRECTIONS = ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))


def place_labels(
    figure: "Figure",
    axis: "Axes",
    points: Sequence[tuple[float, float]],
    errors: Sequence[float],
    names: Sequence[str],
) -> "list[Annotation]":
    """Writes a name beside each point, with a thin line where it is not next to it.

    Each name takes the nearest position where it covers no other name, point, error bar or legend,
    and stays within the axes; where there is none, the position that covers the fewest.

    Args:
        figure: The figure.
        axis: Its panel, whose limits and error bars are final.
        points: In data coordinates.
        errors: Half the length of the vertical bar of each point.
        names: One for each point.
    """
    figure.draw_without_rendering()  # positions depend on the layout
    taken = [_bar(axis, point, error) for point, error in zip(points, errors, strict=True)]
    legend = axis.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent())
    inside = axis.get_window_extent()
    placed = []
    # From the right, where names can still go outwards.
    for index in sorted(range(len(points)), key=lambda i: -points[i][0]):
        best: tuple[int, Annotation, Bbox] | None = None
        for distance, (right, up) in product(_DISTANCES, _DIRECTIONS):
            label = _annotated(axis, names[index], points[index], (right, up), distance)
            box = _box(label)
            covered = sum(box.overlaps(other) for other in taken)
            covered += not (inside.containsx(box.x0) and inside.containsx(box.x1))
            covered += not (inside.containsy(box.y0) and inside.containsy(box.y1))
            if best is None or covered < best[0]:
                if best is not None:
                    best[1].remove()
                best = (covered, label, box)
            else:
                label.remove()
            if covered == 0:
                break
        assert best is not None
        taken.append(best[2])
        placed.append(best[1])
    return placed


def _annotated(
    axis: "Axes",
    name: str,
    point: tuple[float, float],
    direction: tuple[int, int],
    distance: float,
) -> "Annotation":
    right, up = direction
    label = axis.annotate(
        name,
        point,
        xytext=(right * distance, up * distance),
        textcoords="offset points",
        fontsize="small",
        ha={1: "left", 0: "center", -1: "right"}[right],
        va={1: "bottom", 0: "center", -1: "top"}[up],
        arrowprops=None if distance == _DISTANCES[0] else _LINE,
    )
    label.set_in_layout(False)  # the layout is final, and positions depend on it
    return label


def _box(label: "Annotation") -> "Bbox":
    """The box of a name in pixels, without its line, which touches the point."""
    from matplotlib.text import Text

    figure = label.get_figure(root=True)
    assert figure is not None
    label.update_positions(figure.canvas.get_renderer())  # type: ignore[attr-defined]
    return Text.get_window_extent(label)


def _bar(axis: "Axes", point: tuple[float, float], error: float) -> "Bbox":
    """The box of a point and its error bar, in pixels."""
    from matplotlib.transforms import Bbox

    (x, y), margin = point, 4.0
    low, high = axis.transData.transform([(x, y - error), (x, y + error)])
    return Bbox([[low[0] - margin, low[1] - margin], [high[0] + margin, high[1] + margin]])
