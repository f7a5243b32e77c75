"""Cost of a training step relative to the minimum for two-pass objectives.

The floor is two forward-backward passes and one update. Everything beyond it is overhead: copies,
inner products, kernel launches, memory. On CUDA, torch runs a backward pass in another thread;
surrogap and `floor_same_thread` do not. CUDA has three more sections. Two compare steps captured as
CUDA graphs, of the model as it is and compiled, with two vanilla steps captured in the same way
without surrogap. The third compares captured steps that cost less than two passes, each with its
own floor: the passes that it needs, over the samples and for the weight gradients that it needs,
and one update.

All variants of a section share one model and one batch, and take turns in a new order each round.
Each turn starts with an untimed step, since caches still hold other variants' data. On a GPU it
also runs while the CPU prepares the next step, as in training after the first step. The reference
has a turn before and after each variant's, and the ratio is to the mean of the two, so that the
machine's drift affects both equally. A variant's ratio is the median over rounds, with a 95 %
confidence interval; the reference's own ratio shows the machine's resolution. The two-pass
objectives launch the same kernels with different coefficients, so their turns are pooled: after a
third of the time, only they go on, with vanilla, the floors and the steps through `objective.loss`.
A section ends early once the pooled ratio is known to 1 %, and vanilla's to 10 %. The JSON has
every turn.

    python benchmarks/step_cost.py --peers --json results/step_cost.json

Peers are timed if they can be imported: pytorch_optimizer; `gsam`, from the authors' repository
juntang-zhuang/GSAM; and `sam`, from davda54/sam.
"""

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.autograd import set_multithreading_enabled
from torch.optim.lr_scheduler import ConstantLR
from workloads import CASES, Case, Workload

from surrogap import (
    ASAM,
    GSAM,
    SAM,
    EntropySGD,
    GapPenalty,
    Intermittent,
    MomentumSAM,
    Vanilla,
    capture,
)
from surrogap.checks import one_of
from surrogap.core.arithmetic import Task
from surrogap.core.fused import choose
from surrogap.core.geometry import Kind
from surrogap.core.shards import WHOLE
from surrogap.parts import Coefficients

MIN_ROUNDS = 3
EVERY = 5
# The approximate length of a reference turn. Short, since the speed of a CPU changes within a
# second, and least between consecutive turns.
TURN_MS = 50.0

Step = Callable[[], object]
Variant = Callable[[Workload], Step]


def module(name: str, *, of: str) -> Any:
    """Import a peer; None if it is missing, or another module has its name."""
    try:
        found = import_module(name)
    except ModuleNotFoundError:
        return None
    return found if hasattr(found, of) else None


pytorch_optimizer = module("pytorch_optimizer", of="GSAM")
authors = module("gsam", of="GSAM")
davda54 = module("sam", of="SAM")


def plain(
    work: Workload, *, num_passes: int = 1, updates: bool = True, same_thread: bool = False
) -> Step:
    """Forward-backward passes with cleared gradients, and optionally an update."""
    optimizer = work.optimizer()
    # So that memory holds the optimizer's state even if no update follows.
    work.forward_backward()
    optimizer.step()

    def step() -> None:
        for _ in range(num_passes):
            optimizer.zero_grad()
            with set_multithreading_enabled(False) if same_thread else nullcontext():
                work.forward_backward()
        if updates:
            optimizer.step()

    return step


def ours(objective_class: Callable[..., Any], by_loss: bool = False, **settings: Any) -> Variant:
    """A step through `objective.backward`, or through `objective.loss` and its backward."""

    def build(work: Workload) -> Step:
        optimizer = work.optimizer()
        objective = objective_class(work.model, **settings)

        def step() -> None:
            optimizer.zero_grad()
            if by_loss:
                objective.loss(work.loss).backward()
            else:
                objective.backward(work.loss)
            optimizer.step()

        return step

    return build


