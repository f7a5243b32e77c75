"""The tensors of a model: its trainable parameters, frozen parameters and buffers."""

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from surrogap.core.fsdp import FullySharded
from surrogap.core.geometry import norm_parameters
from surrogap.core.random_state import Generator, host_generators
from surrogap.core.shards import (
    WHOLE,
    Sharding,
    compute_device,
    is_sharded,
    mean_over,
    shard_of,
    sharding_of,
)
from surrogap.errors import InvalidTypeError, InvalidValueError, UnsupportedError

T = TypeVar("T")

Dictionaries = list[dict[str, Tensor | None]]

# Engines and wrappers whose models an objective cannot train, by the modules that define them.
_REFUSED = {
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FSDP1",
    "deepspeed.runtime.": "DeepSpeed",
    "megatron.core.distributed.": "Megatron",
    "opacus.grad_sample.": "Opacus",
}


class Weights:
    """The trainable parameters of `model`, each once, and its other tensors.

    Attributes:
        modules: The model and all modules in it.
        parameters: The trainable parameters.
        frozen: The other parameters, except those of special classes, such as quantised ones.
        buffers: The dictionaries in which modules hold their buffers.
        caches: The names of the non-persistent buffers, a set for each module.
        wrappers: The modules wrapped in DistributedDataParallel.
        fsdp: The modules that FSDP2 shards.
        are_sharded: Whether processes hold shards of the parameters.
        drawn: The random generators of Python and NumPy that the first call has drawn from.
        is_checked: Whether a call with these modules has succeeded.
        are_reentrant: Whether that call reached parameters outside its graph, as in reentrant
            checkpointing.

    `Objective` documents the errors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._walk()
        self.refresh()

    def refresh(self) -> None:
        """Find the parameters and buffers as they are now.

        So parameters may be frozen, unfrozen, added and removed between steps.
        """
        self.fsdp.reshard()
        # Walking through the modules takes several percent of a small model's step, so the result
        # is reused while every module holds the same children and parameters.
        if not are_same(contents(self._dictionaries), self._walked):
            self._walk()
        self.parameters = [p for p in self._unique if p.requires_grad]
        others = [p for p in self._unique if not p.requires_grad]
        self.frozen = [p for p in others if type(p) is nn.Parameter and not p.is_inference()]
        self._frozen_states = list(map(_state, self.frozen))
        if not self.parameters:
            raise InvalidValueError(
                "model must have a trainable parameter, got none with requires_grad=True. "
                "Unfreeze the layers to train."
            )
        self._check()

    @property
    def generators(self) -> list[Generator]:
        """The random generators of Python and NumPy that the closure may draw from."""
        return list(self.drawn) if self.is_checked else host_generators()

    def identities(self) -> set[int]:
        """Return the `id` of all current parameters, and of those that FSDP has gathered."""
        return set(map(id, chain(self._model.parameters(), self.fsdp.gathered())))

    def written(self) -> Dictionaries:
        """Return dictionaries of what passes write to: buffers, and frozen parameters.

        The latter, such as those of a momentum encoder, are found once a pass has written to them.
        In-place writes to `p.data` are not detected.
        """
        pairs = zip(self.frozen, self._frozen_states, strict=True)
        self._written |= {self._names[p]: p for p, state in pairs if _state(p) != state}
        return [*self.buffers, self._written]

    def _walk(self) -> None:
        self.modules = modules = list(self._model.modules())
        if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
            raise InvalidTypeError(
                "model must not contain TorchScript modules, got one. Pass the original modules; "
                "torch.compile is also faster."
            )
        if any(map(is_lazy, self._model.parameters())):
            raise InvalidValueError(
                "model must not contain uninitialised lazy modules, got some. Run it on a batch "
                "once before building the objective."
            )
        for each in set(map(type, modules)):
            check_engine(each)
        self.is_checked = self.are_reentrant = False
        self.drawn: set[Generator] = set()
        self._written: dict[str, Tensor | None] = {}
        own = [module._parameters for module in modules]
        self._dictionaries: list[dict[str, Any]] = [*(m._modules for m in modules), *own]
        self._walked = contents(self._dictionaries)
        self._names = self._find_names()
        self._norms = set(norm_parameters(modules))
        self.buffers = [module._buffers for module in modules]
        self.caches = [module._non_persistent_buffers_set for module in modules]
        self._unique = list({id(p): p for p in contents(own) if p is not None}.values())
        self.wrappers = [m for m in modules if isinstance(m, DistributedDataParallel)]
        self.are_sharded = any(map(is_sharded, self._unique))
        self.fsdp = FullySharded(modules)

    @property
    def synchronises(self) -> bool:
        """True if the caller's own backward pass would average gradients over processes.

        False inside `no_sync`, and after `set_requires_gradient_sync(False)`.
        """
        return self.fsdp.reduce and all(w.require_backward_grad_sync for w in self.wrappers)

    def mean_over_shards(self, scalar: Tensor) -> Tensor:
        """Return the mean of a scalar over the processes that share the sharded parameters."""
        if not self.are_sharded:
            return scalar
        parameter: Any = next(filter(is_sharded, self.parameters))
        mesh = parameter.device_mesh
        return mean_over(mesh.get_all_groups(), scalar.to(mesh.device_type)).to(scalar)

    @property
    def names(self) -> list[str]:
        """The names of the parameters, without the prefixes of DDP and torch.compile."""
        return [self._names[parameter] for parameter in self.parameters]

    def _find_names(self) -> dict[nn.Parameter, str]:
        modules = self._model.named_modules()
        wrapped = {path for path, m in modules if isinstance(m, DistributedDataParallel)}
        names = {}
        for name, parameter in self._model.named_parameters():
            path = name.split(".")
            own = [k for i, k in enumerate(path) if ".".join(path[:i]) not in wrapped]
            names[parameter] = ".".join(k for k in own if k != "_orig_mod")
        return names

    @property
    def are_norms(self) -> list[bool]:
        """A flag for each parameter: whether it belongs to a normalisation layer."""
        return [parameter in self._norms for parameter in self.parameters]

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters, or this process's shards of them."""
        if not self.are_sharded:
            return list(self.parameters)
        return [shard_of(parameter, parameter) for parameter in self.parameters]

    @property
    def shardings(self) -> list[Sharding]:
        """The processes over which each parameter is sharded."""
        if not self.are_sharded:
            return [WHOLE] * len(self.parameters)
        return [sharding_of(parameter) for parameter in self.parameters]

    @property
    def devices(self) -> set[torch.device]:
        """The devices on which passes compute."""
        if not self.are_sharded:
            return {parameter.device for parameter in self.parameters}
        return set(map(compute_device, self.parameters))

    def _check(self) -> None:
        for parameter in self.parameters:
            if parameter.is_complex():
                raise InvalidValueError(
                    f"{self._names[parameter]} must be real, got {parameter.dtype}. Store it "
                    "as a real parameter and call torch.view_as_complex in the forward pass."
                )
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                raise UnsupportedError(
                    f"{self._names[parameter]} must not have a post-accumulate-grad hook, got "
                    f"one from {hook.__module__}. It would act on the gradient of each pass: "
                    "remove it, and step the optimizer after backward."
                )
            if self.fsdp.modules and not is_sharded(parameter):
                raise InvalidValueError(
                    f"{self._names[parameter]} must be sharded like the others, got a plain "
                    "parameter. FSDP does not average its gradient, so processes would diverge: "
                    "call fully_shard on the whole model too."
                )


def check_engine(module_class: type[nn.Module]) -> None:
    """Reject the modules of engines whose models an objective cannot train."""
    for each in module_class.__mro__:
        for prefix, engine in _REFUSED.items():
            if each.__module__.startswith(prefix):
                raise InvalidTypeError(
                    f"model must not be trained by {engine}, got {each.__name__}. It manages "
                    "weights or gradients itself during a pass. For several processes use "
                    "torch.nn.parallel.DistributedDataParallel, or "
                    "torch.distributed.fsdp.fully_shard (FSDP2)."
                )


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    """Return values that change when a parameter is written to, or its data replaced."""
    return parameter._version, parameter.data_ptr()


def contents(dictionaries: Iterable[dict[str, T]]) -> list[T]:
    """Return the values of all dictionaries."""
    return list(chain.from_iterable(map(dict.values, dictionaries)))


def are_same(some: list[Any], others: list[Any]) -> bool:
    """Return whether two lists hold identical objects."""
    return len(some) == len(others) and all(map(is_, some, others))
