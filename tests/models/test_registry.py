"""Models by name: ours, timm's, and invalid arguments."""

import subprocess
import sys
from typing import Any

import pytest
import timm
import torch
from torch import nn

from surrogap import GSAM, models
from tests import equality

SMALL = [name for name in models.names() if name.startswith("small_")]
NARROW = [name for name in SMALL if name.endswith(("_narrow", "_tiny"))]
every_small = pytest.mark.parametrize("name", SMALL)


def seeded(name: str, seed: int, **arguments: int) -> nn.Module:
    torch.manual_seed(seed)
    return models.create(name, num_classes=3, **arguments)


def test_names_are_ours_or_mean_what_they_mean_in_timm() -> None:
    both = set(models.names()) & set(timm.list_models())
    assert both == {"resnet50", "resnet101", "resnet152"}


@pytest.mark.parametrize("name", [*NARROW, "small_mlp"])
def test_the_seed_decides_the_weights(name: str) -> None:
    first, again, other = (equality.bits(seeded(name, seed, image_size=28)) for seed in (0, 0, 1))
    assert equality.same_bits(first, again)
    assert not equality.same_bits(first, other)


@every_small
@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3)])
def test_a_gsam_step_reaches_every_parameter(name: str, size: int, channels: int) -> None:
    model = seeded(name, 0, image_size=size, in_channels=channels)
    images, labels = torch.randn(2, channels, size, size), torch.tensor([0, 2])
    report = GSAM(model, rho=0.05, alpha=0.4).backward(
        lambda: nn.functional.cross_entropy(model(images), labels)
    )
    assert torch.isfinite(report.gap)
    # Heads and branches that are initialised to zero stop the gradient of the first pass. At the
    # perturbed weights they are not zero, and the second pass reaches the layers before them.
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()
        assert parameter.grad.any()


@pytest.mark.parametrize(
    ("name", "size"),
    [("convnext_atto", 64), ("resnet18", 64), ("vit_tiny_patch16_224", 64)],
)
def test_timms_names_pass_through(name: str, size: int) -> None:
    with torch.device("meta"):
        model = models.create(name, num_classes=5, image_size=size, in_channels=1)
        assert model(torch.empty(2, 1, size, size)).shape == (2, 5)


def test_a_network_that_a_user_registers_with_timm() -> None:
    @timm.models.register_model
    def surrogap_linear(num_classes: int, in_chans: int, **_: Any) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(in_chans * 16, num_classes))

    model = models.create("surrogap_linear", num_classes=5, image_size=4, in_channels=1)
    assert model(torch.zeros(2, 1, 4, 4)).shape == (2, 5)


def test_timms_own_image_size_is_the_default() -> None:
    with torch.device("meta"):
        model = models.create("vit_tiny_patch16_384", num_classes=5)
    assert model.patch_embed.img_size == (384, 384)


KNOWN = ", ".join(models.names())


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("vit_b23", "The closest is vit_b32; known are"),
        ("ViT-B/32", "The closest is vit_b32; known are"),
        ("small_vits", "The closest is small_vit; known are"),
        ("convnext_tny", "The closest is convnext_tiny; known are"),
        ("resnet18.a1_in1k", "The closest is resnet18; known are"),
        ("qqqq", "Known are"),
        ("hf-hub:a/b", "Known are"),
    ],
)
def test_unknown_name(name: str, closest: str) -> None:
    with pytest.raises(ValueError, match="name must be a known model") as raised:
        models.create(name, num_classes=3)
    assert str(raised.value) == (
        f"name must be a known model, got {name!r}. {closest} {KNOWN}, "
        "and the names in timm.list_models()."
    )


CLASSES = "Pass the number of classes."
PIXELS = "Pass a number of pixels."
COLOURS = "Pass 3 for colour, 1 for grey."


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_classes": 0}, ValueError, f"num_classes must be at least 1, got 0. {CLASSES}"),
        ({"num_classes": "3"}, TypeError, f"num_classes must be an integer, got '3'. {CLASSES}"),
        ({"image_size": 0}, ValueError, f"image_size must be at least 1, got 0. {PIXELS}"),
        ({"image_size": (8, 8)}, TypeError, f"image_size must be an integer, got (8, 8). {PIXELS}"),
        ({"in_channels": -1}, ValueError, f"in_channels must be at least 1, got -1. {COLOURS}"),
        ({"in_channels": True}, TypeError, f"in_channels must be an integer, got True. {COLOURS}"),
        ({"name": None}, TypeError, f"name must be a string, got NoneType. Pass one of {KNOWN}."),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        models.create(**{"name": "small_mlp", "num_classes": 3, **change})
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("vit_b32", 100, "be a multiple of the patch size 32, got 100. {} 96 or 128."),
        ("mixer_s16", 10, "be a multiple of the patch size 16, got 10. {} 16."),
        (
            "vit_tiny_patch16_224",
            100,
            "be a multiple of the patch size 16, got 100. {} 96 or 112.",
        ),
        ("small_vit", 31, "be divisible into 7 to 16 patches per side, got 31. {} 30 or 32."),
        ("small_mixer", 5, "be divisible into 7 to 16 patches per side, got 5. {} 7."),
    ],
)
def test_image_that_does_not_fit_the_patches(name: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match="image_size must") as raised:
        models.create(name, num_classes=3, image_size=size)
    assert str(raised.value) == "image_size must " + message.format("Resize or pad the images to")


@pytest.mark.parametrize("name", ["vit_b32", "resnet50", "small_resnet18", "convnext_tiny"])
def test_timm_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.split(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=f"timm must be installed to build '{name}', got ") as e:
        models.create(name, num_classes=3)
    assert str(e.value).endswith("Run pip install 'surrogap[train]'.")
    models.create("small_mlp", num_classes=3)  # needs only torch


def test_timm_is_loaded_when_a_network_needs_it() -> None:
    code = (
        "import sys; from surrogap import models; models.names();"
        "models.create('small_mlp', num_classes=3); print('timm' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
