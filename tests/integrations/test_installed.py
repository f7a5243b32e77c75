"""The trainers are installed wherever `make test` runs, so their tests are not skipped there."""

from importlib.util import find_spec

import pytest


@pytest.mark.parametrize("name", ["accelerate", "lightning", "peft", "timm", "transformers"])
def test_trainer_is_installed(name: str) -> None:
    assert find_spec(name) is not None
