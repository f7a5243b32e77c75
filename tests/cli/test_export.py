"""`surrogap export`: weights that plain timm loads."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from surrogap.cli import main
from surrogap.data import load
from surrogap.experiments.trained import TrainedRun
from surrogap.training.run import train
from tests.training.small_runs import archive, config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ViT after a step on grey images of 14 pixels."""
    folder = tmp_path_factory.mktemp("vit")
    data = archive(folder / "vit.npz", size=14)
    settings = config(folder, data=str(data), model="small_vit_narrow", steps=1)
    return train(settings).folder


def test_timm_loads_the_weights_and_returns_the_same_logits(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run)]) == 0
    out = capsys.readouterr().out
    folder = run / "export"
    assert f'timm.create_model("local-dir:{folder}", pretrained=True)' in out
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    trained = TrainedRun.read(run)
    splits = trained.splits()
    images = torch.randn(3, 1, 14, 14)
    with torch.no_grad():
        assert torch.equal(model(images), trained.model(splits)(images))
    assert model.pretrained_cfg["label_names"] == list(splits.classes)
    assert list(model.pretrained_cfg["mean"]) == list(splits.mean)


@pytest.mark.parametrize(("image_size", "sides"), [(16, [16, 16]), (None, [12, 8])])
def test_timm_uses_the_image_size_of_the_training(
    image_size: int | None, sides: list[int], tmp_path: Path
) -> None:
    archive(tmp_path / "images.npz", size=12, width=8, channels=3)
    run = train(config(tmp_path, model="resnet10t", image_size=image_size, steps=1)).folder
    assert main(["export", str(run)]) == 0
    model = timm.create_model(f"local-dir:{run / 'export'}", pretrained=True)
    found = timm.data.resolve_model_data_config(model)
    assert list(found["input_size"]) == [3, *sides]
    assert found["crop_pct"] == 1.0


def test_checkpoint_path_of_timm(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "weights"
    assert main(["export", str(run), "--out", str(out)]) == 0
    found = json.loads((out / "config.json").read_text())
    path = out / "model.safetensors"
    model = timm.create_model(found["architecture"], checkpoint_path=path, **found["model_args"])
    for name, tensor in load_file(path).items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert found["surrogap"]["run"] == TrainedRun.read(run).config.to_dict()


def test_weights_shared_by_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in timm's CoaT. safetensors also refuses tensors that are not contiguous."""
    from surrogap.training import model

    def tied(*_: object, **__: object) -> torch.nn.Module:
        first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        second.weight = first.weight
        last = torch.nn.Linear(64, 4)
        last.weight.data = torch.randn(64, 4).T
        return torch.nn.Sequential(torch.nn.Flatten(), first, second, last)

    monkeypatch.setattr(model, "create", tied)
    run = train(config(tmp_path, steps=1)).folder
    assert main(["export", str(run)]) == 0
    expected = TrainedRun.read(run).model(load(tmp_path / "images.npz")).state_dict()
    found = load_file(run / "export" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_model_that_timm_does_not_have_comes_with_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(config(tmp_path, steps=1)).folder
    assert main(["export", str(run)]) == 0
    out = capsys.readouterr().out
    code = "\n".join(line[2:] for line in out.splitlines() if line.startswith("  "))
    namespace: dict[str, torch.nn.Module] = {}
    exec(code, namespace)
    images = torch.randn(3, 1, 8, 8)
    splits = load(tmp_path / "images.npz")
    with torch.no_grad():
        assert torch.equal(namespace["model"](images), TrainedRun.read(run).model(splits)(images))


def test_refusals_write_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    assert main(["export", str(run), "--out", str(there)]) == 2
    assert f"out must be a new folder, got {there}, which exists already" in capsys.readouterr().err
    assert not list(there.iterdir())

    assert main(["export", str(tmp_path)]) == 2
    assert "run must be a folder with a readable config.json" in capsys.readouterr().err

    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((run / "config.json").read_text())
    assert main(["export", str(bare)]) == 2
    assert "weights must be a run's folder with a checkpoint" in capsys.readouterr().err
    assert not (bare / "export").exists()

    file = tmp_path / "file"
    file.touch()
    assert main(["export", str(run), "--out", str(file / "below")]) == 2
    assert "out must be a writable folder" in capsys.readouterr().err
