"""The networks that have a name here, built from timm's classes.

timm is imported where a network is built, since it takes a second to load.
"""

from collections.abc import Callable

from torch import nn

from surrogap.errors import InvalidValueError
from surrogap.models.patches import Patches

# A grid of about 8 x 8 patches is what ViT-S/4 has at 32 px. Fewer than 7 see little, and
# attention over more than 16 x 16 costs more than images of this size are worth.
_GRID = range(7, 17)


def from_timm(
    name: str, *, num_classes: int, image_size: int | None, in_channels: int
) -> nn.Module:
    """The network that timm has by that name, for images of timm's own size if not given.

    Raises:
        ValueError: The image does not split into the network's patches.
    """
    import timm

    arguments = {"num_classes": num_classes, "in_chans": in_channels}
    # timm refuses an image size where the network takes any.
    if image_size is None or not is_sized_by_timm(name):
        model: nn.Module = timm.create_model(name, **arguments)
        return model
    model = timm.create_model(name, img_size=image_size, **arguments)
    for module in model.modules():
        if isinstance(module, timm.layers.PatchEmbed) and not module.dynamic_img_pad:
            _check_patches(image_size, module.patch_size[0])
    return model


def is_sized_by_timm(name: str) -> bool:
    """Return whether timm builds the network of that name for images of one size."""
    import timm

    # Models that users register with timm may have no configuration.
    return bool(getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False))


def vit(
    *,
    num_classes: int,
    image_size: int,
    in_channels: int,
    width: int,
    depth: int,
    num_heads: int,
    patch_size: int | None = None,
) -> nn.Module:
    """A Vision Transformer as the paper's authors train it, on the mean of its patches.

    The head sees the mean over the normalised patches, and starts at zero. There is no class
    token, and no representation layer before the head. The source is their configuration,
    `big_vision/configs/proj/gsam/vit_i1k_gsam_no_aug.py` in `google-research/big_vision`.

    The weights start as timm has it for JAX. Two things differ from there: queries, keys and
    values are drawn as one matrix, so sqrt(2) smaller, and positions with a deviation of 0.02
    instead of `1 / sqrt(width)`.

    Raises:
        ValueError: The image does not split into patches.
    """
    from timm.models.vision_transformer import VisionTransformer

    model: nn.Module = VisionTransformer(
        img_size=image_size,
        patch_size=_patch_size(image_size, patch_size),
        in_chans=in_channels,
        num_classes=num_classes,
        embed_dim=width,
        depth=depth,
        num_heads=num_heads,
        global_pool="avg",
        class_token=False,
        fc_norm=False,  # timm would average first and normalise then
        weight_init="jax",
    )
    return _with_patches(model, "patch_embed.proj")


def mixer(
    *,
    num_classes: int,
    image_size: int,
    in_channels: int,
    width: int,
    depth: int,
    patch_size: int | None = None,
) -> nn.Module:
    """An MLP-Mixer: token MLPs half as wide as `width`, channel MLPs four times.

    Raises:
        ValueError: The image does not split into patches.
    """
    from timm.models.mlp_mixer import MlpMixer

    model: nn.Module = MlpMixer(
        img_size=image_size,
        patch_size=_patch_size(image_size, patch_size),
        in_chans=in_channels,
        num_classes=num_classes,
        embed_dim=width,
        num_blocks=depth,
    )
    return _with_patches(model, "stem.proj")


def small_resnet18(*, num_classes: int, image_size: int, in_channels: int, width: int) -> nn.Module:
    """A ResNet-18 whose stem is one 3x3 convolution, which keeps the image's size.

    It takes images of any size: `image_size` is not looked at.

    Args:
        num_classes: The number of classes.
        image_size: The side of the images in pixels.
        in_channels: The number of the images' channels.
        width: The channels of the stem and of the first stage, an even number. Each further
            stage has twice as many.
    """
    from timm.models.resnet import BasicBlock, ResNet

    model: nn.Module = ResNet(
        BasicBlock,
        layers=(2, 2, 2, 2),
        channels=(width, 2 * width, 4 * width, 8 * width),
        num_classes=num_classes,
        in_chans=in_channels,
        # timm fixes the width of other stems at 64. Of this one nothing but its width remains.
        stem_type="deep",
        stem_width=width // 2,
    )
    stem = nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as timm's
    model.conv1 = stem
    model.maxpool = nn.Identity()
    return model


def mlp(*, num_classes: int, image_size: int, in_channels: int, width: int) -> nn.Module:
    """Two hidden layers with ReLU, on the pixels as one vector."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_channels * image_size**2, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, num_classes),
    )


def _with_patches(model: nn.Module, name: str) -> nn.Module:
    """The model, with the convolution of that name as a product of matrices."""
    convolution = model.get_submodule(name)
    assert isinstance(convolution, nn.Conv2d)
    model.set_submodule(name, Patches(convolution))
    return model


def _check_patches(image_size: int, patch_size: int) -> None:
    """Checks that patches cover the image: timm would leave its edge out without a word.

    Raises:
        ValueError: They do not.
    """
    if image_size % patch_size:
        raise InvalidValueError(
            f"image_size must be a multiple of {patch_size}, the side of a patch, got "
            f"{image_size}. {_resize(image_size, lambda size: size % patch_size == 0)}"
        )


def _patch_size(image_size: int, patch_size: int | None) -> int:
    """The side of a patch: as given, or else the largest that makes a grid within `_GRID`."""
    if patch_size is not None:
        _check_patches(image_size, patch_size)
        return patch_size
    grid = _smallest_grid(image_size)
    if grid is None:
        raise InvalidValueError(
            f"image_size must split into {_GRID[0]} to {_GRID[-1]} equal patches a side, got "
            f"{image_size}. {_resize(image_size, lambda size: _smallest_grid(size) is not None)}"
        )
    return image_size // grid


def _smallest_grid(image_size: int) -> int | None:
    return next((grid for grid in _GRID if image_size % grid == 0), None)


def _resize(image_size: int, fits: Callable[[int], bool]) -> str:
    """Return the remedy for an image size that does not fit: the nearest sizes that do."""
    below = next((size for size in range(image_size, 0, -1) if fits(size)), None)
    above = image_size
    while not fits(above):
        above += 1
    sizes = f"{above}" if below is None else f"{below} or {above}"
    return f"Resize or pad the images to {sizes}."
