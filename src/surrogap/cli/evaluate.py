"""`surrogap evaluate`: score a run on clean and shifted test sets.

surrogap evaluate runs/a
surrogap evaluate runs/b --votes data/cifar10h-counts.npy
surrogap evaluate runs/c --real data/real.json --v2 data/imagenetv2-matched-frequency-format-val
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from surrogap.checks import integer
from surrogap.cli.options import options
from surrogap.cli.results import Results, bar
from surrogap.experiments.tables import Table
from surrogap.training.flags import OptionalInt, OptionalPath, OptionalStr

if TYPE_CHECKING:
    from surrogap.data import Splits
    from surrogap.evaluation import Scores
    from surrogap.experiments.runs import Run
    from surrogap.experiments.trials import Places, Trial

RESULT = "evaluation"

# Where sets are looked for in the folder of the named sets, by the names that they come with.
_USUAL = {
    "votes": "cifar10h-counts.npy",
    "real": "real.json",
    "v2": "imagenetv2-matched-frequency-format-val",
    "r": "imagenet-r",
    "c": "imagenet-c",
}


@dataclass(frozen=True)
class Evaluate:
    """Score a run on clean and shifted test sets.

    Images that are in memory are corrupted as those of CIFAR-10-C are, in five severities. Other
    sets are used where they are found. The scores are written to evaluation.json.
    """

    run: Positional[Path]
    """The run's folder."""

    out: OptionalPath = None
    """The folder to write to. By default the run's."""

    data_root: OptionalStr = None
    """The folder that holds the named sets. By default the run's own."""

    download: bool = False
    """Whether to fetch a named set that is not there."""

    corruptions: bool = True
    """Whether to score corrupted images too, where the images are in memory."""

    votes: OptionalPath = None
    """People's votes on the test images, as CIFAR-10H has them: an .npy file, or an .npz archive.
    By default cifar10h-counts.npy among the named sets, or those in the run's own archive."""

    real: OptionalPath = None
    """ReaL's labels for ImageNet, real.json. By default where it is among the named sets."""

    v2: OptionalPath = None
    """ImageNet-V2's folder. By default imagenetv2-matched-frequency-format-val, likewise."""

    r: OptionalPath = None
    """ImageNet-R's folder. By default imagenet-r, likewise."""

    c: OptionalPath = None
    """ImageNet-C's folder. By default imagenet-c, likewise."""

    skip_damaged: bool = False
    """Leave damaged test image files out, with a warning. By default they are an error."""

    device: str = "auto"
    """cpu, cuda, or another of torch's devices. By default cuda where there is one."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the forward pass."""

    batch_size: int = 500
    """How many images are scored at once."""

    num_workers: OptionalInt = None
    """How many worker processes read files. By default the processors that there are, 8 at most."""


def main(arguments: Sequence[str]) -> int:
    """Evaluates a run, and returns the exit status.

    Raises:
        ValueError: There is no such run, it has no checkpoint, or a set is not there or not whole.
    """
    chosen = options(Evaluate, "evaluate", arguments)
    integer("batch_size", chosen.batch_size, at_least=1, remedy="Pass a number of images, as 500.")
    from surrogap.experiments.runs import Run

    run = Run.read(chosen.run)
    results = Results(run.folder if chosen.out is None else chosen.out, "evaluate", RESULT, [])
    scores = _scores(chosen, run)
    found = result(scores)
    table(found, str(run.folder)).print()
    results.write(found, {})
    print(results.told)
    return 0


def _scores(chosen: Evaluate, run: "Run") -> "list[tuple[Trial, Scores]]":
    import torch

    from surrogap.evaluation import evaluate
    from surrogap.experiments.trials import loading_of, trials
    from surrogap.training.processes import device_of
    from surrogap.training.step import DTYPES

    device = device_of(chosen.device)
    splits = _splits(chosen, run).to(device)
    model = run.network(splits, device)
    dtype = DTYPES[chosen.precision]
    loading = loading_of(
        chosen.batch_size, device, size=run.config.model.image_size, num_workers=chosen.num_workers
    )
    wanted = list(trials(splits, places(chosen, run), loading, with_corruptions=chosen.corruptions))
    scores = []
    with bar("evaluate") as tell:
        for index, trial in enumerate(wanted):
            tell(index, len(wanted), trial.name)
            found = evaluate(
                model,
                trial.batches(),
                truth=trial.truth,
                classes=trial.classes,
                autocast=None if dtype == torch.float32 else dtype,
                device=device,
                across_processes=False,
            )
            scores.append((trial, found))
    return scores


