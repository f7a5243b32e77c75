"""Small runs for the tests: a few images, a small model, a few steps."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surrogap.training.checkpoints import Checkpoints
from surrogap.training.config import Config
from surrogap.training.progress import ProgressDisplay
from surrogap.training.records import Record, read_records
from tests.data.synthetic import pixels

TIMES = ("images_per_second", "seconds")


def archive(
    path: Path, *, num_images: int = 32, size: int = 8, width: int | None = None, channels: int = 1
) -> Path:
    """Write an archive of noise in four classes: 32 images are 4 batches of 8."""
    shape = (size, width or size, channels)
    labels = np.arange(num_images) % 4
    np.savez(
        path,
        train_images=pixels(num_images, *shape),
        train_labels=labels,
        test_images=pixels(num_images // 2, *shape, seed=1),
        test_labels=labels[: num_images // 2],
        classes=np.array(["ant", "bee", "cat", "dog"]),
    )
    return path


def config(folder: Path, **changes: Any) -> Config:
    """Return the configuration of 3 epochs of 4 steps on a small MLP, with images in `folder`."""
    data = folder / "images.npz"
    if not data.exists():
        folder.mkdir(parents=True, exist_ok=True)
        archive(data)
    settings: dict[str, Any] = {
        "model": "small_mlp",
        "data": str(data),
        "augmentation": "none",
        "batch_size": 8,
        "epochs": 3,
        "record_every": 2,
        "device": "cpu",
        "tensorboard": False,
        "out": str(folder / "run"),
    }
    return Config().override(**(settings | changes))


def state(folder: Path) -> dict[str, Any]:
    """Return the newest checkpoint of a run."""
    found = Checkpoints(folder / "checkpoints").newest()
    assert found is not None
    return found


def timeless(records: list[Record]) -> list[Record]:
    """Return records without times."""
    return [{k: v for k, v in record.items() if k not in TIMES} for record in records]


def timeless_records(folder: Path) -> list[Record]:
    return timeless(read_records(folder))


def leaves(tree: object, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested dictionaries and lists, by their path."""
    if isinstance(tree, Mapping):
        parts = [leaves(value, f"{path}/{key}") for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        parts = [leaves(value, f"{path}/{i}") for i, value in enumerate(tree)]
    else:
        return {path: tree}
    return {key: value for part in parts for key, value in part.items()}


def assert_same(one: object, other: object) -> None:
    """Assert that tensors are equal bit for bit, and everything else except times."""
    mine, theirs = leaves(one), leaves(other)
    assert mine.keys() == theirs.keys()
    for path, value in mine.items():
        if path.endswith("/seconds") or path == "/records":
            continue
        if isinstance(value, Tensor):
            assert torch.equal(value, theirs[path]), path
        else:
            assert value == theirs[path], path


class Interrupting(ProgressDisplay):
    """Display that sends a signal to the process after a step."""

    def __init__(self, at: int, number: signal.Signals = signal.SIGTERM) -> None:
        self.at = at
        self.number = number

    def step(self, step: int) -> None:
        if step == self.at:
            os.kill(os.getpid(), self.number)

    def record(self, record: Mapping[str, Any]) -> None:
        pass
