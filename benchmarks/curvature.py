"""Cost of the dominant eigenvalue of a Hessian, here and in other libraries.

The model is a ResNet-18 for 32 px images, trained for a few epochs on the images whose loss is
then measured, in evaluation mode. Every variant finds the dominant eigenvalue of the same Hessian
with the same relative tolerance. Its meaning differs: ours and hessian-eigenthings bound the
residual, PyHessian the change of the estimate. The record therefore has the error of each, relative
to an eigenvalue found beforehand with tolerance 1e-4.

All variants share one model and one list of batches, and take turns in a new order each round.
Memory is the peak that a turn allocates on top of the model and the batches. PyHessian and
hessian-eigenthings are included if they can be imported.

    python benchmarks/curvature.py --data cifar10 --json results/curvature.json
"""

import argparse
import gc
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torchvision.models import resnet18

from surrogap.analysis import Hessian, Surface, dominant_eigenvalue, eigenvalues
from surrogap.data import load

try:
    import pyhessian
except ModuleNotFoundError:
    pyhessian = None
try:
    import hessian_eigenthings
except ModuleNotFoundError:
    hessian_eigenthings = None

MAX_PRODUCTS = 200


@dataclass
class Workload:
    """A model in evaluation mode and batches, on the device."""

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    device: str
    tolerance: float

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def network(is_smoke: bool, num_classes: int) -> nn.Module:
    """The usual ResNet-18 for 32 px images: the stem is a 3x3 convolution, without pooling."""
    if is_smoke:
        stem = (nn.Conv2d(3, 4, kernel_size=8, stride=8), nn.BatchNorm2d(4), nn.ReLU())
        return nn.Sequential(*stem, nn.Flatten(), nn.Linear(64, num_classes))
    model = resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def images(name: str, root: str, number: int) -> tuple[Tensor, Tensor, int]:
    """Images of 3 x 32 x 32 with mean 0 and variance 1, their labels, and the number of classes."""
    splits = load(name, root)
    pixels, labels = splits.train.images[:number], splits.train.labels[:number]
    x = pixels.float().expand(-1, 3, -1, -1)
    margin = (32 - x.shape[-1]) // 2
    x = nn.functional.pad(x, [margin] * 4)
    return (x - x.mean()) / x.std(), labels, len(splits.classes)


def train(work: Workload, num_epochs: int) -> float:
    """Train on the batches, and return the accuracy on them."""
    model, num_steps = work.model.train(), num_epochs * len(work.batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(num_steps, 1))
    for epoch in range(num_epochs):
        for x, y in random.Random(epoch).sample(work.batches, len(work.batches)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
    model.zero_grad()
    model.eval()
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).float().mean().item() for x, y in work.batches]
    return statistics.mean(right)


# An eigenvalue, and the number of products it took.
Found = tuple[float, int]
Variant = Callable[[Workload], Found]


def ours(work: Workload, *, find: Callable[..., Any], method: str) -> Found:
    hessian = Hessian(Surface(work.model, work.batches), method)
    result = find(hessian, tolerance=work.tolerance, max_products=MAX_PRODUCTS)
    return float(result.values[0]), result.num_products


def by_pyhessian(work: Workload) -> Found:
    class Counted(pyhessian.hessian):
        """Counts products."""

        num_products = 0

        def dataloader_hv_product(self, v: list[Tensor]) -> Any:
            self.num_products += 1
            return super().dataloader_hv_product(v)

    with warnings.catch_warnings():
        # It calls backward(create_graph=True), which torch warns about.
        warnings.simplefilter("ignore")
        computed = Counted(
            work.model, nn.CrossEntropyLoss(), dataloader=work.batches, cuda=work.device == "cuda"
        )
        values, _ = computed.eigenvalues(maxIter=MAX_PRODUCTS, tol=work.tolerance)
    work.model.zero_grad()
    return values[0], computed.num_products


def by_hessian_eigenthings(work: Workload) -> Found:
    loss_fn = hessian_eigenthings.supervised_loss(nn.CrossEntropyLoss())
    operator = hessian_eigenthings.HessianOperator(work.model, work.batches, loss_fn)
    value, _, _, num_products, _ = hessian_eigenthings.power_iteration_one(
        operator, max_iter=MAX_PRODUCTS, tol=work.tolerance, seed=0
    )
    return value, num_products


