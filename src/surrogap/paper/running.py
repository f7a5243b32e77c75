"""One run of the study: trained in a temporary folder, scored, and summed up for the ledger."""

import gc
import hashlib
import math
import platform
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from surrogap.analysis.surface import Surface
from surrogap.data import Splits, TensorSet
from surrogap.evaluation import corrupted, evaluate
from surrogap.experiments.eval_scores import mean_scores
from surrogap.experiments.eval_sets import EvalSetPaths, archived_votes, batch_maker, eval_sets
from surrogap.experiments.probes import evaluating, sharpness_at
from surrogap.experiments.surfaces import (
    eval_batch_size,
    loss_fn_of,
    random_subset,
    unaugmented_loader,
)
from surrogap.paper.ledger import Line
from surrogap.paper.study import Scale, StudyRun
from surrogap.training.config import Config
from surrogap.training.failure import RunFailedError
from surrogap.training.images import images_of
from surrogap.training.objective_configs import USUAL_RHO
from surrogap.training.processes import World, device_of
from surrogap.training.records import Record, read_records
from surrogap.training.run import Outcome, train
from surrogap.training.step import DTYPES
from surrogap.training.versions import device_name, versions

NUM_POINTS = 100
# Drawn from the records of steps, and of epochs that were evaluated.
CURVES = ("loss", "gap", "cosine", "grad_norm", "accuracy")
EVALUATED = {"val_accuracy", "val_loss", "test_accuracy", "test_loss"}


@final
class Stopped(Exception):  # noqa: N818
    """The process was asked to end by a signal.

    Args:
        number: The signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.signal = number


@final
@dataclass(frozen=True)
class Environment:
    """The conditions of a run that do not change its results.

    Attributes:
        scale: The study.
        data_root: The folder of the named sets.
        jobs: The number of runs at once.
        compile: Whether to compile the model; None for the set-up's own choice.
        weights: The folder of the weights that fine-tuning starts from.
        commit: The commit of this code; None to ask git.
    """

    scale: Scale
    data_root: str = "data"
    jobs: int = 1
    compile: bool | None = None
    weights: str = "runs/study-weights"
    commit: str | None = None

    @property
    def changes(self) -> dict[str, Any]:
        """Values of the configuration, none of which changes the results."""
        more: dict[str, Any] = {"data_root": self.data_root}
        return more if self.compile is None else {**more, "compile": self.compile}

    def config(self, run: StudyRun, out: str) -> Config:
        """The configuration of a run that is trained to a folder."""
        return _recorded(run.config(**self.changes, out=out), self.scale.num_evaluations)


def finished(run: StudyRun, environment: Environment) -> Line:
    """Trains and scores a run, and returns its line of the ledger.

    A run whose loss is not finite returns a line of kind "failure", so that nobody tries again.

    Raises:
        Stopped: The process was asked to end.
        ValueError: The images are missing, or the configuration is not valid.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = environment.config(run, f"{folder}/run")
        line = _head(run, config, environment)
        try:
            if run.source is not None:
                kept = _trained(_kept(run.source, environment)).folder
                config = config.override(weights=str(kept))
            if _is_source(run, environment.scale):
                config = _kept(run, environment)
            outcome = _trained(config)
        except RunFailedError as failure:
            seconds = round(time.perf_counter() - start, 2)
            return line | {"kind": "failure", "reason": str(failure), "seconds": seconds}
        line |= _of_records(read_records(config.folder), config)
    device = device_of(config.execution.device)
    splits = _images(config).to(device)
    model, scale = outcome.model, environment.scale
    line["num_steps"] = outcome.num_steps
    images = unaugmented_loader(config, splits, World(device), eval_batch_size(config))
    line["train"] = _scored(model, images, config, device)
    if run.purpose == "final":
        line["scores"] = _scores(model, splits, config, device, scale)
    if run.purpose == "final" and run.source is None:
        line["sharpness"] = _sharpness(model, splits, config, scale.sharpness_images)
    line["seconds"] = round(time.perf_counter() - start, 2)
    del outcome, model
    _forget(config, device)
    return line


def _trained(config: Config) -> Outcome:
    """A run from its start to its end, or from its last checkpoint where it keeps some."""
    outcome = train(config, resume=True)
    if outcome.signal is not None:
        raise Stopped(outcome.signal)
    return outcome


def _kept(run: StudyRun, environment: Environment) -> Config:
    """The configuration of a run whose weights fine-tuning starts from: in a folder that stays."""
    folder = Path(environment.weights) / run.key
    config = environment.config(run, str(folder))
    return config.override(checkpoint_every=10**9)  # one, after the last step


def _is_source(run: StudyRun, scale: Scale) -> bool:
    return run.purpose == "final" and any(
        setup.source == run.setup
        and run.method in setup.methods
        and run.seed < scale.num_seeds[letter]
        and not run.label
        for letter, setup in scale.setups.items()
    )


