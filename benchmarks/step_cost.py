"""What a training step costs, against the least that any two-pass method can cost.

The floor is two forward-backward passes and one update. Whatever an objective takes beyond it is
overhead: copies, inner products, kernel launches, memory.

All variants of a case share one model and one batch, and take turns in a new order each round. The
floor has a turn before and after each of them, and a turn's ratio is to the mean of those two, so
that the machine's drifts meet both alike. A variant's ratio is the median over the rounds, with the
interval that holds the median in 95 of 100 runs; the floor's own shows what the machine resolves.
The JSON has every turn.

    python benchmarks/step_cost.py --peers --json results/step_cost.json
"""

import argparse
import difflib
import gc
import importlib.metadata
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR
from torchvision.models import resnet18

import surrogap
from surrogap import ASAM, GSAM, SAM, EntropySGD, GapPenalty, Vanilla

try:
    import pytorch_optimizer
except ModuleNotFoundError:
    pytorch_optimizer = None


def cifar(build_resnet: Callable[..., nn.Module]) -> nn.Module:
    """A ResNet as usual for 32 px images: its stem is a 3x3 convolution, without pooling."""
    model = build_resnet(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


@dataclass(frozen=True)
class Case:
    """A network, its batch, and the kind of optimizer that such networks are trained with."""

    build_model: Callable[[], nn.Module]
    batch_size: int
    optimizer: type[Optimizer]
    # Small enough for the weights to stay finite, whatever variant moves them.
    settings: dict[str, float]
    image_size: int = 32
    num_classes: int = 10
    device: str = "cuda"


ADAMW: dict[str, Any] = {"optimizer": AdamW, "settings": {"lr": 1e-4}}
MOMENTUM: dict[str, Any] = {"optimizer": SGD, "settings": {"lr": 1e-3, "momentum": 0.9}}
IMAGENET: dict[str, Any] = {"image_size": 224, "num_classes": 1000}
vit_b32 = partial(timm.create_model, "vit_base_patch32_224")
vit_cifar = partial(VisionTransformer, img_size=32, patch_size=4, num_classes=10)
vit_small = partial(vit_cifar, embed_dim=384, depth=12, num_heads=6)
vit_tiny = partial(vit_cifar, embed_dim=96, depth=6, num_heads=3)
resnet50 = partial(timm.create_model, "resnet50")
resnet18_narrow = partial(ResNet, BasicBlock, (2, 2, 2, 2), channels=(16, 32, 64, 128))

CASES = {
    "vit_b32_128": Case(vit_b32, 128, **ADAMW, **IMAGENET),
    "vit_b32_512": Case(vit_b32, 512, **ADAMW, **IMAGENET),
    "resnet50_128": Case(resnet50, 128, **MOMENTUM, **IMAGENET),
    "resnet18_cifar_128": Case(partial(cifar, resnet18), 128, **MOMENTUM),
    "vit_small_cifar_128": Case(vit_small, 128, **ADAMW),
    "resnet18_narrow_cpu": Case(partial(cifar, resnet18_narrow), 32, **MOMENTUM, device="cpu"),
    "vit_tiny_cpu": Case(vit_tiny, 32, **ADAMW, device="cpu"),
}


class Workload:
    """A case's model and batch, which all of its variants share."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model = case.build_model().to(case.device)
        shape = (case.batch_size, 3, case.image_size, case.image_size)
        self.images = torch.randn(shape, device=case.device)
        self.labels = torch.randint(case.num_classes, (case.batch_size,), device=case.device)

    def optimizer(self) -> Optimizer:
        """A new one, with no state yet."""
        return self.case.optimizer(self.model.parameters(), **self.case.settings)

    def loss(self) -> Tensor:
        """The forward pass: in bfloat16 on CUDA, in float32 on a CPU."""
        device = self.case.device
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            return nn.functional.cross_entropy(self.model(self.images), self.labels)

    def forward_backward(self) -> Tensor:
        """Adds the gradient of the loss to `.grad`."""
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given."""
        if self.case.device == "cuda":
            torch.cuda.synchronize()


MIN_ROUNDS = 5

Step = Callable[[], object]
Variant = Callable[[Workload], Step]


def plain(work: Workload, *, num_passes: int = 1, updates: bool = True) -> Step:
    """Forward-backward passes, the gradients cleared before each, and perhaps an update."""
    optimizer = work.optimizer()
    # So that memory holds the optimizer's state where no update follows, too.
    work.forward_backward()
    optimizer.step()

    def step() -> None:
        for _ in range(num_passes):
            optimizer.zero_grad()
            work.forward_backward()
        if updates:
            optimizer.step()

    return step


def ours(objective_class: Callable[..., Any], **settings: Any) -> Variant:
    def build(work: Workload) -> Step:
        optimizer = work.optimizer()
        objective = objective_class(work.model, **settings)

        def step() -> None:
            optimizer.zero_grad()
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

    # Its set_closure leaves autocast to the caller of step. Around both passes, autocast would
    # reuse its cast copies of the weights in the second, and hide the perturbation.
    @torch.enable_grad()
    def closure() -> tuple[None, Tensor]:
        base.zero_grad()
        return None, work.forward_backward()

    return lambda: optimizer.step(closure)


OURS: dict[str, Variant] = {
    "forward_backward": partial(plain, updates=False),
    "vanilla": plain,
    "floor": partial(plain, num_passes=2),
    "Vanilla": ours(Vanilla),
    "SAM": ours(SAM, rho=0.05),
    "GSAM": ours(GSAM, rho=0.05, alpha=0.4),
    "GSAM_plain": ours(GSAM, rho=0.05, alpha=0.4, minimize="plain"),
    "ASAM": ours(ASAM, rho=0.5),
    "ASAM_ascent": ours(ASAM, rho=0.5, alpha=0.4),
    "GapPenalty": ours(GapPenalty, rho=0.05, lam=0.1),
    "EntropySGD_2": ours(EntropySGD, inner_steps=2),
}
PEERS: dict[str, Variant] = {
    "pytorch_optimizer.SAM": pytorch_optimizer_sam,
    "pytorch_optimizer.GSAM": pytorch_optimizer_gsam,
}


def peak_bytes(work: Workload, variant: Variant) -> int | None:
    """Peak memory of a step on CUDA, while no other variant holds an optimizer's state."""
    if work.case.device != "cuda":
        return None
    work.model.zero_grad()
    gc.collect()
    step = variant(work)
    step()  # the first makes state and tries algorithms out
    work.model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def ms_per_step(work: Workload, step: Step, num_steps: int) -> float:
    work.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    work.synchronize()
    return (time.perf_counter() - start) * 1e3 / num_steps


def measure(
    case: Case, variants: dict[str, Variant], seconds: float, num_steps: int, advance: Step
) -> dict[str, Any]:
    """What the variants of a case cost, as a record; calls `advance` after each turn.

    Raises:
        RuntimeError: The weights did not stay finite, so the times mean little.
    """
    work = Workload(case)
    peaks = {name: peak_bytes(work, variant) for name, variant in variants.items()}
    steps = {name: variant(work) for name, variant in variants.items()}
    for step in steps.values():
        ms_per_step(work, step, num_steps=2)
        advance()
    turns: dict[str, list[float]] = {name: [] for name in variants}
    over_floor: dict[str, list[float]] = {name: [] for name in variants}
    order, end = random.Random(0), time.perf_counter() + seconds
    while len(turns["vanilla"]) < MIN_ROUNDS or time.perf_counter() < end:
        gc.collect()  # main() keeps it out of the turns
        turns["floor"].append(ms_per_step(work, steps["floor"], num_steps))
        for name in order.sample(list(steps), len(steps)):
            mine, before = ms_per_step(work, steps[name], num_steps), turns["floor"][-1]
            after = ms_per_step(work, steps["floor"], num_steps)
            turns["floor"].append(after)
            over_floor[name].append(2 * mine / (before + after))
            if name != "floor":  # whose turn here shows what the ratios are worth
                turns[name].append(mine)
            advance()
    if not work.loss().isfinite():
        raise RuntimeError("loss must stay finite, got NaN or infinity. Lower the case's lr.")
    num_bytes = sum(p.numel() * p.element_size() for p in work.model.parameters())
    return {
        "parameter_bytes": num_bytes,
        "variants": compare(turns, over_floor, peaks, num_bytes),
    }


def compare(
    turns: dict[str, list[float]],
    over_floor: dict[str, list[float]],
    peaks: dict[str, int | None],
    parameter_bytes: int,
) -> dict[str, dict[str, Any]]:
    """Each variant's times and memory, beside those of vanilla and of the floor."""
    records: dict[str, dict[str, Any]] = {}
    ratios = {name: statistics.median(values) for name, values in over_floor.items()}
    for name, times in turns.items():
        records[name] = record = {
            "turns_ms": times,
            "turns_over_floor": over_floor[name],
            "best_ms": min(times),
            "median_ms": statistics.median(times),
            "over_vanilla": ratios[name] / ratios["vanilla"],
            "over_floor": ratios[name],
            "over_floor_95": interval(over_floor[name]),
            "peak_bytes": peaks[name],
        }
        if (peak := peaks[name]) is not None:
            record["extra_copies"] = (peak - (peaks["vanilla"] or 0)) / parameter_bytes
    return records


def interval(values: list[float]) -> tuple[float, float]:
    """Between which two of the `values` the median lies, with a confidence of about 95 %."""
    ordered, number = sorted(values), len(values)
    # As many lie below the median as heads come up in `number` tosses of a coin.
    low = max(0, round(number / 2 - 0.98 * number**0.5) - 1)
    return ordered[low], ordered[number - 1 - low]


def table(title: str, record: dict[str, Any], absent: list[str], device: str) -> Table:
    """Ratios; on CUDA times and memory too. On a CPU times say more about its neighbours."""
    columns = {
        "x vanilla": ("over_vanilla", ".2f"),
        "x floor": ("over_floor", ".3f"),
        "95 %": ("over_floor_95", ""),
    }
    if device == "cuda":
        times = {"best ms": ("best_ms", ".2f"), "median ms": ("median_ms", ".2f")}
        columns = times | columns | {"extra copies": ("extra_copies", ".3f")}
    result = Table("variant", title=title, title_justify="left", box=box.MARKDOWN)
    for header in columns:
        result.add_column(header, justify="right")
    for name, values in record["variants"].items():
        result.add_row(name, *(cell(values[key], spec) for key, spec in columns.values()))
    for name in absent:
        result.add_row(name, *["absent"] * len(columns))
    return result


def cell(value: float | tuple[float, float], spec: str) -> str:
    return "{:.3f}-{:.3f}".format(*value) if isinstance(value, tuple) else format(value, spec)


def hardware(device: str) -> dict[str, Any]:
    if device == "cuda":
        return {"gpu": torch.cuda.get_device_name()}
    cpuinfo = Path("/proc/cpuinfo")  # platform.processor() is empty on many Linux systems
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"cpu": (models or [platform.processor()])[0], "num_threads": torch.get_num_threads()}


