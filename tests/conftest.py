import os
from collections.abc import Iterator

import pytest
import torch

# Before anything loads the kernels: without a GPU, Triton interprets them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The networks here are so small that a second thread only waits for the first.
torch.set_num_threads(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test that takes it runs on the CPU, and on a GPU with the marker `gpu`."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
