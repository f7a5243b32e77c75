"""The Hessian of the loss, as an operator: products with vectors, never the matrix.

There are three ways to a product `H v`, each for two gradients' worth of arithmetic:

* `forward-over-reverse` differentiates the gradient along `v` while it is computed: the directional
  derivative of `grad f` by forward-mode differentiation. It keeps no graph of the backward pass, so
  it needs the least memory of the exact ones.
* `double-backward` differentiates `<grad f, v>` by a second backward pass.
* `finite-differences` compares the gradients at `w + step * v` and `w - step * v`. It needs nothing
  of the operators and little memory, and has an error: along most directions about 1e-3 of the
  product in float32, 1e-9 in float64. Along sharp ones it may be as large as the product, where the
  curvature changes or a ReLU switches within the step: two small networks, in float32 on twelve
  images, had dominant eigenvalues of less than half, or of the wrong sign. Compare two steps.

The first two need a rule for every operator, which some custom and fused ones lack. Attention runs
by torch's plain implementation there, whose rules are complete.
"""

import math
import re
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from surrogap.analysis.surface import Surface
from surrogap.checks import number, one_of

Method = Literal["forward-over-reverse", "double-backward", "finite-differences"]
METHODS: tuple[Method, ...] = get_args(Method)

# What a product costs, in gradients over the same batches: exact for finite differences, the count
# of multiplications for the others.
GRADIENTS_PER_PRODUCT = 2


class Hessian:
    """The Hessian of a surface at the weights `w`: `hessian @ v` is its product with a vector.

    Args:
        surface: The loss.
        method: How to get products. Where an operator of the model has no rule for it, or the
            weights are sharded, a warning says so, and the next of the three is used.
        step: For finite differences: how far to go along `v` to each side, as a distance. None for
            `(eps * (1 + ||w||))^(1/3)`, which balances rounding and curvature; `eps` is that of the
            weights' dtype.

    Attributes:
        method: The method in use.
        num_products: How many products were computed.

    Raises:
        ValueError: `method` is unknown, or `step` not positive.

    >>> from surrogap.analysis.surface import Surface
    >>> w = nn.Linear(3, 1, bias=False)
    >>> surface = Surface(w, [torch.eye(3)], lambda w, x: 1.5 * w(x).square().sum())
    >>> Hessian(surface) @ torch.tensor([1.0, 0.0, -2.0])
    tensor([ 3.,  0., -6.])
    """

    def __init__(
        self,
        surface: Surface,
        method: Method = "forward-over-reverse",
        *,
        step: float | None = None,
    ) -> None:
        one_of("method", method, METHODS, remedy="Leave it out for the first.")
        if step is not None:
            number("step", step, above=0.0, remedy="Leave it out for one that fits the dtype.")
        self.surface = surface
        self.space = surface.space
        self.method: Method = method
        self.step = step
        self.num_products = 0
        if surface.weights.are_sharded and method != "finite-differences":
            self._fall_back("whole weights", "sharded ones", to="finite-differences")

    def __matmul__(self, v: Tensor) -> Tensor:
        """`H v`, over all batches and processes."""
        v = v.detach().to(device=self.space.device, dtype=self.space.dtype)
        self.space.pieces(v)  # refuses a wrong shape before any pass
        while True:
            try:
                product = self._product(v)
            except (NotImplementedError, RuntimeError) as error:
                operator = _without_rule(error)
                if operator is None or self.method == METHODS[-1]:
                    raise
                self._fall_back(
                    "a rule for every operator",
                    f"none for {operator}",
                    to=METHODS[METHODS.index(self.method) + 1],
                )
            else:
                self.num_products += 1
                return product

    def _fall_back(self, rule: str, value: str, *, to: Method) -> None:
        warnings.warn(
            f"{self.method} must have {rule}, got {value}. "
            f'Going on with {to}: pass method="{to}" to choose it without this warning.',
            stacklevel=3,
        )
        self.method = to

    def _product(self, v: Tensor) -> Tensor:
        if self.method == "finite-differences":
            return self._finite_differences(v)
        of_batch = _forward_over_reverse if self.method == METHODS[0] else _double_backward
        tangents = [
            piece.to(tensor)
            for piece, tensor in zip(
                self.space.pieces(v), self.surface.weights.tensors, strict=True
            )
        ]

        def add(batch: Any, number: int, into: Tensor) -> Tensor:
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                loss, products = of_batch(self.surface, batch, tangents)
            for piece, product in zip(self.space.pieces(into), products, strict=True):
                if product is not None:
                    piece.add_(product.to(piece), alpha=number)
            return loss

        return self.surface.means(add, self.space.zeros())[1]

    def _finite_differences(self, v: Tensor) -> Tensor:
        norm = float(self.space.norm(v))
        if norm == 0.0:
            return self.space.zeros()
        step = (self.step or self._usual_step()) / norm
        gradients = []
        for sign in (1.0, -1.0):
            with self.surface.moved(sign * step * v):
                gradients.append(self.surface.gradient()[1])
        return gradients[0].sub_(gradients[1]).div_(2.0 * step)

    def _usual_step(self) -> float:
        # Rounding the weights errs by eps * ||w|| / step, and the third derivative by step^2.
        eps = max(torch.finfo(tensor.dtype).eps for tensor in self.surface.weights.tensors)
        return math.cbrt(eps * (1.0 + float(self.space.norm(self.surface.position()))))


