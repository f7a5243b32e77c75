"""The trainable parameters during one call of `backward`, and their gradients."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from surrogap.core.shards import (
    WHOLE,
    Sharding,
    added_up,
    device_of,
    fsdp_modules,
    is_sharded,
    piece_of,
    reset,
    sharding_of,
    whole_of,
)
from surrogap.core.vectors import Gradients, are_any, present_of

T = TypeVar("T")
Mean = Callable[[Gradients, Sequence[Tensor]], Gradients]

# Not their subclasses, whose forward passes may do anything.
_NORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm}

_gradient = attrgetter("grad")
_mode = attrgetter("training")
_device = attrgetter("device")
_hooks = attrgetter("_post_accumulate_grad_hooks")
_dtype = attrgetter("dtype")
_layout = attrgetter("layout")


class Weights:
    """The trainable parameters of `model`, each once, and where its buffers live.

    Attributes:
        modules: The model and all modules in it.
        parameters: The trainable parameters.
        frozen: The others, but for those of classes of their own, such as quantised ones.
        buffers: The dictionaries in which modules hold their buffers.
        norms: The modules of torch that track statistics of batches, which they may be told not to.
        other_buffers: `buffers`, but for those of `norms`.
        do_norms_obey: Whether they were seen to keep their statistics when told to track nothing;
            None before it was looked at.
        wrappers: The modules that are wrapped in DistributedDataParallel.
        are_sharded: Whether processes hold pieces of the parameters.

    Raises:
        TypeError: A module is compiled to TorchScript.
        ValueError: There is no trainable parameter, one is complex, or FSDP has only some of them.
        RuntimeError: A parameter has a hook that would act on the gradient of a single pass.
    """

    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    frozen: list[nn.Parameter]
    buffers: list[dict[str, Tensor | None]]
    norms: list[nn.Module]
    other_buffers: list[dict[str, Tensor | None]]
    do_norms_obey: bool | None
    wrappers: list[DistributedDataParallel]
    are_sharded: bool
    _modes: list[bool]
    _other_gradients: dict[int, Tensor | None]

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._walk()
        self.look()

    def look(self) -> None:
        """Finds the parameters and buffers as they are now.

        So freezing, thawing, adding and removing parameters between steps needs no word to
        surrogap. Raises as the class does.
        """
        self._reshard()
        # A walk through the modules takes percents of a small model's step, so the last one is
        # used again while it may be.
        if not self._is_as_walked():
            self._walk()
        # Where code asks whether it trains, other code may write to statistics now.
        modes = list(map(_mode, self.modules))
        if modes != self._modes:
            self._modes, self.do_norms_obey = modes, None
        self.parameters = [p for p in self._unique if p.requires_grad]
        self.frozen, self._other_gradients = [], {}
        if len(self.parameters) < len(self._unique):
            others = [p for p in self._unique if not p.requires_grad]
            self.frozen = [p for p in others if type(p) is nn.Parameter and not p.is_inference()]
            self._other_gradients = {id(p): p.grad for p in others}
        self._frozen_states = list(map(_state, self.frozen))
        if not self.parameters:
            raise ValueError(
                "model must have a trainable parameter, got none with requires_grad=True. "
                "Unfreeze the part to train."
            )
        if any(map(Tensor.is_complex, self.parameters)) or any(map(_hooks, self.parameters)):
            self._refuse()
        if self._fsdp_modules and not all(map(is_sharded, self.parameters)):
            self._refuse_plain()

    def look_again(self) -> None:
        """After a first pass: finds the modules that it has added.

        Raises:
            RuntimeError: It has added trainable parameters, or thawed some, and they have a
                gradient already, to which that of the second pass would be added.
        """
        self._reshard()
        if not self._is_as_walked():
            self._walk()
        now = [p for p in self._unique if p.requires_grad]
        if are_same(now, self.parameters):
            return
        known, before = set(map(id, self.parameters)), self._other_gradients
        reached = [p for p in now if id(p) not in known and p.grad is not before.get(id(p))]
        if reached:
            names = {id(parameter): name for name, parameter in self._model.named_parameters()}
            for parameter in reached:
                parameter.grad = before.get(id(parameter))
            raise RuntimeError(
                f"closure must not add or thaw parameters, got {names[id(reached[0])]} anew. Run "
                "the model once before the first step, and thaw between steps."
            )

    def written(self) -> list[Tensor]:
        """The frozen parameters that a pass has written to since the last look.

        A momentum encoder's, for one. It does not see what is written by way of `p.data`.
        """
        pairs = zip(self.frozen, self._frozen_states, strict=True)
        return [parameter for parameter, state in pairs if _state(parameter) != state]

    def _walk(self) -> None:
        self.modules = modules = list(self._model.modules())
        if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
            raise TypeError(
                "model must not hold modules of TorchScript, got one. Pass the modules that it was "
                "made from; torch.compile is faster, too."
            )
        parameter_homes = [module._parameters for module in modules]
        homes: list[dict[str, Any]] = [*(module._modules for module in modules), *parameter_homes]
        self._homes = [home for home in homes if home]
        self._empty_homes = [home for home in homes if not home]
        self._held = contents(self._homes)
        self.buffers = [module._buffers for module in modules]
        self.norms = [module for module in modules if type(module) in _NORMS]
        self.other_buffers = [m._buffers for m in modules if type(m) not in _NORMS]
        self.do_norms_obey = None
        self._modes = []
        every = contents(parameter_homes)
        self._unique = list({id(p): p for p in every if p is not None}.values())
        self.wrappers = [m for m in modules if isinstance(m, DistributedDataParallel)]
        self.are_sharded = any(map(is_sharded, self._unique))
        self._fsdp_modules = fsdp_modules(modules)

    def _is_as_walked(self) -> bool:
        """Whether every module still holds the same children and parameters."""
        return not any(self._empty_homes) and are_same(contents(self._homes), self._held)

    def _reshard(self) -> None:
        """Has FSDP's modules hold pieces, not the whole that they gathered for a pass.

        After a pass they mostly do so by themselves. Not after an evaluation, nor after an error,
        nor where they were told otherwise; and what they gathered would hide that weights moved.
        """
        for module in self._fsdp_modules:
            module.reshard()

    @property
    def names(self) -> list[str]:
        """What the parameters are called, in a model that is neither compiled nor wrapped.

        A slow walk, for predicates and errors alone.
        """
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        wrapped = [
            f"{path}." if path else ""
            for path, module in self._model.named_modules()
            if isinstance(module, DistributedDataParallel)
        ]
        result = []
        for parameter in self.parameters:
            name = names[id(parameter)]
            for path in reversed(wrapped):  # the innermost first, while the paths still hold
                if name.startswith(f"{path}module."):
                    name = path + name.removeprefix(f"{path}module.")
            result.append(name.replace("_orig_mod.", ""))
        return result

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters, or this process's pieces of them."""
        if not self.are_sharded:
            return list(self.parameters)
        return [piece_of(parameter, parameter) for parameter in self.parameters]

    @property
    def shardings(self) -> list[Sharding]:
        """How the parameters are spread over processes."""
        if not self.are_sharded:
            return [WHOLE] * len(self.parameters)
        return [sharding_of(parameter) for parameter in self.parameters]

    @property
    def devices(self) -> set[torch.device]:
        """Where passes compute."""
        return set(map(device_of if self.are_sharded else _device, self.parameters))

    @property
    def gradients(self) -> Gradients:
        """What `.grad` holds now."""
        return list(map(_gradient, self.parameters))

    @contextmanager
    def gradients_added(self) -> Iterator[Callable[[Gradients, Mean | None], None]]:
        """Clears `.grad`, and gives the body a function that adds a direction to what was there.

        If its second argument is not None, the sum's mean over processes replaces the sum. If the
        body raises, `.grad` is what it was.
        """
        before = self.gradients
        if are_any(before):
            self._clear()
        try:
            yield lambda direction, mean: self._add(before, direction, mean)
        except BaseException:
            try:
                # What was gathered may be from other weights. First, since it clears `.grad`.
                reset(self._fsdp_modules)
            finally:
                for parameter, gradient in zip(self.parameters, before, strict=True):
                    parameter.grad = gradient
            raise

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _add(self, before: Gradients, direction: Gradients, mean: Mean | None) -> None:
        """Like `Tensor.backward`: in place, and leaves None what no pass has reached."""
        if not (are_any(before) or self.are_sharded):
            direction = direction if mean is None else mean(direction, self.tensors)
            for parameter, gradient in zip(self.parameters, direction, strict=True):
                parameter.grad = gradient
            return
        if self.are_sharded:
            before = list(map(added_up, before, self.parameters))
        pieces = self._pieces(before)
        if mean is not None:
            direction = mean(_sum(pieces, direction), self.tensors)
        wholes = list(map(whole_of, direction, self.parameters)) if self.are_sharded else direction
        sums: list[Tensor] = []
        terms: list[Tensor] = []
        for parameter, gradient, piece, term, whole in zip(
            self.parameters, before, pieces, direction, wholes, strict=True
        ):
            parameter.grad = whole if gradient is None else gradient
            if piece is not None and term is not None:
                sums.append(piece)
                terms.append(term)
        if sums:
            (torch._foreach_add_ if mean is None else torch._foreach_copy_)(sums, terms)

    def _pieces(self, tensors: Gradients) -> Gradients:
        """This process's pieces of `tensors`, which are the parameters or their gradients."""
        if not self.are_sharded:
            return tensors
        return list(map(piece_of, tensors, self.parameters))

    def take_gradients(self) -> Gradients:
        """What `.grad` holds, in this process's pieces; it is empty afterwards.

        Raises:
            RuntimeError: There is no gradient at all, or one is sparse.
        """
        self._reshard()
        gradients = self._pieces(self.gradients)
        if not are_any(gradients):
            remedy = "Build the objective from the model that the closure runs"
            if self._fsdp_modules:
                remedy += ", and leave its set_requires_gradient_sync at True"
            raise RuntimeError(
                "loss must depend on the model's trainable parameters, got a gradient for none of "
                f"them. {remedy}."
            )
        self._check_gradients(gradients)
        self._clear()
        return gradients

    def _check_gradients(self, gradients: Gradients) -> None:
        parameters, present = self.parameters, present_of(gradients)
        if len(present) < len(parameters):
            pairs = zip(gradients, parameters, strict=True)
            parameters = [parameter for gradient, parameter in pairs if gradient is not None]
        are_strided = all(map(is_, map(_layout, present), repeat(torch.strided)))
        if not (are_strided and all(map(is_, map(_dtype, present), map(_dtype, parameters)))):
            self._refuse_gradients(gradients)

    def _refuse_gradients(self, gradients: Gradients) -> None:
        for name, parameter, gradient in zip(self.names, self.parameters, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"{name} must have a dense gradient, got layout {gradient.layout}. "
                    "Build its layer with sparse=False."
                )
            if gradient is not None and gradient.dtype is not parameter.dtype:
                raise RuntimeError(
                    f"{name} must have a gradient of its own dtype, got {gradient.dtype}. "
                    "Leave its grad_dtype as it is."
                )

    def _refuse(self) -> None:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.is_complex():
                raise ValueError(
                    f"{name} must be real, got {parameter.dtype}. Hold it as a real parameter and "
                    "call torch.view_as_complex in the forward pass."
                )
            if parameter._post_accumulate_grad_hooks:
                raise RuntimeError(
                    f"{name} must not have a post-accumulate-grad hook, got one. It would act on "
                    "the gradient of each pass: remove it, and step the optimizer after backward."
                )

    def _refuse_plain(self) -> NoReturn:
        pairs = zip(self.names, self.parameters, strict=True)
        name = next(name for name, parameter in pairs if not is_sharded(parameter))
        raise ValueError(
            f"{name} must be sharded like the others, got a plain parameter. FSDP does not average "
            "its gradient, so processes would differ: call fully_shard on the whole model too."
        )


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    """What changes when it is written to, or its data replaced."""
    return parameter._version, parameter.data_ptr()


def _sum(some: Gradients, others: Gradients) -> Gradients:
    return [
        b if a is None else a if b is None else a + b for a, b in zip(some, others, strict=True)
    ]


def contents(homes: Iterable[dict[str, T]]) -> list[T]:
    """What modules hold in these dictionaries."""
    return list(chain.from_iterable(map(dict.values, homes)))


def are_same(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))
