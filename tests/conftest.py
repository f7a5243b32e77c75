import os
import signal
from collections.abc import Iterator

import pytest
import torch

# Before anything loads the kernels: without a GPU, Triton interprets them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Started under nohup or in the background, signals are ignored that some tests send.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

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
