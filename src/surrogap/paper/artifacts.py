"""The tables and figures that are drawn from the study's ledger, and the runs that each needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from surrogap.paper.plan import Stage, stages_of
from surrogap.paper.study import MAIN, METHODS, SHORT, Cell


@final
@dataclass(frozen=True)
class Artifact:
    """A table or a figure.

    Attributes:
        title: What it shows.
        cells: The methods and settings in it.
    """

    title: str
    cells: Sequence[Cell]


def _cells(setup: str, methods: Sequence[str]) -> list[Cell]:
    return [Cell(setup, method) for method in methods]


_PAPER = ("vanilla", "vanilla-2x", "sam", "gsam")
_OBJECTIVES = (
    *("vanilla", "vanilla-2x", "entropy-sgd", "sam", "gsam", "gsam-plain"),
    *("asam", "asam-ascent", "gap-penalty", "momentum-sam"),
)
LAMBDAS = (0.1, 0.2, 0.3, 0.5)
AUGMENTATIONS = ("light", "medium", "strong")
BASE_OPTIMIZERS = {
    "sgd": {},
    "adamw": {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.05},
}

ARTIFACTS: dict[str, Artifact] = {
    "table-1": Artifact(
        "Table 1: vanilla, SAM and GSAM on three networks and several test sets.",
        [cell for setup in "ACD" for cell in _cells(setup, _PAPER)],
    ),
    "fig-methods": Artifact(
        "Test accuracy of all objectives, with and without ascent.", _cells("A", _OBJECTIVES)
    ),
    "table-penalty": Artifact(
        "GSAM and min(f_p + lambda h), over lambda.",
        [
            *_cells("A", ("gsam", "gap-penalty")),
            *(Cell("A", "gap-penalty", {"lam": lam}, f"f_p + {lam:g} h") for lam in LAMBDAS),
        ],
    ),
    "fig-ablation": Artifact(
        "Augmentation, base optimizer, and min(f_p, h) against min(f, h).",
        [
            *_cells("A", ("vanilla-2x", "sam", "gsam", "gsam-plain")),
            *(
                Cell("A", method, {"augmentation": augmentation}, augmentation)
                for augmentation in AUGMENTATIONS[1:]
                for method in ("vanilla-2x", "sam", "gsam")
            ),
            *(
                Cell("A", method, BASE_OPTIMIZERS["adamw"], "adamw")
                for method in ("vanilla", "sam", "gsam")
            ),
        ],
    ),
    "table-epochs": Artifact(
        "Vanilla training for as many and for twice the epochs, against GSAM.",
        _cells("A", ("vanilla", "vanilla-2x", "gsam")),
    ),
    "table-rho-schedule": Artifact(
        "Constant rho against rho_t that decays with the learning rate.",
        [
            *_cells("A", ("vanilla", "sam", "gsam")),
            Cell("A", "sam", {"rho_min": 0.0}, "SAM, rho_t"),
            Cell("A", "gsam", {"rho_min": 0.0}, "GSAM, rho_t"),
        ],
    ),
    "fig-cosine": Artifact(
        "The cosine of g and g_p during training.", _cells("A", ("sam", "gsam"))
    ),
    "fig-gap-curves": Artifact(
        "The surrogate gap during training under different alpha.", _cells("A", ("sam", "gsam"))
    ),
    "fig-cost": Artifact(
        "Test error against cost relative to vanilla training, for every method.",
        _cells("A", tuple(METHODS)),
    ),
}

_REST = tuple(method for method in METHODS if method not in MAIN)


def stages(name: str) -> list[Stage]:
    """The runs of an artifact, or of all of them in the order of what they say most.

    Args:
        name: One of `ARTIFACTS`, or "all".
    """
    if name != "all":
        return stages_of(ARTIFACTS[name].cells)
    return [
        Stage(_cells("A", MAIN), max_seeds=3),
        Stage(_cells("A", _REST), max_seeds=3),
        *(Stage(_cells(setup, SHORT)) for setup in "EBCD"),
        Stage(_cells("A", tuple(METHODS))),
        *(stage for artifact in ARTIFACTS.values() for stage in stages_of(artifact.cells)),
    ]
