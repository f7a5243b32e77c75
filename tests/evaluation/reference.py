"""The scores written out image by image, in plain Python, from their definitions."""

import math
from bisect import bisect_left
from collections.abc import Sequence

from surrogap.evaluation import Scores


def probabilities(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    exponentials = [math.exp(logit - top) for logit in logits]
    return [e / math.fsum(exponentials) for e in exponentials]


def scores(
    logits: Sequence[Sequence[float]],
    sets: Sequence[set[int]],
    votes: Sequence[dict[int, float]] | None = None,
    classes: Sequence[int] | None = None,
) -> Scores:
    """Scores of images with sets of correct classes; the loss is that of `votes`, if given."""
    classes = range(len(logits[0])) if classes is None else classes
    right, five, loss, num_samples = 0, 0, 0.0, 0
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(15)]
    for i, row in enumerate(logits):
        truth = sets[i] & set(classes)
        if not truth:
            continue
        num_samples += 1
        p = dict(zip(classes, probabilities([row[k] for k in classes]), strict=True))
        ranking = sorted(classes, key=lambda k: -p[k])
        right += ranking[0] in truth
        five += any(k in truth for k in ranking[:5])
        if votes is None:
            loss -= math.log(math.fsum(p[k] for k in truth))
        else:
            present = {k: n for k, n in votes[i].items() if k in p}
            loss -= sum(n / sum(present.values()) * math.log(p[k]) for k, n in present.items())
        confidence = p[ranking[0]]
        edges = [b / 15 for b in range(1, 15)]
        bins[bisect_left(edges, confidence)].append((confidence, ranking[0] in truth))
    gap = 0.0
    for members in bins:
        if members:
            confidence = math.fsum(c for c, _ in members) / len(members)
            accuracy = sum(is_right for _, is_right in members) / len(members)
            gap += len(members) / num_samples * abs(accuracy - confidence)
    return Scores(right / num_samples, five / num_samples, loss / num_samples, gap, num_samples)
