"""Build the dataset in the package, `surrogap.data.embedded`, from Fashion-MNIST.

    python benchmarks/embedded_set.py FASHION_MNIST.npz [OUT]

reads an archive of the whole dataset, in the format of `surrogap.data.archives`. It writes the
first 500 training images and the first 200 test images of each class, in the original order, with
the original pixels. An archive compressed with xz was the smallest format tried (2.6 MB; a mosaic
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

NUM_PER_CLASS = {"train": 500, "test": 200}


def first_of_each_class(
    arrays: Mapping[str, np.ndarray[Any, Any]], num_per_class: Mapping[str, int] = NUM_PER_CLASS
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the first images of each class and split, in their order."""
    result = {"classes": arrays["classes"]}
    for split, number in num_per_class.items():
        labels = arrays[f"{split}_labels"]
        of_each = [np.flatnonzero(labels == label)[:number] for label in np.unique(labels)]
        kept = np.sort(np.concatenate(of_each))
        result[f"{split}_images"] = arrays[f"{split}_images"][kept]
        result[f"{split}_labels"] = labels[kept]
    return result


def build(source: str, path: str | Path = PATH) -> None:
    """Write the embedded dataset to `path`, from an archive of Fashion-MNIST."""
    with np.load(source) as archive:
        arrays = first_of_each_class(archive)
    plain = io.BytesIO()
    np.savez(plain, allow_pickle=False, **arrays)
    Path(path).write_bytes(lzma.compress(plain.getvalue(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python benchmarks/embedded_set.py FASHION_MNIST.npz [OUT]")
    build(*sys.argv[1:])
