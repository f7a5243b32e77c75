"""The study's figures, except that of the costs, in a palette for colour-blind readers."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from surrogap.experiments.plotting import Points, curves_with_bands, new_figure
from surrogap.paper.intervals import Interval, paired_difference
from surrogap.paper.learning_rates import on_common_seeds, rate
from surrogap.paper.ledger import Ledger, LedgerLine
from surrogap.paper.methods import METHODS
from surrogap.paper.plan import suggested_ranges
from surrogap.paper.study import Cell, Scale
from surrogap.paper.summaries import Summary
from surrogap.paper.tuning import finished_trials

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette without yellow, which is faint on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
WIDTH = 8.0  # inches: about the width of a README


def methods_figure(scale: Scale, found: Sequence[Summary], ledger: Ledger) -> "Figure":
    """Test accuracy of each method, with its interval."""
    rows = [one for one in reversed(found) if one.lines]
    size = (WIDTH, 1.2 + 0.36 * len(rows))
    figure, (axis,) = new_figure(1, 1, setups_title(scale, found), size=size)
    for position, one in enumerate(rows):
        value = one.interval("test")
        if value is not None:
            error = value.half_width or 0.0
            axis.errorbar(value.mean, position, xerr=error, fmt="o", color=PALETTE[0], capsize=3)
    axis.set_yticks(range(len(rows)), [one.cell.title for one in rows])
    axis.set_ylim(-0.6, max(len(rows), 1) - 0.4)
    axis.set_xlabel("test accuracy, % (mean and 95 % interval over seeds)")
    return figure


# The colours and markers of the methods that several figures show.
_STYLES = {
    "vanilla": (PALETTE[6], "s"),
    "vanilla-short": (PALETTE[5], "<"),
    "vanilla-2x": (PALETTE[3], "v"),
    "sam": (PALETTE[0], "o"),
    "gsam": (PALETTE[1], "D"),
    "sam-norms": (PALETTE[4], "P"),
    "gsam-plain": (PALETTE[2], "^"),
}


def ablation_figure(scale: Scale, found: Sequence[Summary], ledger: Ledger) -> "Figure":
    """Augmentation, base optimizer, and what GSAM minimizes: one panel each."""
    tuned = {one.cell.method: one for one in found if not one.cell.changes}

    def groups(default: str, methods: Sequence[str], name: str) -> dict[str, list[Summary]]:
        """The tuned methods, and those with another value of a setting."""
        grouped = {default: [tuned[method] for method in methods]}
        for one in found:
            if name in one.cell.changes:
                grouped.setdefault(str(one.cell.changes[name]), []).append(one)
        return grouped

    own = str(scale.setups["A"].changes["augmentation"])
    panels = {
        "augmentation": groups(own, ("vanilla-2x", "sam", "gsam", "sam-norms"), "augmentation"),
        "base optimizer": groups("sgd", ("vanilla", "sam", "gsam"), "optimizer"),
        "minimized by GSAM": {"(f_p, h)": [tuned["gsam"]], "(f, h)": [tuned["gsam-plain"]]},
    }
    figure, axes = new_figure(1, 3, setups_title(scale, found), size=(WIDTH + 2, 4.0))
    for axis, (title, grouped) in zip(axes, panels.items(), strict=True):
        for position, group in enumerate(grouped.values()):
            _draw_group(axis, position, group)
        axis.set_xticks(range(len(grouped)), list(grouped))
        axis.set(xlabel=title, xlim=(-0.6, len(grouped) - 0.4))
    # Alone, the third panel would show a small difference as large.
    bottom, top = axes[1].get_ylim()
    axes[2].set_ylim(min(bottom, axes[2].get_ylim()[0]), max(top, axes[2].get_ylim()[1]))
    axes[0].set_ylabel("test accuracy, % (95 % interval)")
    add_legend(figure)
    return figure


def _draw_group(axis: "Axes", position: int, group: Sequence[Summary]) -> None:
    """Draw some cells side by side around a position."""
    for index, one in enumerate(group):
        value = one.interval("test")
        if value is not None:
            colour, marker = _STYLES[one.cell.method]
            x, error = position + 0.18 * (index - (len(group) - 1) / 2), value.half_width or 0.0
            style: dict[str, Any] = {"fmt": marker, "color": colour, "capsize": 3}
            axis.errorbar(x, value.mean, error, label=METHODS[one.cell.method].title, **style)


def cosine_figure(scale: Scale, found: Sequence[Summary], ledger: Ledger) -> "Figure":
    """The cosine of g and g_p against the epoch."""
    return _over_epochs(scale, found, "cosine", "cosine of g and g_p")


def accuracy_curves_figure(scale: Scale, found: Sequence[Summary], ledger: Ledger) -> "Figure":
    """The test accuracy against the epoch, without the lowest values of the first half."""
    figure = _over_epochs(scale, found, "test_accuracy", "test accuracy, %", factor=100.0)
    for axis in figure.axes:
        middle, lines = sum(axis.get_xlim()) / 2, list[Any](axis.lines)
        late = [y for line in lines for x, y in line.get_xydata() if x > middle]
        axis.set_ylim(bottom=min(late, default=2.0) - 2.0)
    return figure


def _over_epochs(
    scale: Scale, found: Sequence[Summary], name: str, label: str, factor: float = 1.0
) -> "Figure":
    """A panel for each set-up, with a curve for each method and a band over its seeds."""
    setups = dict.fromkeys(one.cell.setup for one in found)
    figure, axes = new_figure(1, len(setups), "", size=(WIDTH, 4.0))
    for axis, setup in zip(axes, setups, strict=True):
        for one in (one for one in found if one.cell.setup == setup):
            curves = [curve for line in one.lines.values() if (curve := _curve(line, name))]
            if curves:
                colour, _ = _STYLES[one.cell.method]
                curves_with_bands(axis, one.cell.title, curves, factor, colour)
        axis.set(title=scale.setups[setup].title, xlabel="epoch")
        axis.locator_params(axis="x", integer=True)
    axes[0].set_ylabel(label)
    add_legend(figure)
    return figure


def gap_curves_figure(scale: Scale, found: Sequence[Summary], ledger: Ledger) -> "Figure":
    """The gap against the epoch for each alpha, a panel for each radius, from the tuning runs."""
    setup = found[0].cell.setup
    radii: dict[float, dict[float, LedgerLine]] = {}  # the lines by rho and alpha
    both = (finished_trials(scale, setup, method, ledger) for method in ("sam", "gsam"))
    for run in chain.from_iterable(both):
        if ledger[run.key]["kind"] == "run":
            alpha = float(run.settings.get("alpha", 0.0))
            radii.setdefault(run.settings["rho"], {})[alpha] = ledger[run.key]
    panels = {rho: lines for rho, lines in radii.items() if len(lines) > 1}
    size = (WIDTH, 3.8)
    figure, axes = new_figure(1, max(len(panels), 1), setups_title(scale, found), size=size)
    for axis, (rho, lines) in zip(axes, panels.items(), strict=False):
        axis.set_prop_cycle(color=PALETTE)
        for alpha, line in lines.items():
            label = "alpha 0 (SAM)" if alpha == 0 else f"alpha {alpha:g}"
            axis.plot(*zip(*_curve(line, "gap"), strict=True), label=label)
        axis.set(xlabel="epoch", title=f"rho {rho:g} (tuning run, 1 seed)")
    top = max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(0.0, top)
    add_legend(figure)
    axes[0].set_ylabel("surrogate gap h")
    return figure


def rho_figure(scale: Scale, found: Sequence[Summary], ledger: Ledger) -> "Figure":
    """Validation accuracy gained over vanilla against the radius, a panel for each set-up.

    Bars at the bottom are the ranges that find-rho suggests.
    """
    gains = _gains(found, "val", lambda one: one.cell.changes.get("rho"))
    figure, panels = _gains_figure(scale, gains, "rho", "validation accuracy")
    suggested = suggested_ranges(scale, ledger)
    for setup, axis in panels.items():
        from_bottom = axis.get_xaxis_transform()  # heights are fractions of the panel
        for height, method in zip((0.02, 0.045), gains[setup], strict=False):
            if (setup, method) in suggested:
                low, high = suggested[setup, method]
                style: dict[str, Any] = {"color": _STYLES[method][0], "transform": from_bottom}
                axis.plot([low, min(high, 8.0)], [height] * 2, lw=4, **style)
    return figure


def lr_figure(scale: Scale, found: Sequence[Summary], ledger: Ledger) -> "Figure":
    """Test accuracy gained over vanilla against the learning rate, a panel for each set-up."""
    gains = _gains(on_common_seeds(found), "test", rate)
    label = "learning rate relative to vanilla's tuned one"
    return _gains_figure(scale, gains, label, "test accuracy")[0]


# The value of a setting and the points gained with it, by set-up and method.
_Gains = dict[str, dict[str, list[tuple[float, Interval]]]]


def _gains(
    found: Sequence[Summary], score: str, value: Callable[[Summary], float | None]
) -> _Gains:
    """The gains over vanilla with its tuned settings; cells without a value are left out."""
    plain = {
        one.cell.setup: one.values(score)
        for one in found
        if one.cell == Cell(one.cell.setup, "vanilla")
    }
    gains: _Gains = {}
    for one in found:
        gain, x = paired_difference(one.values(score), plain[one.cell.setup]), value(one)
        if gain is not None and x is not None:
            gains.setdefault(one.cell.setup, {}).setdefault(one.cell.method, []).append((x, gain))
    return gains


def _gains_figure(
    scale: Scale, gains: _Gains, label: str, score: str
) -> "tuple[Figure, dict[str, Axes]]":
    """The figure, and its panels by set-up."""
    num_columns = min(len(gains), 2) or 1
    num_rows = math.ceil(len(gains) / num_columns) or 1
    figure, axes = new_figure(num_rows, num_columns, "", size=(WIDTH, 0.6 + 2.9 * num_rows))
    for axis, (setup, of_setup) in zip(axes, gains.items(), strict=False):
        axis.axhline(0.0, color=PALETTE[6], linewidth=0.8)
        for index, (method, points) in enumerate(of_setup.items()):
            colour, marker = _STYLES[method]
            x, values = zip(*sorted(points, key=lambda point: point[0]), strict=True)
            apart = 1.03 ** (index - (len(of_setup) - 1) / 2)  # so that intervals do not overlap
            style: dict[str, Any] = {"fmt": f"{marker}-", "color": colour, "capsize": 3}
            style |= {"yerr": [gain.half_width or 0.0 for gain in values]}
            means = [gain.mean for gain in values]
            axis.errorbar([apart * one for one in x], means, label=METHODS[method].title, **style)
        axis.set_xscale("log")
        axis.set(title=scale.setups[setup].title, xlabel=label)
        axis.set_ylabel(f"{score}\nover vanilla, points")
        axis.margins(y=0.12)  # so that the lowest interval ends above the bars of find-rho
        ticks = _apart({x for points in of_setup.values() for x, _ in points})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    for axis in axes[len(gains) :]:
        axis.set_visible(False)
    add_legend(figure)
    return figure, dict(zip(gains, axes, strict=False))


def _apart(radii: Iterable[float]) -> list[float]:
    """Some of the radii in increasing order, so far apart that their labels fit on an axis.

    >>> _apart([0.1, 0.2, 0.4, 0.25, 0.5])
    [0.1, 0.2, 0.4]
    """
    found: list[float] = []
    for rho in sorted(radii):
        if not found or rho >= 1.9 * found[-1]:
            found.append(rho)
    return found


def _curve(line: LedgerLine, name: str) -> Points:
    """A curve of a run against the epoch: of its steps, or of the epochs that were evaluated."""
    curves = line["curves"]
    if name.startswith(("val_", "test_")):
        epochs = curves.get("epoch", [])
    else:
        epochs = [step * line["num_epochs"] / line["num_steps"] for step in curves["step"]]
    pairs = zip(epochs, curves.get(name, []), strict=False)
    return [(epoch, value) for epoch, value in pairs if value is not None]


def add_legend(figure: "Figure") -> None:
    """A legend below the panels with each label once, if there are labels."""
    handles: dict[Any, Any] = {}
    for axis in figure.axes:
        own, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, own, strict=True))
    if handles:
        place: dict[str, Any] = {"loc": "outside lower center", "ncols": len(handles)}
        figure.legend(list(handles.values()), list(handles), **place)


def setups_title(scale: Scale, found: Sequence[Summary]) -> str:
    """The titles of the set-ups that a figure shows."""
    setups = dict.fromkeys(one.cell.setup for one in found)
    return "; ".join(scale.setups[setup].title for setup in setups)
