"""The study's figures, in colours that colour-blind readers can distinguish."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from surrogap.experiments.figures import Points, curves_with_bands, new_figure
from surrogap.paper.labels import place_labels
from surrogap.paper.ledger import Ledger, Line
from surrogap.paper.plan import relative_cost
from surrogap.paper.study import METHODS, Scale, trials
from surrogap.paper.summaries import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette without yellow, which is faint on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_WIDTH = 8.0  # inches: about as wide as a README is shown


def methods_figure(scale: Scale, found: Sequence[Summary], ledger: Ledger) -> "Figure":
    """Test accuracy of each method: a point, and a bar for its interval."""
    rows = [one for one in reversed(found) if one.lines]
    size = (_WIDTH, 1.2 + 0.36 * len(rows))
    figure, (axis,) = new_figure(1, 1, _title(scale, found), size=size)
    for position, one in enumerate(rows):
        value = one.interval("test")
        if value is not None:
            error = value.half_width or 0.0
            axis.errorbar(value.mean, position, xerr=error, fmt="o", color=PALETTE[0], capsize=3)
    axis.set_yticks(range(len(rows)), [one.cell.title for one in rows])
    axis.set_ylim(-0.6, max(len(rows), 1) - 0.4)
    axis.set_xlabel("test accuracy, % (mean and 95 % interval over seeds)")
    return figure


def ablation_figure(scale: Scale, found: Sequence[Summary], ledger: Ledger) -> "Figure":
    """Augmentation, base optimizer, and what GSAM minimises: one panel each."""
    tuned = {one.cell.method: one for one in found if not one.cell.changes}

    def varied(name: str) -> list[tuple[str, Summary]]:
        changed = [one for one in found if name in one.cell.changes]
        return [(str(one.cell.changes[name]), one) for one in changed]

    panels = {
        "augmentation": [("light", tuned[m]) for m in ("vanilla-2x", "sam", "gsam")]
        + varied("augmentation"),
        "base optimizer": [("sgd", tuned[m]) for m in ("vanilla", "sam", "gsam")]
        + varied("optimizer"),
        "minimised by GSAM": [("(f_p, h)", tuned["gsam"]), ("(f, h)", tuned["gsam-plain"])],
    }
    figure, axes = new_figure(1, 3, _title(scale, found), size=(_WIDTH + 2, 4.0))
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        _grouped(axis, rows)
        axis.set_xlabel(title)
    axes[0].set_ylabel("test accuracy, %")
    drawn = [pair for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    once = {label: handle for handle, label in drawn}
    if once:
        figure.legend(list(once.values()), list(once), loc="outside lower center", ncols=len(once))
    return figure


def _grouped(axis: "Axes", rows: Sequence[tuple[str, Summary]]) -> None:
    """Points with intervals, in groups along the axis and in colours by method."""
    groups = list(dict.fromkeys(group for group, _ in rows))
    for group, one in rows:
        value = one.interval("test")
        if value is None:
            continue
        own = [other.cell.method for name, other in rows if name == group]
        shift = 0.18 * (own.index(one.cell.method) - (len(own) - 1) / 2)
        colour, marker = _ABLATED[one.cell.method]
        axis.errorbar(
            groups.index(group) + shift,
            value.mean,
            yerr=value.half_width or 0.0,
            fmt=marker,
            capsize=3,
            color=colour,
            label=METHODS[one.cell.method].title,
        )
    axis.set_xticks(range(len(groups)), groups)
    axis.set_xlim(-0.6, len(groups) - 0.4)


_ABLATED = {
    "vanilla": (PALETTE[6], "s"),
    "vanilla-2x": (PALETTE[3], "v"),
    "sam": (PALETTE[0], "o"),
    "gsam": (PALETTE[1], "D"),
    "gsam-plain": (PALETTE[2], "^"),
}


def cosine_figure(scale: Scale, found: Sequence[Summary], ledger: Ledger) -> "Figure":
    """The cosine of g and g_p against the epoch, and a band over the seeds."""
    figure, (axis,) = new_figure(1, 1, _title(scale, found), size=(_WIDTH, 3.8))
    axis.set_prop_cycle(color=PALETTE)
    for one in found:
        curves = [_curve(line, "cosine") for line in one.lines.values()]
        if curves:
            curves_with_bands(axis, one.cell.title, curves)
    axis.set(xlabel="epoch", ylabel="cosine of g and g_p")
    _legend(axis)
    return figure


def gap_figure(scale: Scale, found: Sequence[Summary], ledger: Ledger) -> "Figure":
    """The gap against the epoch for each alpha, one panel for each radius; from the tuning runs."""
    setup = found[0].cell.setup
    radii = {
        run.settings["rho"]: _alphas(scale, setup, float(run.settings["rho"]), ledger)
        for run in trials(scale, setup, "sam")
    }
    panels = {rho: alphas for rho, alphas in radii.items() if len(alphas) > 1}
    size = (_WIDTH, 3.8)
    figure, axes = new_figure(1, max(len(panels), 1), _title(scale, found), size=size)
    for axis, (rho, alphas) in zip(axes, panels.items(), strict=False):
        axis.set_prop_cycle(color=PALETTE)
        for alpha, line in alphas.items():
            label = "alpha 0 (SAM)" if alpha == 0 else f"alpha {alpha:g}"
            axis.plot(*zip(*_curve(line, "gap"), strict=True), label=label)
        axis.set(xlabel="epoch", title=f"rho {rho:g}")
        _legend(axis)
    axes[0].set_ylabel("surrogate gap h")
    return figure


def _alphas(scale: Scale, setup: str, rho: float, ledger: Ledger) -> dict[float, Line]:
    """The finished trials of SAM and GSAM with a radius, by alpha."""
    runs = [*trials(scale, setup, "sam"), *trials(scale, setup, "gsam")]
    return {
        float(run.settings.get("alpha", 0.0)): ledger[run.key]
        for run in runs
        if run.settings["rho"] == rho and run.key in ledger and ledger[run.key]["kind"] == "run"
    }


def cost_figure(scale: Scale, found: Sequence[Summary], ledger: Ledger) -> "Figure":
    """Test error against the cost of training relative to vanilla, with the methods' names."""
    figure, (axis,) = new_figure(1, 1, _title(scale, found), size=(_WIDTH, 5.6))
    timing = ledger.newest_timing(scale.name, found[0].cell.setup)
    points, names, errors = [], [], []
    for one in found:
        value = one.interval("test")
        cost = None if timing is None else relative_cost(timing, one.cell.method)
        if value is not None and cost is not None:
            points.append((cost, 100.0 - value.mean))
            errors.append(value.half_width or 0.0)
            names.append(one.cell)
    for kind, (colour, marker) in _KINDS.items():
        own = [i for i, cell in enumerate(names) if _kind(cell.method) == kind]
        if own:
            axis.errorbar(
                [points[i][0] for i in own],
                [points[i][1] for i in own],
                yerr=[errors[i] for i in own],
                fmt=marker,
                color=colour,
                capsize=3,
                label=kind,
            )
    axis.set(
        xlabel="cost relative to vanilla (measured time of a step, times steps)",
        ylabel="test error, %",
    )
    axis.margins(x=0.15, y=0.15)
    _legend(axis)
    place_labels(figure, axis, points, errors, [cell.title for cell in names])
    return figure


_KINDS = {
    "plain training": (PALETTE[6], "s"),
    "two passes or more": (PALETTE[0], "o"),
    "cheaper variants": (PALETTE[1], "^"),
}


def _kind(method: str) -> str:
    if METHODS[method].is_plain:
        return "plain training"
    return "two passes or more" if METHODS[method].passes >= 2 else "cheaper variants"


def _curve(line: Line, name: str) -> Points:
    """A curve of a run against the epoch."""
    curves = line["curves"]
    epochs = line["num_epochs"] / line["num_steps"]
    pairs = zip(curves["step"], curves.get(name, []), strict=False)
    return [(step * epochs, value) for step, value in pairs if value is not None]


def _legend(axis: "Axes") -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="small")


def _title(scale: Scale, found: Sequence[Summary]) -> str:
    setups = dict.fromkeys(one.cell.setup for one in found)
    return "; ".join(scale.setups[setup].title for setup in setups)
