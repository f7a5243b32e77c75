"""Vanilla, SAM and GSAM side by side, on 100 of scikit-learn's digits.

All three start from the same weights and see the same batches for the same number of steps. A step
of SAM or GSAM makes two passes, so it takes about twice as long.

    python examples/quickstart.py --seeds 5 --epochs 60
"""

# ruff: noqa: B023 (an objective calls its closure immediately, before the loop moves on)

import argparse
from functools import partial

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from surrogap import GSAM, SAM, Vanilla
from surrogap.rho import ProportionalToLR

NUM_IMAGES, BATCH_SIZE = 100, 20
LR, RHO = 3e-3, 0.1
OBJECTIVES = {
    "Vanilla": lambda model, rho: Vanilla(model),
    "SAM": lambda model, rho: SAM(model, rho=rho),
    "GSAM": lambda model, rho: GSAM(model, rho=rho, alpha=0.4),
}
NUM_DECIMALS = {"train loss": 4, "gap h": 4, "cosine": 3, "test loss": 3, "test accuracy %": 2}
loss_fn = nn.CrossEntropyLoss()


def digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """100 training images, about ten of each digit, and the other 1,697 as test images."""
    x, y = map(torch.from_numpy, load_digits(return_X_y=True))
    x = x.float().reshape(-1, 1, 8, 8) / 16
    parts = train_test_split(x, y, train_size=NUM_IMAGES, stratify=y, random_state=seed)
    return TensorDataset(*parts[::2]), TensorDataset(*parts[1::2])


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels_in, channels_out, pool in ((1, 16, 1), (16, 16, 2), (16, 32, 2)):
        layers.append(nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(channels_out), nn.ReLU(), nn.MaxPool2d(pool)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10))


def train(name: str, data: Dataset, seed: int, num_epochs: int, tick: partial[None]) -> nn.Module:
    """Train a model with an objective; everything else depends only on the seed."""
    torch.manual_seed(seed)
    model = network()
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(data, BATCH_SIZE, shuffle=True, generator=order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs * len(loader))
    rho = ProportionalToLR(optimizer, rho_max=RHO, rho_min=RHO / 5, lr_max=LR, lr_min=0.0)
    objective = OBJECTIVES[name](model, rho)
    for _ in range(num_epochs):
        for x, y in loader:
            loss = objective.loss(lambda: loss_fn(model(x), y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            tick(loss=loss.item())
    return model


def measure(model: nn.Module, train_data: TensorDataset, test_data: TensorDataset) -> Tensor:
    """Measure the quantities of `NUM_DECIMALS`, in the same way for all objectives."""
    model.eval()
    sam = SAM(model, rho=RHO)
    loader = DataLoader(train_data, BATCH_SIZE)
    reports = [sam.backward(lambda: loss_fn(model(x), y)) for x, y in loader]
    model.zero_grad()
    seen = torch.tensor([(report.loss, report.gap, report.cosine) for report in reports])
    with torch.no_grad():
        x, y = test_data.tensors
        logits = model(x)
        accuracy = 100 * (logits.argmax(dim=1) == y).float().mean()
        return torch.stack([*seen.mean(dim=0), loss_fn(logits, y), accuracy])


def spread(values: Tensor, num_decimals: int) -> str:
    """Format the mean ± the standard deviation, or a single value."""
    deviation = f" ± {values.std():.{num_decimals}f}" if len(values) > 1 else ""
    return f"{values.mean():.{num_decimals}f}{deviation}"


def show(results: dict[str, list[Tensor]], console: Console) -> None:
    """Print the table, and the differences from Vanilla."""
    found = {name: torch.stack(rows) for name, rows in results.items()}
    table = Table("", *found, title="Mean ± deviation over seeds")
    for index, (quantity, num_decimals) in enumerate(NUM_DECIMALS.items()):
        table.add_row(quantity, *(spread(rows[:, index], num_decimals) for rows in found.values()))
    console.print(table)
    for name in ("SAM", "GSAM"):
        difference = spread((found[name] - found["Vanilla"])[:, -1], 2)
        console.print(f"{name} minus Vanilla, seed by seed: {difference} points of test accuracy.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="runs of each objective")
    parser.add_argument("--epochs", type=int, default=60)
    args = parser.parse_args()
    if min(args.seeds, args.epochs) < 1:
        parser.error(f"--seeds and --epochs must be at least 1, got {args.seeds}, {args.epochs}.")
    torch.set_num_threads(1)  # tensors this small gain nothing from more threads
    console = Console()
    columns = (*Progress.get_default_columns(), "loss {task.fields[loss]:.4f}")
    results: dict[str, list[Tensor]] = {name: [] for name in OBJECTIVES}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        num_steps = args.seeds * len(OBJECTIVES) * args.epochs * NUM_IMAGES // BATCH_SIZE
        task = progress.add_task("", total=num_steps, loss=float("nan"))
        tick = partial(progress.update, task, advance=1)
        for seed in range(args.seeds):
            train_data, test_data = digits(seed)
            for name, found in results.items():
                progress.update(task, description=f"{name}, seed {seed}")
                model = train(name, train_data, seed, args.epochs, tick)
                found.append(measure(model, train_data, test_data))
    show(results, console)


if __name__ == "__main__":
    main()
