"""`surrogap landscape`: draw the loss around a run, or on the line between two.

surrogap landscape runs/a
surrogap landscape runs/a --directions eigenvector random
surrogap landscape runs/a runs/b
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

from surrogap.checks import integer, number
from surrogap.cli.options import options
from surrogap.cli.results import Results, Tell, Writer, bar, tell_cost
from surrogap.cli.subject import Loaded, RunArgument, Subject
from surrogap.errors import InvalidValueError
from surrogap.training.flags import OptionalFloat, OptionalPath, optional

if TYPE_CHECKING:
    from torch import Tensor, nn

    from surrogap.analysis import Line, Plane, Surface

Direction = Literal["random", "gradient", "eigenvector"]

# How far to go where nothing else is said: filters change by as much as they are, or by a distance
# that changes a loss well without leaving the neighbourhood.
_RADII = {"random": 1.0, "gradient": 0.5, "eigenvector": 0.5}
_MAX_PRODUCTS = 50


@dataclass(frozen=True)
class Landscape:
    """Draw the loss around a run along one or two directions, or on the line between two runs.

    The images are as they are, without augmentation, and the network is in evaluation mode. One
    direction gives a curve; two give a contour plot and a surface. The losses go to a JSON file.
    """

    run: RunArgument = None
    """The run's folder. In place of one, pass --model and --data."""

    other: Annotated[Positional[Path | None], optional("RUN2")] = None
    """Another run of the same network, to draw the line between the two: 0 is RUN, 1 is RUN2."""

    directions: tuple[Direction, ...] = ()
    """One or two of random (each filter as long as the weights'), gradient and eigenvector (of the
    largest eigenvalue; the second time, of the second). By default random."""

    points: int = 21
    """At how many places of each direction, or from RUN to RUN2."""

    radius: OptionalFloat = None
    """How far to go to both sides: in filters for random, by default 1; as a distance for the
    others, by default 0.5. With RUN2: how far beyond both, as a part of the line; by default 0."""

    out: OptionalPath = None
    """The folder to write to. By default the run's."""

    subject: Subject = field(default_factory=Subject)


def main(arguments: Sequence[str]) -> int:
    """Draws the loss around a run or between two, and returns the exit status.

    Raises:
        ValueError: There is no such run or network, or the directions do not go together.
    """
    chosen = options(Landscape, "landscape", arguments)
    directions = _directions(chosen)
    subject = replace(chosen.subject, run=chosen.run)
    loaded = subject.load()
    other = None if chosen.other is None else loaded.network_of(chosen.other)
    towards = [] if chosen.other is None else ["to", chosen.other.resolve().name]
    stem = "-".join(["landscape", *directions, *towards])
    ends = ("-contour", "-surface") if len(directions) == 2 else ("",)
    names = [f"{stem}{end}.png" for end in ends]
    folder = subject.folder("landscape") if chosen.out is None else chosen.out
    results = Results(folder, "landscape", stem, names)
    tell_cost(_cost(chosen, directions), f"over {loaded.num_images:,} images")
    found = (
        _around(chosen, directions, loaded) if other is None else _between(chosen, loaded, other)
    )
    numbers = {"subject": subject.title, **loaded.described(), "other": chosen.other}
    writers = dict(zip(names, _figures(found, chosen, subject.title, loaded), strict=True))
    results.write(numbers | asdict(found), writers)
    print(results.told)
    return 0


def _directions(chosen: Landscape) -> tuple[Direction, ...]:
    """Those that were asked for, or the usual one; none between two runs."""
    integer("points", chosen.points, at_least=3, remedy="Pass a number such as 21.")
    if chosen.radius is not None:
        bound: Any = {"above": 0.0} if chosen.other is None else {}
        number("radius", chosen.radius, **bound, remedy="Pass a distance, such as 0.5.")
    directions = chosen.directions or ("random",)
    if chosen.other is not None:
        if chosen.directions:
            raise InvalidValueError(
                f"directions must be left out between two runs, got {' '.join(directions)}. "
                "Pass one run to look around it."
            )
        return ()
    if len(directions) > 2 or directions == ("gradient", "gradient"):
        raise InvalidValueError(
            "directions must be one or two that differ, got "
            f"{' '.join(directions)}. Pass such as --directions eigenvector random."
        )
    return directions


