"""The names that timm has for our networks, for exported weights."""

from dataclasses import dataclass, field
from typing import Any, final

from torch import nn

from surrogap.data import Splits, TensorSet
from surrogap.models.registry import is_sized

# Averages its patches after normalising them, without a class token: see models/architectures.py.
_AVERAGED = {"class_token": False, "global_pool": "avg", "fc_norm": False}
_SMALL = "vit_small_patch32_224"
_BASE = "vit_base_patch32_224"

# From our names to timm's, with what differs there. The size of ViTs' patches is the network's own.
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit_s32": (_SMALL, _AVERAGED),
    "vit_s16": (_SMALL, _AVERAGED),
    "vit_b32": (_BASE, _AVERAGED),
    "vit_b16": (_BASE, _AVERAGED),
    "mixer_s32": ("mixer_s32_224", {}),
    "mixer_s16": ("mixer_s16_224", {}),
    "mixer_b32": ("mixer_b32_224", {}),
    "mixer_b16": ("mixer_b16_224", {}),
    "small_vit": (_SMALL, _AVERAGED),
    "small_vit_narrow": (_SMALL, _AVERAGED | {"embed_dim": 96, "depth": 6, "num_heads": 3}),
}

_RESNET = """\
import safetensors.torch
import timm
from torch import nn

model = timm.create_model(
    "resnet18", num_classes={num_classes}, in_chans={in_chans},
    channels={stages}, stem_type="deep", stem_width={half},
)
model.conv1 = nn.Conv2d({in_chans}, {width}, kernel_size=3, padding=1, bias=False)
model.maxpool = nn.Identity()
"""

# timm's functions for Mixers take no other patches than their own.
_MIXER = """\
import safetensors.torch
from timm.models.mlp_mixer import MlpMixer

model = MlpMixer(
    img_size={image_size}, patch_size={patch_size}, in_chans={in_chans},
    num_classes={num_classes}, embed_dim={width}, num_blocks={depth},
)
"""

_MLP = """\
import safetensors.torch
from torch import nn

model = nn.Sequential(
    nn.Flatten(),
    nn.Linear({pixels}, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
    nn.Linear(512, {num_classes}),
)
"""


@final
@dataclass(frozen=True)
class Architecture:
    """The architecture of a network, to build it without surrogap.

    Attributes:
        name: timm's name for it, or None where timm has no such network.
        arguments: What `timm.create_model` takes beside the name.
        code: Where timm has none, Python that builds it as `model`.
    """

    name: str | None
    arguments: dict[str, Any] = field(default_factory=dict)
    code: str = ""

    def config(self, splits: Splits, sides: tuple[int, int]) -> dict[str, Any]:
        """The content of `config.json`, which timm reads beside the weights.

        Args:
            splits: The set that the network is for.
            sides: The height and the width of its images.
        """
        # Images in memory are seen whole; of files, the loader takes the middle.
        is_whole = isinstance(splits.train, TensorSet)
        return {
            "architecture": self.name,
            "num_classes": len(splits.classes),
            "model_args": self.arguments,
            "code": self.code,
            "pretrained_cfg": {
                "input_size": [splits.channels, *sides],
                "interpolation": "bilinear",
                "crop_pct": 1.0 if is_whole else 0.875,
                "crop_mode": "squash" if is_whole else "center",
                "mean": splits.mean,
                "std": splits.std,
                "num_classes": len(splits.classes),
                "label_names": splits.classes,
            },
        }


def architecture_of(name: str, model: nn.Module, splits: Splits, image_size: int) -> Architecture:
    """Return the architecture of one of our networks, to build it without surrogap.

    Args:
        name: Ours, or timm's.
        model: The network.
        splits: The set that it is for.
        image_size: The side of its images.
    """
    basics = {"num_classes": len(splits.classes), "in_chans": splits.channels}
    if name in _ARCHITECTURES or not (name.startswith("small_") or name == "mixer_s8"):
        return Architecture(*_named(name, model, image_size, basics))
    if name == "small_mlp":
        pixels = splits.channels * image_size**2
        return Architecture(None, code=_MLP.format(pixels=pixels, **basics))
    if name.startswith("small_resnet18"):
        return Architecture(None, code=_resnet_code(model.get_submodule("conv1"), basics))
    return Architecture(None, code=_mixer_code(model, image_size, basics))


def _named(
    name: str, model: nn.Module, image_size: int, basics: dict[str, int]
) -> tuple[str, dict[str, Any]]:
    """The name that timm has for it, and what to pass with it."""
    known, arguments = _ARCHITECTURES.get(name, (name, {}))
    if known.startswith("vit") and known != name:
        patch_size = model.get_submodule("patch_embed").patch_size[0]  # type: ignore[index]
        arguments = arguments | {"patch_size": patch_size}
    if known != name or is_sized(name):
        arguments = arguments | {"img_size": image_size}
    return known, {**arguments, **basics}


def _mixer_code(model: nn.Module, image_size: int, basics: dict[str, int]) -> str:
    stem: Any = model.get_submodule("stem")
    return _MIXER.format(
        image_size=image_size,
        patch_size=stem.patch_size[0],
        width=len(stem.proj.weight),
        depth=len(list(model.get_submodule("blocks").children())),
        **basics,
    )


def _resnet_code(stem: nn.Module, basics: dict[str, int]) -> str:
    width = int(stem.out_channels)  # type: ignore[arg-type]
    stages = tuple(width * 2**i for i in range(4))
    return _RESNET.format(width=width, half=width // 2, stages=stages, **basics)
