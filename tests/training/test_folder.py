"""The folder of a run: other files are never overwritten."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from surrogap.training.config import Config
from surrogap.training.folder import check_folder, prepare_folder, read_config
from surrogap.training.processes import World
from surrogap.training.run import train
from tests.training import small_runs

WORLD = World(torch.device("cpu"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(config: Config, message: str, *, resume: bool = False) -> None:
    """Assert that a run raises an error and leaves its folder unchanged."""
    before = contents(config.folder.parent)
    with pytest.raises(ValueError, match=message):
        train(config, resume=resume)
    assert contents(config.folder.parent) == before


def test_it_holds_the_configuration_and_the_versions(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, steps=1)
    train(config)
    assert read_config(config.folder) == config
    versions = json.loads((config.folder / "versions.json").read_text())
    assert versions["torch"] == torch.__version__
    assert {"surrogap", "python", "timm", "platform", "device", "processes"} <= set(versions)


def test_a_run_that_is_there(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, steps=1)
    train(config)
    refused(config, "out must be a new folder, got .*, which already has this run. Pass --resume")


@pytest.mark.parametrize("resume", [False, True])
def test_another_run(resume: bool, tmp_path: Path) -> None:
    train(small_runs.config(tmp_path, steps=1))
    config = small_runs.config(tmp_path, steps=1, rho=0.3)
    message = r"out must be a folder of this configuration, got .*, whose run has rho=0.1 and not"
    refused(config, message, resume=resume)


def test_another_objective(tmp_path: Path) -> None:
    train(small_runs.config(tmp_path, steps=1, objective="sam"))
    message = r"whose run has objective='sam' and not 'entropy-sgd'. Pass another --out"
    refused(small_runs.config(tmp_path, steps=1, objective="entropy-sgd"), message)


@pytest.mark.parametrize(
    "changes",
    [{"record_every": 7}, {"checkpoint_every": 1}, {"eval_batch_size": 3}, {"max_skipped": 2}],
)
def test_what_may_change(changes: dict[str, Any], tmp_path: Path) -> None:
    train(small_runs.config(tmp_path, steps=2))
    check_folder(small_runs.config(tmp_path, steps=2, **changes), resume=True)


def test_a_folder_with_other_files(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path)
    config.folder.mkdir()
    (config.folder / "thesis.tex").write_text("years of work")
    refused(
        config, "out must be a new or empty folder, or that of a run, got .*, which has other files"
    )


def test_an_empty_folder_is_allowed(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, steps=1)
    config.folder.mkdir()
    assert train(config).step == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, out=str(tmp_path / "images.npz" / "run"))
    with pytest.raises(ValueError, match=r"out must be a writable folder, got .*Not a dir"):
        prepare_folder(config, WORLD)


def test_a_mistake_leaves_no_folder(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, model="resnet5")
    refused(config, "name must be a known model, got 'resnet5'")
    refused(
        small_runs.config(tmp_path, data=str(tmp_path / "no.npz")), "name_or_path must be one of"
    )
    assert not config.folder.exists()


@pytest.mark.parametrize("text", [None, b"{half a", b"\xff\xfe{}"])
def test_a_folder_without_a_run(text: bytes | None, tmp_path: Path) -> None:
    remedy = "Pass a run's folder"
    if text is not None:
        (tmp_path / "config.json").write_bytes(text)
        remedy = "Restore config.json from a copy"
    message = f"run must be a folder with a readable config.json, got .*. {remedy}"
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_a_configuration_of_an_older_version(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"objective": {"name": "vanilla", "alpha": 0.4}}')
    message = "config.json is not a configuration of this version of surrogap: alpha has no effect"
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_a_run_without_its_configuration(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, steps=1)
    train(config)
    (config.folder / "config.json").unlink()
    refused(config, "readable config.json, got .*run. Restore config.json from a copy")


def test_versions_of_what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    config = small_runs.config(tmp_path)
    prepare_folder(config, WORLD)
    assert json.loads((config.folder / "versions.json").read_text())["timm"] is None
