"""Communication cost of each perturbation scope in data-parallel training.

Counted: real processes, connected by gloo on the CPU, take a training step of each variant, and
every collective call is recorded with its size: the larger of its input and its output. In the
table, sizes are multiples of the model's parameters in bytes. `sent` is the amount that one process
sends if each call runs in a ring of n processes: 2 (n-1)/n of the size for an all-reduce, (n-1)/n
for the others. Without reductions in the network, no algorithm sends less for an all-reduce.

Projected, and not measured at that scale: a step of ViT-B/16 (224 px, 128 images on each GPU, bf16
autocast, gradients in float32) on more GPUs than we have. Compute is measured on one GPU:

    python benchmarks/communication.py --measure-compute --json compute.json

Communication follows the alpha-beta model. Gradients of S bytes are sent in k messages of 25 MiB.
With N nodes of n GPUs, an all-reduce runs within each node, and between nodes on 1/n of the data:

    T = k * (2 (n-1) alpha_in + 2 log2(N) alpha_out)
        + 2 (n-1)/n * S / beta_in + 2 (N-1)/N * S/n / beta_out

Rates are 0.8 of the nominal ones. NVLink 4 has 450 GB/s in each direction (NVIDIA's data sheets of
H100 and H200 give the sum of both), of which 380 have been measured
(github.com/NVIDIA/nccl/issues/1264); 400 Gb/s InfiniBand has 50 GB/s. Latencies are from NCCL's
model for choosing algorithms (hwLat in its src/graph/tuning.cc): 3.4 us for a step over NVLink, 14
us for one over the network, where log2(N) steps go up a tree and log2(N) down.

Overlap: DDP sends gradients during backward. In its favor, we count all of that as hidden, up to
the duration of backward, although the last bucket never is. Our all-reduces start after a backward
pass, so all of their time is exposed. Copies into buckets, stragglers and other traffic are left
out of all rows.

    python benchmarks/communication.py --compute compute.json \
        --json results/communication.json --figure results/communication.png
"""

# Packages that only some processes or runs need are imported where they are used: every started
# process imports this file, and a machine with a GPU may have only torch and timm.

import argparse
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from surrogap import GSAM, SAM
from surrogap.checks import one_of

Record = dict[str, Any]


