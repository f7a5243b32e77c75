"""The page about the study's results, written from its ledger."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from surrogap.errors import InvalidValueError
from surrogap.experiments.text_table import Table
from surrogap.paper.artifacts import ARTIFACTS, Artifact, drawn
from surrogap.paper.ledger import Ledger, LedgerLine
from surrogap.paper.plan import chosen, radius_suggestions, trials, val_accuracy
from surrogap.paper.study import METHODS, Scale
from surrogap.paper.summaries import Comparison, comparisons, summaries

_HEAD = """# Results

All tables and figures on this page come from one log, `{ledger}`. It has a line for each finished
run: configuration, seed, scores, curves, time, hardware and commit. This page is the output of
`surrogap reproduce all --scale {scale} --no-train --page docs/results.md`.

**How settings are chosen.** Each method has the same number of trials in each set-up ({trials}),
with one seed each, scored on validation images that no run trains on. Methods with a second
setting, such as GSAM's alpha, try two values of it at the two radii that were best without it. The
settings with the best validation accuracy after the last epoch, the first of equal ones, are
trained with the study's seeds and scored on the test images. No other settings are scored on test
images, except those that a table or figure varies on purpose. [Trials](#trials) lists all trials.

**How to read the numbers.** `±` is half the width of the 95 % confidence interval of the mean over
seeds (Student's t). It is left out for fewer than three seeds. Differences are paired by seed. A
method is called better or worse only if the interval of the paired difference excludes zero. Below
each table is the number of comparisons. The columns:

| column | meaning |
| --- | --- |
| cost | time of the training steps relative to vanilla training |
| test % | test accuracy after the last epoch |
| test %, best epoch | test accuracy after the epoch with the best validation accuracy |
| corrupted % | mean accuracy over {num_corruptions} corruptions of the test images, such as blur |
| human labels % | test accuracy relative to the labels that most people chose (CIFAR-10H) |
| calibration error % | mean difference between confidence and accuracy, in 15 bins |
| training % | accuracy on the training images, without augmentation |
| top eigenvalue | largest eigenvalue of the Hessian of the training loss |
"""

_RADII = """## Radii: find-rho against the study

`surrogap reproduce find-rho --scale {scale}`

`surrogap find-rho` suggests a range of radii to search, here after {train_steps} steps of plain
training. The radii tried are those of the study's trials, with validation accuracy in percent.

{table}

Each radius was tried with one seed, so the radii beside the best one may be as good within noise:
the table shows whether the range has the right order of magnitude, and no more.
"""


def write_page(path: Path, scale: Scale, ledger: Ledger) -> None:
    """Write the page, and its figures to a folder beside it.

    Args:
        path: The page; the folder of its figures has its name without the suffix.
        scale: The study.
        ledger: The finished runs.

    Raises:
        ValueError: The page or its folder cannot be written.
    """
    folder = path.with_suffix("")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(_page(folder, scale, ledger)))
    except OSError as error:
        raise InvalidValueError(
            f"page must be a file that can be written, got {path} ({error.strerror}). "
            "Pass another path."
        ) from error


def _page(folder: Path, scale: Scale, ledger: Ledger) -> Iterator[str]:
    yield _HEAD.format(
        ledger=ledger.path,
        scale=scale.name,
        trials=scale.num_trials,
        num_corruptions=len(scale.corruptions),
    )
    yield "## Set-ups\n"
    yield _setups(scale, ledger).markdown() + "\n"
    waiting = []
    for name, artifact in ARTIFACTS.items():
        if _has_runs(artifact, scale, ledger):
            yield from _section(name, artifact, folder, scale, ledger)
        else:
            waiting.append(f"* `{name}`: {artifact.title}")
    if waiting:
        yield "## Not trained yet\n"
        yield "\n".join(waiting) + "\n"
    yield "## Trials\n"
    yield "Validation accuracy in percent after the last epoch; the chosen setting is bold.\n"
    yield _trials(scale, ledger).markdown() + "\n"
    radii = _radii(scale, ledger)
    if radii.rows:
        yield _RADII.format(scale=scale.name, train_steps=scale.find_rho[0], table=radii.markdown())


def _setups(scale: Scale, ledger: Ledger) -> Table:
    rows = []
    for letter, setup in scale.setups.items():
        lines = [line for line in ledger.of_kind("run") if line["setup"] == letter]
        hardware = ", ".join(sorted({line["hardware"] for line in lines if "hardware" in line}))
        minutes = sum(line["seconds"] for line in lines) / 60
        words = (letter, setup.title, str(len(lines)), f"{minutes:.0f}", hardware or "-")
        rows.append((*words, setup.remark))
    columns = ("set-up", "model and images", "runs", "total minutes", "hardware", "remarks")
    return Table(columns, rows)


def _section(
    name: str, artifact: Artifact, folder: Path, scale: Scale, ledger: Ledger
) -> Iterator[str]:
    yield f"## {artifact.title.removesuffix('.')}\n"
    yield f"`surrogap reproduce {name} --scale {scale.name}`\n"
    found = drawn(name, scale, ledger)
    for file, write in found.writers.items():
        write(folder / file)
        yield f"![{artifact.title}]({folder.name}/{file})\n"
    if artifact.max_seeds != 0:
        yield found.table.markdown() + "\n"
    made = comparisons(summaries(scale, artifact.cells, ledger), artifact.pairs)
    if made:
        yield _compared(made).markdown() + "\n"
    yield " ".join(found.words[len(made) :]) + "\n"


def _has_runs(artifact: Artifact, scale: Scale, ledger: Ledger) -> bool:
    if artifact.max_seeds == 0:
        tried = (trials(scale, cell.setup, cell.method, ledger) for cell in artifact.cells)
        return any(run.key in ledger for runs in tried for run in runs)
    found = summaries(scale, artifact.cells, ledger)
    # For an ablation, only the rows that it varies: the others belong to other tables.
    varied = [one for one in found if one.cell.changes]
    return any(one.lines for one in varied or found)


def _compared(made: Sequence[Comparison]) -> Table:
    columns = ("set-up", "difference", "points of test accuracy", "seeds", "here", "in the paper")
    rows = [
        (
            *(one.first.cell.setup, one.title, one.difference.text(sign="+")),
            *(str(one.difference.num_seeds), one.verdict, one.in_paper or "-"),
        )
        for one in made
    ]
    return Table(columns, rows)


def _trials(scale: Scale, ledger: Ledger) -> Table:
    rows = []
    for letter, setup in scale.setups.items():
        for method in setup.methods if setup.source is None else ():
            cells = _tried(scale, letter, method, ledger)
            if cells:
                rows.append((letter, METHODS[method].title, cells))
    return Table(("set-up", "method", "trials"), rows)


def _tried(scale: Scale, setup: str, method: str, ledger: Ledger) -> str:
    best = chosen(scale, setup, method, ledger)
    cells = []
    for run in trials(scale, setup, method, ledger):
        if run.key in ledger:
            settings = ", ".join(f"{name} {v:g}" for name, v in run.settings.items())
            accuracy = val_accuracy(ledger[run.key])
            text = "failed" if accuracy is None else f"{100 * accuracy:.2f}"
            text = f"{settings}: {text}"
            cells.append(f"**{text}**" if run.settings == best else text)
    return "; ".join(cells)


def _radii(scale: Scale, ledger: Ledger) -> Table:
    """The methods whose tuning is finished, in the set-ups that find-rho was run in."""
    rows = []
    for one in radius_suggestions(scale, ledger):
        for method in one.methods if one.key in ledger else ():
            best = chosen(scale, one.setup, method, ledger)
            if best is not None:
                tried = _tried(scale, one.setup, method, ledger)
                judged = _judged(ledger[one.key]["suggestions"][method], best["rho"])
                words = (one.setup, METHODS[method].title, tried, f"{best['rho']:g}")
                rows.append((*words, *judged))
    columns = ("set-up", "method", "radii tried", "best", "find-rho suggests", "best within range")
    return Table(columns, rows)


def _judged(suggestion: LedgerLine, rho: float) -> tuple[str, str]:
    """The suggested range, and whether it contains a radius."""
    low, high = suggestion["low"], suggestion["high"]
    if low is None:  # all radii of the sweep are too small
        low = suggestion["radii"][-1]["rho"]
    shown = f"from {low:.2g}" if high is None else f"{low:.2g} to {high:.2g}"
    if rho < low:
        return shown, "no, smaller"
    return shown, "yes" if high is None or rho <= high else "no, larger"
