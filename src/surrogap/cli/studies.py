"""The study of `surrogap reproduce`, from which its tables and figures are drawn."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from surrogap.checks import integer, number
from surrogap.cli.terminal import print_stopped
from surrogap.errors import InvalidValueError
from surrogap.experiments.result_files import ResultFiles
from surrogap.experiments.text_table import Table, filled
from surrogap.paper.artifacts import ARTIFACTS, drawn, stages
from surrogap.paper.imagenet_runs import paper_runs, train_runs
from surrogap.paper.ledger import Ledger, LedgerLine
from surrogap.paper.methods import METHODS
from surrogap.paper.plan import (
    Measurement,
    Stage,
    Todo,
    missing_measurements,
    relative_cost,
    step_timing,
    todo,
)
from surrogap.paper.reproductions import Reproduced
from surrogap.paper.scales import SCALES
from surrogap.paper.study import Scale
from surrogap.paper.study_page import write_page
from surrogap.training.flags import OptionalFloat, OptionalPath, OptionalStr, optional

ALL, TIMING, FIND_RHO = "all", "timing", "find-rho"
TITLES = {
    **{name: artifact.title for name, artifact in ARTIFACTS.items()},
    TIMING: "The cost of a step of every method, measured alone on the device, for fig-cost.",
    FIND_RHO: "The radii that surrogap find-rho suggests, to compare with the best of the study.",
    ALL: "All tables and figures of the study. The most informative runs are trained first.",
}
# The kinds of measurements that a name needs.
_MEASURED = {FIND_RHO: (FIND_RHO,), "fig-cost": (TIMING,), ALL: (TIMING, FIND_RHO)}


@dataclass(frozen=True)
class StudyOptions:
    """The options of `surrogap reproduce` for the study."""

    scale: Literal["laptop", "gpu", "paper"] = "laptop"
    """The size of the study. laptop: the embedded dataset, on a CPU. gpu: CIFAR, on one GPU.
    paper: ImageNet; prints the commands, and trains under torchrun."""

    data_root: str = "data"
    """The folder of named datasets, such as cifar10.npz."""

    ledger: OptionalPath = None
    """The file with the finished runs of the study. By default results/study.jsonl, or
    results/study_laptop.jsonl for --scale laptop."""

    jobs: int = 1
    """The number of runs to train at once, each in its own process."""

    time_limit: OptionalFloat = None
    """Start only runs that are expected to end within this time, in seconds. By default there is no
    limit."""

    dry_run: bool = False
    """List the missing runs and their expected time, and train nothing."""

    train: bool = True
    """Train the runs that are missing from the ledger."""

    draw: bool = True
    """Draw the table or figure after training."""

    page: OptionalPath = None
    """The Markdown file for a page with all tables and figures of the study. By default none is
    written."""

    compile: Annotated[bool | None, optional("{True,False}")] = None
    """Compile the models with torch.compile. By default as in each set-up."""

    weights: Path = Path("runs") / "study-weights"
    """The folder for the weights that table-transfer fine-tunes."""

    commit: OptionalStr = None
    """The commit of this code, for the ledger. By default git's."""

    out: OptionalPath = None
    """The folder for the results. By default runs/reproduce-NAME."""

    def folder(self, name: str) -> Path:
        """Return the folder for the results of a table or figure."""
        return (self.out or Path("runs") / f"reproduce-{name}").expanduser()


def reproduce_study(name: str, options: StudyOptions) -> int:
    """Train the runs of a table or figure, draw it, and return the exit status.

    Raises:
        ValueError: An option is not valid, or the images or the ledger are missing.
    """
    integer("jobs", options.jobs, at_least=1, remedy="Pass a number of processes, such as 4.")
    if options.time_limit is not None:
        number("time_limit", options.time_limit, remedy="Pass seconds, such as 500.")
    if options.scale == "paper":
        return _reproduce_on_imagenet(name, options.data_root)
    scale = SCALES[options.scale]
    ledger = Ledger((options.ledger or Path(scale.ledger)).expanduser())
    for remark in ledger.remarks:
        print(remark)
    wanted = [] if name in (TIMING, FIND_RHO) else stages(name, scale.left_out)
    missing = missing_measurements(scale, _MEASURED.get(name, ()), ledger)
    measurements = [step_timing(scale, ledger)] if name == TIMING else missing
    if options.dry_run:
        _print_plan(measurements, wanted, scale, ledger, options.jobs)
        return 0
    if not options.train and not ledger.path.exists():
        raise InvalidValueError(
            f"ledger must be a file with finished runs, got {ledger.path}, which does not exist. "
            "Pass another --ledger, or leave out --no-train."
        )
    status = _train(measurements, wanted, scale, ledger, options) if options.train else 0
    if status == 0 and options.draw:
        for one in ARTIFACTS if name == ALL else [name] if name in ARTIFACTS else []:
            _draw(one, scale, ledger, options.folder(one))
    if status == 0 and options.page is not None:
        write_page(options.page.expanduser(), scale, ledger)
        print(f"Page: {options.page}.")
    return status


