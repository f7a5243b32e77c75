"""The records of a run: one JSON line per interval and per epoch, and the same for TensorBoard.

Every line of `records.jsonl` has a `kind` and the `step` after which it was written:

* "step", every `record_every` steps: the means since the last one of loss, perturbed_loss, gap,
  grad_norm, perturbed_grad_norm, cosine and accuracy (on the training images as augmented), each
  over the steps that measured it; lr of the step, and rho, or the radius that a step with the
  objective would have where this one is plain; images_per_second; seconds since the run began,
  pauses left out; and, where there were any, overflows: the number of steps that fp16's scaler
  skipped because a gradient was not finite.
* "epoch": the same over the epoch; epoch, from 1; and, where it was evaluated, test_loss,
  test_accuracy, test_top5 and test_calibration_error, or the same of val (`eval_on`).
* "sharpness", every `sharpness_every` steps: what the probe measured between two steps on some
  training images; see `surrogap.experiments.probes`.
* "skip": a step without effect, since its loss was not finite; in_a_row, how many there were.
* "failure": the run's end before its last step; reason, in a sentence.

What is not finite, or not measured, is null: loss and gap where no pass computes f(w) on the whole
batch, as with momentum-sam and climb_fraction. There, `training_loss` is the perturbed one.
"""

import fcntl
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

import torch

from surrogap.errors import InvalidValueError, MissingPackageError
from surrogap.training.failure import RunFailedError, disk_remedy
from surrogap.training.folder import RECORDS, TENSORBOARD
from surrogap.training.processes import World
from surrogap.training.step import METRICS

Record = dict[str, Any]


