"""The trainable parameters during one call of `backward`, and their gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor, nn

from surrogap.core.vectors import Gradients

_grad_of = attrgetter("grad")


class Weights:
    """The trainable parameters of `model` as it is now, each once.

    They are looked up anew for each call, so freezing, thawing, adding and removing parameters
    between calls needs no word to surrogap.

    Attributes:
        parameters: The trainable parameters.
        buffers: The dictionaries in which the modules hold their buffers.

    Raises:
        ValueError: There is no trainable parameter, or one is complex.
        RuntimeError: A parameter has a hook that would act on the gradient of a single pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # One walk for parameters and buffers, with no names: `model.named_parameters()` takes a
        # percent of a small model's step.
        found: dict[int, nn.Parameter] = {}
        self.buffers: list[dict[str, Tensor | None]] = []
        seen, stack = {id(model)}, [model]
        while stack:
            module = stack.pop()
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    found[id(parameter)] = parameter
            if module._buffers:
                self.buffers.append(module._buffers)
            for child in reversed(module._modules.values()):
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    stack.append(child)
        self.parameters = list(found.values())
        if not self.parameters:
            raise ValueError(
                "model must have a trainable parameter, got none with requires_grad=True. "
                "Unfreeze the part to train."
            )
        for index, parameter in enumerate(self.parameters):
            if parameter._post_accumulate_grad_hooks or parameter.is_complex():
                self._refuse(index)

    @property
    def names(self) -> list[str]:
        """What the parameters are called. A slow walk, so not for every step."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return [names[id(parameter)] for parameter in self.parameters]

    @property
    def devices(self) -> set[torch.device]:
        """Where the parameters lie."""
        return {parameter.device for parameter in self.parameters}

    @property
    def gradients(self) -> Gradients:
        """What `.grad` holds now."""
        return list(map(_grad_of, self.parameters))

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
                if gradient.layout is not torch.strided:
                    raise RuntimeError(
                        f"{self.names[index]} must have a dense gradient, got layout "
                        f"{gradient.layout}. Build its layer with sparse=False."
                    )
        if is_empty:
            raise RuntimeError(
                "loss must depend on the model's trainable parameters, got a gradient for none of "
                "them. Build the objective from the model that the closure runs."
            )
        self._clear()
        return gradients

    def _refuse(self, index: int) -> None:
        name, parameter = self.names[index], self.parameters[index]
        if parameter.is_complex():
            raise ValueError(
                f"{name} must be real, got {parameter.dtype}. "
                "Hold it as a real parameter and call torch.view_as_complex in the forward pass."
            )
        raise RuntimeError(
            f"{name} must not have a post-accumulate-grad hook, got one. It would act on the "
            "gradient of each pass: remove it, and step the optimizer after backward."
        )
