"""Scores of a model on clean, corrupted and shifted test sets."""

from surrogap.evaluation.corruptions import CORRUPTIONS, Corruption, corrupted, corruptions_of
from surrogap.evaluation.imagenet import (
    IMAGENET_C,
    imagenet_c,
    imagenet_r,
    imagenet_r_synsets,
    imagenet_real,
    imagenet_synsets,
    imagenet_v2,
)
from surrogap.evaluation.metrics import Scores, evaluate, label_sets

__all__ = [
    "CORRUPTIONS",
    "IMAGENET_C",
    "Corruption",
    "Scores",
    "corrupted",
    "corruptions_of",
    "evaluate",
    "imagenet_c",
    "imagenet_r",
    "imagenet_r_synsets",
    "imagenet_real",
    "imagenet_synsets",
    "imagenet_v2",
    "label_sets",
]
