"""The model of a configuration: built, initialised, and wrapped for several processes."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from surrogap.data import Splits, TensorSet
from surrogap.errors import InvalidValueError
from surrogap.models import create
from surrogap.models.registry import is_sized
from surrogap.training.checkpoints import Checkpoints
from surrogap.training.config import Config
from surrogap.training.folder import CHECKPOINTS
from surrogap.training.groups import ModelConfig
from surrogap.training.processes import World


def model_of(config: ModelConfig, splits: Splits) -> nn.Module:
    """Build the model for a set of images on the CPU, with random or given weights.

    Raises:
        ImportError: timm is not installed.
        ValueError: The name is unknown, the image size does not suit the model, it has no dropout
            or no bias in its head, or the weights are those of another model.

    >>> from surrogap.data import load
    >>> model_of(ModelConfig(name="small_mlp"), load("embedded"))[1]
    Linear(in_features=784, out_features=512, bias=True)
    """
    model = create(
        config.name,
        num_classes=len(splits.classes),
        image_size=image_size(config, splits),
        in_channels=splits.channels,
    )
    if config.drop:
        _set_dropout(model, config)
    if config.head_bias is not None:
        _set_head_bias(model, config, num_classes=len(splits.classes))
    if config.weights is not None:
        load_weights(model, Path(config.weights).expanduser(), num_classes=len(splits.classes))
    return model


def image_size(config: ModelConfig, splits: Splits) -> int:
    """Return the size of the model's images; their width if they are not square.

    Raises:
        ValueError: They are not square, and the model needs square images.
    """
    height, width = image_sides(config, splits)
    if height != width and is_sized(config.name):
        raise InvalidValueError(
            f"image_size must be given for images that are not square, got {height}x{width} for "
            f"{config.name}. Pass --image-size {max(height, width)}."
        )
    return width


def image_sides(config: ModelConfig, splits: Splits) -> tuple[int, int]:
    """Return the height and the width of the model's images."""
    if config.image_size is not None:
        return config.image_size, config.image_size
    if not isinstance(splits.train, TensorSet):
        return 224, 224
    height, width = splits.train.images.shape[-2:]
    return height, width


def _set_dropout(model: nn.Module, config: ModelConfig) -> None:
    layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and not name.endswith("attn_drop")
    ]
    for layer in layers:
        layer.p = config.drop
    # timm's ResNets have no dropout layer, but apply this rate before the head.
    if hasattr(model, "drop_rate"):
        vars(model)["drop_rate"] = config.drop
    elif not layers:
        raise InvalidValueError(
            f"drop must be 0 for {config.name}, which has no dropout, got {config.drop}. "
            "Pass --drop 0, or a ViT."
        )


def _set_head_bias(model: nn.Module, config: ModelConfig, *, num_classes: int) -> None:
    layers = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.out_features == num_classes
    ]
    if not layers or layers[-1].bias is None:
        raise InvalidValueError(
            f"head_bias must be left out for {config.name}, whose head is not a linear layer with "
            f"a bias, got {config.head_bias}. Pass --head-bias None."
        )
    nn.init.constant_(layers[-1].bias, config.head_bias or 0.0)


def load_weights(model: nn.Module, source: Path, *, num_classes: int) -> None:
    """Load the weights of a run or of a .safetensors file into a model.

    The model keeps its own head if the weights have one for another number of classes.

    Raises:
        ValueError: There are no weights, or they are those of another model.
    """
    weights, own = read_weights(source), model.state_dict()
    for name, tensor in own.items():
        given = weights.get(name)
        if given is None or (
            given.shape != tensor.shape and not _is_head(given, tensor, num_classes)
        ):
            got = "nothing" if given is None else tuple(given.shape)
            raise InvalidValueError(
                f"weights must be those of the model, got {got} for {name}, which has the shape "
                f"{tuple(tensor.shape)}, in {source}. Pass weights of the same model."
            )
    model.load_state_dict(
        {
            name: w if (w := weights[name]).shape == tensor.shape else tensor
            for name, tensor in own.items()
        }
    )


def _is_head(given: Tensor, tensor: Tensor, num_classes: int) -> bool:
    return given.shape[1:] == tensor.shape[1:] and tensor.shape[:1] == (num_classes,)


def read_weights(source: Path) -> dict[str, Tensor]:
    """Read the weights of a run's newest checkpoint, or of a .safetensors file.

    Raises:
        ValueError: They are missing or damaged.
    """
    state = Checkpoints(source / CHECKPOINTS).newest()
    if state is not None:
        weights: dict[str, Tensor] = state["model"]
        return weights
    if source.suffix == ".safetensors" and source.is_file():
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(source)
        except (SafetensorError, OSError) as error:
            raise InvalidValueError(
                f"weights must be an intact .safetensors file, got {source} ({error}). "
                "Pass another one."
            ) from error
    raise InvalidValueError(
        f"weights must be a run's folder with a checkpoint, or a .safetensors file, got {source}. "
        "Train the model first, or pass the path of a file."
    )


def wrapped(model: nn.Module, config: Config, world: World) -> nn.Module:
    """Move the model to the device, shard or replicate it, and compile it if configured."""
    model = model.to(world.device)
    if config.execution.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if world.is_shared and config.execution.parallel == "fsdp2":
        for block in _blocks(model):
            fully_shard(block)
        fully_shard(model)
    if config.execution.compile:
        # A first pass on part of the batch has another size. By default, torch would then compile
        # for any size, with slower kernels.
        model.compile(dynamic=False)
    if world.is_shared and config.execution.parallel == "ddp":
        ids = [world.device] if world.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, innermost first, which FSDP2 gathers one by one."""
    return [
        child
        for module in reversed(list(model.modules()))
        if isinstance(module, nn.Sequential | nn.ModuleList)
        for child in module
        if any(child.children()) and any(True for _ in child.parameters())
    ]
