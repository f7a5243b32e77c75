"""Models that timm builds from exported weights match ours up to rounding."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from torch import Tensor, nn

from surrogap.data import Splits, TensorSet, loader
from surrogap.experiments.exports import architecture_of
from surrogap.models import create, names
from tests.data.synthetic import files

TIMM = ["convnext_atto", "test_vit3"]


def splits_of(channels: int, size: int, width: int | None = None) -> Splits:
    images = torch.randint(256, (3, channels, size, width or size), dtype=torch.uint8)
    part = TensorSet(images, torch.arange(3))
    return Splits("three", ("a", "b", "c"), part, part)


def rebuilt(name: str, model: nn.Module, splits: Splits, size: int, folder: Path) -> nn.Module:
    """Return the model from the files of an export, without surrogap."""
    architecture = architecture_of(name, model, splits, size)
    (folder / "config.json").write_text(json.dumps(architecture.config(splits, (size, size))))
    save_file(model.state_dict(), folder / "model.safetensors")
    if architecture.name is not None:
        return timm.create_model(f"local-dir:{folder}", pretrained=True)
    namespace: dict[str, Any] = {}
    exec(architecture.code, namespace)
    found: nn.Module = namespace["model"]
    weights = namespace["safetensors"].torch.load_file(folder / "model.safetensors")
    found.load_state_dict(weights)
    return found


def shaken(model: nn.Module) -> nn.Module:
    """Return a model with random weights and statistics, also in heads that start at zero."""
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) * 0.1 + 0.01)
    return model.eval()


def outputs(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(images)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", [*(n for n in names() if "small" in n), "vit_s16", *TIMM])
def test_timm_returns_the_same_logits(name: str, channels: int, tmp_path: Path) -> None:
    size = 32 if name.startswith(("vit", "test", "conv")) else 28
    splits = splits_of(channels, size)
    model = shaken(create(name, num_classes=3, image_size=size, in_channels=channels))
    again = rebuilt(name, model, splits, size, tmp_path)
    images = torch.randn(2, channels, size, size, dtype=torch.float64)
    logits = outputs(again.double(), images)
    assert logits.shape == (2, 3)
    torch.testing.assert_close(logits, outputs(model.double(), images), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("splits", "size", "sides"),
    [
        (splits_of(3, 8), None, (8, 8)),
        (splits_of(3, 8, width=6), None, (8, 6)),
        (splits_of(3, 8, width=6), 16, (16, 16)),
        (None, 14, (14, 14)),
    ],
)
def test_timm_transforms_images_in_the_same_way(
    splits: Splits | None, size: int | None, sides: tuple[int, int], tmp_path: Path
) -> None:
    """Also for models without a fixed image size, with the transform that timm builds."""
    splits = splits or files(tmp_path)
    model = create("resnet10t", num_classes=len(splits.classes))
    config = architecture_of("resnet10t", model, splits, sides[-1]).config(splits, sides)
    transform = create_transform(**resolve_data_config(pretrained_cfg=config["pretrained_cfg"]))
    part = splits.test
    images = (
        [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in part.images]
        if isinstance(part, TensorSet)
        else [Image.open(path) for path in part.paths]
    )
    ours, _ = next(iter(loader(splits, "test", batch_size=len(part), size=size, num_workers=0)))
    theirs = torch.stack([transform(image) for image in images])
    assert ours.shape == theirs.shape
    level = 1 / 255 / min(splits.std)  # Pillow and torch may round differently
    assert (ours - theirs).abs().max() <= 1.01 * level


@pytest.mark.parametrize("name", [n for n in names() if "small" not in n])
def test_timm_has_the_models_of_the_paper(name: str) -> None:
    splits = splits_of(3, 32)
    with torch.device("meta"):
        model = create(name, num_classes=3, image_size=224)
        architecture = architecture_of(name, model, splits, 224)
        namespace: dict[str, Any] = {}
        exec(architecture.code, namespace)
        if architecture.name is not None:
            namespace["model"] = timm.create_model(architecture.name, **architecture.arguments)
        again = namespace["model"]
    found, ours = again.state_dict(), model.state_dict()
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in ours.items()}