def pytorch_optimizer_sam(work: Workload) -> Step:
    optimizer = pytorch_optimizer.SAM(
        work.model.parameters(), work.case.optimizer, rho=0.05, **work.case.settings
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        return work.forward_backward()

    def step() -> None:
        closure()
        optimizer.step(closure)

    return step


def pytorch_optimizer_gsam(work: Workload) -> Step:
    base = work.optimizer()
    rho = pytorch_optimizer.ProportionScheduler(
        ConstantLR(base, factor=1.0), work.case.settings["lr"], max_value=0.05, min_value=0.05
    )
    optimizer = pytorch_optimizer.GSAM(
        work.model.parameters(), base, work.model, rho_scheduler=rho, alpha=0.4
    )
    return lambda: optimizer.step(closure_of(work, base))


def closure_of(work: Workload, base: torch.optim.Optimizer) -> Callable[[], tuple[None, Tensor]]:
    # The peers' set_closure leaves autocast to the caller of step. Around both passes, autocast
    # would reuse its cast copies of the weights in the second pass, and hide the perturbation.
    @torch.enable_grad()
    def closure() -> tuple[None, Tensor]:
        base.zero_grad()
        return None, work.forward_backward()

    return closure


class ConstantRadius:
    """A constant radius with the interface of the authors' scheduler."""

    def step(self) -> float:
        """The next radius."""
        return 0.05


def authors_gsam(work: Workload) -> Step:
    base = work.optimizer()
    optimizer = authors.GSAM(
        *(work.model.parameters(), base, work.model),
        gsam_alpha=0.4,
        rho_scheduler=ConstantRadius(),
    )

    def step() -> None:
        optimizer.step(closure_of(work, base))
        optimizer.update_rho_t()

    return step


def davda54_sam(work: Workload) -> Step:
    optimizer = davda54.SAM(
        work.model.parameters(), work.case.optimizer, rho=0.05, **work.case.settings
    )

    def step() -> None:
        work.forward_backward()
        optimizer.first_step(zero_grad=True)
        work.forward_backward()
        optimizer.second_step(zero_grad=True)

    return step


def first_pass(work: Workload, *, norms: bool = False, fraction: float = 1.0) -> None:
    """A first pass on a fraction of the batch, optionally for the norm layers' gradients only."""
    kinds = (nn.BatchNorm2d, nn.LayerNorm)
    own = {p for m in work.model.modules() if isinstance(m, kinds) for p in m.parameters()}
    others = [p for p in work.model.parameters() if norms and p not in own]
    for parameter in others:
        parameter.requires_grad_(False)
    work.loss_of(*(t[: round(fraction * len(t))] for t in work.batch)).backward()
    for parameter in others:
        parameter.requires_grad_(True)
    work.model.zero_grad()


def captured_plain(work: Workload, before: Callable[[Workload], None] = lambda _: None) -> Step:
    """A pass and the update as a CUDA graph, with torch alone; `before` may add a first pass."""
    settings = {"capturable": True} if "capturable" in work.optimizer().defaults else {}
    optimizer = work.optimizer(fused=True, **settings)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.zero_grad()
            before(work)
            work.forward_backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before(work)
        work.forward_backward()
        optimizer.step()

    def step() -> object:
        graph.replay()
        return optimizer  # keeps it alive: the graph uses its state

    return step


def in_turns(some: Variant, others: Variant) -> Variant:
    """One step of a variant, then steps of another, as `Intermittent` with `every=EVERY`."""

    def build(work: Workload) -> Step:
        steps = itertools.cycle([some(work), *[others(work)] * (EVERY - 1)])
        return lambda: next(steps)()

    return build


def captured(
    objective_class: Callable[..., Any], climb_fraction: float = 1.0, **settings: Any
) -> Variant:
    def build(work: Workload) -> Step:
        work.model.zero_grad()
        optimizer = work.optimizer(fused=True)
        of = (work.model, optimizer) if objective_class is MomentumSAM else (work.model,)
        objective = objective_class(*of, **settings)
        step = capture(
            objective, optimizer, work.loss_of, work.batch, climb_fraction=climb_fraction
        )
        return lambda: step(*work.batch)

    return build


def every_fifth_sam(model: nn.Module) -> Intermittent:
    return Intermittent(SAM(model), every=EVERY)


@dataclass(frozen=True)
class Section:
    """Variants that take turns.

    Args:
        variants: The variants; each section has "vanilla", eager.
        reference: The variant that the others are compared with.
        num_references: The number of reference steps that make up the floor.
        is_compiled: Whether the variants run a compiled model; "vanilla" does not.
        share: The fraction of the time limit to use; steps of a graph vary little.
        floors: The floors of variants that have their own, one step each.
        multiple: The number of steps in a turn is a multiple of this.
        skips: Cases that are left out.
    """

    variants: dict[str, Variant]
    reference: str
    num_references: int = 1
    is_compiled: bool = False
    share: float = 1.0
    floors: dict[str, str] = field(default_factory=dict)
    multiple: int = 1
    skips: tuple[str, ...] = ()


EAGER: dict[str, Variant] = {
    "forward_backward": partial(plain, updates=False),
    "vanilla": plain,
    "floor": partial(plain, num_passes=2),
    "floor_same_thread": partial(plain, num_passes=2, same_thread=True),
    "Vanilla": ours(Vanilla),
    "SAM": ours(SAM, rho=0.05),
    "GSAM": ours(GSAM, rho=0.05, alpha=0.4),
    "GSAM_plain": ours(GSAM, rho=0.05, alpha=0.4, minimize="plain"),
    "GSAM_low": ours(GSAM, rho=0.05, alpha=0.4, memory="low"),
    "ASAM": ours(ASAM, rho=0.5),
    "ASAM_ascent": ours(ASAM, rho=0.5, alpha=0.4),
    "GapPenalty": ours(GapPenalty, rho=0.05, lam=0.1),
    "EntropySGD_2": ours(EntropySGD, inner_steps=2),
    "SAM_loss": ours(SAM, by_loss=True, rho=0.05),
    "GSAM_loss": ours(GSAM, by_loss=True, rho=0.05, alpha=0.4),
}
# Objectives that launch the same kernels with different coefficients, so their steps cost the same.
ALIKE = ("SAM", "GSAM", "GSAM_plain", "ASAM", "ASAM_ascent", "GapPenalty")
BY_LOSS = ("SAM_loss", "GSAM_loss")  # compared with SAM and GSAM
PEERS: dict[str, tuple[Any, Variant]] = {
    "pytorch_optimizer.SAM": (pytorch_optimizer, pytorch_optimizer_sam),
    "pytorch_optimizer.GSAM": (pytorch_optimizer, pytorch_optimizer_gsam),
    "authors' GSAM": (authors, authors_gsam),
    "davda54/sam": (davda54, davda54_sam),
}
CAPTURED: dict[str, Variant] = {
    "vanilla": plain,
    "captured vanilla": captured_plain,
    "captured Vanilla": captured(Vanilla),
    "captured SAM": captured(SAM, rho=0.05),
    "captured GSAM": captured(GSAM, rho=0.05, alpha=0.4),
    "captured ASAM": captured(ASAM, rho=0.5),
    "captured GSAM_low": captured(GSAM, rho=0.05, alpha=0.4, memory="low"),
}
COMPILED: dict[str, Variant] = {
    "vanilla": plain,
    "compiled vanilla": captured_plain,
    "compiled GSAM": captured(GSAM, rho=0.05, alpha=0.4),
}
GRAPHS: dict[str, Any] = {"num_references": 2, "share": 0.5}
# Steps that cost less than two passes, and the floor of each.
CHEAPER: dict[str, Variant] = {
    "vanilla": plain,
    "captured vanilla": captured_plain,
    "captured MomentumSAM": captured(MomentumSAM, rho=1e-3),
    "floor of SAM_norms": partial(captured_plain, before=partial(first_pass, norms=True)),
    "captured SAM_norms": captured(SAM, perturb="norms"),
    "floor of SAM_quarter": partial(captured_plain, before=partial(first_pass, fraction=0.25)),
    "captured SAM_quarter": captured(SAM, climb_fraction=0.25),
    "floor of SAM_norms_quarter": partial(
        captured_plain, before=partial(first_pass, norms=True, fraction=0.25)
    ),
    "captured SAM_norms_quarter": captured(SAM, perturb="norms", climb_fraction=0.25),
    "floor of SAM_every_5": in_turns(partial(captured_plain, before=first_pass), captured_plain),
    "captured SAM_every_5": captured(every_fifth_sam),
}
FLOORS = {
    floor.replace("floor of", "captured"): floor for floor in CHEAPER if floor.startswith("floor")
} | {"captured MomentumSAM": "captured vanilla"}


def sections(device: str, with_peers: bool) -> dict[str, Section]:
    peers = {name: variant for name, (package, variant) in PEERS.items() if package is not None}
    eager = {"eager": Section(EAGER | (peers if with_peers else {}), "floor")}
    if device == "cpu":
        return eager
    return eager | {
        "captured": Section(CAPTURED, "captured vanilla", **GRAPHS),
        "compiled and captured": Section(COMPILED, "compiled vanilla", is_compiled=True, **GRAPHS),
        "cheaper": Section(
            *(CHEAPER, "captured vanilla"),
            floors=FLOORS,
            share=0.5,
            multiple=EVERY,
            skips=("vit_b16_256",),  # its eleven graphs do not fit into 140 GB
        ),
    }


def peak_bytes(work: Workload, variant: Variant) -> int:
    """Peak memory of a step on CUDA, while no other variant holds an optimizer's state."""
    work.model.zero_grad()
    gc.collect()
    step = variant(work)
    step()  # the first creates state and benchmarks algorithms
    work.model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def ms_per_step(work: Workload, step: Step, num_steps: int) -> float:
    """Time steps after an untimed one; on CUDA by the GPU's clock, from the end of that one."""
    step()
    if work.case.device == "cpu":
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        return (time.perf_counter() - start) * 1e3 / num_steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(num_steps):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / num_steps


def build(work: Workload, section: Section) -> dict[str, Step]:
    """Build the steps of a section; afterwards the workload has the uncompiled model again."""
    steps = {"vanilla": section.variants["vanilla"](work)}
    if section.is_compiled:
        work.network = torch.compile(work.model)
    steps |= {n: make(work) for n, make in section.variants.items() if n != "vanilla"}
    work.network = work.model
    work.model.zero_grad()
    return steps


def measure(
    work: Workload, section: Section, seconds: float, advance: Step
) -> dict[str, dict[str, Any]]:
    """Measure the variants of a section; calls `advance` after each turn.

    A turn has the same number of steps for all variants.

    Raises:
        RuntimeError: The weights did not stay finite, so the times mean little.
    """
    steps = build(work, section)
    reference = section.reference
    for step in steps.values():
        ms_per_step(work, step, num_steps=1)
        advance()
    num_steps = max(1, round(TURN_MS / ms_per_step(work, steps[reference], num_steps=3)))
    num_steps = -(-num_steps // section.multiple) * section.multiple
    turns: dict[str, list[float]] = {name: [] for name in steps}
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    names, order, start = list(steps), random.Random(0), time.perf_counter()
    while True:
        num_rounds, spent = len(turns["vanilla"]), time.perf_counter() - start
        if num_rounds >= MIN_ROUNDS and (spent > seconds or is_resolved(ratios, section)):
            break
        if num_rounds >= MIN_ROUNDS and spent > seconds / 3:
            often = ("vanilla", "floor_same_thread", *BY_LOSS, reference, *section.floors)
            names = [name for name in steps if is_alike(name) or name in often]
        gc.collect()  # main() disables it during turns
        last = ""  # the variant with the last turn
        for name in order.sample(names, len(names)):
            floor = section.floors.get(name, reference)
            if last != floor:
                turns[floor].append(ms_per_step(work, steps[floor], num_steps))
            mine, before = ms_per_step(work, steps[name], num_steps), turns[floor][-1]
            after, last = ms_per_step(work, steps[floor], num_steps), floor
            turns[floor].append(after)
            num_floors = 1 if name in section.floors else section.num_references
            ratios[name].append(2 * mine / (before + after) / num_floors)
            if name != floor:  # a floor's own turn only shows the noise of the ratios
                turns[name].append(mine)
            advance()
    if not work.loss().isfinite():
        raise RuntimeError("loss must stay finite, got NaN or infinity. Lower the case's lr.")
    return compare(turns, ratios, section)


def compare(
    turns: dict[str, list[float]], ratios: dict[str, list[float]], section: Section
) -> dict[str, dict[str, Any]]:
    """Each variant's times, also relative to vanilla, to the reference and to its floor."""
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    # A variant's own floor is timed against the reference as well.
    over = {
        name: median * medians[floor]
        if (floor := section.floors.get(name, section.reference)) != section.reference
        else median
        for name, median in medians.items()
    }
    return {
        name: {
            "turns_ms": times,
            "turns_over_floor": ratios[name],
            "best_ms": min(times),
            "median_ms": statistics.median(times),
            "over_vanilla": over[name] / over["vanilla"],
            "over_reference": over[name] * section.num_references,
            "over_floor": medians[name],
            "over_floor_95": interval(ratios[name]),
        }
        for name, times in turns.items()
    }


def is_alike(name: str) -> bool:
    """True if a variant is one of those that cost the same."""
    return name.removeprefix("captured ").removeprefix("compiled ") in ALIKE


def of_alike(ratios: dict[str, list[float]]) -> list[float]:
    return [ratio for name, some in ratios.items() if is_alike(name) for ratio in some]


def is_resolved(ratios: dict[str, list[float]], section: Section) -> bool:
    """True if the ratios are known: pooled or to own floors to 1 %, vanilla's to 10 %."""
    groups = [ratios[name] for name in section.floors] or [of_alike(ratios)]
    return all(width(group) < 0.01 for group in groups) and width(ratios["vanilla"]) < 0.1


def width(values: list[float]) -> float:
    """The width of the confidence interval, relative to the median."""
    low, high = interval(values)
    return (high - low) / statistics.median(values)


def together(records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The ratio to the floor, pooled over the objectives that cost the same."""
    ratios = of_alike({name: record["turns_over_floor"] for name, record in records.items()})
    return {"over_floor": statistics.median(ratios), "over_floor_95": interval(ratios)}


def add_memory(work: Workload, section: Section, records: dict[str, dict[str, Any]]) -> None:
    """Add peak memory, and the excess over vanilla's in copies of the parameters."""
    peaks = {name: peak_bytes(work, variant) for name, variant in section.variants.items()}
    for name, peak in peaks.items():
        extra = (peak - peaks["vanilla"]) / work.parameter_bytes
        records[name] |= {"peak_bytes": peak, "extra_copies": extra}


def arithmetic_cost(work: Workload) -> dict[str, float]:
    """Time the kernels between the passes in a graph, and the GPU's copy bandwidth.

    Traffic in copies of the parameters: the climb reads g and w, writes their copies, reads g and w
    again and writes w; the combination reads g and g_p twice, the copy of w, and writes d and w.
    """
    parameters = [p.detach() for p in work.model.parameters()]
    g, g_p = ([torch.randn_like(p) for p in parameters] for _ in range(2))
    number = len(parameters)
    arithmetic = choose(Task(parameters, [Kind.PLAIN] * number, [WHOLE] * number))

    def step() -> None:
        arithmetic.climb(list(g), 0.05, None)
        arithmetic.combination(list(g_p), Coefficients(-0.4, 1.0, b_1=0.4))

    step()
    graph = torch.cuda.CUDAGraph()
    with arithmetic.capturing(1), torch.cuda.graph(graph):
        step()
    num_bytes = 14 * work.parameter_bytes
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms = min(ms_per_step(work, graph.replay, num_steps=20) for _ in range(5))
    copy_ms = min(ms_per_step(work, lambda: target.copy_(source), num_steps=20) for _ in range(5))
    return {
        "ms": ms,
        "bytes": num_bytes,
        "gb_per_s": num_bytes / ms / 1e6,
        "copy_gb_per_s": 2 * source.nbytes / copy_ms / 1e6,
    }


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, between two of the values."""
    ordered, number = sorted(values), len(values)
    # The number of values below the median is binomial, with probability 1/2.
    low = max(0, round(number / 2 - 0.98 * number**0.5) - 1)
    return ordered[low], ordered[number - 1 - low]


def table(title: str, records: dict[str, dict[str, Any]], device: str) -> Table:
    """A table of ratios; on CUDA also of times and memory. On a shared CPU, times vary too much."""
    columns = {
        "x vanilla": ("over_vanilla", ".2f"),
        "x reference": ("over_reference", ".3f"),
        "x floor": ("over_floor", ".3f"),
        "95 %": ("over_floor_95", ""),
    }
    if device == "cuda":
        times = {"best ms": ("best_ms", ".2f"), "median ms": ("median_ms", ".2f")}
        columns = times | columns | {"extra copies": ("extra_copies", ".3f")}
    result = Table("variant", title=title, title_justify="left", box=box.MARKDOWN)
    for header in columns:
        result.add_column(header, justify="right")
    for name, values in records.items():
        result.add_row(name, *(cell(values.get(key, ""), spec) for key, spec in columns.values()))
    return result


# The columns of a summary, with the section and the variant of each.
SUMMARY = {
    "vanilla": ("eager", "vanilla"),
    "GSAM": ("eager", "GSAM"),
    "captured": ("captured", "captured GSAM"),
    "compiled, captured": ("compiled and captured", "compiled GSAM"),
    "authors' GSAM": ("eager", "authors' GSAM"),
    "pytorch_optimizer's GSAM": ("eager", "pytorch_optimizer.GSAM"),
}


def summary(record: dict[str, Any]) -> str:
    """All cases as a table in Markdown: milliseconds, and the ratio to the floor.

    For objectives that cost the same, the ratio is the pooled one.
    """
    lines = [f"| model, batch | {' | '.join(SUMMARY)} |", "|---" * (len(SUMMARY) + 1) + "|"]
    for name, costs in record["cases"].items():
        case = CASES[name]
        cells = [f"{case.title}, {case.batch_size}"]
        for section, variant in SUMMARY.values():
            found = costs["sections"].get(section, {}).get(variant)
            if found is None:
                cells.append("")
                continue
            pooled = costs["together"][section] if is_alike(variant) else found
            ratio = "" if variant == "vanilla" else f" ({pooled['over_floor']:.2f})"
            cells.append(f"{found['median_ms']:.1f}{ratio}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


CHEAPER_TITLES = {
    "MomentumSAM": "`MomentumSAM(model, optimizer)`",
    "SAM_every_5": "`Intermittent(SAM(model), every=5)`",
    "SAM_norms_quarter": '`SAM(model, perturb="norms")`, `climb=` a quarter of the batch',
    "SAM_quarter": "`SAM(model)`, `climb=` a quarter of the batch",
    "SAM_norms": '`SAM(model, perturb="norms")`',
}


def summary_of_cheaper(record: dict[str, Any]) -> str:
    """Steps that cost less than two passes, in Markdown: in captured vanilla steps, and floors."""
    cases = {name: costs["sections"] for name, costs in record["cases"].items()}
    cases = {name: sections for name, sections in cases.items() if "cheaper" in sections}
    titles = [f"{CASES[name].title}, {CASES[name].batch_size}" for name in cases]
    lines = [f"| step | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name, title in CHEAPER_TITLES.items():
        found = [sections["cheaper"][f"captured {name}"] for sections in cases.values()]
        cells = [f"{f['over_reference']:.2f} ({f['over_floor']:.3f})" for f in found]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    two_passes = [s["captured"]["captured SAM"] for s in cases.values() if "captured" in s]
    if len(two_passes) == len(cases):
        cells = [f"{2 * f['over_floor']:.2f} ({f['over_floor']:.3f})" for f in two_passes]
        lines.append(f"| `SAM(model)` | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(value: float | tuple[float, float] | str, spec: str) -> str:
    if isinstance(value, str):
        return value
    return "{:.3f}-{:.3f}".format(*value) if isinstance(value, tuple) else format(value, spec)


def add_cores(parser: argparse.ArgumentParser) -> None:
    """The option --cores, checked; see `keep_to`."""

    def number(text: str) -> int:
        there = len(os.sched_getaffinity(0))
        if not (text.isdecimal() and 1 <= int(text) <= there):
            message = f"must be from 1 to the {there} available, got {text}."
            raise argparse.ArgumentTypeError(message)
        return int(text)

    parser.add_argument(
        "--cores",
        type=number,
        metavar="N",
        help="number of CPU cores to use (Linux); by default all",
    )


def keep_to(num_cores: int | None) -> None:
    """Restrict this thread and those that it starts to a number of cores; None for all."""
    if num_cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-num_cores:])


def arguments() -> argparse.Namespace:
    """The command line, checked; an error exits with status 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default_device)
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="by default all of the device")
    parser.add_argument("--seconds", type=float, default=60, help="time limit for an eager section")
    parser.add_argument("--peers", action="store_true", help="also time other libraries")
    parser.add_argument(
        "--sections", nargs="+", metavar="NAME", help="such as eager; by default all"
    )
    add_cores(parser)
    parser.add_argument("--json", type=Path, metavar="PATH", help="the file for the record")
    parser.add_argument(
        "--summary", type=Path, metavar="PATH", help="only print the summary of a record"
    )
    args = parser.parse_args()
    if args.summary is not None:
        if not args.summary.is_file():
            parser.error(f"--summary must be a record that --json wrote, got {args.summary}.")
        return args
    known = [name for name, case in CASES.items() if case.device == args.device]
    args.cases = args.cases or known
    for name in args.cases:
        try:
            one_of("--cases", name, known)
        except ValueError as error:
            parser.error(str(error))
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda requires a CUDA GPU. Pass --device cpu.")
    every = sections(args.device, args.peers)
    for name in args.sections or []:
        if name not in every:
            parser.error(f"--sections must name some of {', '.join(every)}, got {name}.")
    args.sections = {name: every[name] for name in args.sections or every}
    return args


def measure_case(case: Case, args: argparse.Namespace, advance: Step) -> dict[str, Any]:
    """Measure all sections of a case, each with its own model, to free memory in between."""
    record: dict[str, Any] = {"sections": {}, "together": {}}
    for name, section in args.sections.items():
        if case in [CASES[skipped] for skipped in section.skips]:
            continue
        work = Workload(case)
        record["parameter_bytes"] = work.parameter_bytes
        seconds = args.seconds * section.share
        records = measure(work, section, seconds, advance)
        if case.device == "cuda" and name == "eager":
            add_memory(work, section, records)
            record["arithmetic"] = arithmetic_cost(work)
        record["sections"][name] = records
        if not section.floors:
            record["together"][name] = together(records)
        del work
        torch.compiler.reset()
        gc.collect()
        if case.device == "cuda":
            torch.cuda.empty_cache()
    return record


def main() -> None:
    args = arguments()
    if args.summary is not None:
        record = json.loads(args.summary.read_text())
        print(summary(record), summary_of_cheaper(record), sep="\n\n")
        return
    keep_to(args.cores)
    torch.backends.cudnn.benchmark = True
    gc.disable()  # a collection takes longer than many steps, and would hit a random variant
    absent = [name for name, (package, _) in PEERS.items() if args.peers and package is None]
    about = provenance(args, args.device, ["pytorch_optimizer"] if pytorch_optimizer else [])
    about["arguments"] |= {"sections": list(args.sections)}
    record: dict[str, Any] = about | {"absent": absent, "cases": {}}
    console, output = Console(stderr=True), Console(width=120)
    # Drawn between turns only: a refresh thread would take time from the steps.
    with Progress(console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        seconds = args.seconds * sum(section.share for section in args.sections.values())
        task = progress.add_task("", total=seconds * len(args.cases))
        for index, name in enumerate(args.cases):
            start = time.perf_counter()

            def advance(index: int = index, name: str = name, start: float = start) -> None:
                done = index * seconds + min(time.perf_counter() - start, seconds)
                progress.update(task, description=name, completed=done, refresh=True)

            record["cases"][name] = costs = measure_case(CASES[name], args, advance)
            write(record, args.json)  # after each case, so that an interrupt loses only one
            print_case(output, name, costs, args.device)
    for name in absent:
        output.print(f"absent: {name}")
    if args.device == "cuda":  # times on a shared CPU vary too much
        print(summary(record), summary_of_cheaper(record), sep="\n\n")


def print_case(output: Console, name: str, costs: dict[str, Any], device: str) -> None:
    for section, records in costs["sections"].items():
        output.print(table(f"{name}, {section}", records, device))
        if both := costs["together"].get(section):
            output.print(
                f"two passes, all objectives that cost the same: {both['over_floor']:.3f} of the "
                f"floor ({cell(both['over_floor_95'], '')})\n"
            )
    if cost := costs.get("arithmetic"):
        output.print(
            f"{name}, between the passes: {cost['ms']:.3f} ms for {cost['bytes'] / 1e9:.2f} GB, "
            f"{cost['gb_per_s']:.0f} GB/s; copying runs at {cost['copy_gb_per_s']:.0f} GB/s\n"
        )


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(f"error: {error}")
