"""One run of the study: trained in a temporary folder, scored, and summarized for the ledger."""

import gc
import hashlib
import math
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from surrogap.data import Splits, TensorSet
from surrogap.errors import InvalidValueError
from surrogap.evaluation import corrupted, corruptions_of, evaluate
from surrogap.experiments.eval_scores import mean_scores
from surrogap.experiments.eval_sets import EvalSetPaths, archived_votes, batch_maker, eval_sets
from surrogap.experiments.probes import sharpness_at
from surrogap.experiments.surfaces import loss_fn_of, random_subset, unaugmented_loader
from surrogap.paper.ledger import LedgerLine
from surrogap.paper.study import Scale, StudyRun
from surrogap.training.config import Config
from surrogap.training.failure import DivergedError
from surrogap.training.groups import DataConfig
from surrogap.training.images import images_of
from surrogap.training.processes import World, device_of
from surrogap.training.records import Record, read_records
from surrogap.training.run import Outcome, train
from surrogap.training.step import AUTOCAST
from surrogap.training.versions import device_name, versions

NUM_POINTS = 100
# The radius of the surrogate gap in the ledger.
_GAP_RHO = 0.05
# The curves, from the records of steps, and of the epochs that were evaluated.
CURVES = ("loss", "gap", "cosine", "grad_norm", "accuracy")
EVALUATED = {"val_accuracy", "val_loss", "test_accuracy", "test_loss"}


