"""How good is it: scores on clean test sets, corrupted ones and shifted ones."""

from surrogap.evaluation.corruptions import CORRUPTIONS, Corruption, corrupted, corrupted_batches
from surrogap.evaluation.metrics import Scores, evaluate, label_sets
from surrogap.evaluation.shifted import (
    IMAGENET_C,
    IMAGENET_C_EXTRA,
    imagenet_a,
    imagenet_a_synsets,
    imagenet_c,
    imagenet_r,
    imagenet_r_synsets,
    imagenet_real,
    imagenet_synsets,
    imagenet_v2,
    imagenet_val,
    mean_corruption_error,
    mean_over_corruptions,
)

__all__ = [
    "CORRUPTIONS",
    "IMAGENET_C",
    "IMAGENET_C_EXTRA",
    "Corruption",
    "Scores",
    "corrupted",
    "corrupted_batches",
    "evaluate",
    "imagenet_a",
    "imagenet_a_synsets",
    "imagenet_c",
    "imagenet_r",
    "imagenet_r_synsets",
    "imagenet_real",
    "imagenet_synsets",
    "imagenet_v2",
    "imagenet_val",
    "label_sets",
    "mean_corruption_error",
    "mean_over_corruptions",
]
