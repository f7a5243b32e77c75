"""The trainable parameters during one call of `backward`, and their gradients."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from surrogap.core.vectors import Gradients

T = TypeVar("T")

_gradient = attrgetter("grad")
_device = attrgetter("device")
_hooks = attrgetter("_post_accumulate_grad_hooks")


class Weights:
    """The trainable parameters of `model`, each once, and where its buffers live.

    Attributes:
        parameters: The trainable parameters.
        buffers: The dictionaries in which modules hold their buffers.

    Raises:
        ValueError: There is no trainable parameter, or one is complex.
        RuntimeError: A parameter has a hook that would act on the gradient of a single pass.
    """

    parameters: list[nn.Parameter]
    buffers: list[dict[str, Tensor | None]]

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._walk()
        self.look()

    def look(self) -> None:
        """Finds the parameters and buffers as they are now.

        So freezing, thawing, adding and removing parameters between steps needs no word to
        surrogap. Raises as the class does.
        """
        # A walk through the modules takes percents of a small model's step, so the last one is
        # used again while every module still holds the same children and parameters.
        children, every = contents(self._child_homes), contents(self._parameter_homes)
        if not (are_same(children, self._children) and are_same(every, self._every)):
            self._walk()
        self.parameters = [p for p in self._unique if p.requires_grad]
        if not self.parameters:
            raise ValueError(
                "model must have a trainable parameter, got none with requires_grad=True. "
                "Unfreeze the part to train."
            )
        if any(map(Tensor.is_complex, self.parameters)) or any(map(_hooks, self.parameters)):
            self._refuse()

    def _walk(self) -> None:
        modules = list(self._model.modules())
        self._child_homes = [module._modules for module in modules]
        self._parameter_homes = [module._parameters for module in modules]
        self.buffers = [module._buffers for module in modules]
        self._children = contents(self._child_homes)
        self._every = contents(self._parameter_homes)
        self._unique = list({id(p): p for p in self._every if p is not None}.values())

    @property
    def names(self) -> list[str]:
        """What the parameters are called. A slow walk, for predicates and errors alone."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return [names[id(parameter)] for parameter in self.parameters]

    @property
    def devices(self) -> set[torch.device]:
        """Where the parameters lie."""
        return set(map(_device, self.parameters))

    @property
    def gradients(self) -> Gradients:
        """What `.grad` holds now."""
        return list(map(_gradient, self.parameters))

    @contextmanager
    def gradients_added(self) -> Iterator[Callable[[Gradients], None]]:
        """Clears `.grad`, and gives the body a function that adds a direction to what was there.

        If the body raises, `.grad` is what it was.
        """
        before = self.gradients
        self._clear()
        try:
            yield lambda direction: self._add(before, direction)
        except BaseException:
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
            raise

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _add(self, before: Gradients, direction: Gradients) -> None:
        """Like `Tensor.backward`: adds in place, and leaves None what no pass has reached."""
        sums: list[Tensor] = []
        terms: list[Tensor] = []
        for parameter, gradient, term in zip(self.parameters, before, direction, strict=True):
            parameter.grad = term if gradient is None else gradient
            if gradient is not None and term is not None:
                sums.append(gradient)
                terms.append(term)
        if sums:
            torch._foreach_add_(sums, terms)

    def take_gradients(self) -> Gradients:
        """What `.grad` holds, which is empty afterwards.

        Raises:
            RuntimeError: There is no gradient at all, or one is sparse.
        """
        gradients = self.gradients
        is_empty = True
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                is_empty = False
                if not (
                    gradient.layout is torch.strided
                    and gradient.dtype is self.parameters[index].dtype
                ):
                    self._refuse_gradient(self.names[index], gradient)
        if is_empty:
            raise RuntimeError(
                "loss must depend on the model's trainable parameters, got a gradient for none of "
                "them. Build the objective from the model that the closure runs."
            )
        self._clear()
        return gradients

    @staticmethod
    def _refuse_gradient(name: str, gradient: Tensor) -> NoReturn:
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"{name} must have a dense gradient, got layout {gradient.layout}. "
                "Build its layer with sparse=False."
            )
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


def contents(homes: Iterable[dict[str, T]]) -> list[T]:
    """What modules hold in these dictionaries."""
    return list(chain.from_iterable(map(dict.values, homes)))


def are_same(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))
