"""`surrogap evaluate`: evaluate a run on clean and shifted test sets.

surrogap evaluate runs/a
surrogap evaluate runs/b --votes data/cifar10h-counts.npy
surrogap evaluate runs/c --real data/real.json --v2 data/imagenetv2-matched-frequency-format-val
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from surrogap.checks import integer
from surrogap.cli.options import RunFolder, options
from surrogap.cli.terminal import progress_bar
from surrogap.experiments.result_files import ResultFiles
from surrogap.training.flags import OptionalInt, OptionalPath, OptionalStr


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a run on clean and shifted test sets.

    Images in memory are corrupted like those of CIFAR-10-C, at five severities. Other test sets are
    used if they are found. The scores are written to evaluation.json.
    """

    run: RunFolder
    """The folder of the run."""

    out: OptionalPath = None
    """The folder for the results. By default the folder of the run."""

    data_root: OptionalStr = None
    """The folder of named datasets. By default that of the run."""

    download: bool = False
    """Download the dataset if it is missing."""

    corruptions: bool = True
    """Evaluate on corrupted images too, if the images are in memory."""

    votes: OptionalPath = None
    """Human labels of the test images, as in CIFAR-10H: an .npy file or an .npz archive. By
    default cifar10h-counts.npy in --data-root, or the votes in the dataset's archive."""

    real: OptionalPath = None
    """The ReaL labels for ImageNet. By default real.json in --data-root, if it exists."""

    v2: OptionalPath = None
    """The folder of ImageNet-V2. By default imagenetv2-matched-frequency-format-val in --data-root,
    if it exists."""

    r: OptionalPath = None
    """The folder of ImageNet-R. By default imagenet-r in --data-root, if it exists."""

    c: OptionalPath = None
    """The folder of ImageNet-C. By default imagenet-c in --data-root, if it exists."""

    skip_damaged: bool = False
    """Leave damaged test image files out, with a warning. By default they are an error."""

    device: str = "auto"
    """cpu, cuda, or another torch device. auto: cuda if available."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The precision of the forward pass."""

    batch_size: int = 500
    """The number of images per batch."""

    num_workers: OptionalInt = None
    """The number of worker processes that read image files. By default the number of CPU cores, at
    most 8."""


def main(arguments: Sequence[str]) -> int:
    """Evaluate a run, and return the exit status.

    Raises:
        ValueError: The run has no checkpoint, or a test set is missing or incomplete.
    """
    chosen = options(Evaluate, "evaluate", arguments)
    integer(
        "batch_size", chosen.batch_size, at_least=1, remedy="Pass a number of images, such as 500."
    )
    from surrogap.experiments.eval_scores import evaluate_run, score_table
    from surrogap.experiments.eval_sets import (
        EvalSetPaths,
        batch_maker,
        eval_sets,
        intact_test_images,
    )
    from surrogap.experiments.trained import TrainedRun
    from surrogap.training.processes import device_of
    from surrogap.training.step import AUTOCAST

    run = TrainedRun.read(chosen.run)
    files = ResultFiles(chosen.out or run.folder, "evaluate", "evaluation", [])
    device, own = device_of(chosen.device), run.config.data
    data = replace(
        own,
        data_root=chosen.data_root or own.data_root,
        skip_damaged=chosen.skip_damaged or own.skip_damaged,
    )
    with progress_bar("check image files") as progress:
        splits = intact_test_images(data, download=chosen.download, on_checked=progress)
    splits = splits.to(device)
    paths = EvalSetPaths(chosen.votes, chosen.real, chosen.v2, chosen.r, chosen.c)
    paths = paths.or_found(data.name, Path(data.data_root).expanduser())
    sets = list(eval_sets(splits, paths, with_corruptions=chosen.corruptions))
    make_batches = batch_maker(
        chosen.batch_size, device, size=run.config.model.image_size, num_workers=chosen.num_workers
    )
    with progress_bar("evaluate") as progress:
        autocast = AUTOCAST[chosen.precision]
        scores = evaluate_run(
            run, splits, sets, make_batches, device, autocast=autocast, progress=progress
        )
    score_table(scores, str(run.folder)).print()
    files.write(scores, {})
    print(files.summary)
    return 0
