"""The embedded dataset: a balanced subset of Fashion-MNIST, for runs without a download.

`benchmarks/embedded_set.py` builds it. The images are Zalando's, under the MIT licence: see
fashion_mnist.LICENSE.
"""

import io
import lzma
from pathlib import Path

import numpy as np

from surrogap.data.archives import splits_of_arrays
from surrogap.data.splits import Splits

PATH = Path(__file__).with_name("fashion_mnist.npz.xz")
# About the share of wrong labels in CIFAR-10N's worst label set.
_WRONG = 0.4


def embedded(path: str | Path = PATH) -> Splits:
    """Return 5,000 training and 2,000 test images of clothes: grey, 28 x 28, in ten classes.

    The noisy labels are synthetic: 40 % of them are wrong, drawn at random from the other classes.

    Args:
        path: The file, if not the one in the package.

    >>> embedded()
    Splits('embedded', 10 classes, train: 5000, test: 2000)
    """
    with np.load(io.BytesIO(lzma.decompress(Path(path).read_bytes()))) as archive:
        arrays = dict(archive)
    noisy = _with_errors(arrays["train_labels"], len(arrays["classes"]))
    return splits_of_arrays("embedded", {**arrays, "train_noisy_labels": noisy})


def _with_errors(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the labels with 40 % of them replaced, the same in each call."""
    random = np.random.default_rng(0)
    is_wrong = random.random(len(labels)) < _WRONG
    return (labels + is_wrong * random.integers(1, num_classes, len(labels))) % num_classes
