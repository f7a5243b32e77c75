"""Libraries that tests skip without are installed wherever `make test` runs."""

from importlib.util import find_spec

import pytest

LIBRARIES = (
    *("accelerate", "lightning", "peft", "timm", "transformers"),
    *("curvlinops", "pytorch_optimizer"),
)


@pytest.mark.parametrize("name", LIBRARIES)
def test_library_is_installed(name: str) -> None:
    assert find_spec(name) is not None
