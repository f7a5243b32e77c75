"""The declaration of the study: set-ups x methods x settings x seeds.

A `Setup` is a model, its images and the training that all methods share; `surrogap.paper.methods`
declares the methods. Every method of a set-up is tuned first (`surrogap.paper.tuning`), with one
seed for each trial, scored on validation images. The settings with the best validation accuracy
after the last epoch are then trained with the study's seeds and scored on the test images.
`surrogap.paper.scales` declares the set-ups, and `surrogap.paper.plan` derives the runs and their
order from a `Scale` and the ledger.

This module does not import torch.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, final

from surrogap.experiments.columns import with_lr_of_gradient
from surrogap.paper.methods import METHODS, Changes
from surrogap.training.config import FREE, Config

Purpose = Literal["tuning", "final"]


@final
@dataclass(frozen=True)
class Setup:
    """A model, its images and the training that all methods share.

    Attributes:
        title: Its name in tables.
        changes: Values of the configuration, by the names of its flags.
        seconds: A guess of the seconds for one pass over the training images, for the first plan.
        methods: The methods that the study compares on it.
        source: For transfer, the set-up that the weights are trained in, with the settings chosen
            there. The method is that of the source; fine-tuning is plain.
        remark: A note for readers of its numbers.
        trials: The settings that plain training is tuned over: learning rate and weight decay.
        more_trials: Further trials of plain training, beyond the best one.
        own: Settings that every method but plain training is tuned over together with its own,
            instead of sharing those that plain training was tuned to.
        shared: For a set-up with `own`, the one with the same images whose methods share settings.
        repeats: The number of best trials to repeat before one is chosen, and of further seeds.
    """

    title: str
    changes: Changes
    seconds: float
    methods: Sequence[str]
    source: str | None = None
    remark: str = ""
    trials: Sequence[Changes] = ()
    more_trials: Sequence[Changes] = ()
    own: Sequence[Changes] = ()
    shared: str = ""
    repeats: tuple[int, int] = (0, 0)

    def num_trials(self, shared: int) -> int:
        """The number of trials of a method, `shared` if it has the settings of plain training."""
        return len(self.trials) if self.own else shared


TUNING_SEED = 1000  # not among the seeds that are scored on test images


@final
@dataclass(frozen=True)
class Scale:
    """The size of a study: hours on a laptop's CPU, or on a GPU.

    Attributes:
        name: Its name on the command line.
        page: The title of the page about its results, and a paragraph below it.
        setups: The set-ups, by letter.
        num_seeds: The number of seeds of a method, by set-up.
        more_seeds: The number of seeds in set-up A of the methods that have more.
        num_ablation_seeds: The number of seeds of a setting that is not a method's own.
        num_trials: The number of trials that a method is tuned with, before one more beyond the
            edge; see `surrogap.paper.tuning.trials`.
        num_evaluations: The number of evaluations of a run, of which the best gives the best epoch.
        corruptions: The corruptions of test images.
        severities: Their severities.
        sharpness_images: The number of training images for eigenvalue and gap.
        timing: The number of rounds in which steps are timed, and of steps in each.
        find_rho: The number of training steps before radii are measured, and of batches for that.
        ledger: The default path of the ledger.
        left_out: The tables and figures that `reproduce all` leaves out: those with many runs.
    """

    name: str
    page: tuple[str, str]
    setups: Mapping[str, Setup]
    num_seeds: Mapping[str, int]
    more_seeds: Mapping[str, int]
    num_ablation_seeds: int
    num_trials: int
    num_evaluations: int
    corruptions: Sequence[str]
    severities: Sequence[int]
    sharpness_images: int
    timing: tuple[int, int]
    find_rho: tuple[int, int]
    ledger: str
    left_out: Sequence[str] = ()

    def has(self, cell: "Cell") -> bool:
        """Whether it has the set-up of a cell, and compares its method there."""
        return cell.setup in self.setups and cell.method in self.setups[cell.setup].methods


@final
@dataclass(frozen=True)
class Cell:
    """One entry of a table or figure: a method in a set-up.

    Attributes:
        setup: The set-up's letter.
        method: The method's name.
        changes: For ablations, values beside the method's settings. `lr_factor` multiplies the
            learning rate that the set-up is tuned to.
        label: Its name in a table; by default the method's title.

    >>> Cell("A", "sam").title
    'SAM'
    """

    setup: str
    method: str
    changes: Changes = field(default_factory=dict, hash=False)
    label: str = ""

    @property
    def title(self) -> str:
        """Its name in tables."""
        return self.label or METHODS[self.method].title


@final
@dataclass(frozen=True)
class StudyRun:
    """One run of the study.

    Attributes:
        setup: The set-up's letter.
        method: The method's name.
        settings: The chosen settings, or those of a trial.
        seed: The seed.
        purpose: "tuning" runs are scored on validation images only, "final" runs on all.
        changes: All values of its configuration that the study sets.
        label: For ablations, the cell's name in a table; empty for the method's own runs.
        source: For transfer, the run whose weights it starts from.
    """

    setup: str
    method: str
    settings: Changes
    seed: int
    purpose: Purpose
    changes: Changes
    label: str = ""
    source: "StudyRun | None" = None

    @cached_property
    def key(self) -> str:
        """A hash of the purpose and of all values that change the result.

        >>> from surrogap.paper.scales import GPU
        >>> run = study_run(GPU, Cell("A", "sam"), {"rho": 0.1}, seed=0, purpose="final")
        >>> other = study_run(GPU, Cell("A", "sam"), {"rho": 0.2}, seed=0, purpose="final")
        >>> run.key == other.key
        False
        """
        values = {name: value for name, value in self.changes.items() if name not in FREE}
        source = [] if self.source is None else [self.source.key]
        text = json.dumps([self.purpose, values, *source], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def keys(self) -> set[str]:
        """Its key and that of its source: runs with a common key must not be trained at once."""
        return {self.key} | (set() if self.source is None else self.source.keys)

    @property
    def name(self) -> str:
        """Set-up and method, in a line."""
        return f"{self.setup} {self.method}"

    @property
    def title(self) -> str:
        """Set-up, method, settings and seed, in a line."""
        return f"{self.name}, {settings_text(self.settings)}, seed {self.seed}"

    def config(self, **more: Any) -> Config:
        """The configuration to train. The study's learning rates are meant for a gradient.

        Raises:
            ValueError: A value is not valid.
        """
        return with_lr_of_gradient(Config().override(**{**self.changes, **more}))


def settings_text(settings: Changes) -> str:
    """Settings in a line."""
    values = {k: f"{v:g}" if isinstance(v, float) else v for k, v in settings.items()}
    return ", ".join(f"{name} {value}" for name, value in values.items())


def study_run(
    scale: Scale,
    cell: Cell,
    settings: Changes,
    shared: Changes | None = None,
    *,
    seed: int,
    purpose: Purpose,
) -> StudyRun:
    """Return the run of a cell with some settings of its method.

    `shared` are the settings of the set-up that plain training was tuned to.
    """
    setup, method = scale.setups[cell.setup], METHODS[cell.method]
    own = dict(cell.changes)
    factor = own.pop("lr_factor", 1.0)
    shown, source = {**settings, **own}, None
    changes = {**setup.changes, **own, "seed": seed, "eval_on": "test"}
    if setup.source is not None:
        before = Cell(setup.source, cell.method)
        source = study_run(scale, before, settings, shared, seed=seed, purpose=purpose)
    else:
        epochs = max(round(setup.changes["epochs"] * method.epochs), 1)
        changes |= {**(shared or {}), **method.changes, "epochs": epochs, **shown}
        if factor != 1.0:
            shown["lr"] = changes["lr"] = factor * changes["lr"]
        changes["eval_on"] = "val" if purpose == "tuning" else "both"
        if method.start:
            changes["start_epoch"] = round(method.start * changes["epochs"])
    return StudyRun(cell.setup, cell.method, shown, seed, purpose, changes, cell.label, source)
