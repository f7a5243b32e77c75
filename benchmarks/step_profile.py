"""Profile of a GSAM step: a timeline of its kernels, and its cost by model and batch size.

Draws one step on the GPU's clock: eager, as a CUDA graph, and as a CUDA graph of a compiled model,
with each kernel in the colour of its phase. Also draws the cost relative to two passes against
parameters and batch size. It needs a GPU, except with --draw, which draws from a record.

    python benchmarks/step_profile.py --json results/step_profile.json --out docs/explanation
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from provenance import provenance, write
from rich.console import Console
from rich.progress import track
from step_cost import (
    GRAPHS,
    Section,
    Step,
    add_cores,
    captured,
    captured_plain,
    keep_to,
    measure,
    ours,
    plain,
)
from torch.profiler import ProfilerActivity, profile
from workloads import ADAMW, CASES, Case, Workload, vit_cifar

from surrogap import GSAM

mpl.use("agg")
import matplotlib.pyplot as plt

CASE = "resnet18_cifar_128"
GSAM_EAGER, GSAM_CAPTURED = (way(GSAM, rho=0.05, alpha=0.4) for way in (ours, captured))
COLOURS = {
    "first pass": "#9ecae1",
    "climb": "#e6550d",
    "second pass": "#3182bd",
    "combination": "#a63603",
    "statistics": "#74c476",
    "update": "#636363",
}
# Sections for the cost of GSAM relative to two passes, eager and captured.
SECTIONS = {
    "eager": Section(
        {"vanilla": plain, "floor": partial(plain, num_passes=2), "GSAM": GSAM_EAGER}, "floor"
    ),
    "captured": Section(
        {"vanilla": plain, "captured vanilla": captured_plain, "GSAM": GSAM_CAPTURED},
        "captured vanilla",
        **GRAPHS,
    ),
}
WIDTHS, BATCHES = (96, 192, 384, 768, 1152), (16, 32, 64, 128, 256, 512)


def vit(width: int = 384, batch_size: int = 128) -> Case:
    network = partial(vit_cifar, width=width, depth=12, num_heads=width // 64 or 1)
    return Case("ViT", network, batch_size, **ADAMW)


def phases(names: Iterable[str]) -> list[str]:
    """The phase of each kernel of a step, in order; surrogap's own kernels delimit the phases."""
    result, phase = [], "first pass"
    for name in names:
        if name.startswith(("save_kernel", "restore_kernel")):
            result.append("statistics")
            continue
        if name.startswith(("copy_kernel", "climb_kernel")):
            phase = "climb"
        elif name.startswith(("products_kernel", "combine_kernel")):
            phase = "combination"
        elif phase in ("climb", "combination"):
            phase = {"climb": "second pass", "combination": "update"}[phase]
        result.append(phase)
    return result


