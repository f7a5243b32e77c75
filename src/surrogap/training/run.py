"""The training loop, from the first batch to the last checkpoint."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from torch import nn

from surrogap.core.rho import radius
from surrogap.errors import InvalidValueError, UserError
from surrogap.evaluation import evaluate
from surrogap.training.checkpoints import Checkpoints, State
from surrogap.training.components import components_of
from surrogap.training.config import Config
from surrogap.training.failure import DivergedError
from surrogap.training.folder import CHECKPOINTS, check_folder, prepare_folder
from surrogap.training.objective_configs import PerturbedConfig
from surrogap.training.probe import MakeProbe, probe_of
from surrogap.training.processes import World, joined
from surrogap.training.progress import NoDisplay, ProgressDisplay
from surrogap.training.records import Meter, Record, Records, read_records
from surrogap.training.signals import StopRequest, stop_requests
from surrogap.training.state import (
    load_random_states,
    load_weights_and_moments,
    random_states,
    share_buffers,
    weights_and_moments,
)
from surrogap.training.step import AUTOCAST, NonFiniteLossError

# The seconds between two checkpoints: an epoch of a small dataset can take less time than saving a
# large model.
_CHECKPOINT_INTERVAL = 60.0


@final
@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        folder: The folder of the run.
        step: The number of steps taken.
        num_steps: The number of steps of the whole run.
        signal: The signal that asked to stop, perhaps during the last step; None without one.
        record: The record of the last epoch; None if no epoch is finished.
        model: The model with its last weights.
        is_first: True in the first process.
    """

    folder: Path
    step: int
    num_steps: int
    signal: signal.Signals | None
    record: Record | None
    model: nn.Module
    is_first: bool

    @property
    def is_finished(self) -> bool:
        """True if all steps were taken."""
        return self.step == self.num_steps


def train(
    config: Config,
    *,
    resume: bool = False,
    progress: ProgressDisplay | None = None,
    probe: MakeProbe | None = None,
) -> Outcome:
    """Train a model, with records and checkpoints in the folder of the run.

    Args:
        config: The configuration.
        resume: Continue from the newest checkpoint in the folder, or start if there is none. On the
            CPU the continued run is bit-identical.
        progress: The display; by default nothing is shown.
        probe: Builds the probe that measures the model every `sharpness_every` steps.

    Raises:
        ImportError: A package is not installed.
        DivergedError: The loss is not finite.
        RunFailedError: The folder cannot be written, for example because the disk is full.
        TypeError: A setting has the wrong type.
        ValueError: Settings do not fit together, images are missing or damaged, or the folder has
            another run or other files.
    """
    with joined(config.execution.device) as world:
        world.from_first(lambda: check_folder(config, resume=resume))
        shown = progress if progress is not None and world.is_first else NoDisplay()
        try:
            with closing(_Trainer(config, world, shown, probe)) as run, stop_requests() as requests:
                return run.train(requests)
        finally:
            shown.stop()


