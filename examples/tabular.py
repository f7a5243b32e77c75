"""Vanilla, SAM and GSAM on tabular data: regression on scikit-learn's diabetes data with an MLP.

    python examples/tabular.py --seeds 10

The closure computes the mean squared error; an objective works with any loss.
"""

import argparse

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from surrogap import GSAM, SAM, Objective, Vanilla

EPOCHS, BATCH_SIZE, LR = 60, 32, 3e-3
OBJECTIVES = {
    "Vanilla": Vanilla,
    "SAM": lambda model: SAM(model, rho=0.2),
    "GSAM": lambda model: GSAM(model, rho=0.2, alpha=0.2),
}


def table(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Ten standardized features and a standardized target; half of the rows are for training."""
    x, y = (torch.from_numpy(array).float() for array in load_diabetes(return_X_y=True))
    parts = train_test_split(x, y[:, None], train_size=0.5, random_state=seed)
    x_train, x_test, y_train, y_test = parts
    x_mean, x_std, y_mean, y_std = x_train.mean(0), x_train.std(0), y_train.mean(), y_train.std()
    train_data = TensorDataset((x_train - x_mean) / x_std, (y_train - y_mean) / y_std)
    return train_data, TensorDataset((x_test - x_mean) / x_std, (y_test - y_mean) / y_std)


def train(objective: Objective, model: nn.Module, data: TensorDataset, seed: int, epochs: int):
    """An ordinary training loop. Only one line uses the objective."""
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(data, BATCH_SIZE, shuffle=True, generator=order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for _ in range(epochs):
        for x, y in loader:
            loss = objective.loss(lambda x=x, y=y: nn.functional.mse_loss(model(x), y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


@torch.no_grad()
def explained_variance(model: nn.Module, data: TensorDataset) -> Tensor:
    """Return R^2: 1 is perfect, 0 is as good as predicting the mean of the targets."""
    x, y = data.tensors
    return 1 - nn.functional.mse_loss(model(x), y) / y.var(correction=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="runs of each objective")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    args = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small gain nothing from more threads
    results: dict[str, list[Tensor]] = {name: [] for name in OBJECTIVES}
    for seed in range(args.seeds):
        train_data, test_data = table(seed)
        for name, found in results.items():
            torch.manual_seed(seed)  # the same initial weights for each objective
            model = nn.Sequential(
                *(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
            )
            train(OBJECTIVES[name](model), model, train_data, seed, args.epochs)
            scores = [explained_variance(model, data) for data in (train_data, test_data)]
            found.append(torch.stack(scores))
    print(f"R^2 over {args.seeds} seeds, mean and standard deviation")
    for name, found in results.items():
        scores = torch.stack(found)
        mean, deviation = scores.mean(0), scores.std(0, correction=0)
        print(
            f"{name:8} train {mean[0]:.3f} ± {deviation[0]:.3f}, "
            f"test {mean[1]:.3f} ± {deviation[1]:.3f}"
        )


if __name__ == "__main__":
    main()