def on_the_gpu(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The GPU's events, in order."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [event for event in trace["traceEvents"] if event.get("cat") in kinds]
    return sorted(events, key=lambda event: event["ts"])


def timeline(trace: dict[str, Any]) -> list[tuple[float, float, str]]:
    """The GPU's events in a step: start and length in milliseconds, and the phase.

    Raises:
        ValueError: The trace is not that of a two-pass step with fused kernels.
    """
    events = on_the_gpu(trace)
    names = phases(event["name"] for event in events)
    if "combination" not in names:
        raise ValueError("trace must hold a two-pass step, got one without the fused kernels.")
    zero = events[0]["ts"]
    return [
        ((event["ts"] - zero) / 1e3, event["dur"] / 1e3, phase)
        for event, phase in zip(events, names, strict=True)
    ]


def by_kernel(trace: dict[str, Any]) -> dict[str, float]:
    """The total milliseconds of each kernel, by name."""
    result: dict[str, float] = {}
    for event in on_the_gpu(trace):
        result[event["name"]] = result.get(event["name"], 0.0) + event["dur"] / 1e3
    return result


def profiled(work: Workload, step: Step) -> dict[str, Any]:
    """The profiler's trace of one step; the second one, since the first is slow."""
    for _ in range(5):
        step()
    for _ in range(2):
        work.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            work.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
        return trace


def timelines() -> tuple[dict[str, Any], dict[str, Any]]:
    """Timelines of a GSAM step in three variants, and its and vanilla's time per kernel."""
    work = Workload(CASES[CASE])
    ways = {
        "eager": (GSAM_EAGER, plain),
        "captured": (GSAM_CAPTURED, captured_plain),
        "compiled and captured": (GSAM_CAPTURED, captured_plain),
    }
    drawn, kernels = {}, {}
    for name, (gsam, vanilla) in ways.items():
        work.network = torch.compile(work.model) if "compiled" in name else work.model
        trace = profiled(work, gsam(work))
        drawn[name] = timeline(trace)
        alone = by_kernel(profiled(work, vanilla(work)))
        kernels[name] = {"GSAM": by_kernel(trace), "vanilla": alone}
    return drawn, kernels


def beyond_two_passes(kernels: dict[str, dict[str, float]], most: int = 12) -> list[str]:
    """The kernels in which a GSAM step differs most from two vanilla ones."""
    names = {name for way in kernels.values() for name in way}
    more = {
        name: kernels["GSAM"].get(name, 0.0) - 2 * kernels["vanilla"].get(name, 0.0)
        for name in names
    }
    ordered = sorted(names, key=lambda name: (-abs(more[name]), name))
    return [f"{more[name]:+8.3f} ms  {name[:90]}" for name in ordered[:most]]


def growth(cases: dict[int, Case], seconds: float) -> dict[str, dict[int, Any]]:
    """The cost of GSAM relative to two passes in each case, eager and captured."""
    result: dict[str, dict[int, Any]] = {name: {} for name in SECTIONS}
    for key, case in track(cases.items(), console=Console(stderr=True)):
        for name, section in SECTIONS.items():
            work = Workload(case)
            record = measure(work, section, seconds * section.share, advance=lambda: None)
            kept = ("median_ms", "over_floor", "over_floor_95", "over_vanilla")
            values = {k: record["GSAM"][k] for k in kept}
            result[name][key] = values | {"parameter_bytes": work.parameter_bytes}
            del work
            gc.collect()
            torch.cuda.empty_cache()
    return result


def draw_timelines(record: dict[str, Any], path: Path) -> None:
    lines = record["timelines"]
    size = (10, 1.8 * len(lines))
    figure, axes = plt.subplots(len(lines), 1, figsize=size, sharex=True, layout="constrained")
    for axis, (name, kernels) in zip(axes, lines.items(), strict=True):
        busy = sum(length for _, length, _ in kernels)
        # The profiler pauses before or after the first kernel; later pauses belong to the step.
        first = sorted(kernels)[:10]
        ends = pairwise((start, start + length) for start, length, _ in first)
        _, zero = max((later - end, later) for (_, end), (later, _) in ends)
        for phase, colour in COLOURS.items():
            spans = [(start - zero, length) for start, length, other in kernels if other == phase]
            total = sum(length for _, length in spans)
            axis.broken_barh(spans, (0, 1), color=colour, label=f"{phase} {total:.2f} ms")
        axis.set(yticks=[], title=f"{name}: GPU busy for {busy:.1f} ms")
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small", frameon=False)
    case = CASES[record["case"]]
    words = f"{case.title}, batch size {case.batch_size}, {_gpu(record)}, under the profiler"
    axes[-1].set(xlabel=f"time, ms ({words})")
    axes[-1].set_xlim(left=0.0)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_growth(record: dict[str, Any], path: Path) -> None:
    """Draw only captured steps: eager ones wait for the CPU, whose speed varies."""
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), sharey=True, layout="constrained")
    labels = {
        "widths": "parameters, millions (batch size 128)",
        "batches": "batch size (21 million parameters)",
    }
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        costs = record[key]["captured"]
        xs = [
            cost["parameter_bytes"] / 4e6 if key == "widths" else float(size)
            for size, cost in costs.items()
        ]
        lows, highs = zip(*(cost["over_floor_95"] for cost in costs.values()), strict=True)
        axis.plot(xs, [cost["over_floor"] for cost in costs.values()], "o-")
        axis.fill_between(xs, lows, highs, alpha=0.3)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(xscale="log", xlabel=label, xticks=xs, xticklabels=[f"{x:.3g}" for x in xs])
        axis.minorticks_off()
    axes[0].set(ylabel="GSAM step / floor")
    figure.suptitle(
        f"Captured steps of a ViT of depth 12, 32 px, bf16 autocast, {_gpu(record)}; "
        "bands: 95 % intervals",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _gpu(record: dict[str, Any]) -> str:
    return str(record["hardware"]["gpu"])


def draw(record: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw_timelines(record, folder / "step-timeline.png")
    draw_growth(record, folder / "step-growth.png")


def arguments() -> argparse.Namespace:
    """The command line, checked; an error exits with status 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="the file for the record")
    parser.add_argument("--out", type=Path, required=True, help="the folder for the figures")
    parser.add_argument("--draw", type=Path, metavar="PATH", help="only draw from this record")
    parser.add_argument("--seconds", type=float, default=3, help="time limit for each point")
    add_cores(parser)
    args = parser.parse_args()
    if args.draw is not None and not args.draw.is_file():
        parser.error(f"--draw must be a record that --json wrote, got {args.draw}.")
    if args.draw is None and not torch.cuda.is_available():
        parser.error("A profile requires a CUDA GPU. To draw from a record, pass --draw.")
    return args


def main() -> None:
    args = arguments()
    if args.draw is not None:
        draw(json.loads(args.draw.read_text()), args.out)
        return
    keep_to(args.cores)
    torch.backends.cudnn.benchmark = True
    drawn, kernels = timelines()
    record = provenance(args, "cuda") | {
        "case": CASE,
        "timelines": drawn,
        "kernels": kernels,
        "widths": growth({width: vit(width) for width in WIDTHS}, args.seconds),
        "batches": growth({size: vit(batch_size=size) for size in BATCHES}, args.seconds),
    }
    write(record, args.json)
    draw(record, args.out)
    for name, spans in drawn.items():
        print(f"{name}: two vanilla steps {2 * sum(kernels[name]['vanilla'].values()):.3f} ms")
        for phase in COLOURS:
            total = sum(length for _, length, other in spans if other == phase)
            print(f"{total:8.3f} ms  {phase}")
        print("beyond two vanilla steps:", *beyond_two_passes(kernels[name]), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