def _cost(chosen: Landscape, directions: Sequence[Direction]) -> float:
    from surrogap.analysis.gap import FORWARD
    from surrogap.analysis.hessian import GRADIENTS_PER_PRODUCT

    num_points = chosen.points ** len(directions) if directions else len(_line_steps(chosen))
    cost = FORWARD * num_points + directions.count("gradient")
    return cost + GRADIENTS_PER_PRODUCT * _MAX_PRODUCTS * ("eigenvector" in directions)


def _line_steps(chosen: Landscape) -> list[float]:
    """From 0 to 1, both among them, and as far beyond as was asked for."""
    num = chosen.points - 1
    beyond = round((chosen.radius or 0.0) * num)
    return [i / num for i in range(-beyond, num + beyond + 1)]


def _steps(chosen: Landscape, direction: Direction) -> list[float]:
    """To both sides; 0 is among them if the number of points is odd."""
    radius = _RADII[direction] if chosen.radius is None else chosen.radius
    last = chosen.points - 1
    return [radius * (2 * i - last) / last for i in range(chosen.points)]


def _between(chosen: Landscape, loaded: Loaded, other: "nn.Module") -> "Line":
    from surrogap.analysis import between

    label = f"0: {chosen.run}\n1: {chosen.other}"
    with bar("landscape") as tell:
        return between(loaded.surface, other, _line_steps(chosen), label=label, progress=tell)


def _around(chosen: Landscape, directions: Sequence[Direction], loaded: Loaded) -> "Line | Plane":
    from surrogap.analysis import line, plane

    surface = loaded.surface
    with bar("landscape") as tell:
        vectors, labels = _vectors(surface, directions, chosen.subject.seed, tell)
        steps = [_steps(chosen, direction) for direction in directions]
        if len(directions) == 1:
            return line(surface, vectors[0], steps[0], label=labels[0], progress=tell)
        names = (labels[0], labels[1])
        return plane(surface, vectors[0], vectors[1], *steps, labels=names, progress=tell)


def _vectors(
    surface: "Surface", directions: Sequence[Direction], seed: int, tell: Tell
) -> "tuple[list[Tensor], list[str]]":
    """The directions as vectors, and what to call them."""
    from surrogap.analysis import Hessian, eigenvalues, gradient_direction, random_direction

    vectors, labels = [], []
    num = directions.count("eigenvector")
    if num:
        pairs = eigenvalues(
            Hessian(surface), num, max_products=_MAX_PRODUCTS, seed=seed, progress=tell
        )
    for index, direction in enumerate(directions):
        place = directions[:index].count(direction)
        if direction == "random":
            vectors.append(random_direction(surface, seed + place))
            labels.append(f"random {seed + place} (filters)")
        elif direction == "gradient":
            vectors.append(gradient_direction(surface))
            labels.append("gradient")
        else:
            vectors.append(pairs.vectors[place])
            labels.append(f"eigenvector ({float(pairs.values[place]):.4g})")
    return vectors, labels


def _figures(
    found: "Line | Plane", chosen: Landscape, title: str, loaded: Loaded
) -> "list[Writer]":
    from surrogap.analysis import Line
    from surrogap.analysis.figures import contour, curves, relief

    loss = f"{loaded.config.objective.loss}, {loaded.num_images:,} images"
    if isinstance(found, Line):
        words = {} if chosen.other is None else {"xlabel": "fraction of the way from 0 to 1"}
        title = title if chosen.other is None else "from one run to another"
        return [curves([found], title=title, loss=loss, **words).savefig]
    return [draw(found, title=title, loss=loss).savefig for draw in (contour, relief)]