@final
class Records:
    """The records of one run, to be written on from a position.

    Args:
        folder: The run's.
        position: How many bytes of the records there are to keep: what a checkpoint knew of.
        step: After how many steps that was.
        tensorboard: Whether to write for TensorBoard too.

    Raises:
        ImportError: TensorBoard is not installed.
        RunFailedError: They cannot be written.
        ValueError: Another process is writing them.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> records = Records(folder)
    >>> records.write({"kind": "step", "step": 1, "loss": math.nan})
    >>> records.close()
    >>> read_records(folder)
    [{'kind': 'step', 'step': 1, 'loss': None}]
    """

    def __init__(
        self, folder: Path, *, position: int = 0, step: int = 0, tensorboard: bool = False
    ) -> None:
        self.path = folder / RECORDS
        writer = _summary_writer() if tensorboard else None
        with self._complaining():
            self.path.touch()
            self._file = self.path.open("r+b")
            self._lock()
            self._go_on_from(position)
            try:
                # What comes after the step that the run goes on from is written anew.
                self._writer: Any = writer and writer(folder / TENSORBOARD, purge_step=step + 1)
            except OSError:
                self._file.close()
                raise

    def _go_on_from(self, position: int) -> None:
        lines = self._file.read(position)
        if len(lines) < position:
            warnings.warn(
                f"records must be as long as the checkpoint knew them, got {len(lines)} of "
                f"{position} bytes in {self.path}. What is missing stays missing.",
                stacklevel=4,
            )
            position = lines.rfind(b"\n") + 1
        try:
            _records_of(lines[:position], self.path)  # now, not when the run has ended
        except ValueError:
            self._file.close()
            raise
        self._file.truncate(position)
        self._file.seek(position)

    def _lock(self) -> None:
        """Keeps other processes from the run until this one ends, however it does."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise InvalidValueError(
                f"out must be a folder that no other process trains in, got {self.path.parent}. "
                "Wait for it to end, or pass another one."
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes one line.

        Raises:
            RunFailedError: The disk is full.
        """
        line = json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False)
        with self._complaining():
            self._file.write(line.encode() + b"\n")
            self._file.flush()
            if self._writer is not None:
                self._write_scalars(record)

    def position(self) -> int:
        """How many bytes there are, all of them on the disk.

        Raises:
            RunFailedError: The disk is full.
        """
        with self._complaining():
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Ends the files."""
        # Each tries again to write what could not be written, which has been told already.
        with suppress(OSError):
            self._file.close()
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()

    def _write_scalars(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, float) and math.isfinite(value):
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    @contextmanager
    def _complaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailedError(
                f"Cannot write {self.path}: {error.strerror}. {disk_remedy(error)}, then pass "
                "--resume."
            ) from error


def read_records(folder: Path) -> list[Record]:
    """The records of the run in a folder; none where there are none.

    A last line that was being written when the process died is left out.

    Raises:
        ValueError: Another line is no record.
    """
    path = folder / RECORDS
    if not path.is_file():
        return []
    return _records_of(path.read_bytes(), path)


def _records_of(content: bytes, path: Path) -> list[Record]:
    lines = content.split(b"\n")[:-1]  # after the last newline is nothing, or half a line
    return [_record_of(line, f"line {number} of {path}") for number, line in enumerate(lines, 1)]


def _record_of(line: bytes, place: str) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not {"kind", "step"} <= record.keys():
        raise InvalidValueError(
            f"records must be JSON objects with kind and step, got something else in {place}. "
            "Remove the line, or restore the file from a copy."
        )
    return record


@final
class Meter:
    """Means of a step's measurements, kept on the device until they are read, and their time.

    A mean is over the steps that measured a quantity; that of "value" is over all steps, so that it
    is finite only if all of them were.

    Args:
        world: The processes.

    >>> meter = Meter(World(torch.device("cpu")))
    >>> for loss in (1.0, torch.nan, 3.0):
    ...     meter.add(torch.tensor([loss] * len(METRICS)))
    >>> meter.means()["loss"], meter.means()["value"]
    (2.0, nan)
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_value = torch.tensor([name == "value" for name in METRICS], device=world.device)
        self.reset()

    def reset(self) -> None:
        """Start from no steps."""
        # For each measurement, its sum and the number of steps that made it.
        self._sums = torch.zeros(2, len(METRICS), device=self._world.device)
        self.count = 0
        self._start = time.perf_counter()

    def add(self, measures: torch.Tensor) -> None:
        """Add what a step measured, without waiting for it."""
        self.count += 1
        counts = measures.isfinite() | self._is_value
        self._sums += torch.stack([torch.where(counts, measures, 0.0), counts.to(measures)])

    def means(self) -> dict[str, float]:
        """The means over steps and processes. Reading them waits for the device."""
        sums, counts = self._world.mean(self._sums).unbind()
        return dict(zip(METRICS, (sums / counts).tolist(), strict=True))

    @property
    def seconds(self) -> float:
        """How long it took, pauses left out."""
        return time.perf_counter() - self._start

    def leave_out(self, seconds: float) -> None:
        """Has a pause not count."""
        self._start += seconds

    def state_dict(self) -> dict[str, Any]:
        """The sums of each process, and the time."""
        sums = self._world.gathered(self._sums.cpu())
        return {"sums": sums, "count": self.count, "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, also among another number of processes."""
        sums, rank = state["sums"], self._world.rank
        own = sums[rank] if len(sums) == self._world.size else torch.stack(sums).mean(0)
        self._sums = own.to(self._sums)
        self.count = state["count"]
        self._start = time.perf_counter() - state["seconds"]


def training_loss(record: Mapping[str, Any]) -> float | None:
    """Return a record's training loss: the perturbed one where f(w) was not computed.

    >>> training_loss({"loss": None, "perturbed_loss": 0.7})
    0.7
    """
    loss: float | None = record.get("loss")
    return record.get("perturbed_loss") if loss is None or math.isnan(loss) else loss


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingPackageError(
            f"tensorboard must be installed to write for it, got {error}. Run pip install "
            "'surrogap[train]', or pass --no-tensorboard."
        ) from error
    return SummaryWriter


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
