"""The paper's models have the paper's shapes and numbers of parameters."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from surrogap import models
from surrogap.models.patches import Patches

CLASSES, CHANNELS, SIZE = 1000, 3, 224
IMAGE = (2, CHANNELS, SIZE, SIZE)

# Patch size, width and depth, from the papers on ViT (Table 1; S from DeiT) and Mixer (Table 1).
VITS = {
    "vit_s32": (32, 384, 12),
    "vit_s16": (16, 384, 12),
    "vit_b32": (32, 768, 12),
    "vit_b16": (16, 768, 12),
}
MIXERS = {
    "mixer_s32": (32, 512, 8),
    "mixer_s16": (16, 512, 8),
    "mixer_s8": (8, 512, 8),
    "mixer_b32": (32, 768, 12),
    "mixer_b16": (16, 768, 12),
}
# Bottleneck blocks in each of the four stages, from the paper on ResNets (Table 1).
RESNETS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3)}
PAPER = [*RESNETS, *VITS, *MIXERS]


def meta(name: str, num_classes: int = CLASSES, **arguments: int) -> nn.Module:
    """Build a model on the meta device, for the shapes of its weights."""
    with torch.device("meta"):
        return models.create(name, num_classes=num_classes, **arguments)


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def vit(patch: int, d: int, depth: int, *, size: int, channels: int, classes: int) -> int:
    patches = (size // patch) ** 2
    norm = 2 * d
    attention = linear(d, 3 * d) + linear(d, d)
    mlp = linear(d, 4 * d) + linear(4 * d, d)
    embedding = linear(patch**2 * channels, d) + patches * d
    return embedding + depth * (2 * norm + attention + mlp) + norm + linear(d, classes)


def mixer(patch: int, d: int, depth: int, *, size: int, channels: int, classes: int) -> int:
    patches = (size // patch) ** 2
    norm = 2 * d
    tokens = linear(patches, d // 2) + linear(d // 2, patches)
    mlp = linear(d, 4 * d) + linear(4 * d, d)
    embedding = linear(patch**2 * channels, d)
    return embedding + depth * (2 * norm + tokens + mlp) + norm + linear(d, classes)


def conv_and_norm(kernel: int, inputs: int, outputs: int) -> int:
    return kernel**2 * inputs * outputs + 2 * outputs


def resnet(blocks: tuple[int, ...]) -> int:
    total, inputs = conv_and_norm(7, CHANNELS, 64), 64
    for stage, num_blocks in enumerate(blocks):
        d = 64 * 2**stage
        total += conv_and_norm(1, inputs, 4 * d)  # the shortcut of the first block
        for _ in range(num_blocks):
            total += conv_and_norm(1, inputs, d) + conv_and_norm(3, d, d)
            total += conv_and_norm(1, d, 4 * d)
            inputs = 4 * d
    return total + linear(inputs, CLASSES)


def small_resnet18(width: int, *, channels: int, classes: int) -> int:
    total, inputs = conv_and_norm(3, channels, width), width
    for stage in range(4):
        d = width * 2**stage
        total += conv_and_norm(1, inputs, d) if stage else 0
        total += conv_and_norm(3, inputs, d) + 3 * conv_and_norm(3, d, d)
        inputs = d
    return total + linear(inputs, classes)


def mlp(width: int, *, size: int, channels: int, classes: int) -> int:
    return linear(size**2 * channels, width) + linear(width, width) + linear(width, classes)


@pytest.mark.parametrize("name", PAPER)
def test_parameters_of_the_papers_networks(name: str) -> None:
    image = {"size": SIZE, "channels": CHANNELS, "classes": CLASSES}
    if name in RESNETS:
        expected = resnet(RESNETS[name])
    elif name in VITS:
        expected = vit(*VITS[name], **image)
    else:
        expected = mixer(*MIXERS[name], **image)
    assert num_parameters(meta(name)) == expected


def published(weights: object) -> int:
    return int(weights.meta["num_params"])  # type: ignore[attr-defined]


def test_parameters_that_torchvision_publishes() -> None:
    weights = torchvision.models
    assert num_parameters(meta("resnet50")) == published(weights.ResNet50_Weights.DEFAULT)
    assert num_parameters(meta("resnet101")) == published(weights.ResNet101_Weights.DEFAULT)
    assert num_parameters(meta("resnet152")) == published(weights.ResNet152_Weights.DEFAULT)
    # torchvision's have a class token, and its position embedding.
    token = 2 * 768
    assert num_parameters(meta("vit_b32")) + token == published(weights.ViT_B_32_Weights.DEFAULT)
    assert num_parameters(meta("vit_b16")) + token == published(
        weights.ViT_B_16_Weights.IMAGENET1K_V1
    )


@pytest.mark.parametrize(
    ("name", "millions"),
    # Tolstikhin et al. 2021, Table 1, which truncates to millions.
    [("mixer_s32", 19), ("mixer_s16", 18), ("mixer_b32", 60), ("mixer_b16", 59)],
)
def test_parameters_that_the_mixer_paper_publishes(name: str, millions: int) -> None:
    assert num_parameters(meta(name)) // 1_000_000 == millions


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "of_timm", "arguments"),
    [
        ("vit_s32", "vit_small_patch32_224", {"class_token": False, "global_pool": "avg"}),
        ("vit_s16", "vit_small_patch16_224", {"class_token": False, "global_pool": "avg"}),
        ("vit_b32", "vit_base_patch32_224", {"class_token": False, "global_pool": "avg"}),
        ("vit_b16", "vit_base_patch16_224", {"class_token": False, "global_pool": "avg"}),
        ("mixer_s32", "mixer_s32_224", {}),
        ("mixer_s16", "mixer_s16_224", {}),
        ("mixer_b32", "mixer_b32_224", {}),
        ("mixer_b16", "mixer_b16_224", {}),
        ("resnet50", "resnet50", {}),
    ],
)
def test_weights_are_those_of_timms_variant(
    name: str, of_timm: str, arguments: dict[str, object]
) -> None:
    """Weights can be exchanged with timm's models."""
    if name in VITS:
        arguments = {**arguments, "fc_norm": False}
    with torch.device("meta"):
        theirs = timm.create_model(of_timm, **arguments)
    assert shapes(meta(name)) == shapes(theirs)