def _splits(chosen: Evaluate, run: "Run") -> "Splits":
    """Return the run's images, of which the test files are checked for damage."""
    from surrogap.data import intact
    from surrogap.training.images import images_of

    config = run.config.data
    skip_damaged = chosen.skip_damaged or config.skip_damaged
    # Training files are not read here, so they are not checked.
    every = replace(config, skip_damaged=False)
    splits = images_of(every, chosen.data_root, download=chosen.download)
    with bar("check image files") as tell:
        return intact(splits, ["test"], skip_damaged=skip_damaged, on_checked=tell)


def places(chosen: Evaluate, run: "Run") -> "Places":
    """Where the other sets are: as told, or where they usually are and suit the run."""
    from surrogap.data import archive_of
    from surrogap.experiments.trials import Places, has_votes

    data = run.config.data
    root = Path(chosen.data_root or data.data_root).expanduser()
    suit = {"cifar10": ("votes",), "imagenet": ("real", "v2", "r", "c")}.get(data.name, ())
    found = {name: getattr(chosen, name) for name in _USUAL}
    for name in suit:
        if found[name] is None and (root / _USUAL[name]).exists():
            found[name] = root / _USUAL[name]
    archive = archive_of(data.name, root)
    if found["votes"] is None and archive is not None and has_votes(archive):
        found["votes"] = archive
    return Places(**found)


def result(scores: "Sequence[tuple[Trial, Scores]]") -> dict[str, Any]:
    """What was found, for JSON: by set, and for corruptions by corruption and severity too."""
    sets = {trial.name: asdict(s) for trial, s in scores if trial.corruption is None}
    corrupted: dict[tuple[str, int], dict[str, Any]] = {
        trial.corruption: asdict(s) for trial, s in scores if trial.corruption is not None
    }
    if not corrupted:
        return {"sets": sets}
    names = list(dict.fromkeys(name for name, _ in corrupted))
    return {
        "sets": sets,
        "corruptions": {
            "mean": _mean(corrupted),
            "by_corruption": {
                name: _mean({key: s for key, s in corrupted.items() if key[0] == name})
                for name in names
            },
            "by_severity": {
                name: {str(key[1]): s for key, s in corrupted.items() if key[0] == name}
                for name in names
            },
        },
    }


def _mean(scores: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, float]:
    from surrogap.evaluation import mean_over_corruptions

    measures = ("accuracy", "top5", "loss", "calibration_error")
    return {
        measure: mean_over_corruptions({key: s[measure] for key, s in scores.items()})
        for measure in measures
    }


def table(found: Mapping[str, Any], title: str) -> Table:
    """A line for each set, and for each corruption over its severities."""
    rows = [(name, str(s["num_samples"]), *_cells(s)) for name, s in found["sets"].items()]
    if "corruptions" in found:
        corruptions = found["corruptions"]
        by_corruption = corruptions["by_corruption"]
        number = f"mean of {len(by_corruption)} corruptions"
        rows.append((number, "", *_cells(corruptions["mean"])))
        rows += [(f"  {name}", "", *_cells(s)) for name, s in by_corruption.items()]
    columns = ("set", "images", "accuracy %", "top-5 %", "loss", "calibration error %")
    return Table(columns, rows, title)


def _cells(scores: Mapping[str, float]) -> tuple[str, ...]:
    accuracy, top5 = (f"{100 * scores[name]:.2f}" for name in ("accuracy", "top5"))
    return accuracy, top5, f"{scores['loss']:.4f}", f"{100 * scores['calibration_error']:.2f}"
