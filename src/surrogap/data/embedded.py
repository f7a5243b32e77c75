"""The embedded set: a balanced subset of Fashion-MNIST in the package, for runs without a download.

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


def embedded(path: str | Path = PATH) -> Splits:
    """Return 5,000 training and 2,000 test images of clothes: grey, 28 x 28, in ten classes.

    Args:
        path: The file, if not the one in the package.

    >>> embedded()
    Splits('embedded', 10 classes, train: 5000, test: 2000)
    """
    with np.load(io.BytesIO(lzma.decompress(Path(path).read_bytes()))) as archive:
        return splits_of_arrays("embedded", dict(archive))