def tiny() -> nn.Module:
    """The smallest model with parameters and buffers, for tests."""
    layers = [nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


def resnet18_cifar() -> nn.Module:
    """The usual ResNet-18 for 32 px images: the stem is a 3x3 convolution, without pooling."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def vit_small_cifar() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=32, patch_size=4, num_classes=10, embed_dim=384, depth=12, num_heads=6
    )


def vit_b16() -> nn.Module:
    import timm

    return timm.create_model("vit_base_patch16_224")


MODELS = {"tiny": tiny, "resnet18_cifar": resnet18_cifar, "vit_small_cifar": vit_small_cifar}
OBJECTIVES = {"SAM": partial(SAM, rho=0.05), "GSAM": partial(GSAM, rho=0.05, alpha=0.4)}
# Class names of the modules that FSDP shards separately.
BLOCKS = ("BasicBlock", "Block")
BATCH_SIZE, NUM_WARM_UP, NUM_COUNTED = 4, 2, 2


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        is_sharded: Whether to use FSDP2 instead of DDP.
        objective: The name of the objective; None for `loss.backward()`.
        scope: The objective's scope; a number means groups of that size.
    """

    is_sharded: bool = False
    objective: str | None = None
    scope: str | int | None = None

    @property
    def name(self) -> str:
        """The name in the table."""
        wrapper = "FSDP2" if self.is_sharded else "DDP"
        scope = f"groups of {self.scope}" if isinstance(self.scope, int) else self.scope
        return ", ".join(filter(None, (wrapper, self.objective, scope)))


def variants(objectives: Sequence[str], num_processes: int) -> list[Variant]:
    scopes: list[str | int] = ["replica", "global"]
    if num_processes > 2:  # a group of all processes is the global scope
        scopes.insert(1, 2)
    with_ddp = [Variant(objective=name, scope=scope) for name in objectives for scope in scopes]
    sharded = [Variant(is_sharded=True, objective=name) for name in (None, *objectives)]
    return [Variant(), *with_ddp, *sharded]


@dataclass(frozen=True)
class Call:
    """A collective call.

    Attributes:
        kind: One of `KINDS`.
        group_size: The number of processes that take part.
        num_bytes: The larger of the input and the output of one process.
    """

    kind: str
    group_size: int
    num_bytes: int

    @property
    def sent(self) -> float:
        """Bytes that each process sends in a ring, on average."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * (self.group_size - 1) / self.group_size * self.num_bytes


KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")


class Calls(TorchDispatchMode):
    """Context manager that records collective calls, including those of DDP's C++ reducer.

    The profiler records them too, but without the sizes of lists of tensors, and for gloo it
    reports an all-reduce instead of each reduce-scatter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls.append(call(func.__name__, args))
        return func(*args, **(kwargs or {}))


def call(operator: str, args: Sequence[Any]) -> Call:
    """Return the collective call that a c10d operator makes.

    Raises:
        RuntimeError: The operator is unknown, so that no call goes uncounted.
    """
    plain_name = operator.partition(".")[0].strip("_").replace("_", "").removesuffix("base")
    kinds = [kind for kind in KINDS if kind.replace("_", "") == plain_name]
    if not kinds:
        raise RuntimeError(f"collective calls must be one of {KINDS}, got {operator}. Add it.")
    group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
    num_bytes = max(sum(tensor.nbytes for tensor in tensors(arg)) for arg in args)
    return Call(kinds[0], dist.ProcessGroup.unbox(group).size(), num_bytes)


def tensors(arg: Any) -> Iterator[Tensor]:
    if isinstance(arg, Tensor):
        yield arg
    elif isinstance(arg, list | tuple):
        for item in arg:
            yield from tensors(item)


def count(variant: Variant, model_name: str) -> Record:
    """Count this process's calls in a step, after warm-up steps, since DDP rebuilds its buckets.

    Raises:
        RuntimeError: The calls differ between steps.
    """
    step, sizes = trainer(variant, model_name)
    for _ in range(NUM_WARM_UP):
        step()
    counted = []
    for _ in range(NUM_COUNTED):
        with Calls() as calls:
            step()
        counted.append(Counter(calls.calls))
    if counted[0] != counted[1]:
        raise RuntimeError(f"all steps of {variant.name} must make the same calls, got {counted}.")
    return sizes | {"calls": totals(counted[0])}


def trainer(variant: Variant, model_name: str) -> tuple[Callable[[], None], Record]:
    """A training step, and the sizes of its model."""
    torch.manual_seed(0)
    model = MODELS[model_name]()
    sizes = {
        "parameter_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "buffer_bytes": sum(buffer.nbytes for buffer in model.buffers()),
    }
    model = wrapped(model, variant.is_sharded)
    # A small rate, since the labels are random.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    images, labels = torch.randn(BATCH_SIZE, 3, 32, 32), torch.randint(10, (BATCH_SIZE,))
    backward = backward_of(variant, model)

    def step() -> None:
        optimizer.zero_grad()
        backward(lambda: cross_entropy(model(images), labels))
        optimizer.step()

    return step, sizes


def wrapped(model: nn.Module, is_sharded: bool) -> nn.Module:
    """The model in DDP, or sharded by block; both with their default settings."""
    if not is_sharded:
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if type(module).__name__ in BLOCKS:
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def backward_of(variant: Variant, model: nn.Module) -> Callable[[Callable[[], Tensor]], object]:
    if variant.objective is None:
        return lambda closure: closure().backward()
    scope: Any = variant.scope
    if isinstance(scope, int):
        scope = dist.new_subgroups(scope)[0]
    return OBJECTIVES[variant.objective](model, scope=scope).backward


def totals(calls: Counter[Call]) -> list[Record]:
    """The calls by kind and size of the group."""
    keys = sorted({(call.kind, call.group_size) for call in calls})
    rows = []
    for kind, group_size in keys:
        mine = {c: n for c, n in calls.items() if (c.kind, c.group_size) == (kind, group_size)}
        row: Record = {"kind": kind, "group_size": group_size, "num_calls": sum(mine.values())}
        row["bytes"] = sum(c.num_bytes * n for c, n in mine.items())
        row["sent_bytes"] = sum(c.sent * n for c, n in mine.items())
        rows.append(row)
    return rows


def bytes_of(record: Record, kind: str | None = None, key: str = "bytes") -> float:
    return sum(row[key] for row in record["calls"] if kind in (None, row["kind"]))


def work(rank: int, jobs: list[tuple[str, Variant]], size: int, store: str, results: Any) -> None:
    """Run all jobs, one after another, in one process."""
    if sys.platform == "linux":  # the machine's host name may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for model_name, variant in jobs:
        results.put((model_name, variant, count(variant, model_name)))
    # Wrapped models hold the process group, and gloo's threads must end before Python exits:
    # https://github.com/pytorch/pytorch/pull/179291.
    gc.collect()
    dist.destroy_process_group()


def count_all(
    jobs: list[tuple[str, Variant]], num_processes: int, tick: Callable[[str], object]
) -> Record:
    """Count the calls of all jobs; calls `tick` with a job's name when all processes finished it.

    Raises:
        RuntimeError: Processes counted differently, or DDP did not average each gradient once.
    """
    found: dict[tuple[str, Variant], list[Record]] = {job: [] for job in jobs}
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        args = (jobs, num_processes, str(Path(folder) / "store"), results)
        processes = mp.spawn(work, args, nprocs=num_processes, join=False)
        while not processes.join(timeout=0.1) or not results.empty():
            while not results.empty():
                model_name, variant, record = results.get()
                found[model_name, variant].append(record)
                if len(found[model_name, variant]) == num_processes:
                    tick(f"{model_name}, {variant.name}")
    counted: Record = {}
    for (model_name, variant), (record, *others) in found.items():
        if any(other != record for other in others):
            raise RuntimeError(
                f"all processes of {variant.name} must make the same calls, got {others}."
            )
        calls = {"calls": record.pop("calls")}
        model = counted.setdefault(model_name, record | {"variants": {}})
        model["variants"][variant.name] = calls
    for name, model in counted.items():
        reduced, size = bytes_of(model["variants"]["DDP"], "all_reduce"), model["parameter_bytes"]
        if reduced != size:
            raise RuntimeError(f"DDP must reduce {name}'s {size} bytes, got {reduced}.")
    return counted


@dataclass(frozen=True)
class Links:
    """Links between GPUs: bytes per second and GPU in each direction, and seconds per step."""

    inner_rate: float
    outer_rate: float
    inner_latency: float = 3.4e-6
    outer_latency: float = 14e-6
    gpus_per_node: int = 8

    def all_reduce_s(self, num_bytes: float, num_gpus: int) -> float:
        """The time `T` of an all-reduce; see the module's docstring."""
        inner = min(num_gpus, self.gpus_per_node)
        nodes = num_gpus // inner
        num_messages = math.ceil(num_bytes / BUCKET_BYTES)
        latency = 2 * (inner - 1) * self.inner_latency + 2 * math.log2(nodes) * self.outer_latency
        within = 2 * (inner - 1) / inner * num_bytes / self.inner_rate
        between = 2 * (nodes - 1) / nodes * num_bytes / inner / self.outer_rate
        return num_messages * latency + within + between


BUCKET_BYTES = 25 * 2**20  # the default of DDP and of surrogap
EFFICIENCY = 0.8
NVLINK = 450e9 * EFFICIENCY
LINKS = {
    "NVLink in nodes of 8, 400 Gb/s InfiniBand per GPU": Links(NVLINK, 50e9 * EFFICIENCY),
    "NVLink in nodes of 8, 100 Gb/s Ethernet per node": Links(NVLINK, 12.5e9 / 8 * EFFICIENCY),
}
NUMS_GPUS = (8, 64, 1024)
# How often the gradients are averaged within a node and globally, as counted.
REDUCTIONS = {"replica": (0, 1), "node": (2, 1), "global": (0, 2)}


def project(compute: Record) -> list[Record]:
    """Project steps on many GPUs from the compute time on one."""
    rows = []
    for name, links in LINKS.items():
        for num_gpus in NUMS_GPUS:
            everywhere = 1e3 * links.all_reduce_s(compute["parameter_bytes"], num_gpus)
            in_node = 1e3 * links.all_reduce_s(compute["parameter_bytes"], links.gpus_per_node)
            exposed = {"vanilla": max(0.0, everywhere - compute["backward_ms"])}
            for scope, (num_inner, num_outer) in REDUCTIONS.items():
                exposed[scope] = num_inner * in_node + num_outer * everywhere
            if num_gpus <= links.gpus_per_node:
                del exposed["node"]  # with a single node, that is the global scope
            vanilla_ms = compute["vanilla_ms"] + exposed["vanilla"]
            for scope, exposed_ms in exposed.items():
                compute_ms = compute["vanilla_ms" if scope == "vanilla" else "gsam_ms"]
                total_ms = compute_ms + exposed_ms
                row: Record = {"links": name, "num_gpus": num_gpus, "scope": scope}
                row |= {"compute_ms": compute_ms, "exposed_ms": exposed_ms, "total_ms": total_ms}
                row["over_vanilla"] = total_ms / vanilla_ms
                rows.append(row | {"over_twice_vanilla": total_ms / vanilla_ms / 2})
    return rows


def measure_compute(
    model: nn.Module, image_size: int, batch_size: int, device: str, num_rounds: int = 8
) -> Record:
    """Median milliseconds on one device; variants take turns, so that drift affects all equally."""
    torch.manual_seed(0)
    model = model.to(device)
    images = torch.randn(batch_size, 3, image_size, image_size, device=device)
    labels = torch.randint(10, (batch_size,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    objective = OBJECTIVES["GSAM"](model)

    def loss() -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return cross_entropy(model(images), labels)

    def forward_backward() -> None:
        optimizer.zero_grad()
        loss().backward()

    def vanilla() -> None:
        forward_backward()
        optimizer.step()

    def gsam() -> None:
        optimizer.zero_grad()
        objective.backward(loss)
        optimizer.step()

    steps = {"forward": loss, "forward_backward": forward_backward, "vanilla": vanilla}
    steps["gsam"] = gsam
    for step in steps.values():
        ms_per_step(step, device)
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(num_rounds):
        for name, step in steps.items():
            turns[name].append(ms_per_step(step, device))
    result: Record = {f"{name}_ms": statistics.median(times) for name, times in turns.items()}
    result["backward_ms"] = result["forward_backward_ms"] - result["forward_ms"]
    result["parameter_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    return result | {"batch_size": batch_size, "image_size": image_size, "turns_ms": turns}


def ms_per_step(step: Callable[[], object], device: str, num_steps: int = 4) -> float:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    synchronize()
    return (time.perf_counter() - start) * 1e3 / num_steps


def read_compute(path: Path) -> Record:
    """Read the record that `--measure-compute` wrote.

    Raises:
        ValueError: The file cannot be read, or does not hold measured times.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not JSON"
        raise ValueError(
            f"--compute must be a readable JSON file, got {path} ({reason})."
        ) from None
    compute = record.get("compute") if isinstance(record, dict) else None
    names = ("vanilla_ms", "gsam_ms", "backward_ms", "parameter_bytes")
    values = [compute.get(name) if isinstance(compute, dict) else None for name in names]
    if not all(isinstance(value, int | float) and value > 0 for value in values):
        raise ValueError(
            f"--compute must hold measured times, got {path} without positive "
            f"{', '.join(names)}. Make one with --measure-compute on a machine with a GPU."
        )
    return compute


def tables(record: Record) -> Iterator[Any]:
    for name, model in record["counted"].items():
        yield counted_table(name, model, record["arguments"]["processes"])
    for links in dict.fromkeys(row["links"] for row in record["projected"] or []):
        yield projected_table(links, [row for row in record["projected"] if row["links"] == links])


def counted_table(name: str, model: Record, num_processes: int) -> Any:
    from rich import box
    from rich.table import Table

    size, buffers = model["parameter_bytes"], model["buffer_bytes"]
    title = (
        f"Counted: {name}, {size / 1e6:.2f} MB of parameters, {buffers / 1e6:.3f} MB of buffers, "
        f"{num_processes} processes.\n"
        "Calls in a step / their size as a multiple of the parameters'."
    )
    result = Table("variant", title=title, title_justify="left", box=box.MARKDOWN)
    for header in (*KINDS, "sent, MB", "x vanilla"):
        result.add_column(header.replace("_", "-"), justify="right")
    for variant, record in model["variants"].items():
        cells = []
        for kind in KINDS:
            parts = []
            for row in (row for row in record["calls"] if row["kind"] == kind):
                group = "" if row["group_size"] == num_processes else f" in {row['group_size']}s"
                parts.append(f"{row['num_calls']} / {row['bytes'] / size:.4g}{group}")
            cells.append(" + ".join(parts))
        sent = bytes_of(record, key="sent_bytes")
        vanilla = bytes_of(model["variants"][variant.partition(",")[0]], key="sent_bytes")
        result.add_row(variant, *cells, f"{sent / 1e6:.2f}", f"{sent / vanilla:.3f}")
    return result


def projected_table(links: str, rows: list[Record]) -> Any:
    from rich import box
    from rich.table import Table

    title = f"Projected, not measured: ViT-B/16, {links}.\nMilliseconds of a step."
    result = Table("GPUs", "scope", title=title, title_justify="left", box=box.MARKDOWN)
    for header in ("compute", "communication exposed", "total", "x vanilla", "x twice vanilla"):
        result.add_column(header, justify="right")
    for row in rows:
        times = (f"{row[key]:.1f}" for key in ("compute_ms", "exposed_ms", "total_ms"))
        ratios = (f"{row[key]:.3f}" for key in ("over_vanilla", "over_twice_vanilla"))
        result.add_row(f"{row['num_gpus']:,}", row["scope"], *times, *ratios)
    return result


def draw(record: Record, path: Path) -> None:
    """Draw a row of panels for the counts, and below it one for the projections."""
    from matplotlib.figure import Figure

    projected = record["projected"] or []
    links = list(dict.fromkeys(row["links"] for row in projected))
    num_rows, num_columns = 1 + bool(links), max(len(record["counted"]), len(links))
    figure = Figure(figsize=(6.4 * num_columns, 3.6 * num_rows), layout="constrained")
    grid = figure.add_gridspec(num_rows, 1)
    counted = grid[0].subgridspec(1, len(record["counted"])).subplots(squeeze=False)[0]
    for axis, (name, model) in zip(counted, record["counted"].items(), strict=True):
        draw_counted(axis, name, model)
    if links:
        below = grid[1].subgridspec(1, len(links)).subplots(squeeze=False, sharey=True)[0]
        for axis, name in zip(below, links, strict=True):
            draw_projected(axis, name, [row for row in projected if row["links"] == name])
    figure.savefig(path, dpi=150)


def draw_counted(axis: Any, name: str, model: Record) -> None:
    names = list(model["variants"])[::-1]
    left = [0.0] * len(names)
    for kind in KINDS:
        sizes = [bytes_of(model["variants"][n], kind) / model["parameter_bytes"] for n in names]
        axis.barh(names, sizes, left=left, label=kind.replace("_", "-"))
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axis.set_xlabel("size of the calls in a step / parameters")
    axis.set_title(f"counted: {name}", fontsize=10)
    axis.legend(frameon=False, fontsize=8)


def draw_projected(axis: Any, name: str, rows: list[Record]) -> None:
    colors = {"vanilla": "0.6", "replica": "tab:blue", "node": "tab:green", "global": "tab:orange"}
    for scope, color in colors.items():
        mine = [row for row in rows if row["scope"] == scope]
        shift = (list(colors).index(scope) - 1.5) * 0.2
        places = [NUMS_GPUS.index(row["num_gpus"]) + shift for row in mine]
        compute, exposed = ([row[key] for row in mine] for key in ("compute_ms", "exposed_ms"))
        axis.bar(places, compute, width=0.18, color=color, label=scope)
        axis.bar(places, exposed, width=0.18, bottom=compute, color=color, hatch="////", ec="white")
        for place, row in zip(places, mine, strict=True):
            label = f"{row['over_vanilla']:.2f}"
            axis.text(place, row["total_ms"], label, ha="center", va="bottom", fontsize=7)
    axis.set_xticks(range(len(NUMS_GPUS)), [f"{number:,} GPUs" for number in NUMS_GPUS])
    axis.set_ylabel("ms (hatched: communication)")
    axis.margins(y=0.2)
    axis.set_title(f"projected, not measured: ViT-B/16\n{name}", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="upper left", ncols=4)


def arguments() -> argparse.Namespace:
    """The command line, checked; an error exits with status 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--processes", type=int, default=4, metavar="N", help="an even number of processes")
    names, usual = ", ".join(MODELS), ["resnet18_cifar", "vit_small_cifar"]
    add("--models", nargs="+", metavar="NAME", default=usual, help=f"models to count: {names}")
    known = ", ".join(OBJECTIVES)
    add("--objectives", nargs="+", metavar="NAME", default=["GSAM"], help=f"some of {known}")
    add("--measure-compute", action="store_true", help="only time one GPU for the projection")
    add("--compute", type=Path, metavar="PATH", help="record of --measure-compute, to project from")
    add("--json", type=Path, metavar="PATH", help="the file for the record")
    add("--figure", type=Path, metavar="PATH", help="the file for the figure: .png, .svg or .pdf")
    args = parser.parse_args()
    if args.processes < 2 or args.processes % 2:
        parser.error(f"--processes must be even and at least 2, got {args.processes}.")
    for option, given, choices in (
        ("--models", args.models, MODELS),
        ("--objectives", args.objectives, OBJECTIVES),
    ):
        for name in given:
            try:
                one_of(option, name, choices)
            except ValueError as error:
                parser.error(str(error))
    if args.figure and args.figure.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--figure must end in .png, .svg or .pdf, got {args.figure}.")
    if args.measure_compute and (args.compute or args.figure):
        parser.error("--measure-compute cannot be combined with --compute or --figure.")
    if args.measure_compute and not torch.cuda.is_available():
        parser.error("--measure-compute requires a CUDA GPU, and torch found none.")
    try:
        args.measured = read_compute(args.compute) if args.compute else None
    except ValueError as error:
        parser.error(str(error))
    for path in filter(None, (args.json, args.figure)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()  # fail now, not after all runs
        except OSError as error:
            parser.error(f"--json and --figure must be writable, got {path} ({error.strerror}).")
    return args


def count_with_progress(args: argparse.Namespace) -> Record:
    from rich.console import Console
    from rich.progress import Progress

    jobs = [(m, v) for m in args.models for v in variants(args.objectives, args.processes)]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting processes", total=len(jobs))
        return count_all(
            jobs,
            args.processes,
            lambda name: progress.update(task, advance=1, description=name),
        )


def report(record: Record) -> None:
    from rich.console import Console

    output = Console(width=140)
    for table in tables(record):
        output.print(table)
    if record["projected"] is None:
        output.print(
            "No projection: it needs compute times from a GPU. Run this there with "
            "--measure-compute --json PATH,\nand again here with --compute PATH."
        )
        return
    compute, gpu = record["compute"], record["compute"]["hardware"].get("gpu", "one GPU")
    output.print(
        f"Compute was measured on {gpu}: backward {compute['backward_ms']:.1f} ms, a vanilla step "
        f"{compute['vanilla_ms']:.1f} ms, a GSAM step {compute['gsam_ms']:.1f} ms."
    )


def main() -> None:
    from provenance import provenance, write

    args = arguments()
    measured = args.__dict__.pop("measured")
    record: Record = provenance(args, "cuda" if args.measure_compute else "cpu")
    if args.measure_compute:
        compute = measure_compute(vit_b16(), image_size=224, batch_size=128, device="cuda")
        origin = {key: record[key] for key in ("date", "hardware", "versions")}
        record["compute"] = compute | origin
        for name, value in compute.items():
            if isinstance(value, float):
                print(f"{name:<20} {value:.2f}")
    else:
        record["counted"] = count_with_progress(args)
        record["compute"] = measured
        record["links"] = {name: asdict(links) for name, links in LINKS.items()}
        record["projected"] = project(measured) if measured else None
        report(record)
    write(record, args.json)
    if args.figure:
        draw(record, args.figure)


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(f"error: {error}")
