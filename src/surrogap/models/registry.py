"""The models by name."""

from functools import partial

from torch import nn

from surrogap.checks import closest, integer
from surrogap.errors import InvalidTypeError, InvalidValueError, MissingPackageError
from surrogap.models import architectures

_VIT_S = partial(architectures.vit, width=384, depth=12, num_heads=6)
_VIT_B = partial(architectures.vit, width=768, depth=12, num_heads=12)
_MIXER_S = partial(architectures.mixer, width=512, depth=8)
_MIXER_B = partial(architectures.mixer, width=768, depth=12)

# The rows of the paper's Table 1. The names end in the patch size.
_PAPER = {
    "resnet50": partial(architectures.from_timm, "resnet50"),
    "resnet101": partial(architectures.from_timm, "resnet101"),
    "resnet152": partial(architectures.from_timm, "resnet152"),
    "vit_s32": partial(_VIT_S, patch_size=32),
    "vit_s16": partial(_VIT_S, patch_size=16),
    "vit_b32": partial(_VIT_B, patch_size=32),
    "vit_b16": partial(_VIT_B, patch_size=16),
    "mixer_s32": partial(_MIXER_S, patch_size=32),
    "mixer_s16": partial(_MIXER_S, patch_size=16),
    "mixer_s8": partial(_MIXER_S, patch_size=8),
    "mixer_b32": partial(_MIXER_B, patch_size=32),
    "mixer_b16": partial(_MIXER_B, patch_size=16),
}

# For images of 28 to 64 px. "half" is half the width and depth. "narrow" is a quarter of the width,
# and half the depth for ViT and Mixer: small enough for a CPU. "tiny" is ten times as fast again,
# with 16 patches.
_COARSE = architectures.COARSE_GRID
_SMALL = {
    "small_resnet18": partial(architectures.small_resnet18, width=64),
    "small_resnet18_narrow": partial(architectures.small_resnet18, width=16),
    "small_vit": _VIT_S,
    "small_vit_half": partial(architectures.vit, width=192, depth=6, num_heads=3),
    "small_vit_narrow": partial(architectures.vit, width=96, depth=6, num_heads=3),
    "small_vit_tiny": partial(architectures.vit, width=64, depth=4, num_heads=2, grid=_COARSE),
    "small_mixer": _MIXER_S,
    "small_mixer_half": partial(architectures.mixer, width=256, depth=4),
    "small_mixer_narrow": partial(architectures.mixer, width=128, depth=4),
    "small_mixer_tiny": partial(architectures.mixer, width=64, depth=4, grid=_COARSE),
    "small_mlp": partial(architectures.mlp, width=512),
}


def names() -> list[str]:
    """Return the names of the built-in models: the paper's twelve, then the small ones.

    `create` also accepts the names in `timm.list_models()`.

    >>> names()[:5]
    ['resnet50', 'resnet101', 'resnet152', 'vit_s32', 'vit_s16']
    """
    return [*_PAPER, *_SMALL]


def create(
    name: str, *, num_classes: int, image_size: int | None = None, in_channels: int = 3
) -> nn.Module:
    """Build a model with random weights, which depend on `torch.manual_seed`.

    Args:
        name: One of `names()`, or of `timm.list_models()`.
        num_classes: The number of classes.
        image_size: The height and width of the images in pixels. By default 224 for the paper's
            models, 32 for the small ones, and timm's default for the others. It has no effect on
            ResNets and on timm models that take images of any size.
        in_channels: The number of channels of the images: 3 for colour, 1 for grey.

    Raises:
        ImportError: timm is not installed.
        TypeError: An argument has the wrong type.
        ValueError: The name is unknown, a number is not positive, or `image_size` is not a multiple
            of the patch size.

    >>> import torch
    >>> model = create("small_mlp", num_classes=10, image_size=28, in_channels=1)
    >>> model(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    if not isinstance(name, str):
        raise InvalidTypeError(
            f"name must be a string, got {type(name).__name__}. Pass one of {', '.join(names())}."
        )
    integer("num_classes", num_classes, at_least=1, remedy="Pass the number of classes.")
    integer("in_channels", in_channels, at_least=1, remedy="Pass 3 for colour, 1 for grey.")
    if image_size is not None:
        integer("image_size", image_size, at_least=1, remedy="Pass a number of pixels.")
    try:
        return _build(name, num_classes, image_size, in_channels)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"timm must be installed to build {name!r}, got {error}. "
            "Run pip install 'surrogap[train]'."
        ) from error


def is_sized(name: str) -> bool:
    """Return True if the model of that name is built for square images of one size.

    >>> is_sized("small_mlp"), is_sized("small_resnet18")
    (True, False)
    """
    return "resnet" not in name if name in names() else architectures.is_sized_by_timm(name)


def _build(name: str, num_classes: int, image_size: int | None, in_channels: int) -> nn.Module:
    arguments = {"num_classes": num_classes, "in_channels": in_channels}
    if name in _PAPER:
        return _PAPER[name](image_size=image_size or 224, **arguments)
    if name in _SMALL:
        return _SMALL[name](image_size=image_size or 32, **arguments)
    import timm

    # Not `timm.is_model`: it also accepts `resnet50.a1_in1k`, which names weights.
    names_of_timm = timm.list_models()
    if name not in names_of_timm:
        raise InvalidValueError(_unknown(name, names_of_timm))
    return architectures.from_timm(name, image_size=image_size, **arguments)


def _unknown(name: str, names_of_timm: list[str]) -> str:
    guess = closest(name.lower(), [*names(), *names_of_timm])
    start = f"The closest is {guess}; known are" if guess else "Known are"
    return (
        f"name must be a known model, got {name!r}. {start} {', '.join(names())}, "
        "and the names in timm.list_models()."
    )
