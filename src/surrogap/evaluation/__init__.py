"""How good is it: scores on clean test sets, corrupted ones and shifted ones."""

from surrogap.evaluation.corruptions import CORRUPTIONS, Corruption, corrupted, corrupted_batches
from surrogap.evaluation.metrics import Scores, evaluate, label_sets

__all__ = [
    "CORRUPTIONS",
    "Corruption",
    "Scores",
    "corrupted",
    "corrupted_batches",
    "evaluate",
    "label_sets",
]
