"""Training engines whose models an objective cannot train: FSDP1, DeepSpeed and Megatron."""

from torch import nn

from surrogap.errors import InvalidTypeError

_DIRECT = "Use DistributedDataParallel of torch.nn.parallel, or torch.distributed.fsdp.fully_shard."

# The prefixes of a class's module and name, and the error message.
_REFUSED = (
    (
        "torch.distributed.fsdp.",
        "FullyShardedDataParallel",
        "model must not be wrapped in FullyShardedDataParallel (FSDP1), got one. It moves weights "
        "and gradients to flattened copies during a pass. Call torch.distributed.fsdp.fully_shard "
        "(FSDP2) instead.",
    ),
    (
        "deepspeed.runtime.",
        "",
        "model must not be run by DeepSpeed, got {name}. Its ZeRO optimizer takes the gradients "
        f"inside backward, before an objective sees them. {_DIRECT}",
    ),
    (
        "megatron.core.distributed.",
        "",
        "model must not be wrapped by Megatron, got {name}. It reduces gradients into buffers of "
        f"its own inside backward, before an objective sees them. {_DIRECT}",
    ),
)


def check_engine(module_class: type[nn.Module]) -> None:
    """Refuse modules of such an engine."""
    for each in module_class.__mro__:
        check_owner(each.__module__, each.__name__)


def check_owner(module: str, name: str) -> None:
    """Refuse classes and functions of such an engine, given the name and its module's."""
    for prefix, start, message in _REFUSED:
        if module.startswith(prefix) and name.startswith(start):
            raise InvalidTypeError(message.format(name=name))