dominant = partial(eigenvalues, which="dominant")
OURS: dict[str, Variant] = {
    "lanczos": partial(ours, find=dominant, method="forward-over-reverse"),
    "lanczos, double-backward": partial(ours, find=dominant, method="double-backward"),
    "power iteration": partial(ours, find=dominant_eigenvalue, method="forward-over-reverse"),
}
PEERS: dict[str, tuple[Any, Variant]] = {
    "PyHessian": (pyhessian, by_pyhessian),
    "hessian-eigenthings": (hessian_eigenthings, by_hessian_eigenthings),
}


def turn(work: Workload, variant: Variant) -> dict[str, float]:
    """The cost and the result of one variant."""
    gc.collect()
    is_cuda = work.device == "cuda"
    before = torch.cuda.memory_allocated() if is_cuda else 0
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    work.synchronize()
    start = time.perf_counter()
    value, num_products = variant(work)
    work.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if is_cuda else 0
    return {"seconds": seconds, "value": value, "num_products": num_products, "peak_bytes": peak}


def measure(work: Workload, variants: dict[str, Variant], num_rounds: int) -> dict[str, Any]:
    """The cost and the result of each variant, turn by turn."""
    hessian = Hessian(Surface(work.model, work.batches))
    truth = dominant(hessian, tolerance=1e-4, max_products=MAX_PRODUCTS)
    record: dict[str, Any] = {
        "eigenvalue": float(truth.values[0]),
        "residual": float(truth.residuals[0]),
        "variants": {name: [] for name in variants},
    }
    order = random.Random(0)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("turns", total=num_rounds * len(variants))
        for variant in variants.values():  # warm-up
            variant(replace(work, tolerance=0.5))
        for _ in range(num_rounds):
            for name in order.sample(list(variants), len(variants)):
                record["variants"][name].append(turn(work, variants[name]))
                progress.advance(task)
    return record


def table(record: dict[str, Any], absent: list[str]) -> Table:
    truth = record["eigenvalue"]
    result = Table("variant", title=f"dominant eigenvalue {truth:.5g}", box=box.MARKDOWN)
    for header in ("s", "products", "ms / product", "error %", "peak MiB"):
        result.add_column(header, justify="right")
    for name, turns in record["variants"].items():
        seconds = statistics.median(t["seconds"] for t in turns)
        products = statistics.median(t["num_products"] for t in turns)
        per_product = statistics.median(t["seconds"] / t["num_products"] for t in turns)
        error = max(abs(t["value"] / truth - 1) for t in turns)
        peak = max(t["peak_bytes"] for t in turns) / 2**20
        cells = (f"{seconds:.2f}", f"{products:g}", f"{per_product * 1e3:.1f}", f"{error:.2%}")
        result.add_row(name, *cells, f"{peak:.0f}" if peak else "")
    for name in absent:
        result.add_row(name, *["absent"] * 5)
    return result


def arguments() -> argparse.Namespace:
    """The command line, checked; an error exits with status 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default_device)
    parser.add_argument("--data", default="embedded", help="a dataset by name or path")
    parser.add_argument("--root", default="data", help="the folder of the named datasets")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=500, help="images per batch")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of training beforehand")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few images")
    parser.add_argument("--json", type=Path, metavar="PATH", help="the file for the record")
    args = parser.parse_args()
    if args.smoke:
        args.images, args.batch, args.rounds, args.epochs = 48, 20, 1, 1
    for name in ("images", "batch", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}.")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda requires a CUDA GPU. Pass --device cpu.")
    return args


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    try:
        x, y, num_classes = images(args.data, args.root, args.images)
    except ValueError as error:
        print(f"--data: {error}", file=sys.stderr)
        sys.exit(2)
    model = network(args.smoke, num_classes).to(args.device)
    parts = zip(
        x.to(args.device).split(args.batch), y.to(args.device).split(args.batch), strict=True
    )
    work = Workload(model, list(parts), args.device, args.tolerance)
    accuracy = train(work, args.epochs)
    present = {name: variant for name, (module, variant) in PEERS.items() if module is not None}
    record = measure(work, OURS | present, args.rounds)
    absent = [name for name in PEERS if name not in present]
    console = Console(width=120)
    console.print(table(record, absent))
    console.print(f"{len(x)} images of {args.data}, batches of {args.batch}, {accuracy:.1%} right.")
    size = sum(p.numel() for p in model.parameters())
    about = provenance(args, args.device, list(present)) | {"num_weights": size}
    write(about | {"accuracy": accuracy} | record, args.json)


if __name__ == "__main__":
    main()
