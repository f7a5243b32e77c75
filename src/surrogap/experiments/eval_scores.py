"""The scores of a run on its test sets, their means over corruptions, and a table of them."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from surrogap.data import Splits
from surrogap.evaluation import evaluate
from surrogap.experiments.eval_sets import EvalSet, MakeBatches
from surrogap.experiments.text_table import Table
from surrogap.experiments.trained import TrainedRun

_NAMES = ("accuracy", "top5", "loss", "calibration_error")
_COLUMNS = ("test set", "images", "accuracy %", "top-5 %", "loss", "calibration error %")

Values = Mapping[str, Any]


def evaluate_run(
    run: TrainedRun,
    splits: Splits,
    sets: Sequence[EvalSet],
    make_batches: MakeBatches,
    device: torch.device,
    *,
    autocast: torch.dtype | None,
    progress: Callable[[int, int, str], object],
) -> dict[str, Any]:
    """Evaluate a run on test sets.

    `progress` is called with the number of finished test sets, the total, and the current name.

    Returns:
        The scores for JSON: `sets` by name, and `corruptions` by corruption and severity, with
        their means.

    Raises:
        ValueError: The run has no checkpoint, or a test set is incomplete.
    """
    model = run.model(splits, device)
    scores: dict[str, Values] = {}
    corrupted: dict[str, dict[int, Values]] = {}
    for index, one in enumerate(sets):
        progress(index, len(sets), one.name)
        found = asdict(
            evaluate(
                model,
                one.batches(make_batches),
                truth=one.truth,
                classes=one.classes,
                autocast=autocast,
                device=device,
                across_processes=False,
            )
        )
        if one.corruption is None:
            scores[one.name] = found
        else:
            name, severity = one.corruption
            corrupted.setdefault(name, {})[severity] = found
    if not corrupted:
        return {"sets": scores}
    return {
        "sets": scores,
        "corruptions": {
            "mean": mean_scores([s for values in corrupted.values() for s in values.values()]),
            "by_corruption": {
                name: mean_scores(list(values.values())) for name, values in corrupted.items()
            },
            "by_severity": corrupted,
        },
    }


def mean_scores(scores: Sequence[Values]) -> dict[str, float]:
    """Return the mean of each score over corrupted test sets."""
    return {name: statistics.fmean(values[name] for values in scores) for name in _NAMES}


def score_table(scores: Mapping[str, Any], title: str) -> Table:
    """Return the scores from `evaluate_run` as a table: a row per test set and per corruption."""
    rows = [(name, str(s["num_samples"]), *_cells(s)) for name, s in scores["sets"].items()]
    if "corruptions" in scores:
        by_corruption = scores["corruptions"]["by_corruption"]
        mean = f"mean of {len(by_corruption)} corruptions"
        rows.append((mean, "", *_cells(scores["corruptions"]["mean"])))
        rows += [(f"  {name}", "", *_cells(s)) for name, s in by_corruption.items()]
    return Table(_COLUMNS, rows, title)


def _cells(scores: Mapping[str, float]) -> tuple[str, ...]:
    accuracy, top5 = (f"{100 * scores[name]:.2f}" for name in ("accuracy", "top5"))
    return accuracy, top5, f"{scores['loss']:.4f}", f"{100 * scores['calibration_error']:.2f}"
