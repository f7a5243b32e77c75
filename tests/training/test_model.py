"""The model of a configuration: image sizes, dropout, head and initial weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from surrogap.data import Splits, load
from surrogap.training.groups import ModelConfig
from surrogap.training.model import load_weights, model_of
from surrogap.training.run import train
from tests.data.synthetic import files
from tests.training import small_runs


@pytest.fixture
def splits(tmp_path: Path) -> Splits:
    return load(small_runs.archive(tmp_path / "images.npz"))


def test_the_model_has_the_size_of_the_images(splits: Splits, tmp_path: Path) -> None:
    model = model_of(ModelConfig(name="small_mlp"), splits)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 4)
    model = model_of(ModelConfig(name="small_mlp", image_size=12), splits)
    assert model(torch.zeros(2, 1, 12, 12)).shape == (2, 4)
    model = model_of(ModelConfig(name="small_mlp"), files(tmp_path / "files"))
    assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 2)


@pytest.mark.parametrize("name", ["small_mlp", "small_vit_narrow", "small_mixer", "test_vit3"])
def test_images_that_are_not_square(name: str, tmp_path: Path) -> None:
    data = small_runs.archive(tmp_path / "images.npz", size=28, width=20)
    config = small_runs.config(tmp_path, model=name)
    message = f"image_size must be given for images that are not square, got 28x20 for {name}. Pass"
    with pytest.raises(ValueError, match=message):
        train(config)
    assert not config.folder.exists()
    for model in (ModelConfig(name="small_mlp", image_size=28), ModelConfig(name="resnet10t")):
        size = (28, 28) if model.image_size else (28, 20)
        assert model_of(model, load(data)).eval()(torch.zeros(2, 1, *size)).shape == (2, 4)


@pytest.mark.parametrize(
    "name", ["small_vit_narrow", "small_mixer_narrow", "small_resnet18_narrow"]
)
def test_dropout_makes_passes_differ(name: str, splits: Splits) -> None:
    x = torch.randn(2, 1, 8, 8)
    for drop, differs in ((0.0, False), (0.5, True)):
        model = model_of(ModelConfig(name=name, drop=drop), splits)
        for parameter in model.parameters():  # a head of zeros would hide dropout
            nn.init.normal_(parameter, std=0.1)
        assert torch.equal(model(x), model(x)) is not differs
        assert torch.equal(model.eval()(x), model(x))


def test_attention_itself_drops_nothing(splits: Splits) -> None:
    model = model_of(ModelConfig(name="small_vit_narrow", drop=0.5), splits)
    layers = {n: m.p for n, m in model.named_modules() if isinstance(m, nn.Dropout)}
    assert {p for name, p in layers.items() if name.endswith("attn_drop")} == {0.0}
    assert {p for name, p in layers.items() if not name.endswith("attn_drop")} == {0.5}


def test_dropout_where_there_is_none(splits: Splits) -> None:
    with pytest.raises(ValueError, match="drop must be 0 for small_mlp, which has no dropout, got"):
        model_of(ModelConfig(name="small_mlp", drop=0.1), splits)


@pytest.mark.parametrize("name", ["small_mlp", "small_vit_narrow", "small_resnet18_narrow"])
def test_the_biases_of_a_head(name: str, splits: Splits) -> None:
    model = model_of(ModelConfig(name=name, head_bias=-10.0), splits)
    biases = [parameter for parameter in model.parameters() if parameter.shape == (4,)]
    assert torch.equal(biases[-1], torch.full((4,), -10.0))
    with torch.no_grad():  # only the biases of the head remain
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.zero_()
    assert torch.equal(model.eval()(torch.zeros(2, 1, 8, 8)), torch.full((2, 4), -10.0))


def test_a_head_without_biases(splits: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 4, bias=False))
    monkeypatch.setattr("surrogap.training.model.create", lambda *_, **settings: bare)
    message = (
        "head_bias must be left out for small_mlp, whose head is not a linear layer with a bias"
    )
    with pytest.raises(ValueError, match=message):
        model_of(ModelConfig(name="small_mlp", head_bias=0.0), splits)


def test_weights_of_a_run_and_a_new_head(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, steps=1)
    train(config)
    trained = small_runs.state(config.folder)["model"]
    other = load("embedded")
    model = model_of(ModelConfig(name="small_mlp", image_size=8, weights=str(config.folder)), other)
    own = model.state_dict()
    assert own["5.weight"].shape == (10, 512)  # ten classes instead of four
    for name in ("1.weight", "3.bias"):
        assert torch.equal(own[name], trained[name])


def test_weights_of_a_file(tmp_path: Path, splits: Splits) -> None:
    config = ModelConfig(name="small_mlp", weights=str(tmp_path / "w.safetensors"))
    expected = model_of(ModelConfig(name="small_mlp"), splits).state_dict()
    save_file(expected, tmp_path / "w.safetensors")
    found = model_of(config, splits).state_dict()
    assert all(torch.equal(found[name], w) for name, w in expected.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "missing",
            r"weights must be those of the model, got nothing for weight, which has the shape",
        ),
        (
            "shape",
            r"weights must be those of the model, got \(4, 5\) for weight, which has the shape",
        ),
    ],
)
def test_weights_of_another_network(change: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"other" if change == "missing" else "weight": torch.zeros(4, 5)}, path)
    with pytest.raises(ValueError, match=message):
        load_weights(nn.Linear(3, 4, bias=False), path, num_classes=4)


@pytest.mark.parametrize("length", [0, 4, 20, -1])
def test_weights_of_a_damaged_file(length: int, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"weight": torch.zeros(4, 3)}, path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"weights must be an intact .safetensors file, got"):
        load_weights(nn.Linear(3, 4, bias=False), path, num_classes=4)


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weights must be a run's folder with a checkpoint, or a"):
        load_weights(nn.Linear(3, 4), tmp_path / "nothing", num_classes=4)
