"""The declaration of the study: set-ups x methods x settings x seeds.

A `Setup` is a model, its images and the training that all methods share; `surrogap.paper.methods`
declares the methods. Every method of a set-up is tuned first (`surrogap.paper.tuning`), with one
seed for each trial, scored on validation images. The settings with the best validation accuracy
after the last epoch are then trained with the study's seeds and scored on the test images.
`surrogap.paper.plan` derives the runs and their order from a `Scale` and the ledger.

This module does not import torch.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

from surrogap.experiments.columns import with_lr_of_gradient
from surrogap.paper.methods import MAIN, METHODS, NOISY, SHORT, TRANSFERRED, Changes
from surrogap.training.config import Config
from surrogap.training.identity import FREE

Purpose = Literal["tuning", "final"]


@final
@dataclass(frozen=True)
class Setup:
    """A model, its images and the training that all methods share.

    Attributes:
        title: Its name in tables.
        changes: Values of the configuration, by the names of its flags.
        trials: The settings that plain training is tuned over: learning rate and weight decay.
        more_trials: Further trials of plain training, beyond the best one.
        seconds: A guess of the seconds for one pass over the training images, for the first plan.
        methods: The methods that the study compares on it.
        source: For transfer, the set-up that the weights are trained in, with the settings chosen
            there. The method is that of the source; fine-tuning is plain.
        remark: A note for readers of its numbers.
    """

    title: str
    changes: Changes
    trials: Sequence[Changes]
    seconds: float
    methods: Sequence[str]
    source: str | None = None
    remark: str = ""
    more_trials: Sequence[Changes] = ()


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
        num_seeds_main: The number of seeds of the methods in `many`, in set-up A.
        many: The methods with more seeds.
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
    """

    name: str
    page: tuple[str, str]
    setups: Mapping[str, Setup]
    num_seeds: Mapping[str, int]
    num_seeds_main: int
    many: Sequence[str]
    num_ablation_seeds: int
    num_trials: int
    num_evaluations: int
    corruptions: Sequence[str]
    severities: Sequence[int]
    sharpness_images: int
    timing: tuple[int, int]
    find_rho: tuple[int, int]
    ledger: str


# All methods of a set-up share the learning rate and the weight decay that plain training was tuned
# to. A test compares them with the ledger.
_SGD = {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "lr": 0.2, "weight_decay": 1e-3}
_ADAMW = {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0}
_SGD_TRIALS: list[Changes] = [
    {"lr": lr, "weight_decay": decay} for lr in (0.1, 0.2) for decay in (5e-4, 1e-3)
]
_ADAMW_TRIALS: list[Changes] = [
    {"lr": lr, "weight_decay": decay} for lr in (5e-4, 1e-3) for decay in (0.1, 0.3)
]

_A: Changes = {
    "model": "small_resnet18",
    "data": "cifar10",
    "train_per_class": 1000,
    "val_per_class": 500,
    "augmentation": "light",
    "batch_size": 128,
    **_SGD,
    "decay": "cosine",
    "epochs": 150,
    "precision": "bf16",
    "capture": True,
    "channels_last": True,
    "eval_batch_size": 1000,
}
_TOKENS: Changes = {**_ADAMW, "epochs": 200, "warmup_epochs": 5.0, "channels_last": False}
# The appendix of the paper: SGD without weight decay, a linear learning-rate decay, 500 steps.
_FINE_TUNING: Changes = {
    **{name: value for name, value in _A.items() if not name.endswith("_per_class")},
    "objective": "vanilla",
    "nesterov": False,
    "lr": 0.01,
    "weight_decay": 0.0,
    "clip_norm": 1.0,
    "decay": "linear",
    "warmup_steps": 100,
}

