"""`surrogap show`: show a run or a comparison.

surrogap show runs/a
surrogap show runs/compare-fashion-mnist-gsam
surrogap show runs/a --png curves.png
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from surrogap.cli.options import RunFolder, options
from surrogap.errors import InvalidValueError
from surrogap.experiments.charts import CHART_WIDTH, chart, side_by_side
from surrogap.training.config import is_run
from surrogap.training.flags import OptionalPath


@dataclass(frozen=True)
class Show:
    """Show the summary and the curves of a run, or the table of a comparison."""

    run: RunFolder
    """The folder of a run, or of surrogap compare."""

    png: OptionalPath = None
    """The PNG file for the curves. By default curves.png, in the folder of the run."""


def main(arguments: Sequence[str]) -> int:
    """Show a run, and return the exit status.

    Raises:
        ValueError: The run does not exist, or has no records yet.
    """
    chosen = options(Show, "show", arguments)
    comparison = chosen.run / "comparison.json"
    if comparison.is_file() and not is_run(chosen.run):
        from surrogap.experiments.comparison import print_comparison, read_comparison

        print_comparison(*read_comparison(comparison), title=str(chosen.run))
        return 0
    from surrogap.experiments.run_summary import curves_of, draw_curves, summary_table
    from surrogap.experiments.trained import TrainedRun
    from surrogap.training.records import read_records

    run = TrainedRun.read(chosen.run)
    records = read_records(run.folder)
    if not records:
        raise InvalidValueError(
            f"run must have records, got none yet in {run.folder}. Train it for an epoch."
        )
    summary_table(run, records).print()
    curves, unit = curves_of(records)
    if not curves:  # the run failed before its first record
        return 0
    print()
    if (sys.stdout.encoding or "").lower().startswith("utf"):
        charts = [chart(label, curve, width=26, height=5) for label, curve in curves.items()]
        fits_two = shutil.get_terminal_size().columns >= 2 * CHART_WIDTH
        print(*(side_by_side(charts) if fits_two else charts), sep="\n")
    else:
        for label, curve in curves.items():
            print(f"{label}: from {curve[0][1]:.4g} to {curve[-1][1]:.4g}")
    path = chosen.png or run.folder / "curves.png"
    draw_curves(path, curves, str(run.folder), unit)
    print(f"\nCurves: {path}")
    return 0
