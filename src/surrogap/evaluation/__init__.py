"""How good is it: scores on clean test sets, corrupted ones and shifted ones."""

from surrogap.evaluation.metrics import Scores, evaluate, label_sets

__all__ = ["Scores", "evaluate", "label_sets"]
