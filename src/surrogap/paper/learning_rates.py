"""Methods at other learning rates than the one that plain training was tuned to."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from surrogap.experiments.text_table import Table
from surrogap.paper.intervals import paired_difference
from surrogap.paper.summaries import Summary


def on_common_seeds(found: Sequence[Summary]) -> list[Summary]:
    """The cells of each set-up, with the seeds that all of its finished cells have.

    Otherwise a curve over the learning rates would mix means over different seeds.
    """
    seeds: dict[str, set[int]] = {}
    for one in found:
        if one.lines:
            setup = one.cell.setup
            seeds[setup] = seeds.get(setup, set(one.lines)) & set(one.lines)
    return [
        replace(one, lines={s: line for s, line in one.lines.items() if s in seeds[one.cell.setup]})
        if one.lines
        else one
        for one in found
    ]


def rate(one: Summary) -> float:
    """The learning rate of a cell relative to the one that plain training was tuned to."""
    return float(one.cell.changes.get("lr_factor", 1.0))


def at_own_rates(found: Sequence[Summary], setup: str) -> dict[str, Summary]:
    """The methods of a set-up, each at the learning rate with the best validation accuracy.

    That is the mean over the seeds of `found`. Of equal rates, the first is chosen.
    """
    best: dict[str, Summary] = {}
    for one in found:
        former = best.get(one.cell.method)
        if one.cell.setup == setup and (former is None or _accuracy(one) > _accuracy(former)):
            best[one.cell.method] = one
    return best


def _accuracy(one: Summary) -> float:
    return statistics.fmean(one.values("val").values())


def own_rates_table(found: Sequence[Summary]) -> Table:
    """The gains over vanilla, each method at its own best learning rate and at the shared one."""
    rows: list[tuple[str, ...]] = []
    common = on_common_seeds(found)
    for setup in _finished_setups(common):
        best = at_own_rates(common, setup)
        shared = {
            one.cell.method: one for one in common if one.cell.setup == setup and rate(one) == 1.0
        }
        for method, own in best.items():
            if method != "vanilla":
                found_gains = (
                    _gain(own, best["vanilla"]),
                    _gain(shared[method], shared["vanilla"]),
                )
                rates = (f"{rate(own):g}", f"{rate(best['vanilla']):g}")
                title = shared[method].cell.title
                rows.append((setup, title, *rates, *found_gains, str(len(own.lines))))
    gains = ("gain, each at its own lr", "gain, both at factor 1")
    columns = ("lr factor", "vanilla's lr factor", *gains, "seeds")
    return Table(("set-up", "method", *columns), rows)


def _finished_setups(found: Sequence[Summary]) -> Iterable[str]:
    """The set-ups in which all learning rates have runs: others have no best one yet."""
    setups = dict.fromkeys(one.cell.setup for one in found)
    return [s for s in setups if all(one.lines for one in found if one.cell.setup == s)]


def _gain(one: Summary, other: Summary) -> str:
    gain = paired_difference(one.values("test"), other.values("test"))
    return "-" if gain is None else gain.text(sign="+")