Products = list[Tensor | None]


class _Loss(nn.Module):
    """The loss of a batch as a module, so that torch can run it with other parameters."""

    def __init__(self, surface: Surface) -> None:
        super().__init__()
        self.model = surface.model
        self._loss_of = surface.loss_of

    def forward(self, batch: Any) -> Tensor:
        return self._loss_of(batch)


def _forward_over_reverse(
    surface: Surface, batch: Any, tangents: list[Tensor]
) -> tuple[Tensor, Products]:
    """A batch's loss, and its `H v` for each parameter; None where that is zero."""
    _load_rules()
    module = _Loss(surface)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    keys = [names[id(parameter)] for parameter in surface.weights.parameters]
    primals = dict(zip(keys, (p.detach() for p in surface.weights.parameters), strict=True))

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        # BatchNorm writes its statistics, which within a derivative only new tensors take.
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        result: Tensor = functional_call(module, parameters | buffers, (batch,))
        return result

    def gradient(parameters: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        value, pullback, *_ = vjp(loss, parameters)
        # Not torch.func.grad, which keeps the graph of the backward pass, for nobody here.
        (result,) = pullback(torch.ones_like(value), retain_graph=False, create_graph=False)
        return result, value

    (_, value), (products, _), *_ = jvp(
        gradient, (primals,), (dict(zip(keys, tangents, strict=True)),)
    )
    return value, [products[key] for key in keys]


def _double_backward(
    surface: Surface, batch: Any, tangents: list[Tensor]
) -> tuple[Tensor, Products]:
    """As `_forward_over_reverse`."""
    parameters = surface.weights.parameters
    loss = surface.loss_of(batch)
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    # A gradient without graph does not depend on the weights: its part of the Hessian is zero.
    pairs = [
        (gradient, tangent)
        for gradient, tangent in zip(gradients, tangents, strict=True)
        if gradient is not None and gradient.requires_grad
    ]
    if not pairs:
        return loss.detach(), [None] * len(parameters)
    outputs, directions = zip(*pairs, strict=True)
    _refuse_once_differentiable(outputs)
    products = torch.autograd.grad(outputs, parameters, directions, allow_unused=True)
    return loss.detach(), list(products)


def _refuse_once_differentiable(outputs: Sequence[Tensor]) -> None:
    """Raises where torch would have, had it not pruned the part of the graph that does."""
    seen, found = set(), [output.grad_fn for output in outputs]
    while found:
        node = found.pop()
        if node is not None and node not in seen:
            if node.name() == "torch::autograd::Error":
                raise NotImplementedError("A function is marked with @once_differentiable.")
            seen.add(node)
            found += [following for following, _ in node.next_functions]


@cache
def _load_rules() -> None:
    """Torch writes some forward rules in a language that it deprecates, and warns of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        import_module("torch._decomp.decompositions_for_jvp")


# What torch says where an operator lacks a derivative, and where the name stands in it.
_COMPLAINTS = (
    r"forward AD with (?:aten::)?(\S+) that does not support it",
    r"derivative for '?(?:aten::)?(\w+)'? is not implemented",
    r"not implemented for (\S+)",
)
_COMPLAINTS_OF_FUNCTIONS = (
    "implement the jvp function",
    "override the setup_context staticmethod",
    "once_differentiable",
)


def _without_rule(error: Exception) -> str | None:
    """The operator that an error says has no derivative; None for an error of another kind."""
    message = str(error)
    for complaint in _COMPLAINTS:
        if found := re.search(complaint, message):
            return found[1]
    if any(complaint in message for complaint in _COMPLAINTS_OF_FUNCTIONS):
        return _custom_function(error.__traceback__)
    return None


def _custom_function(traceback: TracebackType | None) -> str:
    """The `torch.autograd.Function` whose missing rule an error tells of, as far as can be seen."""
    place = ""
    while traceback is not None:
        frame, line = traceback.tb_frame, traceback.tb_lineno
        for value in frame.f_locals.values():
            if isinstance(value, type) and issubclass(value, Function) and not _is_torchs(value):
                return value.__name__
        if frame.f_code.co_filename != __file__:
            place = f" in {Path(frame.f_code.co_filename).name}, line {line}"
        traceback = traceback.tb_next
    return f"a custom autograd function{place}"


def _is_torchs(function: type) -> bool:
    return function.__module__.split(".")[0] == "torch"
