"""`surrogap landscape`: draw the loss around a run, or on the line between two runs.

surrogap landscape runs/a
surrogap landscape runs/a --directions eigenvector random
surrogap landscape runs/a runs/b
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from surrogap.checks import integer, number
from surrogap.cli.model_options import ModelOptions
from surrogap.cli.options import OptionalRunFolder, options
from surrogap.cli.terminal import print_cost, progress_bar
from surrogap.errors import InvalidValueError
from surrogap.experiments.result_files import ResultFiles, Writer
from surrogap.training.flags import OptionalFloat, OptionalPath, optional

if TYPE_CHECKING:
    from surrogap.analysis import Line, Plane
    from surrogap.experiments.surfaces import LoadedModel

DirectionName = Literal["random", "gradient", "eigenvector"]


@dataclass(frozen=True)
class Landscape:
    """Draw the loss around a run along one or two directions, or on the line between two runs.

    Images are not augmented, and the model is in evaluation mode. One direction gives a curve; two
    give a contour plot and a surface. The losses are written to a JSON file.
    """

    run: OptionalRunFolder = None
    """The folder of the run. Without a run, pass --model and --data."""

    other: Annotated[Positional[Path | None], optional("[RUN2]")] = None
    """The folder of a second run of the same model, to draw the line from RUN (0) to RUN2 (1)."""

    directions: Annotated[
        tuple[DirectionName, ...], arg(metavar="NAME [NAME]", help_behavior_hint="")
    ] = ()
    """One or two of random (filter-normalised), gradient and eigenvector (of the largest
    eigenvalue; if repeated, of the second largest). By default random."""

    points: int = 21
    """The number of points along each direction, or from RUN to RUN2."""

    radius: OptionalFloat = None
    """The distance to each side: in filter norms for random (default 1), Euclidean for the other
    directions (default 0.5). With RUN2: the extension of the line at both ends, as a fraction of
    its length (default 0)."""

    out: OptionalPath = None
    """The folder for the results. By default the folder of the run."""

    model_options: Annotated[ModelOptions, arg(name="model")] = field(default_factory=ModelOptions)


def main(arguments: Sequence[str]) -> int:
    """Draw the loss around a run or between two runs, and return the exit status.

    Raises:
        ValueError: The run or the model does not exist, or the options do not fit together.
    """
    chosen = options(Landscape, "landscape", arguments)
    directions = _checked_directions(chosen)
    model_options = replace(chosen.model_options, run=chosen.run)
    loaded = model_options.load()
    from surrogap.analysis import between
    from surrogap.experiments.landscapes import landscape_cost, loss_along
    from surrogap.experiments.trained import TrainedRun

    other = None
    if chosen.other is not None:
        other = TrainedRun.read(chosen.other).model(loaded.splits, loaded.device)
    to_other = [] if chosen.other is None else ["to", chosen.other.resolve().name]
    stem = "-".join(["landscape", *directions, *to_other])
    ends = ("-contour", "-surface") if len(directions) == 2 else ("",)
    names = [f"{stem}{end}.png" for end in ends]
    folder = chosen.out or model_options.folder("landscape")
    files = ResultFiles(folder, "landscape", stem, names)
    steps = _line_steps(chosen)
    num_points = chosen.points ** len(directions) if directions else len(steps)
    print_cost(landscape_cost(directions, num_points), f"over {loaded.num_images:,} images")
    found: Line | Plane
    with progress_bar("landscape") as progress:
        if other is not None:
            label = f"0: {chosen.run}\n1: {chosen.other}"
            found = between(loaded.surface, other, steps, label=label, progress=progress)
        else:
            found = loss_along(
                loaded.surface,
                directions,
                num_points=chosen.points,
                radius=chosen.radius,
                seed=model_options.seed,
                progress=progress,
            )
    values = {"subject": model_options.title, **loaded.description(), "other": chosen.other}
    writers = dict(zip(names, _figures(found, chosen, model_options.title, loaded), strict=True))
    files.write(values | asdict(found), writers)
    print(files.summary)
    return 0


def _checked_directions(chosen: Landscape) -> tuple[DirectionName, ...]:
    """Return the directions; empty between two runs."""
    integer("points", chosen.points, at_least=3, remedy="Pass a number such as 21.")
    if chosen.radius is not None:
        bound: Any = {"above": 0.0} if chosen.other is None else {}
        number("radius", chosen.radius, **bound, remedy="Pass a distance, such as 0.5.")
    directions = chosen.directions or ("random",)
    if chosen.other is not None:
        if chosen.directions:
            raise InvalidValueError(
                f"directions must be left out between two runs, got {' '.join(directions)}. "
                "Pass one run to draw the loss around it."
            )
        return ()
    if len(directions) > 2 or directions == ("gradient", "gradient"):
        raise InvalidValueError(
            f"directions must be one or two different ones, got {' '.join(directions)}. "
            "For example, pass --directions eigenvector random."
        )
    return directions


def _line_steps(chosen: Landscape) -> list[float]:
    """Return the points between two runs: from 0 to 1, and beyond both by the radius."""
    num = chosen.points - 1
    beyond = round((chosen.radius or 0.0) * num)
    return [i / num for i in range(-beyond, num + beyond + 1)]


def _figures(
    found: "Line | Plane", chosen: Landscape, title: str, loaded: "LoadedModel"
) -> list[Writer]:
    from surrogap.analysis import Line
    from surrogap.analysis.figures import contour, curves, relief

    loss = f"{loaded.config.objective.loss}, {loaded.num_images:,} images"
    if isinstance(found, Line):
        words = {} if chosen.other is None else {"xlabel": "fraction of the way from 0 to 1"}
        title = title if chosen.other is None else "from one run to another"
        return [curves([found], title=title, loss=loss, **words).savefig]
    return [draw(found, title=title, loss=loss).savefig for draw in (contour, relief)]
