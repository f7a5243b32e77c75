"""The architectures of the named models, built from timm's classes.

timm is imported inside the functions, since it takes a second to load.
"""

from collections.abc import Callable

from torch import nn

from surrogap.errors import InvalidValueError
from surrogap.models.patches import Patches

# The allowed numbers of patches per side. ViT-S/4 has 8 at 32 px. Fewer than 7 are too coarse, and
# attention over more than 16 x 16 patches is too expensive for images of this size.
_GRID = range(7, 17)
# For a CPU: 16 patches take a third of the time of 49.
COARSE_GRID = range(4, 17)


def from_timm(
    name: str, *, num_classes: int, image_size: int | None, in_channels: int
) -> nn.Module:
    """Build timm's model of that name, by default for images of its default size.

    Raises:
        ValueError: The image size is not a multiple of the patch size.
    """
    import timm

    arguments = {"num_classes": num_classes, "in_chans": in_channels}
    # timm rejects an image size for models that take any.
    if image_size is None or not is_sized_by_timm(name):
        model: nn.Module = timm.create_model(name, **arguments)
        return model
    model = timm.create_model(name, img_size=image_size, **arguments)
    for module in model.modules():
        if isinstance(module, timm.layers.PatchEmbed) and not module.dynamic_img_pad:
            _check_patches(image_size, module.patch_size[0])
    return model


def is_sized_by_timm(name: str) -> bool:
    """Return True if timm builds the model of that name for one image size."""
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
    grid: range = _GRID,
) -> nn.Module:
    """Build the Vision Transformer of the paper's authors, with global average pooling.

    The head is applied to the mean of the normalised patches, and is initialised to zero. There is
    no class token and no representation layer before the head. The source is the authors'
    configuration, `big_vision/configs/proj/gsam/vit_i1k_gsam_no_aug.py` in
    `google-research/big_vision`.

    The initialisation is timm's for JAX. It differs from the authors' in two ways: queries, keys
    and values are drawn as one matrix, so sqrt(2) times smaller, and position embeddings have a
    standard deviation of 0.02 instead of `1 / sqrt(width)`.

    Raises:
        ValueError: The image size is not a multiple of the patch size.
    """
    from timm.models.vision_transformer import VisionTransformer

    model: nn.Module = VisionTransformer(
        img_size=image_size,
        patch_size=_patch_size(image_size, patch_size, grid),
        in_chans=in_channels,
        num_classes=num_classes,
        embed_dim=width,
        depth=depth,
        num_heads=num_heads,
        global_pool="avg",
        class_token=False,
        fc_norm=False,  # otherwise timm averages before it normalises
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
    grid: range = _GRID,
) -> nn.Module:
    """Build an MLP-Mixer; token MLPs have width `width / 2`, channel MLPs `4 * width`.

    Raises:
        ValueError: The image size is not a multiple of the patch size.
    """
    from timm.models.mlp_mixer import MlpMixer

    model: nn.Module = MlpMixer(
        img_size=image_size,
        patch_size=_patch_size(image_size, patch_size, grid),
        in_chans=in_channels,
        num_classes=num_classes,
        embed_dim=width,
        num_blocks=depth,
    )
    return _with_patches(model, "stem.proj")


def small_resnet18(*, num_classes: int, image_size: int, in_channels: int, width: int) -> nn.Module:
    """Build a ResNet-18 whose stem is a 3x3 convolution with stride 1, without pooling.

    Args:
        num_classes: The number of classes.
        image_size: Ignored: it takes images of any size.
        in_channels: The number of channels of the images.
        width: The number of channels of the stem and of the first stage, which must be even. Each
            further stage has twice as many.
    """
    from timm.models.resnet import BasicBlock, ResNet

    model: nn.Module = ResNet(
        BasicBlock,
        layers=(2, 2, 2, 2),
        channels=(width, 2 * width, 4 * width, 8 * width),
        num_classes=num_classes,
        in_chans=in_channels,
        # The stem is replaced below: this type is only for its width, which is 64 in the others.
        stem_type="deep",
        stem_width=width // 2,
    )
    stem = nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as in timm
    model.conv1 = stem
    model.maxpool = nn.Identity()
    return model


def mlp(*, num_classes: int, image_size: int, in_channels: int, width: int) -> nn.Module:
    """Build an MLP with two hidden layers and ReLU, on the flattened pixels."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_channels * image_size**2, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, num_classes),
    )


def _with_patches(model: nn.Module, name: str) -> nn.Module:
    """Replace the patch convolution of that name by a matrix product, and return the model."""
    convolution = model.get_submodule(name)
    assert isinstance(convolution, nn.Conv2d)
    model.set_submodule(name, Patches(convolution))
    return model


def _check_patches(image_size: int, patch_size: int) -> None:
    """Check that the patches cover the image: timm would silently crop it.

    Raises:
        ValueError: They do not.
    """
    if image_size % patch_size:
        raise InvalidValueError(
            f"image_size must be a multiple of the patch size {patch_size}, got "
            f"{image_size}. {_resize(image_size, lambda size: size % patch_size == 0)}"
        )


def _patch_size(image_size: int, patch_size: int | None, grid: range) -> int:
    """Return the patch size: the given one, or the largest with a number of patches in `grid`."""
    if patch_size is not None:
        _check_patches(image_size, patch_size)
        return patch_size
    number = _smallest_grid(image_size, grid)
    if number is None:
        raise InvalidValueError(
            f"image_size must be divisible into {grid[0]} to {grid[-1]} patches per side, got "
            f"{image_size}. {_resize(image_size, lambda s: _smallest_grid(s, grid) is not None)}"
        )
    return image_size // number


def _smallest_grid(image_size: int, grid: range) -> int | None:
    return next((number for number in grid if image_size % number == 0), None)


def _resize(image_size: int, fits: Callable[[int], bool]) -> str:
    """Return the remedy for an invalid image size: the nearest valid ones."""
    below = next((size for size in range(image_size, 0, -1) if fits(size)), None)
    above = image_size
    while not fits(above):
        above += 1
    sizes = f"{above}" if below is None else f"{below} or {above}"
    return f"Resize or pad the images to {sizes}."