def _recorded(config: Config, num_evaluations: int) -> Config:
    """About 100 points of each curve, some evaluations, and no checkpoint."""
    splits = _images(config)
    steps = config.schedule.epochs * max(len(splits.train) // config.data.batch_size, 1)
    return config.override(
        record_every=max(steps // NUM_POINTS, 1),
        eval_every=max(config.schedule.epochs // num_evaluations, 1),
        checkpoint_every=0,
        tensorboard=False,
    )


def _images(config: Config) -> Splits:
    data = config.data
    return _splits(
        *(data.name, data.data_root, data.train_per_class, data.val_per_class, data.train_labels)
    )


@cache
def _splits(name: str, root: str, train: int | None, val: int | None, labels: str) -> Splits:
    """A set's splits, which many runs share."""
    data = Config().override(
        data=name, data_root=root, train_per_class=train, val_per_class=val, train_labels=labels
    )
    return images_of(data.data)


def _head(run: StudyRun, config: Config, environment: Environment) -> Line:
    device = device_of(config.execution.device)
    splits = _images(config)
    values = config.to_dict()
    values["output"]["out"] = values["model"]["weights"] = values["data"]["data_root"] = None
    return {
        "kind": "run",
        "key": run.key,
        "title": run.title,
        "purpose": run.purpose,
        "setup": run.setup,
        "method": run.method,
        "label": run.label,
        "source": None if run.source is None else run.source.key,
        "settings": dict(run.settings),
        "seed": run.seed,
        "num_epochs": config.schedule.epochs,
        "scale": environment.scale.name,
        "jobs": environment.jobs,
        "images": _fingerprint(splits),
        "config": values,
        **provenance(device, environment),
    }


def provenance(device: torch.device, environment: Environment) -> dict[str, Any]:
    """Date, commit, hardware and versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": environment.commit or _commit(),
        "hardware": device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "versions": versions(),
    }


@cache
def _commit() -> str | None:
    """The commit that this code is of, with a plus where files differ; None outside of git."""
    folder = Path(__file__).parent
    try:
        words = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
        found = subprocess.run(words, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def _fingerprint(splits: Splits) -> str:
    """A hash of the training images and labels: runs on other images must not be mixed."""
    digest = hashlib.sha256()
    assert isinstance(splits.train, TensorSet)
    for tensor in (splits.train.images, splits.train.labels):
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def _of_records(records: Sequence[Record], config: Config) -> dict[str, Any]:
    """The records of a finished run, summed up: curves, last and best epoch, and the pace."""
    steps = [record for record in records if record["kind"] == "step"]
    epochs = [record for record in records if record["kind"] == "epoch"]
    evaluated = [record for record in epochs if EVALUATED & record.keys()]
    validated = [record for record in epochs if record.get("val_accuracy") is not None]
    paces = [record["images_per_second"] for record in epochs]
    found: dict[str, Any] = {}
    if validated:
        last, best = validated[-1], max(validated, key=lambda record: record["val_accuracy"])
        found["val"] = {name: last[f"val_{name}"] for name in ("accuracy", "loss")}
        found["best"] = {name: best[name] for name in ("epoch", *sorted(EVALUATED & best.keys()))}
    return found | {
        "seconds_per_step": config.data.batch_size / statistics.median(paces),
        "curves": _curves(steps, "step", CURVES) | _curves(evaluated, "epoch", sorted(EVALUATED)),
    }


def _curves(
    records: Sequence[Record], along: str, names: Sequence[str]
) -> dict[str, list[float | None]]:
    thinned = records[:: max(math.ceil(len(records) / NUM_POINTS), 1)]
    curves = {name: [_rounded(record.get(name)) for record in thinned] for name in (along, *names)}
    return {name: curve for name, curve in curves.items() if any(v is not None for v in curve)}


def _rounded(value: float | None) -> float | None:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _scored(
    model: nn.Module, batches: Any, config: Config, device: torch.device, **settings: Any
) -> dict[str, float]:
    dtype = DTYPES[config.execution.precision]
    autocast = None if dtype == torch.float32 else dtype
    return asdict(evaluate(model, batches, autocast=autocast, device=device, **settings))


def _scores(
    model: nn.Module,
    splits: Splits,
    config: Config,
    device: torch.device,
    scale: Scale,
) -> dict[str, dict[str, float]]:
    """Scores on the test images: clean, with people's votes where there are some, corrupted."""
    paths = EvalSetPaths(votes=archived_votes(config.data.name, config.data.data_root))
    make_batches = batch_maker(eval_batch_size(config), device, size=config.model.image_size)
    found = {
        one.name: _scored(model, one.batches(make_batches), config, device, truth=one.truth)
        for one in eval_sets(splits, paths, with_corruptions=False)
    }
    assert isinstance(splits.test, TensorSet)
    labels = splits.test.labels
    where = (config.data.name, config.data.data_root, str(device))
    sets = _corrupted(*where, tuple(scale.corruptions), tuple(scale.severities))
    each = {
        key: _scored(
            model, make_batches(replace(splits, test=TensorSet(images, labels))), config, device
        )
        for key, images in sets.items()
    }
    found["corrupted"] = mean_scores(each)
    found["corrupted"]["num_sets"] = len(each)
    return found


@cache
def _corrupted(
    name: str, root: str, device: str, kinds: tuple[str, ...], severities: tuple[int, ...]
) -> Mapping[tuple[str, int], Tensor]:
    """The corrupted test images of a set, which take longer to make than a run to score."""
    test = _splits(name, root, None, None, "clean").test
    assert isinstance(test, TensorSet)
    images = test.images.to(device)
    return {
        (kind, severity): corrupted(images, kind, severity)
        for kind in kinds
        for severity in severities
        if kind != "saturate" or images.shape[1] == 3
    }


def _sharpness(
    model: nn.Module, splits: Splits, config: Config, num_images: int
) -> dict[str, float]:
    """The dominant eigenvalue, and the gap at one radius for all methods, on training images."""
    world = World(device_of(config.execution.device))
    few, batch_size = random_subset(splits, num_images), eval_batch_size(config)
    batches = list(unaugmented_loader(config, few, world, batch_size))
    with evaluating(model):
        surface = Surface(model, batches, loss_fn_of(config.objective), is_checked=False)
        return sharpness_at(surface, USUAL_RHO)


def _forget(config: Config, device: torch.device) -> None:
    """Frees what one run leaves in a process that goes on to the next."""
    gc.collect()
    if config.execution.compile:
        # Each model is compiled for itself; without this, the cache fills up after eight of them.
        torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
