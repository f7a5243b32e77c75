"""Synthetic ledgers, for tests of the tables and figures that are drawn from them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from surrogap.paper.artifacts import stages
from surrogap.paper.ledger import Ledger, LedgerLine
from surrogap.paper.methods import METHODS
from surrogap.paper.plan import todo
from surrogap.paper.scales import LAPTOP
from surrogap.paper.study import Scale, StudyRun
from surrogap.paper.tuning import trials
from tests.training import small_runs

# Points of test accuracy above vanilla.
GAINS = {name: 0.2 * number for number, name in enumerate(METHODS)}


def line(run: StudyRun, scale: Scale, **changes: Any) -> LedgerLine:
    """A finished run: accuracy by method, plus a term by seed that all methods share."""
    shared = 0.5 * math.sin(7.0 * run.seed)  # so that pairing by seed matters
    own = 0.05 * math.cos(13.0 * run.seed + len(run.method))
    accuracy = (88.0 + GAINS[run.method] + shared + own) / 100
    # The second trial is the best, and of equal ones the first.
    best = [one.settings for one in trials(scale, run.setup, run.method)[1:2]]
    num_steps, num_epochs = 100, run.changes["epochs"]
    steps = list(range(1, num_steps + 1))
    alpha = float(run.settings.get("alpha", 0.0))
    found: LedgerLine = {
        "kind": "run",
        "key": run.key,
        "title": run.title,
        "purpose": run.purpose,
        "setup": run.setup,
        "method": run.method,
        "label": run.label,
        "settings": dict(run.settings),
        "config": {"optimizer": {name: run.changes[name] for name in ("lr", "weight_decay")}},
        "seed": run.seed,
        "num_epochs": num_epochs,
        "num_steps": num_steps,
        "scale": scale.name,
        "jobs": 1,
        "seconds": 10.0 * METHODS[run.method].passes,
        "train": {"accuracy": 0.9995, "loss": 0.01, "num_samples": 10000},
        "val": {"accuracy": accuracy - 0.01 + 0.01 * (run.settings in best), "loss": 0.5},
        "best": {"epoch": 3, "val_accuracy": accuracy, "test_accuracy": accuracy + 0.001},
        "curves": {
            "step": steps,
            "cosine": [1.0 - 0.1 * step / num_steps for step in steps],
            "gap": [0.1 + 0.1 * step / num_steps - 0.05 * alpha for step in steps],
        },
    }
    if run.purpose == "final":
        found["scores"] = {
            "test": {"accuracy": accuracy, "calibration_error": 0.03, "num_samples": 10000},
            "corrupted": {"accuracy": accuracy - 0.2, "loss": 1.0, "calibration_error": 0.1},
            "votes": {"accuracy": accuracy - 0.005, "loss": 0.5, "calibration_error": 0.03},
        }
        found["sharpness"] = {"eigenvalue": 30.0 - GAINS[run.method] + own}
    return found | changes


def timing(scale: Scale, setup: str = "A") -> LedgerLine:
    """A timing in which a step costs as much as its passes."""
    return {
        "kind": "timing",
        "key": "timing",
        "scale": scale.name,
        "setup": setup,
        "date": "2026-01-01",
        "compile": False,
        "seconds_per_step": {
            method.step: 1e-3 * METHODS[method.step].passes for method in METHODS.values()
        },
    }


def ledger(path: Path, scale: Scale, name: str = "all") -> Ledger:
    """All runs of an artifact, as if they were trained."""
    found = Ledger(path)
    while left := [item for item in todo(scale, stages(name), found) if item.is_ready]:
        for item in left:
            found.append(line(item.run, scale))
    found.append(timing(scale))
    return found


def tiny(folder: Path, **changes: Any) -> Scale:
    """A study on grey noise that takes a second for each run."""
    small_runs.archive(folder / "images.npz", num_images=48)
    with np.load(folder / "images.npz") as archive:
        arrays = dict(archive)
    arrays["train_noisy_labels"] = (arrays["train_labels"] + 1) % 4
    arrays["test_human_counts"] = np.eye(4, dtype=np.int64)[arrays["test_labels"]]
    np.savez(folder / "images.npz", **arrays)
    small = {
        "model": "small_mlp",
        "image_size": None,
        "data": str(folder / "images.npz"),
        "train_per_class": 8,
        "val_per_class": 4,
        "augmentation": "none",
        "batch_size": 8,
        "epochs": 2,
    }
    chosen = {"A": LAPTOP.setups["A"], "G": LAPTOP.setups["G"]}
    setups = {
        letter: replace(setup, changes={**setup.changes, **small, **changes}, more_trials=())
        for letter, setup in chosen.items()
    }
    return replace(
        LAPTOP,
        setups=setups,
        num_seeds={"A": 2, "G": 1},
        num_ablation_seeds=2,
        num_trials=2,
        num_evaluations=30,
        corruptions=("contrast",),
        sharpness_images=8,
        timing=(2, 5),
        find_rho=(6, 1),
        ledger=str(folder / "study.jsonl"),
    )