@pytest.mark.parametrize("name", PAPER)
def test_output_at_224_px_and_at_another_size(name: str) -> None:
    with torch.device("meta"):
        assert meta(name)(torch.empty(IMAGE)).shape == (2, CLASSES)
        other = meta(name, num_classes=7, image_size=96, in_channels=1)
        assert other(torch.empty(2, 1, 96, 96)).shape == (2, 7)


def test_vit_averages_normalised_patches() -> None:
    model = models.create("small_vit_narrow", num_classes=5).eval()
    assert not any("token" in name or "pre_logits" in name for name, _ in model.named_parameters())
    nn.init.normal_(model.head.weight)
    nn.init.normal_(model.norm.weight)
    images = torch.randn(2, 3, 32, 32)
    tokens = model.blocks(model.patch_embed(images) + model.pos_embed)
    expected = model.head(model.norm(tokens).mean(dim=1))
    torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("channels", "size"), [(1, (28, 28)), (3, (32, 16))])
def test_patches_are_a_convolution(
    channels: int, size: tuple[int, int], memory_format: torch.memory_format
) -> None:
    convolution = nn.Conv2d(channels, 6, kernel_size=4, stride=4, dtype=torch.float64)
    convolution.to(memory_format=memory_format)
    images = torch.randn(2, channels, *size, dtype=torch.float64).to(memory_format=memory_format)
    results = []
    for module in (convolution, Patches(convolution)):
        convolution.zero_grad()
        output = module(images)
        output.square().sum().backward()
        results.append((output, convolution.weight.grad, convolution.bias.grad))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("name", ["small_vit_narrow", "small_mixer_narrow"])
def test_our_patches_have_the_weights_of_a_convolution(name: str) -> None:
    """Weights of models with a convolution can be loaded."""
    embedding = "patch_embed.proj" if "vit" in name else "stem.proj"
    patches = models.create(name, num_classes=5).get_submodule(embedding)
    assert isinstance(patches, Patches)
    convolution = nn.Conv2d(3, len(patches.weight), kernel_size=4, stride=4)
    convolution.load_state_dict(patches.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert convolution.weight.any()
    torch.testing.assert_close(patches(images), convolution(images))


@pytest.mark.parametrize(("size", "patch"), [(28, 4), (32, 4), (64, 8)])
@pytest.mark.parametrize(("channels", "classes"), [(1, 10), (3, 100)])
def test_parameters_of_the_small_networks(
    size: int, patch: int, channels: int, classes: int
) -> None:
    image = {"size": size, "channels": channels, "classes": classes}
    expected = {
        "small_resnet18": small_resnet18(64, channels=channels, classes=classes),
        "small_resnet18_narrow": small_resnet18(16, channels=channels, classes=classes),
        "small_vit": vit(patch, 384, 12, **image),
        "small_vit_half": vit(patch, 192, 6, **image),
        "small_vit_narrow": vit(patch, 96, 6, **image),
        "small_vit_tiny": vit(size // 4, 64, 4, **image),
        "small_mixer": mixer(patch, 512, 8, **image),
        "small_mixer_half": mixer(patch, 256, 4, **image),
        "small_mixer_narrow": mixer(patch, 128, 4, **image),
        "small_mixer_tiny": mixer(size // 4, 64, 4, **image),
        "small_mlp": mlp(512, **image),
    }
    assert [*PAPER, *expected] == models.names()
    for name, count in expected.items():
        model = meta(name, num_classes=classes, image_size=size, in_channels=channels)
        assert num_parameters(model) == count
        images = torch.empty(2, channels, size, size, device="meta")
        assert model(images).shape == (2, classes)


def test_small_resnet18_keeps_the_image_until_the_second_stage() -> None:
    model = meta("small_resnet18", num_classes=10)
    assert num_parameters(model) == 11_173_962  # as in kuangliu/pytorch-cifar
    stem = model.maxpool(
        model.act1(model.bn1(model.conv1(torch.empty(1, 3, 32, 32, device="meta"))))
    )
    assert stem.shape == model.layer1(stem).shape == (1, 64, 32, 32)
    assert model.layer4(model.layer3(model.layer2(model.layer1(stem)))).shape == (1, 512, 4, 4)
