"""The study behind the tables and figures of `surrogap reproduce`: plan, train, draw."""

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, final

from surrogap.experiments.tables import Table
from surrogap.paper.artifacts import stages
from surrogap.paper.ledger import Ledger, Line
from surrogap.paper.plan import Stage, Todo, is_known, todo
from surrogap.paper.study import SCALES, Scale
from surrogap.training.arguments import at_least


@final
@dataclass(frozen=True)
class StudyOptions:
    """How a study is trained."""

    scale: Literal["laptop", "gpu"]
    data_root: str
    ledger: Path | None
    jobs: int
    time_limit: float | None
    compile: bool | None


def plan_study(name: str, options: StudyOptions) -> int:
    """Prints the runs that are left, with the time that each is expected to take."""
    scale, ledger, wanted = _opened(name, options)
    left = todo(scale, wanted, ledger, jobs=options.jobs)
    rows = [
        (
            item.run.purpose,
            item.run.title if item.is_ready else f"{item.run.cell}, as tuned, seed {item.run.seed}",
            f"{item.seconds:.0f} s",
        )
        for item in left
    ]
    Table(("purpose", "run", "expected"), rows).print()
    print(_summary(left, options.jobs))
    return 0


def train_study(name: str, options: StudyOptions) -> int:
    """Trains the runs that are left until time is up, and returns the exit status."""
    from surrogap.paper.running import Environment, Stopped
    from surrogap.paper.workers import Clock, WorkerError, train_all

    scale, ledger, wanted = _opened(name, options)
    environment = Environment(scale, options.data_root, options.jobs, options.compile)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        left = train_all(
            wanted,
            ledger,
            environment,
            clock=Clock(options.time_limit),
            tell=_Teller(options.jobs),
        )
    except Stopped as stopped:
        print(
            f"surrogap: {stopped.signal.name} stopped surrogap reproduce. Finished runs are in "
            f"{ledger.path}, and the same command trains the others.",
            file=sys.stderr,
        )
        return 128 + stopped.signal
    except WorkerError as error:
        print(f"surrogap: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    print(_summary(left, options.jobs))
    return 0


def _opened(name: str, options: StudyOptions) -> tuple[Scale, Ledger, list[Stage]]:
    at_least("jobs", options.jobs, 1, remedy="Pass a number of processes, as 4.")
    scale = SCALES[options.scale]
    ledger = Ledger((options.ledger or Path(scale.ledger)).expanduser())
    for remark in ledger.remarks:
        print(remark)
    wanted = stages(name)
    cells = [cell for stage in wanted for cell in stage.cells if cell.setup in scale.setups]
    unknown = dict.fromkeys(cell.method for cell in cells if not is_known(cell, scale))
    if unknown:
        print(f"Left out, since this version cannot be configured for them: {', '.join(unknown)}.")
    return scale, ledger, wanted


def _stop(number: int, frame: FrameType | None) -> None:
    from surrogap.paper.running import Stopped

    raise Stopped(signal.Signals(number))


@final
class _Teller:
    """Prints a line for each finished run."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    def __call__(self, line: Line, left: Sequence[Todo]) -> None:
        words = [f"{line['title']}:"]
        if line["kind"] == "failure":
            words.append("failed")
        else:
            words.append(f"validation {100 * line['val']['accuracy']:.2f} %,")
            if "scores" in line:
                words.append(f"test {100 * line['scores']['test']['accuracy']:.2f} %,")
            words.append(f"training {100 * line['train']['accuracy']:.2f} %,")
            words.append(f"{line['seconds']:.0f} s")
        print(time.strftime("%H:%M:%S"), *words, f"({len(left)} left)", flush=True)


def _summary(left: Sequence[Todo], jobs: int) -> str:
    if not left:
        return "All runs are finished."
    minutes = sum(item.seconds for item in left) / 60 / jobs
    at_once = f", {jobs} at once" if jobs > 1 else ""
    return f"{len(left)} runs are left, about {minutes:.0f} minutes{at_once}."
