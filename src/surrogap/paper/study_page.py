"""The page about the study's results, written from its ledger."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from surrogap.errors import InvalidValueError
from surrogap.experiments.text_table import Table
from surrogap.paper.artifacts import ARTIFACTS, Artifact
from surrogap.paper.intervals import paired_difference
from surrogap.paper.ledger import Ledger
from surrogap.paper.method_sections import reading_section, setups_section
from surrogap.paper.methods import MAIN, METHODS
from surrogap.paper.study import Cell, Scale
from surrogap.paper.summaries import Comparison, Summary, cell_table, comparisons, summaries
from surrogap.paper.tuning import chosen, finished_trials
from surrogap.paper.tuning_sections import radii_section, trials_section

_PLAIN = tuple(name for name, method in METHODS.items() if method.is_plain)

_GAINS = (
    'Points of test accuracy gained over plain training ("vanilla"), with 95 % intervals. "Norm '
    'layers" means that only normalisation layers are perturbed.\n'
)
_PRELIMINARY = "Results with three seeds are preliminary: more may change them. "
_NOTES = (
    'For "best epoch", both methods are scored at their epoch with the best validation accuracy. '
    "{preliminary}[How to read this page](#how-to-read-this-page) explains intervals and terms, "
    "and [Choose an objective](how-to/choose.md) draws conclusions.\n"
)

# The cells of each table and figure, by its name.
Rows = Mapping[str, Sequence[Summary]]


def write_page(path: Path, scale: Scale, ledger: Ledger) -> None:
    """Write the page, and its figures to the folder `path.with_suffix("")`.

    Raises:
        ValueError: The page or its folder cannot be written.
    """
    folder = path.with_suffix("")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(_page(folder, scale, ledger)))
    except OSError as error:
        raise InvalidValueError(
            f"page must be a writable file, got {path} ({error.strerror}). Pass another path."
        ) from error


def _page(folder: Path, scale: Scale, ledger: Ledger) -> Iterator[str]:
    found = {name: summaries(scale, one.cells, ledger) for name, one in ARTIFACTS.items()}
    results = "\n".join(_results(folder, scale, ledger, found))
    sections = (setups_section, trials_section, radii_section)
    details = "\n".join(line for section in sections for line in section(scale, ledger))
    made = {
        (one.first.cell.setup, one.title): one
        for name, artifact in ARTIFACTS.items()
        for one in comparisons(found[name], artifact.pairs)
    }
    title, about = scale.page
    yield f"# {title}\n"
    yield f"{about}\n"
    yield from _in_short(scale, ledger)
    yield results
    text = results + details
    yield reading_section(f"{folder.name}.md", scale, ledger, list(made.values()), text)
    yield details


def _results(folder: Path, scale: Scale, ledger: Ledger, found: Rows) -> Iterator[str]:
    """The tables and figures that have runs, and a list of what is missing."""
    waiting = []
    for name, artifact in ARTIFACTS.items():
        if _has_runs(artifact, found[name], scale, ledger):
            yield from _section(name, found[name], folder, scale, ledger)
        elif name not in scale.left_out:
            waiting.append(f"* `{name}`: {artifact.title}")
    planned = (rows for name, rows in found.items() if name not in scale.left_out)
    rows = {one.cell: one for of_artifact in planned for one in of_artifact}
    if num_missing := sum(not row.lines for row in rows.values()):
        yield "## Not trained yet\n"
        yield "\n".join([*waiting, ""])
        yield (
            f"{num_missing} of {len(rows)} planned rows are missing, because their runs have not "
            f"finished. `surrogap reproduce all --scale {scale.name} --dry-run` lists the runs.\n"
        )


def _in_short(scale: Scale, ledger: Ledger) -> Iterator[str]:
    """The gains of the main methods in each set-up, and the set-ups that have no final runs."""
    yield "## In short\n"
    tuned = [letter for letter, setup in scale.setups.items() if setup.source is None]
    wider = {
        letter: scale.setups[letter].shared
        for letter in tuned
        if scale.setups[letter].shared and chosen(scale, letter, "vanilla", ledger)
    }
    rows = [row for letter in tuned for row in _gain_rows(scale, letter, letter, ledger)]
    trained = {row[0] for row in rows}
    for letter, shared in wider.items():
        if letter not in trained:  # its plain training is the first to have runs
            rows += _gain_rows(scale, shared, letter, ledger)
    if rows:
        yield _GAINS
        letters = [letter for letter in tuned if letter in {*trained, *wider}]
        for letter in letters:
            setup = scale.setups[letter]
            state = "" if letter in trained else " So far, only plain training has finished."
            yield f"* {letter}: {setup.title}. {setup.remark}".strip() + state
        yield ""
        titles = (f"over {METHODS[method].title}" for method in _PLAIN)
        columns = ("set-up", "method", *titles, "over vanilla, best epoch", "seeds")
        yield Table(columns, rows).markdown() + "\n"
        preliminary = any(row[-1] == "3" for row in rows)
        yield _NOTES.format(preliminary=_PRELIMINARY if preliminary else "")
        widest = [letter for letter in letters if letter not in wider.values()]
        if edges := _rates_at_edge(scale, widest, ledger):
            yield f"The chosen learning rate of vanilla is {edges}; a better one may lie beyond.\n"
        for letter, shared in wider.items():
            yield from _wider_tuning(scale, letter, shared, ledger)
    final = {line["setup"] for line in ledger.of_kind("run", purpose="final")}
    if waiting := [f"{s.title} ({name})" for name, s in scale.setups.items() if name not in final]:
        yield f"Not trained yet: {'; '.join(waiting)}.\n"


def _gain_rows(scale: Scale, letter: str, plain: str, ledger: Ledger) -> list[tuple[str, ...]]:
    """Rows of the gains of a set-up's main methods over plain training in the set-up `plain`."""
    cells = [Cell(plain, m) for m in _PLAIN if m in scale.setups[plain].methods]
    trained = {one.cell.method: one for one in summaries(scale, cells, ledger)}
    baselines = [trained.get(method) for method in _PLAIN]
    methods = [m for m in MAIN if m in scale.setups[letter].methods and m not in _PLAIN]
    rows = []
    for one in summaries(scale, [Cell(letter, method) for method in methods], ledger):
        found = [
            None if other is None else paired_difference(one.values(score), other.values(score))
            for other, score in (*((other, "test") for other in baselines), (baselines[0], "best"))
        ]
        if any(found):
            texts = [gain.text(sign="+") if gain else "-" for gain in found]
            name = letter if letter == plain else f"{letter}, vanilla of {plain}"
            rows.append((name, one.cell.title, *texts, str(len(one.lines))))
    return rows


