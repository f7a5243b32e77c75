"""Export of weights for timm, with timm's name for the model or code that builds it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from surrogap.atomic import atomic_write
from surrogap.data import Splits, TensorSet
from surrogap.errors import InvalidValueError
from surrogap.experiments.trained import TrainedRun
from surrogap.models.registry import is_sized
from surrogap.training.model import image_sides, image_size

WEIGHTS = "model.safetensors"

# Averages the patches after normalising them, and has no class token: see models/architectures.py.
_AVERAGED = {"class_token": False, "global_pool": "avg", "fc_norm": False}
_SMALL = "vit_small_patch32_224"
_BASE = "vit_base_patch32_224"

# From our names to timm's, with the arguments that differ. The patch size of ViTs is added later.
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
    "small_vit_half": (_SMALL, _AVERAGED | {"embed_dim": 192, "depth": 6, "num_heads": 3}),
    "small_vit_narrow": (_SMALL, _AVERAGED | {"embed_dim": 96, "depth": 6, "num_heads": 3}),
    "small_vit_tiny": (_SMALL, _AVERAGED | {"embed_dim": 64, "depth": 4, "num_heads": 2}),
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

# timm's functions that create Mixers do not take a patch size.
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
    """The architecture of a model, for building it without surrogap.

    Attributes:
        name: timm's name for it; None if timm does not have it.
        arguments: The arguments of `timm.create_model` besides the name.
        code: Python code that builds the model as `model`, if timm does not have it.
    """

    name: str | None
    arguments: dict[str, Any] = field(default_factory=dict)
    code: str = ""

    def config(self, splits: Splits, sides: tuple[int, int]) -> dict[str, Any]:
        """Return the content of `config.json`, which timm reads along with the weights."""
        # Images in memory are used whole; image files are center-cropped.
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


def export_run(run: TrainedRun, folder: Path) -> Architecture:
    """Write the weights of a run and timm's `config.json` to a new folder.

    Raises:
        ValueError: The run has no checkpoint, or the folder exists or is not writable.
    """
    if folder.exists():
        raise InvalidValueError(
            f"out must be a new folder, got {folder}, which exists already. "
            "Pass another --out, or delete it."
        )
    splits, name = run.splits(), run.config.model.name
    model = run.model(splits)
    architecture = architecture_of(name, model, splits, image_size(run.config.model, splits))
    config = {
        **architecture.config(splits, image_sides(run.config.model, splits)),
        "surrogap": {"run": run.config.to_dict(), "classes": splits.classes},
    }
    _write(folder, model.state_dict(), config)
    return architecture


def _write(folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    # Clones, since safetensors refuses tensors that layers share.
    tensors = {name: weight.contiguous().clone() for name, weight in weights.items()}
    try:
        with atomic_write(folder) as temporary:
            temporary.mkdir(parents=True, exist_ok=True)
            (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidValueError(
            f"out must be a writable folder, got {folder} ({reason}). Pass another --out."
        ) from error


def architecture_of(name: str, model: nn.Module, splits: Splits, image_size: int) -> Architecture:
    """Return the architecture of a model by name, ours or timm's, as trained on a dataset."""
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
    """Return timm's name for a model, and the arguments to pass with it."""
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