def _reproduce_on_imagenet(name: str, data_root: str) -> int:
    """List the commands for ImageNet, or train the runs under torchrun."""
    from surrogap.training.processes import is_launched

    runs = paper_runs(name)
    if not is_launched():
        for run in runs:
            print(run.command)
        return 0
    stopped = train_runs(runs, data_root)
    if stopped is None or stopped.signal is None:
        return 0
    if stopped.is_first:
        print_stopped("reproduce", stopped.signal)
    return 128 + stopped.signal


def _print_plan(
    measurements: Sequence[Measurement],
    wanted: Sequence[Stage],
    scale: Scale,
    ledger: Ledger,
    jobs: int,
) -> None:
    left = todo(scale, wanted, ledger, jobs=jobs)
    rows: list[tuple[str, str, str]] = [
        (
            one.kind,
            one.title if one.is_ready(scale, ledger) else f"{one.title}, once one is tuned",
            f"{one.seconds:.0f} s",
        )
        for one in measurements
    ]
    rows += [(item.run.purpose, _title(item), f"{item.seconds:.0f} s") for item in left]
    if rows:
        Table(("purpose", "run", "expected"), rows).print()
    print(_summary(measurements, left, jobs))


def _title(item: Todo) -> str:
    """Return the title of a run, even if its settings are not known yet."""
    run = item.run
    if item.is_ready:
        return run.title
    if run.purpose == "tuning":
        return f"{run.title}, may change"
    return ", ".join(filter(None, (run.name, run.label, "as tuned", f"seed {run.seed}")))


def _summary(measurements: Sequence[Measurement], left: Sequence[Todo], jobs: int) -> str:
    if not measurements and not left:
        return "All runs are finished."
    seconds = sum(one.seconds for one in measurements) + sum(one.seconds for one in left) / jobs
    counts = {"measurement": len(measurements), "run": len(left)}
    words = (f"{number} {name}{'s' * (number > 1)}" for name, number in counts.items() if number)
    at_once = f", {jobs} at once" if jobs > 1 else ""
    minutes = max(round(seconds / 60), 1)
    time_left = f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
    return f"{' and '.join(words)} left, about {time_left}{at_once}."


def _train(
    measurements: Sequence[Measurement],
    wanted: Sequence[Stage],
    scale: Scale,
    ledger: Ledger,
    options: StudyOptions,
) -> int:
    import torch

    from surrogap.paper.running import Environment, Stopped
    from surrogap.paper.workers import train_study

    ledger.check_writable()
    if scale.name == "gpu" and not torch.cuda.is_available():
        raise InvalidValueError(
            "scale must be laptop without a CUDA device, got gpu. Pass --scale laptop, or "
            "--no-train to draw from the ledger."
        )
    environment = Environment(
        scale,
        data_root=options.data_root,
        jobs=options.jobs,
        compile=options.compile,
        weights=str(options.weights.expanduser()),
        commit=options.commit,
    )
    planned = todo(scale, wanted, ledger, jobs=options.jobs)
    if measurements or planned:
        print(_summary(measurements, planned, options.jobs), flush=True)
    try:
        waiting, left = train_study(
            wanted,
            ledger,
            environment,
            measurements=measurements,
            time_limit=options.time_limit,
            after_measurement=_print_measurement,
            after_run=_print_line,
        )
    except (Stopped, KeyboardInterrupt) as stopped:  # Ctrl-C between runs, or during several
        received = stopped.signal if isinstance(stopped, Stopped) else signal.SIGINT
        saved = f"Finished runs are in {ledger.path}. Run the same command to train the others."
        return print_stopped("reproduce", received, saved)
    if wanted or waiting or not measurements:
        print(_summary(waiting, left, options.jobs))
    if not left and not all(one.is_ready(scale, ledger) for one in waiting):
        print(
            "find-rho is compared with tuned radii. To tune some, run surrogap reproduce table-1."
        )
    return 0


def _print_measurement(line: LedgerLine) -> None:
    if line["kind"] == "find-rho":
        for method, suggestion in line["suggestions"].items():
            print(f"{line['setup']}, {METHODS[method].title}: {suggestion['words']}", flush=True)
        return
    rows = [
        (method, f"{1e3 * seconds:.3f}", f"{relative_cost(line, method):.2f}")
        for method, seconds in line["seconds_per_step"].items()
    ]
    Table(("method", "ms per step", "cost relative to vanilla"), rows).print()


def _print_line(line: LedgerLine, left: Sequence[Todo]) -> None:
    words = [f"{line['title']}:"]
    if line["kind"] == "failure":
        words.append(f"failed, {line['reason']}")
    else:
        scores = {
            "validation": line.get("val"),
            "test": line.get("scores", {}).get("test"),
            "training": line["train"],
        }
        found = [f"{name} {100 * s['accuracy']:.2f} %" for name, s in scores.items() if s]
        words.append(", ".join([*found, f"{line['seconds']:.0f} s"]))
    print(time.strftime("%H:%M:%S"), *words, f"({len(left)} left)", flush=True)


def _draw(name: str, scale: Scale, ledger: Ledger, folder: Path) -> None:
    found = drawn(name, scale, ledger)
    files = ResultFiles(folder, "reproduce", name, list(found.writers))
    files.write(found.numbers, found.writers)
    show(found, files)


def show(found: Reproduced, files: ResultFiles) -> None:
    """Print a table, the text below it, and the paths of its files."""
    if found.table.rows:
        found.table.print()
    for line in found.words:
        print(filled(line))
    print(files.summary)
