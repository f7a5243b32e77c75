"""The figure of test accuracy against the cost of training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from surrogap.experiments.plotting import new_figure
from surrogap.paper.drawings import PALETTE, WIDTH, add_legend, setups_title
from surrogap.paper.intervals import Interval
from surrogap.paper.labels import place_labels
from surrogap.paper.ledger import Ledger
from surrogap.paper.methods import METHODS
from surrogap.paper.study import Scale
from surrogap.paper.summaries import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW = 5  # seeds
_LONG = 22  # letters of a name in one line
_MAX_COST = 2.5  # a method that costs more would squeeze the others
# Between the positions of methods whose costs are equal; relative to vanilla, as the costs are.
_SPACING = 0.035
_KINDS = {
    "plain training": (PALETTE[6], "s"),
    "full cost (two passes or more)": (PALETTE[0], "o"),
    "cheaper": (PALETTE[1], "^"),
}


class _Timed(NamedTuple):
    """A method with finished runs and a measured cost."""

    runs: Summary
    cost: float
    accuracy: Interval

    @property
    def rings(self) -> list[float]:
        """The accuracies of single seeds, if they are few: of many, the interval says enough."""
        values = list(self.runs.values("test").values())
        return values if len(values) < _FEW else []


def cost_figure(scale: Scale, found: Sequence[Summary], ledger: Ledger) -> "Figure":
    """Test accuracy against the cost of training relative to vanilla, with the methods' names."""
    numbers = sorted({len(one.lines) for one in found if one.lines})
    seeds = " to ".join(map(str, dict.fromkeys([*numbers[:1], *numbers[-1:]])))
    title = f"{setups_title(scale, found)}, {seeds} seeds"
    figure, (axis,) = new_figure(1, 1, title, size=(WIDTH, 5.6))
    known = [
        _Timed(one, one.cost, accuracy)
        for one in found
        if one.cost and (accuracy := one.interval("test"))
    ]
    shown = [one for one in known if one.cost <= _MAX_COST]
    points = [
        (x, one.accuracy.mean) for x, one in zip(_side_by_side(axis, shown), shown, strict=True)
    ]
    for (x, mean), one in zip(points, shown, strict=True):
        is_plain = METHODS[one.runs.cell.method].is_plain
        kind = list(_KINDS)[0 if is_plain else 1 if one.cost > 1.9 else 2]
        colour, marker = _KINDS[kind]
        for ring in one.rings:
            axis.plot(x, ring, "o", color=colour, ms=4, mfc="white", mew=0.8)
        axis.errorbar(x, mean, one.accuracy.half_width, color=colour, capsize=3, zorder=1)
        axis.plot(x, mean, marker, color=colour, label=kind)
    beyond = [
        f"{one.runs.cell.title} ({one.accuracy.mean:.1f} %, cost {one.cost:.1f})"
        for one in known
        if one.cost > _MAX_COST
    ]
    outside = f"\nnot shown: {', '.join(beyond)}" if beyond else ""
    axis.set_xlabel(f"cost of training relative to vanilla (time of a step x steps){outside}")
    axis.set_ylabel("test accuracy, %")
    axis.margins(x=0.28, y=0.15)
    add_legend(figure)
    errors = [  # to the end of the bar, or to the farthest ring
        max([one.accuracy.half_width or 0.0, *(abs(y - mean) for y in one.rings)])
        for (_, mean), one in zip(points, shown, strict=True)
    ]
    titles = (one.runs.cell.title for one in shown)
    names = [",\n".join(t.rsplit(", ", 1)) if len(t) > _LONG else t for t in titles]
    place_labels(figure, axis, points, errors, names)
    return figure


def _side_by_side(axis: "Axes", shown: Sequence[_Timed]) -> list[float]:
    """The positions of methods, those of nearly equal costs side by side in a grey band."""
    costs = [one.cost for one in shown]
    positions = list(costs)
    for group in _equal(costs):
        low, high = _band(costs, group)
        if len(group) > 1:
            axis.axvspan(low, high, color="black", alpha=0.06, linewidth=0)
            for position, index in enumerate(group):
                positions[index] = low + _SPACING * (position + 0.5)
    return positions


def _equal(costs: Sequence[float]) -> list[list[int]]:
    """The indices of costs that are too close to be drawn apart, in groups and in order.

    >>> _equal([1.0, 2.0, 1.99])
    [[0], [2, 1]]
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(costs)), key=costs.__getitem__):
        group = [index]
        while groups and _band(costs, groups[-1])[1] > _band(costs, group)[0]:
            group = groups.pop() + group
        groups.append(group)
    return groups


def _band(costs: Sequence[float], group: Sequence[int]) -> tuple[float, float]:
    """The ends of the costs that a group takes up if it is drawn side by side."""
    middle, half = sum(costs[index] for index in group) / len(group), _SPACING * len(group) / 2
    return middle - half, middle + half
