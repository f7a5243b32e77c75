"""The sections of the results page on tuning: all trials, and find-rho against the best radii."""

import math
import statistics
from collections.abc import Iterator, Sequence

from surrogap.experiments.text_table import Table
from surrogap.paper.ledger import Ledger
from surrogap.paper.methods import METHODS, Changes
from surrogap.paper.plan import suggested_ranges
from surrogap.paper.study import Scale, settings_text
from surrogap.paper.tuning import (
    accuracies,
    chosen,
    finished_trials,
    repeats,
    trials,
    val_accuracy,
)

_RADII = """## Radii: find-rho against the study

`surrogap reproduce find-rho --scale {scale}`

`surrogap find-rho` suggests a range of radii to search: those whose ascent step raises the loss by
0.05 to 0.5, here after {train_steps} steps of plain training. The best radius is that of the
[trials](#trials).

{table}

The limits of 0.05 and 0.5 were chosen after the trials on {origin}, so
{validity}. The ranges {widths}contain {inside} of the
{tried} radii tried. With one seed each, radii next to the best one may be as good.
"""


def trials_section(scale: Scale, ledger: Ledger) -> Iterator[str]:
    """All trials, choices at the edge of their grid, and superseded trials."""
    yield "## Trials\n"
    yield "Validation accuracy in percent after the last epoch; the chosen setting's is bold.\n"
    scores = {tuned: _scores(scale, *tuned, ledger) for tuned in _tuned(scale)}
    rows, grids = [], list[str]()
    for (setup, method), found in scores.items():
        title = METHODS[method].title
        state = ["unfinished"] * (chosen(scale, setup, method, ledger) is None)
        if found and scale.setups[setup].own:
            grids.append(f"Set-up {', '.join([setup, title, *state])}:\n")
            grids.append(_grid(found).markdown() + "\n")
        elif found:
            cells = [f"{settings_text(settings)}: {text}" for settings, text in found]
            rows.append((setup, title, "; ".join(cells + state)))
    yield Table(("set-up", "method", "trials"), rows).markdown() + "\n"
    yield from grids
    if repeated := [row for tuned in scores for row in _means(scale, *tuned, ledger)]:
        yield "The best trials, repeated with further seeds:\n"
        columns = ("set-up", "method", "settings", "seeds", "mean")
        yield Table(columns, repeated).markdown() + "\n"
    if edges := _edges(scale, ledger):
        yield (
            "Chosen values at the edge of the range tried, so a better value may lie beyond: "
            f"{'; '.join(edges)}. Settings with only two values tried are left out: both are "
            "edges.\n"
        )
    if superseded := _superseded(scale, ledger):
        yield "Superseded trials, with a learning rate or radius that the study no longer uses:\n"
        yield Table(("set-up", "method", "shared settings", "trials"), superseded).markdown() + "\n"


def _tuned(scale: Scale) -> list[tuple[str, str]]:
    """Return the set-ups with their methods; fine-tuning is not tuned."""
    return [
        (letter, method)
        for letter, setup in scale.setups.items()
        if setup.source is None
        for method in setup.methods
    ]


def _scores(scale: Scale, setup: str, method: str, ledger: Ledger) -> list[tuple[Changes, str]]:
    """The settings that were tried, and their accuracies."""
    best = chosen(scale, setup, method, ledger)
    found = []
    for run in finished_trials(scale, setup, method, ledger):
        accuracy = val_accuracy(ledger[run.key])
        text = "failed" if accuracy is None else f"{100 * accuracy:.2f}"
        found.append((run.settings, f"**{text}**" if run.settings == best else text))
    return found


def _grid(scores: Sequence[tuple[Changes, str]]) -> Table:
    """A table with learning rate and weight decay in its rows, and other settings in its columns.

    Without others, weight decay is in the columns.
    """
    cells: dict[str, dict[str, str]] = {}
    for settings, text in scores:
        items = list(settings.items())
        split = min(2, len(items) - 1)
        row, column = (settings_text(dict(part)) for part in (items[:split], items[split:]))
        cells.setdefault(row, {})[column] = text
    columns = list(dict.fromkeys(column for found in cells.values() for column in found))
    rows = [(row, *(found.get(one, "-") for one in columns)) for row, found in cells.items()]
    return Table(("settings", *columns), rows)


