"""How the embedded set was made, and can be made again.

    python -m surrogap.data.fashion_mnist FASHION_MNIST.npz

takes an archive of the whole set, as `surrogap.data.archives` describes it, and writes of each
class the first 500 images for training and the first 200 for testing, in the original order, with
the original pixels. An xz-compressed archive was the smallest of what was tried (2.6 MB; a mosaic
as WebP or PNG 2.8 MB, differences of neighbouring pixels 2.7 MB).
"""

import io
import lzma
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from surrogap.data.embedded import PATH

TRAIN_PER_CLASS, TEST_PER_CLASS = 500, 200


def part(
    arrays: Mapping[str, np.ndarray[Any, Any]],
    train_per_class: int = TRAIN_PER_CLASS,
    test_per_class: int = TEST_PER_CLASS,
) -> dict[str, np.ndarray[Any, Any]]:
    """The first images of each class, in their order.

    >>> images, labels = np.arange(6, dtype=np.uint8), np.array([0, 0, 0, 1, 1, 1])
    >>> whole = {"train_images": images, "train_labels": labels}
    >>> whole |= {"test_images": images, "test_labels": labels, "classes": np.array(["a", "b"])}
    >>> part(whole, 2, 1)["train_images"]
    array([0, 1, 3, 4], dtype=uint8)
    """
    result = {"classes": arrays["classes"]}
    for name, count in (("train", train_per_class), ("test", test_per_class)):
        labels = arrays[f"{name}_labels"]
        of_each = [np.flatnonzero(labels == label)[:count] for label in np.unique(labels)]
        kept = np.sort(np.concatenate(of_each))
        result[f"{name}_images"] = arrays[f"{name}_images"][kept]
        result[f"{name}_labels"] = labels[kept]
    return result


def build(source: str | Path, path: str | Path = PATH) -> None:
    """Writes the embedded set.

    Args:
        source: The whole Fashion-MNIST as an `.npz` archive.
        path: Where to write it.
    """
    with np.load(source) as archive:
        arrays = part(archive)
    plain = io.BytesIO()
    np.savez(plain, allow_pickle=False, **arrays)
    preset = 9 | lzma.PRESET_EXTREME
    Path(path).write_bytes(lzma.compress(plain.getvalue(), preset=preset))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m surrogap.data.fashion_mnist FASHION_MNIST.npz [OUT]")
    build(*sys.argv[1:])
