"""The paper's own scale: its tables and figures as ImageNet recipes with changed settings.

Without torchrun the commands are listed; under torchrun the runs are trained, one after another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from surrogap.errors import InvalidValueError
from surrogap.experiments.recipes import RECIPES, imagenet, transfer
from surrogap.training.config import Config

if TYPE_CHECKING:
    from surrogap.training.run import Outcome


@final
@dataclass(frozen=True)
class PaperRun:
    """A recipe with some settings changed.

    Attributes:
        recipe: The recipe's name.
        changes: Values of the configuration, by the names of its flags.

    >>> print(PaperRun("vit-b32-vanilla", {"epochs": 600}).command.partition("cli ")[2])
    train --recipe vit-b32-vanilla --epochs 600 --out runs/vit-b32-vanilla-epochs-600
    """

    recipe: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def out(self) -> str:
        """The run's folder."""
        if not self.changes:
            return str(RECIPES[self.recipe].config.folder)
        words = [f"{name.replace('_', '-')}-{value}" for name, value in self.changes.items()]
        return "-".join([f"runs/{self.recipe}", *words])

    def config(self, data_root: str) -> Config:
        """The configuration to train.

        Raises:
            ValueError: A value is not valid.
        """
        config = RECIPES[self.recipe].config.override(**self.changes)
        return config.override(data_root=data_root, out=self.out)

    @property
    def command(self) -> str:
        """The command that trains it."""
        flags = [f"--{name.replace('_', '-')} {value}" for name, value in self.changes.items()]
        return " ".join([RECIPES[self.recipe].command, *flags, f"--out {self.out}"])


def _runs(recipe: str, *changes: Mapping[str, Any]) -> list[PaperRun]:
    return [PaperRun(recipe, one) for one in changes or ({},)]


_TWICE = {"epochs": 600}
_STRENGTHS = ({"augmentation": "medium"}, {"augmentation": "strong"})
_ADABELIEF = {"optimizer": "adabelief"}

# Radii of ASAM are ten times SAM's, as in the paper's appendix.
PAPER_RUNS: dict[str, Sequence[PaperRun]] = {
    "table-1": [PaperRun(recipe.name) for recipe in imagenet.recipes()],
    "fig-methods": [
        *_runs("mixer-s32-vanilla"),
        *_runs("mixer-s32-vanilla", {"objective": "entropy-sgd"}),
        *_runs(
            "mixer-s32-sam",
            {},
            {"objective": "asam", "rho": 5.0},
            {"objective": "asam", "rho": 5.0, "alpha": 0.2},
        ),
        *_runs("mixer-s32-gsam"),
    ],
    "table-penalty": [
        *_runs("vit-b32-gsam"),
        *_runs(
            "vit-b32-sam",
            *({"objective": "gap-penalty", "rho": 0.6, "lam": lam / 10} for lam in range(6)),
        ),
    ],
    "table-transfer": [PaperRun(recipe.name) for recipe in transfer.recipes()],
    "fig-ablation": [
        *_runs("vit-b32-vanilla", _TWICE, *({**_TWICE, **one} for one in _STRENGTHS), _ADABELIEF),
        *_runs("vit-b32-sam", {}, *_STRENGTHS, _ADABELIEF),
        *_runs("vit-b32-gsam", {}, *_STRENGTHS, _ADABELIEF, {"minimize": "plain"}),
    ],
    "table-epochs": [*_runs("vit-b32-vanilla", {}, _TWICE), *_runs("vit-b32-gsam")],
    "table-rho-schedule": [
        *_runs("vit-b32-vanilla", _TWICE),
        *_runs("vit-b32-sam"),
        *_runs("vit-b32-gsam", {"rho_min": None}, {"alpha": 0.0}, {}),
    ],
    "fig-cosine": _runs("vit-b32-gsam"),
    "fig-gap-curves": _runs("vit-b32-gsam", *({"alpha": a} for a in (0.0, 0.2, 0.4)), {}),
}


def paper_runs(name: str) -> list[PaperRun]:
    """The runs of a table or figure, or of "all"; each once.

    Raises:
        ValueError: The table or figure is not in the paper.
    """
    if name != "all" and name not in PAPER_RUNS:
        raise InvalidValueError(
            f"scale must be laptop or gpu for {name}, which is not in the paper, got paper. "
            "Pass --scale gpu."
        )
    wanted = PAPER_RUNS.values() if name == "all" else [PAPER_RUNS[name]]
    return list({run.out: run for runs in wanted for run in runs}.values())


def train_runs(runs: Sequence[PaperRun], data_root: str) -> "Outcome | None":
    """Train some runs one after another, or continue them.

    Returns:
        The outcome of the run that a signal stopped, or None if all runs are finished.

    Raises:
        RunFailedError: A run failed.
        ValueError: The images are missing, or a folder holds another run.
    """
    from surrogap.experiments.probes import sharpness_probe
    from surrogap.training.progress import display_for_stdout
    from surrogap.training.run import train

    for run in runs:
        config, progress = run.config(data_root), display_for_stdout()
        outcome = train(config, resume=True, progress=progress, probe=sharpness_probe)
        if outcome.signal is not None:
            return outcome
    return None
