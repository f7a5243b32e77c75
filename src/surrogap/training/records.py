"""The records of a run: a JSON line for each interval and epoch, and the same for TensorBoard.

Every line of `records.jsonl` has a `kind` and the `step` after which it was written:

* "step", every `record_every` steps: the means since the last record of loss, perturbed_loss, gap,
  grad_norm, perturbed_grad_norm, cosine and accuracy (on augmented training images), each over the
  steps that measured it; lr; rho, also after a step with the plain gradient; images_per_second;
  seconds of training, without evaluation and checkpoints; and, if there were any, overflows: the
  number of steps that the gradient scaler of fp16 skipped.
* "epoch": the same over the epoch; epoch, from 1; and, if it was evaluated, test_loss,
  test_accuracy, test_top5 and test_calibration_error, or the same for val (`eval_on`).
* "sharpness", every `sharpness_every` steps: the measurements of the probe on some training images;
  see `surrogap.experiments.probes`.
* "skip": a step that was skipped because its loss was not finite; in_a_row, the number of
  consecutive skips.
* "failure": the end of the run before its last step; reason, a sentence.

Values that are not finite or not measured are null. loss and gap are null if no pass computes f(w)
on the whole batch, as with momentum-sam and climb_fraction; `training_loss` is then the perturbed
loss.
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
    """Writer of a run's records, which continues from a position.

    Args:
        folder: The folder of the run.
        position: The length of the file, in bytes, at the checkpoint that the run resumes from.
            What follows is removed.
        step: The step of that checkpoint.
        tensorboard: Also write for TensorBoard.

    Raises:
        ImportError: TensorBoard is not installed.
        RunFailedError: The records cannot be written.
        ValueError: Another process is writing them, or they are damaged.

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
        with self._checked_disk():
            self.path.touch()
            self._file = self.path.open("r+b")
            try:
                self._lock()
                self._truncate(position)
                # Events after this step are written again.
                self._writer: Any = writer and writer(folder / TENSORBOARD, purge_step=step + 1)
            except (OSError, ValueError):
                self._file.close()
                raise

    def _truncate(self, position: int) -> None:
        lines = self._file.read(position)
        if len(lines) < position:
            warnings.warn(
                f"records must be as long as at the checkpoint, got {len(lines)} of {position} "
                f"bytes in {self.path}. The missing records cannot be restored.",
                stacklevel=4,
            )
            position = lines.rfind(b"\n") + 1
        _records_of(lines[:position], self.path)  # damage is found now, not at the end
        self._file.truncate(position)
        self._file.seek(position)

    def _lock(self) -> None:
        """Lock the run for other processes until this process ends."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidValueError(
                f"out must not be in use by another process, got {self.path.parent}. "
                "Wait for it to end, or pass another folder."
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one line.

        Raises:
            RunFailedError: The records cannot be written.
        """
        line = json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False)
        with self._checked_disk():
            self._file.write(line.encode() + b"\n")
            self._file.flush()
            if self._writer is not None:
                self._write_scalars(record)

    def position(self) -> int:
        """Flush the records to the disk, and return their length in bytes.

        Raises:
            RunFailedError: The records cannot be written.
        """
        with self._checked_disk():
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the files."""
        # Closing writes what is left in buffers. If that fails, the error has been raised before.
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
    def _checked_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailedError(
                f"Cannot write {self.path}: {error.strerror}. {disk_remedy(error)}, then pass "
                "--resume."
            ) from error


def read_records(folder: Path) -> list[Record]:
    """Read the records of the run in a folder; an empty list if there are none.

    An incomplete last line, from a process that died, is left out.

    Raises:
        ValueError: A line is not a record.
    """
    path = folder / RECORDS
    if not path.is_file():
        return []
    return _records_of(path.read_bytes(), path)


def _records_of(content: bytes, path: Path) -> list[Record]:
    lines = content.split(b"\n")[:-1]  # what follows the last newline is empty or incomplete
    return [_record_of(line, f"line {number} of {path}") for number, line in enumerate(lines, 1)]


def _record_of(line: bytes, place: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not {"kind", "step"} <= record.keys():
        raise InvalidValueError(
            f"records must be JSON objects with kind and step, got something else in {place}. "
            "Remove the line, or restore the file from a copy."
        )
    return record


@final
class Meter:
    """Means of the metrics over steps, accumulated on the device, and the training time.

    A mean is over the steps that measured a metric. The mean of "value" is over all steps, so it is
    finite only if it was finite in each of them.

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
        """Clear the sums, and restart the clock."""
        # For each metric, its sum and the number of steps that measured it.
        self._sums = torch.zeros(2, len(METRICS), device=self._world.device)
        self.count = 0
        self._start = time.perf_counter()

    def add(self, metrics: torch.Tensor) -> None:
        """Add the metrics of a step, without waiting for the device."""
        self.count += 1
        counts = metrics.isfinite() | self._is_value
        self._sums += torch.stack([torch.where(counts, metrics, 0.0), counts.to(metrics)])

    def means(self) -> dict[str, float]:
        """Return the means over steps and processes. This waits for the device."""
        sums, counts = self._world.mean(self._sums).unbind()
        return dict(zip(METRICS, (sums / counts).tolist(), strict=True))

    @property
    def seconds(self) -> float:
        """The training time, without pauses."""
        return time.perf_counter() - self._start

    def leave_out(self, seconds: float) -> None:
        """Subtract a pause from the time."""
        self._start += seconds

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of all processes, the number of steps and the time."""
        sums = self._world.gathered(self._sums.cpu())
        return {"sums": sums, "count": self.count, "seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, possibly from another number of processes."""
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
            f"tensorboard must be installed, got {error}. Run pip install 'surrogap[train]', or "
            "pass --no-tensorboard."
        ) from error
    return SummaryWriter


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