GPU = Scale(
    name="gpu",
    page=(
        "Results",
        "Models trained on CIFAR with one GPU. [Results on a CPU](results-laptop.md) has the same "
        "tables and figures for small models on Fashion-MNIST, with all methods.",
    ),
    setups={
        "A": Setup(
            "ResNet-18, 10,000 images of CIFAR-10",
            *(_A, _SGD_TRIALS, 0.25, tuple(METHODS)),
            more_trials=[
                *({"lr": 0.4, "weight_decay": decay} for decay in (1e-3, 2e-3)),
                {"lr": 0.2, "weight_decay": 2e-3},
            ],
        ),
        "B": Setup(
            "ResNet-18, 10,000 images of CIFAR-100",
            {**_A, "data": "cifar100", "train_per_class": 100, "val_per_class": 50},
            *(_SGD_TRIALS, 0.25, SHORT),
            remark="Images were read from JPEG of quality 97, which is near lossless.",
        ),
        "C": Setup(
            "ViT, 10,000 images of CIFAR-10",
            {**_A, **_TOKENS, "model": "small_vit", "compile": True},
            *(_ADAMW_TRIALS, 0.3, SHORT),
        ),
        "D": Setup(
            "Mixer, 10,000 images of CIFAR-10",
            {**_A, **_TOKENS, "model": "small_mixer", "compile": True},
            *(_ADAMW_TRIALS, 0.3, SHORT),
        ),
        "E": Setup(
            "ResNet-18, CIFAR-10N labels",
            {**_A, "train_labels": "noisy", "lr": 0.1},
            *(_SGD_TRIALS, 0.25, NOISY),
            remark="A's images; about 40 % of the labels are wrong. Validation labels are clean.",
        ),
        "F": Setup(
            "A's weights fine-tuned to Flowers-102",
            {**_FINE_TUNING, "data": "flowers102", "epochs": 72},
            *((), 0.15, TRANSFERRED, "A"),
            remark="Images of 64 px, read from JPEG of quality 95.",
        ),
        "P": Setup(
            "A's weights fine-tuned to Pets-37",
            {**_FINE_TUNING, "data": "pets37", "epochs": 18},
            *((), 0.6, TRANSFERRED, "A"),
            remark="Images of 64 px, read from JPEG of quality 95.",
        ),
    },
    num_seeds={"A": 5, "B": 3, "C": 3, "D": 3, "E": 3, "F": 3, "P": 3},
    num_seeds_main=10,
    many=("vanilla-2x", "sam", "gsam", "sam-norms", "gsam-norms"),
    num_ablation_seeds=3,
    num_trials=4,
    num_evaluations=30,
    corruptions=(
        *("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "gaussian_blur"),
        *("defocus_blur", "fog", "brightness", "contrast", "saturate", "pixelate"),
        "jpeg_compression",
    ),
    severities=(3,),
    sharpness_images=500,
    timing=(7, 40),
    find_rho=(200, 4),  # the defaults of surrogap find-rho
    ledger="results/study.jsonl",
)

# Without augmentation, 20 epochs are enough to memorise the images.
_SMALL: Changes = {
    **_A,
    "model": "small_resnet18_narrow",
    "image_size": 14,  # half the size of the images: a quarter of the time
    "data": "embedded",
    "train_per_class": 150,
    "val_per_class": 200,
    "augmentation": "none",
    "batch_size": 50,
    "lr": 0.1,
    "epochs": 20,
    "precision": "fp32",
    "capture": False,
    "device": "cpu",
}
_SMALL_TOKENS: Changes = {
    **_SMALL,
    **_ADAMW,
    "image_size": None,
    "epochs": 40,
    "warmup_epochs": 3.0,
    "channels_last": False,
}
_SMALL_SGD_TRIALS: list[Changes] = [
    {"lr": lr, "weight_decay": decay} for lr in (0.05, 0.1) for decay in (1e-3, 4e-3)
]
_SMALL_MORE_TRIALS: list[Changes] = [{"lr": lr, "weight_decay": 1e-3} for lr in (0.025, 0.2)]
_SMALL_ADAMW_TRIALS: list[Changes] = [
    {"lr": lr, "weight_decay": decay} for lr in (1e-3, 2e-3) for decay in (0.1, 0.3)
]

LAPTOP = Scale(
    name="laptop",
    page=(
        "Results on a CPU",
        "Small models, trained on 1,500 of the Fashion-MNIST images that come with the package, so "
        "that anyone can repeat every run without a GPU. [Results](results.md) has larger "
        "models, trained on CIFAR.",
    ),
    setups={
        "A": Setup(
            "narrow ResNet-18, Fashion-MNIST",
            *(_SMALL, _SMALL_SGD_TRIALS, 0.6, tuple(METHODS)),
            remark="1,500 images of 14 px.",
            more_trials=_SMALL_MORE_TRIALS,
        ),
        "C": Setup(
            "tiny ViT, Fashion-MNIST",
            {**_SMALL_TOKENS, "model": "small_vit_tiny"},
            *(_SMALL_ADAMW_TRIALS, 0.5, SHORT),
            remark="A's images, of 28 px.",
        ),
        "D": Setup(
            "tiny Mixer, Fashion-MNIST",
            {**_SMALL_TOKENS, "model": "small_mixer_tiny"},
            *(_SMALL_ADAMW_TRIALS, 0.4, SHORT),
            remark="A's images, of 28 px.",
        ),
        "E": Setup(
            "narrow ResNet-18, 40 % wrong labels",
            {**_SMALL, "train_labels": "noisy"},
            *(_SMALL_SGD_TRIALS, 0.6, NOISY),
            remark="A's images, with labels replaced at random. Validation labels are clean.",
            more_trials=_SMALL_MORE_TRIALS,
        ),
        "G": Setup(
            "A's weights fine-tuned to 500 of its images",
            {**_SMALL, "objective": "vanilla", "lr": 0.01, "weight_decay": 0.0}
            | {"train_per_class": 50, "decay": "linear", "epochs": 5},
            *((), 0.2, TRANSFERRED, "A"),
            remark="To try the command: it says nothing about transfer to other images.",
        ),
    },
    num_seeds={"A": 5, "C": 5, "D": 5, "E": 5, "G": 3},
    num_seeds_main=10,
    many=MAIN,
    num_ablation_seeds=3,
    num_trials=4,
    num_evaluations=10,
    corruptions=GPU.corruptions,
    severities=(3,),
    sharpness_images=100,
    timing=(7, 10),
    find_rho=GPU.find_rho,
    ledger="results/study_laptop.jsonl",
)

SCALES = {scale.name: scale for scale in (LAPTOP, GPU)}


@final
@dataclass(frozen=True)
class Cell:
    """One entry of a table or figure: a method in a set-up.

    Attributes:
        setup: The set-up's letter.
        method: The method's name.
        changes: For ablations, values beside the method's settings.
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

    @property
    def key(self) -> str:
        """A hash of the purpose and of all values that change the result.

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
    def cell(self) -> str:
        """Set-up and method, in a line."""
        return f"{self.setup} {self.method}"

    @property
    def title(self) -> str:
        """Set-up, method, settings and seed, in a line."""
        return f"{self.cell}, {settings_text(self.settings)}, seed {self.seed}"

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
    shown, source = {**settings, **cell.changes}, None
    changes = {**setup.changes, **cell.changes, "seed": seed, "eval_on": "test"}
    if setup.source is not None:
        before = Cell(setup.source, cell.method)
        source = study_run(scale, before, settings, shared, seed=seed, purpose=purpose)
    else:
        epochs = max(round(setup.changes["epochs"] * method.epochs), 1)
        changes |= {**(shared or {}), **method.changes, "epochs": epochs, **shown}
        changes["eval_on"] = "val" if purpose == "tuning" else "both"
        if method.start:
            changes["start_epoch"] = round(method.start * changes["epochs"])
    return StudyRun(cell.setup, cell.method, shown, seed, purpose, changes, cell.label, source)
