"""The page about the study's results, written from its ledger."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from surrogap.errors import InvalidValueError
from surrogap.experiments.text_table import Table
from surrogap.paper.artifacts import ARTIFACTS, Artifact
from surrogap.paper.intervals import paired_difference
from surrogap.paper.ledger import Ledger
from surrogap.paper.methods import MAIN, METHODS
from surrogap.paper.plan import TIMED_SETUP
from surrogap.paper.study import Cell, Scale
from surrogap.paper.summaries import (
    Comparison,
    comparisons,
    summaries,
    table,
    tally,
)
from surrogap.paper.tuning import chosen, trials, val_accuracy
from surrogap.paper.tuning_sections import radii_section, trials_section

_READING = """## How to read this page

All tables and figures come from the ledger, `{ledger}`: one line for each finished run. This page
is the output of `surrogap reproduce all --scale {scale} --no-train --page docs/{page}`;
[how to reproduce it](how-to/reproduce.md).

**Settings.** In each set-up, a method gets {trials} [trials](#trials) with one seed each, scored on
validation images that no run trains on{val_error}.
If the best radius is the largest or smallest tried, one trial beyond it is added.{more}
The settings with the best validation accuracy after the last epoch (the first, if tied) are
trained with the study's seeds and scored on the test images. Only ablations score other settings on
the test images. The trials build on each other: SAM and the other objectives use the learning
rate and weight decay that are best for vanilla, and GSAM is tried at the best radii of
SAM. So SAM benefits from more trials than vanilla, and GSAM from more than SAM.{own}

**Intervals.** `±` is half the width of the 95 % confidence interval of the mean over seeds
(Student's t), for three seeds or more. A seed changes initialisation and data order, so the
intervals do not cover the choice of training and test images. With three seeds, an interval can be
too narrow by chance. Differences are of test accuracy after the last epoch, paired by seed. The
verdict is "better" or "worse" only if the interval of the difference excludes zero.

**Comparisons.** {tally}
Many comparisons share the same runs of vanilla, so false verdicts come in groups. Differences at
the best epoch, at other learning rates, on validation images and of other scores are not counted.

| term | meaning |
| --- | --- |
{terms}
"""

# Terms and their meanings, each shown if the page uses it.
_TERMS = {
    "vanilla": "plain training, the baseline",
    "norm layers": "only the scale and bias of normalisation layers are perturbed; all weights are "
    "trained",
    "climb on 1/4 batch": "the perturbation is computed on a quarter of the batch",
    "every 5th step": "the objective is used at every fifth step; the other steps are plain",
    "last third": "plain training for the first two thirds of the epochs, then the objective",
    "Entropy-SGD": "five passes per step, so it is trained for two fifths of the epochs",
    "f_p": "the loss at the perturbed weights; `f` is the loss at the weights, and `h = f_p - f` "
    "the surrogate gap",
    "min(f, h)": '`GSAM(minimize="plain")`, which minimises `f` and `h`; GSAM minimises `f_p` and '
    "`h`",
    "f_p + lambda h": "`GapPenalty`, which minimises this sum",
    "+ ascent": "also reduces the surrogate gap, by GSAM's ascent along `g_perp`",
    "light augmentation": "random crops and horizontal flips",
    "| cost |": "time of a training step relative to vanilla, times the number of steps, so that "
    "2x epochs costs 2.00 by definition. Measured in set-up A only. Steps are {timed}, the best of "
    "{num_rounds} rounds",
    "test %": "test accuracy after the last epoch",
    "test %, best epoch": "test accuracy after the epoch with the best validation accuracy",
    "corrupted %": "mean accuracy over {num_corruptions} corruptions of the test images, such as "
    "blur, of severity {severities} (1 is weakest, 5 strongest)",
    "human labels %": "test accuracy with the majority labels of human annotators (CIFAR-10H)",
    "calibration error %": "expected calibration error (ECE) on the test images, with 15 bins",
    "training %": "accuracy on the training images, without augmentation",
    "top eigenvalue": "eigenvalue of the Hessian with the largest magnitude, of the loss on "
    "{sharpness_images} training images, in evaluation mode: median (lowest to highest seed). "
    "Where these ranges overlap, we conclude nothing",
}

_BASELINES = ("vanilla", "vanilla-2x", "vanilla-short")


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
    results = "\n".join(_results(folder, scale, ledger))
    details = "\n".join(_details(scale, ledger))
    title, about = scale.page
    yield f"# {title}\n"
    yield f"{about}\n"
    yield from _in_short(scale, ledger)
    yield results
    yield _reading(f"{folder.name}.md", scale, ledger, results + details)
    yield details


def _results(folder: Path, scale: Scale, ledger: Ledger) -> Iterator[str]:
    """The tables and figures that have runs, and a list of what is missing."""
    waiting = []
    for name, artifact in ARTIFACTS.items():
        if _has_runs(artifact, scale, ledger):
            yield from _section(name, folder, scale, ledger)
        elif name not in scale.left_out:
            waiting.append(f"* `{name}`: {artifact.title}")
    planned = (one for name, one in ARTIFACTS.items() if name not in scale.left_out)
    cells = dict.fromkeys(cell for artifact in planned for cell in artifact.cells)
    rows = summaries(scale, list(cells), ledger)
    if num_missing := sum(not row.lines for row in rows):
        yield "## Not trained yet\n"
        yield "\n".join([*waiting, ""])
        yield (
            f"{num_missing} of {len(rows)} planned rows are missing, because their runs have not "
            f"finished. `surrogap reproduce all --scale {scale.name} --dry-run` lists the runs.\n"
        )


def _reading(page: str, scale: Scale, ledger: Ledger, text: str) -> str:
    """The methodology of the study, and the terms used in `text`."""
    is_captured = scale.setups[TIMED_SETUP].changes["capture"]
    numbers = {
        "timed": "captured (one CUDA graph each) and timed on one GPU"
        if is_captured
        else "timed on a CPU",
        "num_rounds": scale.timing[0],
        "num_corruptions": _num_corruptions(scale, ledger),
        "severities": ", ".join(map(str, scale.severities)),
        "sharpness_images": scale.sharpness_images,
    }
    terms = {term: meaning for term, meaning in _TERMS.items() if term in text}
    made = {
        (one.first.cell.setup, one.title): one
        for artifact in ARTIFACTS.values()
        for one in comparisons(summaries(scale, artifact.cells, ledger), artifact.pairs)
    }
    return _READING.format(
        ledger=ledger.path,
        page=page,
        scale=scale.name,
        trials=scale.num_trials,
        val_error=_val_error(scale, ledger),
        more=_more_trials(scale, ledger),
        own=_own_trials(scale),
        tally=tally(list(made.values())),
        terms="\n".join(f"| {t.strip('| ')} | {terms[t].format(**numbers)} |" for t in terms),
    )


def _num_corruptions(scale: Scale, ledger: Ledger) -> int:
    """The number of corruptions that the images have: grayscale ones have one less."""
    lines = ledger.of_kind("run", scale=scale.name, purpose="final")
    scores = (line["scores"].get("corrupted", {}) for line in lines)
    return max(
        (one["num_sets"] for one in scores if "num_sets" in one), default=len(scale.corruptions)
    )


def _details(scale: Scale, ledger: Ledger) -> Iterator[str]:
    yield "## Set-ups\n"
    yield _setups(scale, ledger).markdown() + "\n"
    yield from _training(scale, ledger)
    yield from trials_section(scale, ledger)
    yield from radii_section(scale, ledger)


def _in_short(scale: Scale, ledger: Ledger) -> Iterator[str]:
    """The gains of the main methods in each set-up, and the set-ups that have no final runs."""
    yield "## In short\n"
    tuned = {letter: setup for letter, setup in scale.setups.items() if setup.source is None}
    wider = {
        letter: setup.shared
        for letter, setup in tuned.items()
        if setup.shared and chosen(scale, letter, "vanilla", ledger)
    }
    rows = [row for letter in tuned for row in _gains(scale, letter, letter, ledger)]
    trained = {row[0] for row in rows}
    for letter, shared in wider.items():
        if letter not in trained:  # its plain training is the first to have runs
            rows += _gains(scale, shared, letter, ledger)
    if rows:
        yield (
            'Points of test accuracy gained over plain training ("vanilla"), with 95 % intervals. '
            '"Norm layers" means that only normalisation layers are perturbed.\n'
        )
        setups = {letter: tuned[letter] for letter in tuned if letter in {*trained, *wider}}
        for name, one in setups.items():
            state = "" if name in trained else " So far, only plain training has finished."
            yield f"* {name}: {one.title}. {one.remark}".strip() + state
        yield ""
        titles = (f"over {METHODS[method].title}" for method in _BASELINES)
        columns = ("set-up", "method", *titles, "over vanilla, best epoch", "seeds")
        yield Table(columns, rows).markdown() + "\n"
        preliminary = any(row[-1] == "3" for row in rows)
        yield (
            'For "best epoch", both methods are scored at their epoch with the best validation '
            "accuracy. "
            + "Results with three seeds are preliminary: more may change them. "
            * preliminary
            + "[How to read this page](#how-to-read-this-page) explains intervals and terms, and "
            "[Choose an objective](how-to/choose.md) draws conclusions.\n"
        )
        widest = [name for name in setups if name not in wider.values()]
        if edges := _rates_at_edge(scale, widest, ledger):
            yield f"The chosen learning rate of vanilla is {edges}; a better one may lie beyond.\n"
        for letter, shared in wider.items():
            yield from _wider_tuning(scale, letter, shared, ledger)
    final = {line["setup"] for line in ledger.of_kind("run", purpose="final")}
    if waiting := [f"{s.title} ({name})" for name, s in scale.setups.items() if name not in final]:
        yield f"Not trained yet: {'; '.join(waiting)}.\n"


def _gains(scale: Scale, letter: str, plain: str, ledger: Ledger) -> list[tuple[str, ...]]:
    """Rows of the gains of a set-up's main methods over plain training in the set-up `plain`."""
    cells = [Cell(plain, m) for m in _BASELINES if m in scale.setups[plain].methods]
    trained = {one.cell.method: one for one in summaries(scale, cells, ledger)}
    baselines = [trained.get(method) for method in _BASELINES]
    methods = [m for m in MAIN if m in scale.setups[letter].methods and m not in _BASELINES]
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
    """What plain training gains in a set-up where it is tuned more widely than in `shared`."""
    gains, better = [], []
    for method in _BASELINES:
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
            runs = trials(scale, setup, "vanilla", ledger)
            rates = [run.settings["lr"] for run in runs if run.key in ledger]
            if best and best["lr"] == extreme(rates):
                found.append(setup)
        if found:
            words.append(f"the {edge} tried in {' and '.join(found)}")
    return ", and ".join(words)


def _setups(scale: Scale, ledger: Ledger) -> Table:
    rows = []
    for letter, setup in scale.setups.items():
        lines = ledger.of_kind("run", scale=scale.name, setup=letter)
        hardware = ", ".join(sorted({line["hardware"] for line in lines if "hardware" in line}))
        minutes = sum(line["seconds"] / line["jobs"] for line in lines) / 60
        words = (letter, setup.title, str(len(lines)), f"{minutes:.0f}", hardware or "-")
        rows.append((*words, setup.remark))
    columns = ("set-up", "model and images", "runs", "minutes", "hardware", "remarks")
    return Table(columns, rows)


def _num_images(scale: Scale, setup: str, ledger: Ledger) -> dict[str, int]:
    """The number of images of each split, from the ledger."""
    found, changes = dict[str, int](), scale.setups[setup].changes
    for line in ledger.of_kind("run", scale=scale.name, setup=setup):
        found["training"] = num = line["train"]["num_samples"]
        if "val_per_class" in changes:
            found["validation"] = round(num * changes["val_per_class"] / changes["train_per_class"])
        if "scores" in line:
            found["test"] = line["scores"]["test"]["num_samples"]
    return found


def _training(scale: Scale, ledger: Ledger) -> Iterator[str]:
    """The training that all methods of a set-up share, for each set-up with runs."""
    first, letter_of_first = list[str](), ""
    for letter, setup in scale.setups.items():
        images = _num_images(scale, letter, ledger)
        if not images:
            continue
        tuned = chosen(scale, letter, "vanilla", ledger) if setup.source is None else None
        own = {**setup.changes, **(tuned or {})}
        nesterov = "Nesterov " if own.get("nesterov") else ""
        words = [
            f"{own['epochs']} epochs",
            f"batch size {own['batch_size']}",
            f"SGD with {nesterov}momentum {own['momentum']}"
            if own["optimizer"] == "sgd"
            else "AdamW",
            f"{own['decay']} decay of each method's own learning rate, and its own weight decay"
            if setup.own
            else f"learning rate {own['lr']:g} with {own['decay']} decay",
            f"{own['warmup_epochs']:g} epochs of warm-up" if "warmup_epochs" in own else "",
            f"{own['warmup_steps']} steps of warm-up" if "warmup_steps" in own else "",
            "" if setup.own else f"weight decay {own['weight_decay']:g}",
            f"gradients clipped to norm {own['clip_norm']:g}" if "clip_norm" in own else "",
            f"{own['augmentation']} augmentation".replace("none", "no"),
            own["precision"],
            *(f"{number:,} {split} images" for split, number in images.items()),
        ]
        new = [word for word in words if word and word not in first]
        same = [f"{'otherwise ' if new else ''}as {letter_of_first}"] if first else []
        yield f"Set-up {letter}: {', '.join(new + same)}.\n"
        first, letter_of_first = first or words, letter_of_first or letter


def _val_error(scale: Scale, ledger: Ledger) -> str:
    """The standard error of the validation accuracy of vanilla training in set-up A."""
    runs = [run for run in trials(scale, "A", "vanilla") if run.key in ledger]
    best = max((val_accuracy(ledger[run.key]) or 0.0 for run in runs), default=0.0)
    number = _num_images(scale, "A", ledger).get("validation")
    if not best or not number:
        return ""
    error = 100 * math.sqrt(best * (1 - best) / number)
    return f" ({number:,} in A, for a standard error of about {error:.1f} points)"


def _more_trials(scale: Scale, ledger: Ledger) -> str:
    """A sentence about the further trials of plain training, if there are some."""
    num_first = scale.num_trials
    numbers = {
        letter: len(setup.more_trials)
        for letter, setup in scale.setups.items()
        if setup.source is None  # fine-tuning is not tuned
        and setup.more_trials
        and any(run.key in ledger for run in trials(scale, letter, "vanilla", ledger)[num_first:])
    }
    if not numbers:
        return ""
    *others, last = numbers
    setups = f"set-ups {', '.join(others)} and {last}" if others else f"set-up {last}"
    return (
        f" In {setups},\nplain training of each length gets up to {max(numbers.values())} more, "
        "with learning rates or weight decays beyond this grid."
    )


def _own_trials(scale: Scale) -> str:
    """Sentences about the set-ups where each method has its own learning rate."""
    return "".join(
        f"\nIn {letter}, each method instead has {setup.num_trials(scale.num_trials)} trials, "
        "which also vary its learning rate and weight decay.\nNone is added beyond the grid. GSAM "
        "is tried with the better half of SAM's settings." + _repeated(*setup.repeats)
        for letter, setup in scale.setups.items()
        if setup.own
    )


def _repeated(num_best: int, num_seeds: int) -> str:
    return (
        f" The best {num_best} trials of a method\nare repeated with {num_seeds} further seeds, "
        f"and the settings with the best mean over all {1 + num_seeds} are chosen."
        if num_best
        else ""
    )


def _section(name: str, folder: Path, scale: Scale, ledger: Ledger) -> Iterator[str]:
    """A figure, its notes, and the tables of the methods that it compares."""
    artifact = ARTIFACTS[name]
    yield f"## {artifact.title.removesuffix('.')}\n"
    yield f"`surrogap reproduce {name} --scale {scale.name}`\n"
    found = summaries(scale, artifact.cells, ledger)
    if artifact.draw is not None:
        file = f"{folder.name}/{name}.png"
        artifact.draw(scale, found, ledger).savefig(folder.parent / file)
        yield f"![{artifact.title}]({file})\n"
    yield artifact.notes + "\n"
    if artifact.second_table is not None and (second := artifact.second_table(found)).rows:
        yield second.markdown() + "\n"
    if artifact.pairs:
        yield table(scale, found, artifact.scores).markdown() + "\n"
        if made := comparisons(found, artifact.pairs):
            yield _compared(made).markdown() + "\n"


def _has_runs(artifact: Artifact, scale: Scale, ledger: Ledger) -> bool:
    if artifact.max_seeds == 0:
        tried = (trials(scale, cell.setup, cell.method, ledger) for cell in artifact.cells)
        return any(run.key in ledger for runs in tried for run in runs)
    # In a set-up with ablations, only their runs count: the others belong to other tables.
    ablated = {cell.setup for cell in artifact.cells if cell.changes}
    return any(
        line["label"] or one.cell.setup not in ablated
        for one in summaries(scale, artifact.cells, ledger)
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