@final
class Stopped(Exception):  # noqa: N818
    """Raised when a signal stops the process.

    Args:
        number: The signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.signal = number


@final
@dataclass(frozen=True)
class Environment:
    """The environment of a run, which does not change its results.

    Attributes:
        scale: The study.
        data_root: The folder of the named datasets.
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

    def device(self, setup: str) -> torch.device:
        """The device of a set-up."""
        return device_of(str(self.scale.setups[setup].changes.get("device", "auto")))

    def config(self, run: StudyRun, out: str) -> Config:
        """The configuration of a run: about 100 points of each curve, and no checkpoint."""
        config = run.config(**self.changes, out=out)
        epochs = config.schedule.epochs
        num_steps = epochs * max(len(_splits(config.data).train) // config.data.batch_size, 1)
        return config.override(
            record_every=max(num_steps // NUM_POINTS, 1),
            eval_every=max(epochs // self.scale.num_evaluations, 1),
            checkpoint_every=0,
            tensorboard=False,
        )

    def config_with_weights(self, run: StudyRun) -> Config:
        """The configuration of a run whose weights are kept, for fine-tuning to start from."""
        config = self.config(run, str(Path(self.weights) / run.key))
        return config.override(checkpoint_every=10**9)  # one checkpoint, after the last step


def train_and_score(run: StudyRun, environment: Environment) -> LedgerLine:
    """Train and score a run, and return its line of the ledger.

    A run whose loss is not finite returns a line of kind "failure", so that it is not tried again.

    Raises:
        RunFailedError: The disk is full.
        Stopped: A signal stopped the process.
        ValueError: The images are missing, or the configuration is not valid.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = environment.config(run, f"{folder}/run")
        line = _description(run, config, environment)
        try:
            if run.source is not None:
                weights = _train(environment.config_with_weights(run.source)).folder
                config = config.override(weights=str(weights))
            if _is_source(run, environment.scale):
                config = environment.config_with_weights(run)
            outcome = _train(config)
        except DivergedError as failure:
            seconds = round(time.perf_counter() - start, 2)
            return line | {"kind": "failure", "reason": str(failure), "seconds": seconds}
        line |= _summary(read_records(config.folder), config)
    line["num_steps"] = outcome.num_steps
    line |= _measurements(run, outcome.model, config, environment.scale)
    line["seconds"] = round(time.perf_counter() - start, 2)
    del outcome
    _free_memory(config)
    return line


def _train(config: Config) -> Outcome:
    outcome = train(config, resume=True)
    if outcome.signal is not None:
        raise Stopped(outcome.signal)
    return outcome


def _is_source(run: StudyRun, scale: Scale) -> bool:
    return run.purpose == "final" and any(
        setup.source == run.setup
        and run.method in setup.methods
        and run.seed < scale.num_seeds[letter]
        and not run.label
        for letter, setup in scale.setups.items()
    )


@cache
def _splits(data: DataConfig) -> Splits:
    """The splits of a dataset, which many runs share.

    Raises:
        ValueError: The images are missing, or not in an archive.
    """
    remedy = "docs/how-to/reproduce.md shows how to get the images for --data-root."
    try:
        splits = images_of(data)
    except InvalidValueError as error:
        raise InvalidValueError(f"{error} {remedy}") from error
    if not isinstance(splits.train, TensorSet):
        raise InvalidValueError(
            f"data_root must hold the archive {data.name}.npz, got {data.data_root}, which has "
            f"image files. {remedy}"
        )
    return splits


def _description(run: StudyRun, config: Config, environment: Environment) -> LedgerLine:
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
        "images": _fingerprint(_splits(config.data)),
        "config": values,
        **provenance(device_of(config.execution.device), environment),
    }


def provenance(device: torch.device, environment: Environment) -> dict[str, Any]:
    """Date, commit, hardware and versions."""
    found = versions()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": environment.commit or _commit(),
        "hardware": device_name(device) if device.type == "cuda" else found["processor"],
        "versions": found,
    }


@cache
def _commit() -> str | None:
    """The commit of this code, with a plus if files differ from it; None outside of a checkout."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():  # otherwise git describes a repository around the package
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--dirty=+"]
    try:
        found = subprocess.run(
            [*words, "--exclude=*"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def _fingerprint(splits: Splits) -> str:
    """A hash of the training images and labels: runs on different images must not be mixed."""
    digest = hashlib.sha256()
    assert isinstance(splits.train, TensorSet)
    for tensor in (splits.train.images, splits.train.labels):
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def _summary(records: Sequence[Record], config: Config) -> dict[str, Any]:
    """The records of a finished run: curves, last and best epoch, and the time of a step."""
    steps = [record for record in records if record["kind"] == "step"]
    epochs = [record for record in records if record["kind"] == "epoch"]
    evaluated = [record for record in epochs if EVALUATED & record.keys()]
    validated = [record for record in epochs if record.get("val_accuracy") is not None]
    speed = statistics.median(record["images_per_second"] for record in epochs)
    found: dict[str, Any] = {}
    if validated:
        last, best = validated[-1], max(validated, key=lambda record: record["val_accuracy"])
        found["val"] = {name: last[f"val_{name}"] for name in ("accuracy", "loss")}
        found["best"] = {name: best[name] for name in ("epoch", *sorted(EVALUATED & best.keys()))}
    return found | {
        "seconds_per_step": config.data.batch_size / speed,
        "curves": _curves(steps, "step", CURVES) | _curves(evaluated, "epoch", sorted(EVALUATED)),
    }


def _curves(
    records: Sequence[Record], along: str, names: Sequence[str]
) -> dict[str, list[float | None]]:
    """At most `NUM_POINTS` points of each curve that is not empty, to five digits."""
    curves = {}
    for name in (along, *names):
        values = [r.get(name) for r in records[:: max(math.ceil(len(records) / NUM_POINTS), 1)]]
        if any(value is not None for value in values):
            curves[name] = [float(f"{v:.5g}") if isinstance(v, float) else v for v in values]
    return curves


def _measurements(run: StudyRun, model: nn.Module, config: Config, scale: Scale) -> dict[str, Any]:
    """Scores and sharpness of a trained model."""
    device = device_of(config.execution.device)
    splits, world = _splits(config.data).to(device), World(device)
    images = unaugmented_loader(config, splits, world)
    found: dict[str, Any] = {"train": _scored(model, images, config)}
    if run.purpose == "final":
        found["scores"] = _scores(model, splits, config, scale)
    if run.purpose == "final" and run.source is None:
        few = random_subset(splits, scale.sharpness_images)
        batches = list(unaugmented_loader(config, few, world))
        loss_fn = loss_fn_of(config.objective)
        found["sharpness"] = sharpness_at(model, batches, loss_fn, _GAP_RHO)
    return found


def _scored(model: nn.Module, batches: Any, config: Config, **settings: Any) -> dict[str, float]:
    autocast, device = AUTOCAST[config.execution.precision], device_of(config.execution.device)
    return asdict(evaluate(model, batches, autocast=autocast, device=device, **settings))


def _scores(
    model: nn.Module, splits: Splits, config: Config, scale: Scale
) -> dict[str, dict[str, float]]:
    """Scores on the test images: clean, with human labels if there are some, and corrupted."""
    data, device = config.data, device_of(config.execution.device)
    paths = EvalSetPaths(votes=archived_votes(data.name, data.data_root))
    batch_size = data.batch_size_in_evaluation()
    make_batches = batch_maker(batch_size, device, size=config.model.image_size)
    found = {
        one.name: _scored(model, one.batches(make_batches), config, truth=one.truth)
        for one in eval_sets(splits, paths, with_corruptions=False)
    }
    assert isinstance(splits.test, TensorSet)
    kinds = tuple((kind, severity) for kind in scale.corruptions for severity in scale.severities)
    each = []
    for images in _corrupted(data.name, data.data_root, str(device), kinds):
        test = TensorSet(images, splits.test.labels)
        each.append(_scored(model, make_batches(replace(splits, test=test)), config))
    found["corrupted"] = mean_scores(each) | {"num_sets": len(each)}
    return found


@cache
def _corrupted(
    name: str, root: str, device: str, kinds: tuple[tuple[str, int], ...]
) -> list[Tensor]:
    """The corrupted test images of a dataset. Making them takes longer than scoring a run."""
    test = _splits(DataConfig(name=name, data_root=root)).test
    assert isinstance(test, TensorSet)
    images, known = test.images.to(device), corruptions_of(test.images.shape[1])
    return [corrupted(images, kind, severity) for kind, severity in kinds if kind in known]


def _free_memory(config: Config) -> None:
    """Free the memory that a run leaves behind, for the next run in the same process."""
    gc.collect()
    if config.execution.compile:
        # Each model is compiled separately; without this, the cache is full after eight of them.
        torch.compiler.reset()
    torch.cuda.empty_cache()
