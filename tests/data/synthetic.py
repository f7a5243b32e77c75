"""Small synthetic sets, in the layouts of the real ones."""

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from surrogap.data import Splits, TensorSet, load


def pixels(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def arrays(**changes: Any) -> dict[str, Any]:
    """Return the arrays of a valid archive, with changes; None removes an array."""
    good = {
        "train_images": pixels(6, 8, 8, 3),
        "train_labels": np.array([0, 1, 2, 0, 1, 2]),
        "test_images": pixels(3, 8, 8, 3, seed=1),
        "test_labels": np.array([2, 1, 0]),
        "classes": np.array(["ant", "bee", "cat"]),
    }
    return {name: value for name, value in {**good, **changes}.items() if value is not None}


def tensors(number: int, size: int = 8, channels: int = 3) -> Splits:
    """Return images whose upper left pixel is their number."""
    images = torch.from_numpy(pixels(number, channels, size, size))
    images[:, :, 0, 0] = torch.arange(number, dtype=torch.uint8)[:, None]
    images_and_labels = TensorSet(images, torch.arange(number) % 3)
    return Splits("synthetic", ("ant", "bee", "cat"), images_and_labels, test=images_and_labels)


def save_image(path: Path, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(40, 50, 3, seed=seed)).save(path)


def folder(root: Path, parts: tuple[str, ...] = ("train", "val"), per_class: int = 5) -> Path:
    for part in parts:
        for label, name in enumerate(("ant", "bee")):
            for i in range(per_class):
                save_image(root / part / name / f"{i}.png", seed=100 * label + i)
    return root


def files(root: Path, per_class: int = 5) -> Splits:
    return load(folder(root, per_class=per_class))


def pickled(path: Path, content: object) -> str:
    """Write a pickle, and return its checksum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))
    return md5(path)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
