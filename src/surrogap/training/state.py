"""The state of a run: gathered from its processes, and loaded into them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from surrogap.training.processes import World


def weights_and_moments(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return the state of the model and of its optimizer, by the names of the weights, on the CPU.

    It does not depend on DDP, FSDP2 or the number of processes. Only the first process gets it; the
    others get empty dictionaries. Buffers that differ between processes are those of the first.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": dict(weights), "optimizer": dict(moments)}


def load_weights_and_moments(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], world: World
) -> None:
    """Load the state of `weights_and_moments`, broadcast from the first process."""
    options = StateDictOptions(
        full_state_dict=world.is_shared, broadcast_from_rank0=world.is_shared
    )
    set_model_state_dict(model, state["model"], options=options)
    # torch fails to broadcast an empty optimizer state, such as that of SGD without momentum.
    moments = state["optimizer"]
    if world.from_first(lambda: _has_tensors(moments["state"])):
        # Settings come from the configuration, since some may change: capture needs other ones.
        for saved, own in zip(
            moments.get("param_groups", ()), optimizer.param_groups, strict=False
        ):
            saved.update({name: value for name, value in own.items() if name != "params"})
        set_optimizer_state_dict(model, optimizer, moments, options=options)


def _has_tensors(moments: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(isinstance(v, torch.Tensor) for own in moments.values() for v in own.values())


def share_buffers(model: nn.Module, world: World) -> None:
    """Broadcast the buffers of the first process; with FSDP2 each process has its own."""
    if world.is_shared and not isinstance(model, DistributedDataParallel):
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def random_states(world: World) -> dict[str, list[torch.Tensor]]:
    """Return the states of the random generators of all processes."""
    states = {"cpu": world.gathered(torch.get_rng_state())}
    if world.device.type == "cuda":
        states["cuda"] = world.gathered(torch.cuda.get_rng_state(world.device))
    return states


def load_random_states(states: Mapping[str, list[torch.Tensor]], world: World) -> None:
    """Load the states of the random generators.

    A process or a device that the saved run did not have keeps its own state.
    """
    if world.rank < len(states["cpu"]):
        torch.set_rng_state(states["cpu"][world.rank])
    if world.device.type == "cuda" and world.rank < len(states.get("cuda", ())):
        torch.cuda.set_rng_state(states["cuda"][world.rank], world.device)