def _means(
    scale: Scale, setup: str, method: str, ledger: Ledger
) -> Iterator[tuple[str, str, str, str, str]]:
    """The best trials that were repeated, with their mean accuracies."""
    again = repeats(scale, setup, method, ledger)
    best = chosen(scale, setup, method, ledger)
    for run in trials(scale, setup, method, ledger):
        if further := accuracies(again, run.settings, ledger):
            found = [*accuracies([run], run.settings, ledger), *further]
            mean = f"{100 * statistics.fmean(found):.2f}"
            shown = f"**{mean}**" if run.settings == best else mean
            title, text = METHODS[method].title, settings_text(run.settings)
            yield setup, title, text, str(len(found)), shown


def _edges(scale: Scale, ledger: Ledger) -> list[str]:
    """The methods whose chosen settings are the largest or smallest that were tried."""
    found = []
    for setup, method in _tuned(scale):
        best = chosen(scale, setup, method, ledger) or {}
        tried = [run.settings for run in finished_trials(scale, setup, method, ledger)]
        values = {name: {one[name] for one in tried} for name in best}
        edge = {
            name: value
            for name, value in best.items()
            if len(values[name]) > 2 and value in (min(values[name]), max(values[name]))
        }
        if edge:
            found.append(f"{setup} {METHODS[method].title} ({settings_text(edge)})")
    return found


def _superseded(scale: Scale, ledger: Ledger) -> list[tuple[str, str, str, str]]:
    """The tuning runs that are no longer trials of the study, by method and shared settings."""
    keys = {
        run.key
        for tuned in _tuned(scale)
        for found in (trials, repeats)
        for run in found(scale, *tuned, ledger)
    }
    groups: dict[tuple[str, str, str], list[str]] = {}
    for line in ledger.of_kind("run", scale=scale.name, purpose="tuning"):
        if line["key"] not in keys:
            optimizer = line["config"]["optimizer"]
            shared = settings_text({name: optimizer[name] for name in ("lr", "weight_decay")})
            own = f"{settings_text(line['settings'])}: {100 * line['val']['accuracy']:.2f}"
            group = (line["setup"], METHODS[line["method"]].title, shared)
            groups.setdefault(group, []).append(own)
    return [(*group, "; ".join(cells)) for group, cells in groups.items()]


def radii_section(scale: Scale, ledger: Ledger) -> Iterator[str]:
    """The radii that find-rho suggests, for the methods whose tuning is finished."""
    rows, inside, factors = [], list[bool](), list[float]()
    for (setup, method), (low, high) in suggested_ranges(scale, ledger).items():
        best = chosen(scale, setup, method, ledger)
        if best is not None:
            runs = finished_trials(scale, setup, method, ledger)
            radii = [run.settings["rho"] for run in runs]
            inside += [low <= rho <= high for rho in radii]
            factors += [high / low] * (high < math.inf)
            rho = best["rho"]
            shown = f"from {low:.2g}" if high == math.inf else f"{low:.2g} to {high:.2g}"
            verdict = "no, smaller" if rho < low else "yes" if rho <= high else "no, larger"
            rows.append((setup, METHODS[method].title, f"{rho:g}", shown, verdict))
    if rows:
        columns = ("set-up", "method", "best radius", "find-rho suggests")
        is_origin = scale.name == "gpu"
        yield _RADII.format(
            scale=scale.name,
            train_steps=scale.find_rho[0],
            origin="CIFAR-10" if is_origin else "[CIFAR-10](results.md#trials)",
            validity="these trials cannot validate them"
            if is_origin
            else "the trials here do test them",
            table=Table((*columns, "within range"), rows).markdown(),
            widths=f"span a factor of {min(factors):.0f} to {max(factors):.0f} and "
            if factors
            else "",
            inside=sum(inside),
            tried=len(inside),
        )
