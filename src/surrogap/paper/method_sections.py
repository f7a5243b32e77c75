"""The sections of the results page on its methodology: how to read it, and the set-ups."""

import math
from collections.abc import Iterator, Sequence

from surrogap.experiments.text_table import Table
from surrogap.paper.ledger import Ledger
from surrogap.paper.plan import TIMED_SETUP
from surrogap.paper.study import Scale
from surrogap.paper.summaries import Comparison, tally
from surrogap.paper.tuning import chosen, finished_trials, trials, val_accuracy

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


def reading_section(
    page: str, scale: Scale, ledger: Ledger, made: Sequence[Comparison], text: str
) -> str:
    """The methodology of the study, its comparisons, and the terms used in `text`."""
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
    return _READING.format(
        ledger=ledger.path,
        page=page,
        scale=scale.name,
        trials=scale.num_trials,
        val_error=_val_error(scale, ledger),
        more=_more_trials(scale, ledger),
        own=_own_trials(scale),
        tally=tally(made),
        terms="\n".join(f"| {t.strip('| ')} | {terms[t].format(**numbers)} |" for t in terms),
    )


def _num_corruptions(scale: Scale, ledger: Ledger) -> int:
    """The number of corruptions that the images have: grayscale ones have one less."""
    lines = ledger.of_kind("run", scale=scale.name, purpose="final")
    scores = (line["scores"].get("corrupted", {}) for line in lines)
    return max(
        (one["num_sets"] for one in scores if "num_sets" in one), default=len(scale.corruptions)
    )


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
        and finished_trials(scale, letter, "vanilla", ledger)[num_first:]
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


def setups_section(scale: Scale, ledger: Ledger) -> Iterator[str]:
    """The set-ups, and the training that their methods share."""
    yield "## Set-ups\n"
    yield _setups(scale, ledger).markdown() + "\n"
    yield from _training(scale, ledger)


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
