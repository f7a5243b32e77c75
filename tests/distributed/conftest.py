from collections.abc import Iterator

import pytest

from tests.distributed.processes import Processes


@pytest.fixture(scope="session")
def two() -> Iterator[Processes]:
    processes = Processes(2)
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Processes]:
    processes = Processes(4)
    yield processes
    processes.stop()
