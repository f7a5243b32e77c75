"""Sets by name or path."""

import subprocess
import sys
from pathlib import Path

import pytest

from surrogap.data import SETS, load
from tests.data.synthetic import folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "cifar_10",
            "name_or_path must be one of embedded, cifar10, cifar100, flowers102, pets37, "
            "imagenet, got 'cifar_10'. The closest is 'cifar10'. Or pass the path of an .npz",
        ),
        ("xyzzy", "got 'xyzzy'. Pass one of them. Or pass the path of"),
        (
            "sets/mine.npz",
            "name_or_path must be one of .*, or the path of a dataset, got sets/mine.npz. Please",
        ),
        (
            "mine.npz",
            "name_or_path must be one of .*, or the path of a dataset, got mine.npz. Please pass",
        ),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(name)


def test_a_name_comes_before_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "embedded")
    assert len(load("embedded").train) == 5000
    assert len(load("./embedded").train) == 10


def test_the_documented_names_are_the_known() -> None:
    assert load.__doc__ is not None
    assert all(f'"{name}"' in load.__doc__ for name in SETS)


def test_what_is_missing_is_named() -> None:
    # None in sys.modules is how Python marks a module that cannot be imported.
    code = "import sys; sys.modules['torchvision'] = None; import surrogap.data"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (
        "MissingPackageError: surrogap.data needs numpy, Pillow and torchvision (" in result.stderr
    )
    assert "Run pip install 'surrogap[train]'." in result.stderr