def versions() -> dict[str, str | None]:
    packages = ["torch", "torchvision", "timm"]
    packages += ["pytorch_optimizer"] if pytorch_optimizer else []
    found = {name: importlib.metadata.version(name) for name in packages}
    python, cuda = platform.python_version(), torch.version.cuda
    return {"surrogap": surrogap.__version__, "python": python, "cuda": cuda, **found}


def arguments() -> argparse.Namespace:
    """The command line, checked; a mistake exits with status 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default_device)
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="all of the device's by default")
    parser.add_argument("--seconds", type=float, default=60, help="timing of each case")
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn")
    parser.add_argument("--peers", action="store_true", help="time other libraries too")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write everything")
    args = parser.parse_args()
    known = [name for name, case in CASES.items() if case.device == args.device]
    args.cases = args.cases or known
    for name in args.cases:
        if name not in known:
            closest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            parser.error(
                f"--cases must name cases of {args.device}, got {name}. "
                f"Known are {', '.join(known)}; the closest is {closest}."
            )
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}.")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device must be present, got cuda without a CUDA GPU. Pass --device cpu.")
    return args


def main() -> None:
    args = arguments()
    torch.backends.cudnn.benchmark = True
    gc.disable()  # a collection takes longer than many a step, and falls on whoever comes then
    peers = PEERS if args.peers else {}
    absent = [] if pytorch_optimizer else list(peers)
    variants = OURS | (peers if pytorch_optimizer else {})
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": vars(args),
        "hardware": hardware(args.device),
        "versions": versions(),
        "absent": absent,
        "cases": {},
    }
    console = Console(stderr=True)
    # Drawn between turns only: the thread that would draw it meanwhile takes time from the steps.
    with Progress(console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=args.seconds * len(args.cases))
        for index, name in enumerate(args.cases):
            start = time.perf_counter()

            def advance(index: int = index, name: str = name, start: float = start) -> None:
                seconds = min(time.perf_counter() - start, args.seconds)
                done = index * args.seconds + seconds
                progress.update(task, description=name, completed=done, refresh=True)

            record["cases"][name] = measure(
                CASES[name], variants, args.seconds, args.steps, advance
            )
            if args.json:  # after each case, so that a run cut short leaves what it has
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(record, indent=1, default=str) + "\n")
    output = Console(width=120)
    for name, costs in record["cases"].items():
        output.print(table(name, costs, absent, args.device))


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(f"error: {error}")
