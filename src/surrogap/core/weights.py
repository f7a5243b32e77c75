"""The trainable parameters during one call of `backward`: gradients out and in, there and back."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from surrogap.core.vectors import Layout, Vector


class Weights:
    """The trainable parameters of `model` as it is now, each once.

    They are looked up anew for each call, so freezing, thawing, adding and removing parameters
    between calls needs no word to surrogap.

    Args:
        model: Whose parameters.
        kind: A label for each parameter, from its name and itself; see `Layout`.

    Raises:
        ValueError: There is no trainable parameter, or one is complex.
        RuntimeError: A parameter has a hook that would act on the gradient of a single pass.
    """

    def __init__(
        self, model: nn.Module, kind: Callable[[str, nn.Parameter], Hashable] | None = None
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(
                "model must have a trainable parameter, got none with requires_grad=True. "
                "Unfreeze the part to train."
            )
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.kinds = [kind(*pair) if kind else None for pair in named]
        self._reached = [False] * len(named)
        for name, parameter in named:
            _check_parameter(name, parameter)

    @cached_property
    def layout(self) -> Layout:
        """Where each parameter lies in a vector. Lazy modules have no shape before a first pass."""
        return Layout(self.parameters, self.kinds)

    @property
    def devices(self) -> set[torch.device]:
        """Where the parameters lie."""
        return {parameter.device for parameter in self.parameters}

    @property
    def gradients(self) -> list[Tensor | None]:
        """What `.grad` holds now."""
        return [parameter.grad for parameter in self.parameters]

    @gradients.setter
    def gradients(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    @contextmanager
    def gradients_added(self) -> Iterator[Callable[[Vector], None]]:
        """Clears `.grad`, and gives the body a function that adds a vector to what was there.

        If the body raises, `.grad` is what it was.
        """
        before = self.gradients
        self.gradients = [None] * len(before)
        try:
            yield lambda direction: self._add(before, direction)
        except BaseException:
            self.gradients = before
            raise

    def _add(self, before: list[Tensor | None], direction: Vector) -> None:
        """Like `Tensor.backward`: adds in place, and leaves None what no pass has reached."""
        sums: list[Tensor] = []
        terms: list[Tensor] = []
        after = before.copy()
        for index, (gradient, view) in enumerate(zip(before, direction.views, strict=True)):
            if not self._reached[index]:
                continue
            if gradient is None:
                after[index] = view
            else:
                sums.append(gradient)
                terms.append(view)
        if sums:
            torch._foreach_add_(sums, terms)
        self.gradients = after

    def take_gradients(self, into: Vector | None = None) -> Vector:
        """Moves `.grad` into a vector, zeros where there is none.

        Raises:
            RuntimeError: There is no gradient at all, or one is sparse.
        """
        gradients = self.gradients
        if all(gradient is None for gradient in gradients):
            raise RuntimeError(
                "loss must depend on the model's trainable parameters, got a gradient for none of "
                "them. Build the objective from the model that the closure runs."
            )
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            self._reached[index] = True
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"{self.names[index]} must have a dense gradient, got layout "
                    f"{gradient.layout}. Build its layer with sparse=False."
                )
        vector = (into or Vector(self.layout)).read_(gradients)
        self.gradients = [None] * len(gradients)
        return vector

    @contextmanager
    def saved(self) -> Iterator[Vector]:
        """Gives the body an exact copy of the weights, and puts it back whatever happens there."""
        copy = Vector(self.layout).read_(self.parameters)
        try:
            yield copy
        finally:
            copy.write_to_(self.parameters)

    def move_(self, to: Vector) -> None:
        """Writes `to` into the weights, in place."""
        to.write_to_(self.parameters)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if parameter.is_complex():
        raise ValueError(
            f"{name} must be real, got {parameter.dtype}. "
            "Hold it as a real parameter and call torch.view_as_complex in the forward pass."
        )
    if parameter._post_accumulate_grad_hooks:
        raise RuntimeError(
            f"{name} must not have a post-accumulate-grad hook, got one. It would act on the "
            "gradient of each pass: remove it, and step the optimizer after backward."
        )