class _Trainer:
    """The state of a run in progress."""

    def __init__(
        self, config: Config, world: World, progress: ProgressDisplay, probe: MakeProbe | None
    ) -> None:
        self.config = config
        self.world = world
        self.progress = progress
        self.checkpoints = Checkpoints(config.folder / CHECKPOINTS)
        # The weights that a run started from may be gone, and a resumed run does not need them.
        is_resumed = world.from_first(lambda: bool(self.checkpoints.paths()))
        started = config.override(weights=None) if is_resumed else config
        self.components = components_of(started, world, progress.check)
        self.probe = probe_of(probe, config, self.components, world)
        world.from_first(lambda: prepare_folder(config, world))
        self.step = 0
        self.rho: float | None = None
        self.saved_at = time.monotonic()
        self.num_skipped = 0
        self.meters = [Meter(world) for _ in range(3)]
        self.interval, self.epoch, self.whole = self.meters
        self.records: Records | None = None  # in the first process only
        position = self._resume()
        world.from_first(lambda: self._open_records(position))

    def _open_records(self, position: int) -> None:
        self.records = Records(
            self.config.folder,
            position=position,
            step=self.step,
            tensorboard=self.config.output.tensorboard,
        )

    def train(self, requests: StopRequest) -> Outcome:
        """Run the loop: a step for each batch, and if due a record, an evaluation, a checkpoint."""
        components, output = self.components, self.config.output
        title = f"{self.config.model.name} {self.config.objective.name}"
        self.progress.start(title, self.step, components.num_steps)
        stopped_by = 0
        components.model.train()
        while self.step < components.num_steps and not stopped_by:
            for images, targets in components.images:
                components.rate.set_(components.optimizer, self.step)
                self._take_step(images, targets)
                self.progress.step(self.step)
                is_last = self.step == components.num_steps
                ends_epoch = components.images.position == len(components.images) or is_last
                if self.step % output.record_every == 0:
                    self._record("step", self.interval)
                if output.sharpness_every and self.step % output.sharpness_every == 0:
                    self._measure()
                if ends_epoch:
                    self._end_epoch(is_last)
                stopped_by = self.world.largest(requests.signal)
                if output.checkpoint_every != 0 and (
                    stopped_by or is_last or self._is_due(ends_epoch)
                ):
                    self._save()
                if stopped_by or is_last:
                    break
        return self._outcome(stopped_by)

    def _outcome(self, stopped_by: int) -> Outcome:
        return Outcome(
            folder=self.config.folder,
            step=self.step,
            num_steps=self.components.num_steps,
            signal=signal.Signals(stopped_by) if stopped_by else None,
            record=self.world.from_first(lambda: _last_epoch(self.config.folder)),
            model=self.components.model,
            is_first=self.world.is_first,
        )

    def _take_step(self, images: torch.Tensor, targets: torch.Tensor) -> None:
        self.step += 1
        if isinstance(self.config.objective, PerturbedConfig):
            self.rho = radius(self.components.objective.rho)
        try:
            metrics = self.components.step(images, targets)
        except NonFiniteLossError:
            self._skip()
            return
        self.num_skipped = 0
        for meter in (self.interval, self.epoch):
            meter.add(metrics)

    def _skip(self) -> None:
        self.num_skipped += 1
        self._write({"kind": "skip", "step": self.step, "in_a_row": self.num_skipped})
        if self.num_skipped > self.config.execution.max_skipped:
            self._fail(f"in {self.num_skipped} steps in a row")

    def _fail(self, what: str) -> NoReturn:
        reason = (
            f"loss must be finite, got infinity or NaN {what}, up to step {self.step} of "
            f"{self.config.folder}. Pass a smaller --lr or --rho, a --clip-norm or a longer "
            "warm-up, and another --out."
        )
        self._write({"kind": "failure", "step": self.step, "reason": reason})
        raise DivergedError(reason)

    def _record(self, kind: str, meter: Meter, **more: Any) -> None:
        """Write the means of a meter, and reset it."""
        means = meter.means()
        self._check_captured(means.pop("value"))
        num_images, overflows = meter.count * self.config.data.batch_size, means.pop("overflow")
        self._write(
            {
                "kind": kind,
                "step": self.step,
                **more,
                **means,
                "lr": self.components.optimizer.param_groups[0]["lr"],
                "rho": self.rho,
                "images_per_second": num_images / meter.seconds,
                "seconds": self.whole.seconds,
                **({"overflows": round(overflows * meter.count)} if overflows > 0 else {}),
            }
        )
        meter.reset()

    def _check_captured(self, value: float) -> None:
        """Stop a run whose captured steps had a non-finite loss, which is known only afterwards."""
        if self.config.execution.capture and not math.isfinite(value):
            self._fail("since the last record")

    def _end_epoch(self, is_last: bool) -> None:
        number = -(-self.step // len(self.components.images))
        scores = {}
        if is_last or number % self.config.output.eval_every == 0:
            with self._pause():
                scores = self._scores()
        self._record("epoch", self.epoch, epoch=number, **scores)
        losses = (value for name, value in scores.items() if name.endswith("_loss"))
        if is_last and not all(map(math.isfinite, losses)):
            self._fail("when the model was evaluated")

    def _measure(self) -> None:
        assert self.probe is not None
        with self._pause():
            measurements = self.probe()
        self._write({"kind": "sharpness", "step": self.step, **measurements})

    def _scores(self) -> dict[str, float]:
        share_buffers(self.components.model, self.world)
        names = ("loss", "accuracy", "top5", "calibration_error")
        found: dict[str, float] = {}
        for split, images in self.components.eval_images.items():
            scores = evaluate(
                self.components.model,
                images,
                autocast=AUTOCAST[self.config.execution.precision],
                device=self.world.device,
            )
            found |= {f"{split}_{name}": getattr(scores, name) for name in names}
        return found

    def _is_due(self, ends_epoch: bool) -> bool:
        every = self.config.output.checkpoint_every
        if every is not None:
            return self.step % every == 0
        return ends_epoch and self.world.from_first(
            lambda: time.monotonic() - self.saved_at > _CHECKPOINT_INTERVAL
        )

    def _save(self) -> None:
        if self.epoch.count:
            self._check_captured(self.epoch.means()["value"])
        with self._pause():
            state: State = {
                "step": self.step,
                "num_skipped": self.num_skipped,
                **weights_and_moments(self.components.model, self.components.optimizer),
                "scaler": self.components.step.state_dict(),
                "objective": self.components.objective.state_dict(),
                "images": self.components.images.state_dict(),
                "random": random_states(self.world),
                "meters": [meter.state_dict() for meter in self.meters],
            }

            def write() -> None:
                assert self.records is not None
                state["records"] = self.records.position()
                self.checkpoints.save(state, self.step)

            self.world.from_first(write)
            self.saved_at = time.monotonic()

    def _resume(self) -> int:
        """Load the newest checkpoint, if there is one, and return the length of its records."""
        large: dict[str, Any] = {"model": {}, "optimizer": {}}

        def read() -> State | None:
            state = self.checkpoints.newest()
            if state is not None:
                large.update({name: state.pop(name) for name in large})
            return state

        try:
            rest = self.world.from_first(read)
            return 0 if rest is None else self._load(large, rest)
        except UserError:
            raise
        except RuntimeError as error:
            if "loading state_dict" not in str(error):
                raise
            raise InvalidValueError(
                f"out must have a checkpoint of this model for these images, got "
                f"{self.config.folder}, whose checkpoint differs "
                f"({str(error).splitlines()[-1].strip()}) Check that the images are the same."
            ) from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidValueError(
                f"checkpoint must have the state of a run, got something else in "
                f"{self.checkpoints.folder} ({type(error).__name__}: {error}). Delete it."
            ) from error

    def _load(self, large: State, rest: State) -> int:
        load_weights_and_moments(
            self.components.model, self.components.optimizer, large, self.world
        )
        self.components.step.load_state_dict(rest["scaler"])
        self.components.objective.load_state_dict(rest["objective"])
        self.components.images.load_state_dict(rest["images"])
        load_random_states(rest["random"], self.world)
        for meter, state in zip(self.meters, rest["meters"], strict=True):
            meter.load_state_dict(state)
        self.step, self.num_skipped = rest["step"], rest["num_skipped"]
        position: int = rest["records"]
        return position

    def _write(self, record: Record) -> None:
        if self.records is not None:
            self.records.write(record)
            self.progress.record(record)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Context manager whose time does not count as training."""
        start = time.perf_counter()
        try:
            yield
        finally:
            for meter in self.meters:
                meter.leave_out(time.perf_counter() - start)

    def close(self) -> None:
        """Close the files that records are written to."""
        if self.records is not None:
            self.records.close()


def _last_epoch(folder: Path) -> Record | None:
    epochs = [record for record in read_records(folder) if record["kind"] == "epoch"]
    return epochs[-1] if epochs else None
