"""The tables and figures of the study, and the runs that each needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from surrogap.experiments.text_table import Table
from surrogap.paper import drawings
from surrogap.paper.cost_figure import cost_figure
from surrogap.paper.learning_rates import own_rates_table
from surrogap.paper.ledger import Ledger
from surrogap.paper.methods import (
    CHEAPER,
    MAIN,
    METHODS,
    NOISY,
    NOISY_OWN,
    SHORT,
    TRANSFERRED,
    Changes,
)
from surrogap.paper.plan import Stage
from surrogap.paper.reproductions import Reproduced
from surrogap.paper.study import Cell, Scale
from surrogap.paper.summaries import (
    Summary,
    cell_legend,
    cell_numbers,
    cell_table,
    comparisons,
    in_words,
    missing,
    summaries,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[Scale, Sequence[Summary], Ledger], "Figure"]
Pairs = Sequence[tuple[str, str]]

_ALL_SCORES = ("test", "best", "corrupted", "votes", "calibration", "train", "eigenvalue")
_FEW_SCORES = ("test", "best", "train", "eigenvalue")


@final
@dataclass(frozen=True)
class Artifact:
    """A table or a figure.

    Attributes:
        title: A sentence about it.
        cells: The methods and settings in it.
        pairs: Titles of cells to compare, the first with the second; the page's tables need some.
        scores: The columns of its table.
        draw: Draws its figure; None for a table.
        max_seeds: The largest number of seeds that it needs; 0 for the tuning runs only.
        notes: The limits of its conclusions.
        second_table: A table besides that of the cells, on the page of results.
    """

    title: str
    cells: Sequence[Cell]
    pairs: Pairs
    scores: Sequence[str] = _FEW_SCORES
    draw: Draw | None = None
    max_seeds: int | None = None
    notes: str = ""
    second_table: Callable[[Sequence[Summary]], Table] | None = None


def _cells(setup: str, methods: Sequence[str]) -> list[Cell]:
    return [Cell(setup, method) for method in methods]


_PAPER = ("vanilla", "vanilla-2x", "sam", "gsam")
_OBJECTIVES = (
    *("vanilla", "vanilla-2x", "entropy-sgd", "sam", "gsam", "gsam-plain"),
    *("asam", "asam-ascent", "gap-penalty", "momentum-sam", "sam-norms", "gsam-norms"),
)
_LAMBDAS = (0.1, 0.2, 0.3, 0.5)
_ADAMW = {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.05}


def _pairs(*pairs: tuple[str, str]) -> Pairs:
    """Pairs of methods, as the titles of their cells."""
    return [(METHODS[first].title, METHODS[second].title) for first, second in pairs]


def _against(methods: Sequence[str], *others: str) -> Pairs:
    """Each method against each of the others."""
    return _pairs(*((m, other) for other in others for m in methods if m not in others))


def _varied(method: str, changes: Changes, label: str) -> Cell:
    return Cell("A", method, changes, f"{METHODS[method].title}, {label}")


def _other_lrs(setup: str, method: str) -> list[Cell]:
    """A method at other learning rates, further away in E, where they matter most."""
    factors = {"1/2": 0.5, "2x": 2.0} | ({"1/4": 0.25, "4x": 4.0} if setup == "E" else {})
    return [
        Cell(setup, method, {"lr_factor": factor}, f"{METHODS[method].title}, {name} lr")
        for name, factor in factors.items()
    ]


# With clean labels, plain training that ends early is not of interest. One more method for twice
# the epochs would crowd the figure.
_CLEAN = tuple(name for name in METHODS if name not in ("vanilla-short", "momentum-sam-2x"))
# Variants of SAM that cost less.
_CHEAPER_SAM = tuple(name for name in METHODS if name.startswith("sam-"))
_STRENGTHS = ("medium", "strong")
_BASELINES = ("vanilla", "vanilla-2x")
_BANDS = "Lines are means over seeds; bands reach from the lowest seed to the highest."
_CURVES = ("vanilla", "sam", "gsam", "sam-norms")
_ABLATED = ("vanilla-2x", "sam", "gsam", "sam-norms")

ARTIFACTS: dict[str, Artifact] = {
    "fig-cost": Artifact(
        "Test accuracy against the cost of training, for every method.",
        _cells("A", _CLEAN),
        [
            *_against(_CLEAN, *_BASELINES),
            *_pairs(("gsam", "sam"), ("gsam-norms", "sam-norms"), ("asam-ascent", "asam")),
            *_against(_CHEAPER_SAM, "sam"),
        ],
        draw=cost_figure,
        notes="Filled markers are means, with 95 % intervals for three seeds or more. With fewer "
        "than five seeds, rings show single seeds. Methods in a grey band have nearly the same "
        "cost; they are drawn side by side, in order of cost. The cost excludes data loading and "
        "evaluation. Differences are paired by seed, so two methods can differ although their "
        "intervals in the figure overlap.",
    ),
    "fig-accuracy-curves": Artifact(
        "Test accuracy during training, with clean and with noisy labels.",
        [*_cells("A", _CURVES), *_cells("E", (*_CURVES, "vanilla-short"))],
        (),
        draw=drawings.accuracy_curves_figure,
        notes=f"{_BANDS} Low accuracies early in training are cut off. With noisy labels, "
        "accuracy can fall midway, as the model memorises wrong labels.",
    ),
    "table-1": Artifact(
        "The paper's Table 1: vanilla training, SAM and GSAM on several test sets.",
        [cell for setup in "ACD" for cell in _cells(setup, _PAPER)],
        [*_against(("sam", "gsam"), *_BASELINES), *_pairs(("gsam", "sam"))],
        _ALL_SCORES,
        notes="The paper's Table 1 has twelve models on ImageNet. Here the images are small and "
        "few, so the differences need not carry over to ImageNet, not even in sign.",
    ),
    "table-setups": Artifact(
        "SAM, GSAM and SAM on norm layers in all set-ups, and cheaper methods in some.",
        [
            *(cell for setup in "AB" for cell in _cells(setup, (*SHORT, *CHEAPER[:2]))),
            *(cell for setup in "CDS" for cell in _cells(setup, (*SHORT, *CHEAPER))),
            *_cells("E", NOISY),
            *_cells("N", NOISY_OWN),
        ],
        [
            *_against(SHORT[2:], *_BASELINES, "vanilla-short"),
            *_against(CHEAPER, *_BASELINES),
            *_pairs(("vanilla-2x", "vanilla"), ("vanilla-short", "vanilla")),
            *_against((*SHORT[3:], *CHEAPER), "sam"),
        ],
        _ALL_SCORES,
        notes="With noisy labels (E, N), compare the best epoch too: a method may memorise wrong "
        "labels late in training.",
    ),
    "fig-methods": Artifact(
        "Test accuracy of all objectives.",
        _cells("A", _OBJECTIVES),
        (),
        draw=drawings.methods_figure,
        notes="`fig-cost` has the scores and differences. More seeds may change the order of "
        "methods whose intervals overlap.",
    ),
    "table-penalty": Artifact(
        "GSAM and min(f_p + lambda h), over lambda.",
        [
            *_cells("A", ("gsam", "gap-penalty")),
            *(Cell("A", "gap-penalty", {"lam": lam}, f"f_p + {lam:g} h") for lam in _LAMBDAS),
        ],
        _pairs(("gsam", "gap-penalty")),
        _ALL_SCORES,
        notes="rho is the one chosen for the penalty; the rows differ only in lambda.",
    ),
    "table-transfer": Artifact(
        "Weights trained under each objective, fine-tuned to other images.",
        [cell for setup in "FPG" for cell in _cells(setup, TRANSFERRED)],
        _pairs(("sam", "vanilla"), ("gsam", "vanilla"), ("gsam", "sam")),
        ("test", "train"),
        notes="Fine-tuning was not tuned: one learning rate, as in the paper's appendix.",
    ),
    "fig-ablation": Artifact(
        "Augmentation, base optimizer, and min(f_p, h) against min(f, h).",
        [
            *_cells("A", ("vanilla", *_ABLATED, "gsam-plain")),
            *(
                _varied(method, {"augmentation": strength}, strength)
                for strength in _STRENGTHS
                for method in _ABLATED
            ),
            *(_varied(method, _ADAMW, "adamw") for method in ("vanilla", "sam", "gsam")),
        ],
        [
            *_pairs(("gsam", "gsam-plain")),
            *(
                (f"{first}, {label}", f"{second}, {label}")
                for pairs, labels in (
                    (_against(_ABLATED[1:], "vanilla-2x"), _STRENGTHS),
                    (_against(("sam", "gsam"), "vanilla"), ("adamw",)),
                    (_pairs(("gsam", "sam")), (*_STRENGTHS, "adamw")),
                )
                for label in labels
                for first, second in pairs
            ),
        ],
        draw=drawings.ablation_figure,
        notes="The settings are those of set-up A, which were not tuned again for each "
        "augmentation or optimizer. At scale laptop, set-up S is tuned with strong augmentation.",
    ),
    "table-epochs": Artifact(
        "GSAM against vanilla training with the same number of epochs and with twice as many.",
        _cells("A", ("vanilla", "vanilla-2x", "gsam")),
        _pairs(("vanilla-2x", "vanilla"), ("gsam", "vanilla"), ("gsam", "vanilla-2x")),
        _ALL_SCORES,
        notes="The learning rate decays over all epochs, however many there are.",
    ),
    "table-rho-schedule": Artifact(
        "Constant rho against rho_t that decays with the learning rate.",
        [
            *_cells("A", ("vanilla", "sam", "gsam")),
            *(_varied(method, {"rho_min": 0.0}, "rho_t") for method in ("sam", "gsam")),
        ],
        [("SAM, rho_t", "SAM"), ("GSAM, rho_t", "GSAM")],
        notes="rho_t decays to 0 from the rho that was chosen for a constant radius, so its mean "
        "is half of that.",
    ),
    "fig-cosine": Artifact(
        "The cosine of g and g_p during training.",
        _cells("A", ("sam", "gsam")),
        (),
        draw=drawings.cosine_figure,
        notes=f"{_BANDS} `g` is the gradient at the weights, `g_p` the one at the perturbed "
        "weights. The smaller the cosine, the more a step of SAM differs from a plain one.",
    ),
    "fig-gap-curves": Artifact(
        "The surrogate gap during training under different alpha.",
        _cells("A", ("sam", "gsam")),
        (),
        draw=drawings.gap_curves_figure,
        max_seeds=0,
        notes="The surrogate gap `h` is the loss at the perturbed weights minus the loss at the "
        "weights. GSAM also minimises it; alpha sets how strongly. The curves are from the tuning "
        "runs, with one seed each: ignore differences that are smaller than their fluctuations.",
    ),
    "fig-rho": Artifact(
        "The gain of SAM over vanilla training against the radius rho.",
        [
            cell
            for setup in "ACDES"
            for cell in (
                Cell(setup, "vanilla"),
                *(
                    Cell(setup, method, radius, f"{METHODS[method].title}, rho {radius['rho']:g}")
                    for method in ("sam", "sam-norms")
                    for radius in METHODS[method].trials
                ),
            )
        ],
        (),
        ("val", "test", "train"),
        draw=drawings.rho_figure,
        notes="Points of validation accuracy, paired by seed, with 95 % intervals. Thick bars at "
        "the bottom are the ranges that `surrogap find-rho` suggests.",
    ),
    "fig-lr": Artifact(
        "The gain over vanilla training against the learning rate.",
        [
            cell
            for setup in "ACDE"
            for method in _CURVES
            for cell in (Cell(setup, method), *_other_lrs(setup, method))
        ],
        (),
        ("val", "test", "train"),
        draw=drawings.lr_figure,
        notes="Gains over vanilla at its tuned learning rate (factor 1 on the axis), in points of "
        "test accuracy. Differences are paired by seed, with 95 % intervals, over the seeds that "
        "all learning rates have. Rho, alpha and weight decay were tuned at that learning rate "
        "only, so at other rates, the other methods may do better than shown. Each method's own "
        "learning rate is the one with the best mean validation accuracy over these seeds.",
        second_table=own_rates_table,
    ),
}

_LATE = tuple(name for name in METHODS if name.endswith("-late"))
_REST = tuple(method for method in _CLEAN if method not in MAIN)
_STRONG = [
    cell for cell in ARTIFACTS["fig-ablation"].cells if cell.changes.get("augmentation") == "strong"
]
# Ablations and fine-tuning. The radii come last: they are many, and each has a trial already.
_VARIED = [
    cell
    for name, artifact in ARTIFACTS.items()
    for cell in artifact.cells
    if name not in ("fig-rho", "fig-lr") and (cell.changes or cell.setup in "FPG")
]


def stages(name: str, left_out: Sequence[str] = ()) -> list[Stage]:
    """The runs of an artifact, set-up by set-up; for "all" of all artifacts, by importance.

    `left_out` are artifacts that "all" leaves out.
    """
    if name == "all":
        return [
            # With other settings of plain training, all methods of a set-up are trained again.
            *(Stage(_cells(setup, ("vanilla",)), max_seeds=0) for setup in "EA"),
            Stage(_cells("A", _CURVES), max_seeds=3),
            Stage(_cells("E", NOISY)),
            # How much of the gain with wrong labels is left if plain training is tuned as widely?
            Stage(_cells("N", ("vanilla", "vanilla-short"))),
            Stage(_cells("C", MAIN)),
            Stage(_cells("A", _LATE), max_seeds=3),
            *(Stage(_cells(setup, MAIN)) for setup in "DBS"),
            Stage(_cells("A", [m for m in _CHEAPER_SAM if m in _REST]), max_seeds=3),
            Stage(_cells("N", NOISY_OWN)),
            Stage(_cells("A", MAIN), max_seeds=5),
            Stage(_STRONG),
            Stage(_cells("A", _REST), max_seeds=3),
            Stage(_VARIED),
            # Every table has rows by now. The others are further seeds.
            *(stage for one in ARTIFACTS if one not in left_out for stage in stages(one)),
        ]
    cells, max_seeds = ARTIFACTS[name].cells, ARTIFACTS[name].max_seeds
    setups = dict.fromkeys(cell.setup for cell in cells)
    return [Stage([c for c in cells if c.setup == setup], max_seeds) for setup in setups]


def drawn(name: str, scale: Scale, ledger: Ledger) -> Reproduced:
    """Draw a table or figure from the runs that the ledger has."""
    artifact = ARTIFACTS[name]
    found = summaries(scale, artifact.cells, ledger)
    made = comparisons(found, artifact.pairs)
    shown = cell_table(scale, found, artifact.scores)
    words = [cell_legend(shown), *in_words(made), artifact.notes]
    if artifact.max_seeds != 0:  # otherwise the figure shows trials, which have no rows
        words = [*(words if shown.rows else []), missing(found)]
    writers = {}
    if artifact.draw is not None:
        writers = {f"{name}.png": artifact.draw(scale, found, ledger).savefig}
    return Reproduced(
        shown,
        {"scale": scale.name, **cell_numbers(found, made, artifact.scores)},
        writers,
        [*filter(None, words)],
    )
