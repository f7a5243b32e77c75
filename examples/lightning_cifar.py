"""GSAM in Lightning's Trainer, on CIFAR-10 or on random images of its size.

    python examples/lightning_cifar.py --data cifar --epochs 30 --precision bf16-mixed

`--data` is the folder of CIFAR-10, which is downloaded if it is missing. Without `--data` the
images are random, to check that the script runs.
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from torchvision import datasets
from torchvision.transforms import v2

from surrogap import GSAM
from surrogap.integrations.lightning import SharpnessAware
from surrogap.rho import ProportionalToLR

LR, RHO = 0.1, 0.1
MEAN, DEVIATION = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)


def block(channels: int, width: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2))


class Classifier(pl.LightningModule):
    """A small convolutional network. Nothing in it refers to surrogap."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        blocks = [block(3, width), block(width, 2 * width), block(2 * width, 4 * width)]
        pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.net = nn.Sequential(*blocks, *pool, nn.Linear(4 * width, 10))
        self.train_accuracy = MulticlassAccuracy(10, average="micro")
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        self.train_accuracy(logits, y)
        self.log("train_accuracy", self.train_accuracy, on_epoch=True, on_step=False)
        return cross_entropy(logits, y, label_smoothing=0.1)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def splits(folder: str | None) -> tuple[Dataset, Dataset]:
    if folder is None:
        images, labels = torch.randn(256, 3, 32, 32), torch.randint(10, (256,))
        data = TensorDataset(images, labels)
        return data, data
    plain = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, DEVIATION)]
    augmented = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), *plain])
    train_data = datasets.CIFAR10(folder, train=True, download=True, transform=augmented)
    test_data = datasets.CIFAR10(folder, train=False, transform=v2.Compose(plain))
    return train_data, test_data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", help="the folder of CIFAR-10")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--precision", default="32-true", help="as for Lightning's Trainer")
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    train_data, test_data = splits(args.data)
    train_loader = DataLoader(train_data, 128, shuffle=True, num_workers=args.workers)
    test_loader = DataLoader(test_data, 256, num_workers=args.workers)
    callback = SharpnessAware(
        lambda model, optimizer: GSAM(
            model,
            rho=ProportionalToLR(optimizer, rho_max=RHO, rho_min=0.0, lr_max=LR, lr_min=0.0),
            alpha=0.4,
        )
    )
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        precision=args.precision,
        gradient_clip_val=5.0,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), train_loader, test_loader)
    measured = {name: float(value) for name, value in trainer.callback_metrics.items()}
    print(" ".join(f"{name} {value:.4f}" for name, value in sorted(measured.items())))


if __name__ == "__main__":
    main()
