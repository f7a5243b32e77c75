"""All that a run must remember, gathered from its processes and given back to them."""

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
    """The state of the network and of its optimizer, by the weights' names, on the CPU.

    It knows neither DDP nor FSDP2 nor the number of processes. The first process has it, and the
    others get empty dictionaries. Of statistics that differ between processes it holds the first's.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": dict(weights), "optimizer": dict(moments)}


def load_weights_and_moments(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], world: World
) -> None:
    """Gives them back; the first process's `state` is everybody's."""
    options = StateDictOptions(
        full_state_dict=world.is_shared, broadcast_from_rank0=world.is_shared
    )
    set_model_state_dict(model, state["model"], options=options)
    # torch fails to send moments to other processes where there are none, as those of plain SGD.
    moments = state["optimizer"]
    if world.from_first(lambda: _has_tensors(moments["state"])):
        # The settings are the configuration's. Some may change: a captured step wants others.
        for saved, own in zip(
            moments.get("param_groups", ()), optimizer.param_groups, strict=False
        ):
            saved.update({name: value for name, value in own.items() if name != "params"})
        set_optimizer_state_dict(model, optimizer, moments, options=options)


def _has_tensors(moments: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(isinstance(v, torch.Tensor) for own in moments.values() for v in own.values())


def share_buffers(model: nn.Module, world: World) -> None:
    """Gives all processes the statistics of the first, where FSDP2 has let each keep its own."""
    if world.is_shared and not isinstance(model, DistributedDataParallel):
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def random_states(world: World) -> dict[str, list[torch.Tensor]]:
    """Where each process's random numbers stand."""
    states = {"cpu": world.gathered(torch.get_rng_state())}
    if world.device.type == "cuda":
        states["cuda"] = world.gathered(torch.cuda.get_rng_state(world.device))
    return states


def load_random_states(states: Mapping[str, list[torch.Tensor]], world: World) -> None:
    """Lets random numbers go on from there.

    A process that had no part in the run that was saved keeps its own, and so does a device that
    had none.
    """
    if world.rank < len(states["cpu"]):
        torch.set_rng_state(states["cpu"][world.rank])
    if world.device.type == "cuda" and world.rank < len(states.get("cuda", ())):
        torch.cuda.set_rng_state(states["cuda"][world.rank], world.device)
