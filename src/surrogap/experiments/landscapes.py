"""The loss along named directions, on a grid of points."""

from collections.abc import Sequence

from torch import Tensor

from surrogap.analysis import (
    Hessian,
    Line,
    Plane,
    Surface,
    eigenvalues,
    gradient_direction,
    line,
    plane,
    random_direction,
)
from surrogap.analysis.gap import FORWARD
from surrogap.analysis.hessian import GRADIENTS_PER_PRODUCT
from surrogap.analysis.surface import Progress

# Default radii: 1 changes each filter by its own norm; 0.5 changes the loss visibly, but stays
# close to the weights.
_RADII = {"random": 1.0, "gradient": 0.5, "eigenvector": 0.5}
_MAX_PRODUCTS = 50


def landscape_cost(directions: Sequence[str], num_points: int) -> float:
    """Return the cost of losses along directions, in gradients.

    `num_points` is the number of points on the whole grid.
    """
    cost = FORWARD * num_points + directions.count("gradient")
    return cost + GRADIENTS_PER_PRODUCT * _MAX_PRODUCTS * ("eigenvector" in directions)


def loss_along(
    surface: Surface,
    directions: Sequence[str],
    *,
    num_points: int,
    radius: float | None,
    seed: int,
    progress: Progress,
) -> Line | Plane:
    """Compute the loss along one or two directions, centred at the weights.

    Args:
        surface: The loss.
        directions: One or two of "random" (filter-normalised), "gradient" and "eigenvector" (of the
            largest eigenvalue; if repeated, of the second largest).
        num_points: The number of points along each direction. If it is odd, one is the centre.
        radius: The distance to each side, in filter norms for "random"; None for 1 along "random"
            and 0.5 along the others.
        seed: The seed of random directions.
        progress: Called with the number of finished evaluations and the total.
    """
    vectors, labels = _vectors(surface, directions, seed, progress)
    steps = []
    for direction in directions:
        distance, last = _RADII[direction] if radius is None else radius, num_points - 1
        steps.append([distance * (2 * i - last) / last for i in range(num_points)])
    if len(directions) == 1:
        return line(surface, vectors[0], steps[0], label=labels[0], progress=progress)
    names = (labels[0], labels[1])
    return plane(surface, vectors[0], vectors[1], *steps, labels=names, progress=progress)


def _vectors(
    surface: Surface, directions: Sequence[str], seed: int, progress: Progress
) -> tuple[list[Tensor], list[str]]:
    """Return the directions as vectors, and their labels."""
    vectors, labels = [], []
    num = directions.count("eigenvector")
    if num:
        pairs = eigenvalues(
            Hessian(surface), num, max_products=_MAX_PRODUCTS, seed=seed, progress=progress
        )
    for index, direction in enumerate(directions):
        nth = directions[:index].count(direction)
        if direction == "random":
            vectors.append(random_direction(surface, seed + nth))
            labels.append(f"random (seed {seed + nth})")
        elif direction == "gradient":
            vectors.append(gradient_direction(surface))
            labels.append("gradient")
        else:
            vectors.append(pairs.vectors[nth])
            labels.append(f"eigenvector ({float(pairs.values[nth]):.4g})")
    return vectors, labels