def _wider_tuning(scale: Scale, letter: str, shared: str, ledger: Ledger) -> Iterator[str]:
    """The gain of plain training in a set-up where it is tuned more widely than in `shared`."""
    gains, better = [], []
    both = [scale.setups[name].methods for name in (letter, shared)]
    for method in (m for m in _PLAIN if all(m in methods for methods in both)):
        pair, title = [Cell(letter, method), Cell(shared, method)], METHODS[method].title
        found = [one.values("test") for one in summaries(scale, pair, ledger)]
        if (gain := paired_difference(*found)) is not None:
            gains.append(f"{gain.text(sign='+')} ({title})")
            better += [f'"{title}"'] * (gain.mean > 0 and gain.excludes_zero)
    if gains:
        due = (
            f" So part of {shared}'s gains over {' and '.join(better)} comes from tuning plain "
            "training less."
        )
        yield (
            f"Plain training was tuned more widely in {letter} than in {shared}. This changes its "
            f"accuracy by {' and '.join(gains)}.{due if better else ''}\n"
        )


def _rates_at_edge(scale: Scale, setups: Sequence[str], ledger: Ledger) -> str:
    """The set-ups whose learning rate is the smallest or largest that plain training tried."""
    words = []
    for edge, extreme in (("smallest", min), ("largest", max)):
        found = []
        for setup in setups:
            best = chosen(scale, setup, "vanilla", ledger)
            runs = finished_trials(scale, setup, "vanilla", ledger)
            rates = [run.settings["lr"] for run in runs]
            if best and best["lr"] == extreme(rates):
                found.append(setup)
        if found:
            words.append(f"the {edge} tried in {' and '.join(found)}")
    return ", and ".join(words)


def _section(
    name: str, found: Sequence[Summary], folder: Path, scale: Scale, ledger: Ledger
) -> Iterator[str]:
    """A figure, its notes, and the tables of the methods that it compares."""
    artifact = ARTIFACTS[name]
    yield f"## {artifact.title.removesuffix('.')}\n"
    yield f"`surrogap reproduce {name} --scale {scale.name}`\n"
    if artifact.draw is not None:
        file = f"{folder.name}/{name}.png"
        artifact.draw(scale, found, ledger).savefig(folder.parent / file)
        yield f"![{artifact.title}]({file})\n"
    yield artifact.notes + "\n"
    if artifact.second_table is not None and (second := artifact.second_table(found)).rows:
        yield second.markdown() + "\n"
    if artifact.pairs:
        yield cell_table(scale, found, artifact.scores).markdown() + "\n"
        if made := comparisons(found, artifact.pairs):
            yield _compared(made).markdown() + "\n"


def _has_runs(artifact: Artifact, found: Sequence[Summary], scale: Scale, ledger: Ledger) -> bool:
    if artifact.max_seeds == 0:
        return any(finished_trials(scale, c.setup, c.method, ledger) for c in artifact.cells)
    # In a set-up with ablations, only their runs count: the others belong to other tables.
    ablated = {cell.setup for cell in artifact.cells if cell.changes}
    return any(
        line["label"] or one.cell.setup not in ablated
        for one in found
        for line in one.lines.values()
    )


def _compared(made: Sequence[Comparison]) -> Table:
    points = "points of test accuracy"
    columns = ("set-up", "difference", points, "seeds", "verdict", "in the paper")
    rows = [
        (
            *(one.first.cell.setup, one.title, one.difference.text(sign="+")),
            *(str(one.difference.num_seeds), one.verdict, one.in_paper or "-"),
        )
        for one in made
    ]
    return Table(columns, rows)
