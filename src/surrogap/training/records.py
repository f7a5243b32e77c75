"""What a run saw: one JSON line per interval and per epoch, and the same for TensorBoard.

Every line of `records.jsonl` has a `kind` and the `step` after which it was written:

* "step", every `record_every` steps: the means since the last one of loss, perturbed_loss, gap,
  grad_norm, perturbed_grad_norm, cosine and accuracy (on the training images as augmented); lr and
  rho of the step; images_per_second; seconds since the run began, pauses left out; and, where there
  were any, overflows: how many steps had a gradient that was not finite, which fp16's scaler drops.
* "epoch": the same over the epoch; epoch, from 1; and, where it was evaluated, test_loss,
  test_accuracy, test_top5 and test_calibration_error, or the same of val (`eval_on`).
* "sharpness", every `sharpness_every` steps: what the probe measured between two steps on some
  training images; see `surrogap.experiments.probes`.
* "skip": a step without effect, since its loss was not finite; in_a_row, how many there were.
* "failure": the run's end before its last step; reason, in a sentence.

What is not finite, or not measured, is null.
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

from surrogap.training.failure import RunFailedError
from surrogap.training.folder import RECORDS, TENSORBOARD
from surrogap.training.processes import World
from surrogap.training.step import MEASURES

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
        self._file.truncate(position)
        self._file.seek(position)

    def _lock(self) -> None:
        """Keeps other processes from the run until this one ends, however it does."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(
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
                f"records must fit on the disk, got {error.strerror} for {self.path}. The last "
                "checkpoint is intact: make room, then pass --resume."
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
    lines = path.read_bytes().split(b"\n")[
        :-1
    ]  # behind the last newline is nothing, or half a line
    return [_record_of(line, f"line {number} of {path}") for number, line in enumerate(lines, 1)]


def _record_of(line: bytes, place: str) -> Record:
    try:
        record: Record = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"records must be lines of JSON, got something else in {place}. Remove the line, or "
            "bring the file back from a copy."
        ) from error
    return record


@final
class Meter:
    """Means of what steps measure, kept on the device until they are read, and the time they took.

    Args:
        world: The processes.
        drops_overflows: Whether steps whose gradients are not finite have no effect, as with fp16.
            Norms and cosine are those of the other steps then.

    >>> meter = Meter(World(torch.device("cpu")))
    >>> for loss in (1.0, 3.0):
    ...     meter.add(torch.tensor([loss] * len(MEASURES)))
    >>> meter.means()["loss"]
    2.0
    """

    def __init__(self, world: World, *, drops_overflows: bool = False) -> None:
        self._world = world
        self._drops_overflows = drops_overflows
        norms = ("grad_norm", "perturbed_grad_norm", "cosine")
        self._are_norms = torch.tensor([name in norms for name in MEASURES], device=world.device)
        self.reset()

    def reset(self) -> None:
        """Begins anew."""
        # The last is the number of overflows.
        self._sums = torch.zeros(len(MEASURES) + 1, device=self._world.device)
        self.count = 0
        self._start = time.perf_counter()

    def add(self, measures: torch.Tensor) -> None:
        """Adds what a step measured, without waiting for it."""
        self.count += 1
        if self._drops_overflows:
            overflows = _overflows(measures)
            self._sums[-1] += overflows
            measures = torch.where(overflows & self._are_norms, 0.0, measures)
        self._sums[:-1] += measures

    def means(self) -> dict[str, float]:
        """The means over steps and processes. Reading them waits for the device."""
        *sums, overflows = self._world.mean(self._sums).unbind()
        counts = self.count - self._are_norms * overflows
        return dict(zip(MEASURES, (torch.stack(sums) / counts).tolist(), strict=True))

    @property
    def num_overflows(self) -> int:
        """How many steps were dropped. Reading it waits for the device."""
        return round(float(self._sums[-1])) if self._drops_overflows else 0

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
        self._sums = torch.zeros_like(self._sums)
        self._sums[: len(own)] = own  # older checkpoints do not count overflows
        self.count = state["count"]
        self._start = time.perf_counter() - state["seconds"]


def _overflows(measures: torch.Tensor) -> torch.Tensor:
    """Whether a gradient was not finite, in whichever pass that there was."""
    finite = dict(zip(MEASURES, measures.isfinite().unbind(), strict=True))
    return ~finite["grad_norm"] | (finite["perturbed_loss"] & ~finite["perturbed_grad_norm"])


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"tensorboard must be installed to write for it, got {error}. Run pip install "
            "'surrogap[train]', or pass --no-tensorboard."
        ) from error
    return SummaryWriter


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
