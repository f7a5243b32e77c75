"""The Hessian of the loss as an operator: matrix-vector products, without the matrix.

There are three methods for a product `H v`, each at the arithmetic cost of two gradients:

* `forward-over-reverse` takes the directional derivative of `grad f` along `v` by forward-mode
  differentiation. It keeps no graph of the backward pass, so it needs less memory than the other
  exact method.
* `double-backward` differentiates `<grad f, v>` by a second backward pass.
* `finite-differences` subtracts the gradients at `w + step * v` and `w - step * v`. It works with
  every operator and needs little memory, but is not exact: for smooth models, expect a relative
  error of about 1e-3 in float32, 1e-9 in float64, and much larger ones in bfloat16. Where a ReLU
  switches within the step, the error may be as large as the product. Compare two steps.

The first two need a derivative rule for every operator, which some custom and fused operators lack.
For them, attention uses torch's math implementation, whose rules are complete. The first also needs
the loss to read every parameter as an attribute of a module, and not to call `torch.autograd.grad`
for an input. Products of the second must be symmetric, which is checked on one batch.
"""

import math
import re
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.func import functional_call, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from surrogap.analysis.surface import Surface
from surrogap.checks import number, one_of
from surrogap.core.autograd_graph import leaves, nodes

ProductMethod = Literal["forward-over-reverse", "double-backward", "finite-differences"]
PRODUCT_METHODS: tuple[ProductMethod, ...] = get_args(ProductMethod)

# The cost of a product, in gradients over the same batches: exact for finite differences, counted
# in multiplications for the others.
GRADIENTS_PER_PRODUCT = 2


class Hessian:
    """The Hessian of a surface at the weights `w`: `hessian @ v` is its product with a vector.

    Args:
        surface: The loss.
        method: The method for products: "forward-over-reverse" is exact and needs less memory than
            "double-backward", which is exact too. "finite-differences" works with every operator,
            but is approximate. If an operator of the model lacks the derivative rule that a method
            needs, or the product would be wrong, the next method is used, with a warning. Sharded
            weights support only "finite-differences".
        step: The distance to each side along `v`, for finite differences. None for
            `0.1 * (eps * (1 + ||w||))^(1/3)`, which balances rounding and truncation error; `eps`
            is that of the weights' dtype.

    Attributes:
        method: The method in use.
        num_products: The number of products so far.

    Raises:
        ValueError: `method` is unknown, or `step` is not positive.

    >>> from surrogap.analysis.surface import Surface
    >>> w = nn.Linear(3, 1, bias=False)
    >>> surface = Surface(w, [torch.eye(3)], lambda w, x: 1.5 * w(x).square().sum())
    >>> Hessian(surface) @ torch.tensor([1.0, 0.0, -2.0])
    tensor([ 3.,  0., -6.])
    """

    def __init__(
        self,
        surface: Surface,
        method: ProductMethod = "forward-over-reverse",
        *,
        step: float | None = None,
    ) -> None:
        one_of("method", method, PRODUCT_METHODS, remedy="Leave it out for the first.")
        if step is not None:
            number("step", step, above=0.0, remedy="Leave it out for a step that fits the dtype.")
        self.surface = surface
        self.space = surface.space
        self.method: ProductMethod = method
        self.step = step
        self.num_products = 0
        self._is_checked = False
        if surface.weights.are_sharded and method != "finite-differences":
            self._fall_back("The weights are sharded.", to="finite-differences")

    def __matmul__(self, v: Tensor) -> Tensor:
        """`H v`, over all batches and processes."""
        v = v.detach().to(device=self.space.device, dtype=self.space.dtype)
        self.space.pieces(v)  # raises for a wrong shape before any pass
        while True:
            try:
                self._check_symmetry()
                product = self._product(self.surface, v)
            except RuntimeError as error:
                is_no_rule = isinstance(error, _NoRuleError) or _NO_RULE.search(str(error))
                if self.method == PRODUCT_METHODS[-1] or not is_no_rule:
                    raise
                following = PRODUCT_METHODS[PRODUCT_METHODS.index(self.method) + 1]
                self._fall_back(str(error).splitlines()[0], to=following)
            else:
                self.num_products += 1
                return product

    def _fall_back(self, reason: str, *, to: ProductMethod) -> None:
        warnings.warn(
            f'Using {to} instead of {self.method}; pass method="{to}" to avoid this warning. '
            f"{reason}",
            stacklevel=3,
        )
        self.method = to

    def _check_symmetry(self) -> None:
        """Check once that products by "double-backward" are symmetric on the first batch.

        Rules of second derivatives are written by hand, and may be wrong, as is that of
        `torch._weight_norm`.
        """
        if self._is_checked or self.method != "double-backward":
            return
        space = self.space
        u, v = (space.random(0, name) for name in "uv")
        for surface in self.surface.batch_surfaces(1):
            hu, hv = (self._product(surface, vector) for vector in (u, v))
            error = (space.dot(u, hv) - space.dot(v, hu)).abs() / (space.norm(hu) + space.norm(hv))
            if error > _rounding(surface):
                raise _NoRuleError(
                    f"The Hessian is not symmetric, with a relative error of {float(error):.2g}: "
                    "an operator has a wrong second derivative."
                )
        self._is_checked = True

    def _product(self, surface: Surface, v: Tensor) -> Tensor:
        if self.method == "finite-differences":
            return self._finite_differences(v)
        of_batch = _forward_over_reverse if self.method == PRODUCT_METHODS[0] else _double_backward
        tangents = [
            piece.to(tensor)
            for piece, tensor in zip(self.space.pieces(v), surface.weights.tensors, strict=True)
        ]

        def add(batch: Any, number: int, into: Tensor) -> Tensor:
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                loss, products = of_batch(surface, batch, tangents)
            for piece, product in zip(self.space.pieces(into), products, strict=True):
                if product is not None:
                    piece.add_(product.to(piece), alpha=number)
            return loss

        return surface.means(add, self.space.zeros())[1]

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
        # The error from rounding the weights is eps * ||w|| / step. Along sharp directions of small
        # language models, that from third derivatives is about (50 * step)^2.
        eps = max(torch.finfo(tensor.dtype).eps for tensor in self.surface.weights.tensors)
        return 0.1 * math.cbrt(eps * (1.0 + float(self.space.norm(self.surface.position()))))


Products = list[Tensor | None]


class _Loss(nn.Module):
    """The loss of a batch as a module, for `functional_call`."""

    def __init__(self, surface: Surface) -> None:
        super().__init__()
        self.model = surface.model
        self._loss_of = surface.loss_of

    def forward(self, batch: Any) -> Tensor:
        return self._loss_of(batch)


def _forward_over_reverse(
    surface: Surface, batch: Any, tangents: list[Tensor]
) -> tuple[Tensor, Products]:
    """The loss of a batch, and its `H v` for each parameter; None if that is zero."""
    _load_rules()
    module = _Loss(surface)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    keys = [names[id(parameter)] for parameter in surface.weights.parameters]
    primals = dict(zip(keys, (p.detach() for p in surface.weights.parameters), strict=True))

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        # BatchNorm updates its statistics in place, which needs new tensors within a derivative.
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        result: Tensor = functional_call(module, parameters | buffers, (batch,))
        return result

    def gradient(parameters: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        value, pullback, *_ = vjp(loss, parameters)
        # Not torch.func.grad, which keeps the graph of the backward pass.
        (result,) = pullback(torch.ones_like(value), retain_graph=False, create_graph=False)
        return result, value

    (_, value), (products, _), *_ = jvp(
        gradient, (primals,), (dict(zip(keys, tangents, strict=True)),)
    )
    if surface.weights.identities() & set(map(id, leaves(value))):
        raise _NoRuleError("The loss reads parameters that are not attributes of a module.")
    return value.detach(), [products[key] for key in keys]


def _double_backward(
    surface: Surface, batch: Any, tangents: list[Tensor]
) -> tuple[Tensor, Products]:
    """The same as `_forward_over_reverse`, by a second backward pass."""
    parameters = surface.weights.parameters
    loss = surface.loss_of(batch)
    functions: list[Any] = [n for n in nodes(loss) if isinstance(n, BackwardCFunction)]
    if any(function.name() == "CheckpointFunctionBackward" for function in functions):
        raise _NoRuleError("Reentrant checkpointing hides parameters from the graph.")
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    if functions and any(g is not None and not g.requires_grad for g in gradients):
        raise _NoRuleError(f"The backward pass of {functions[0].name()} may not be differentiable.")
    # A gradient without a graph does not depend on the weights: its rows of the Hessian are zero.
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
    """Raise the error that torch omits when it prunes the node of the graph that would raise it."""
    if any(node.name() == "torch::autograd::Error" for node in nodes(*outputs)):
        raise _NoRuleError("A function is marked with @once_differentiable.")


def _rounding(surface: Surface) -> Tensor:
    """The largest relative asymmetry of products that rounding explains, with a margin."""

    def add(batch: Any, number: int, into: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = surface.loss_of(batch)
        dtypes = {metadata.dtype for node in nodes(loss) for metadata in node._input_metadata}
        eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
        # A GPU may round float32 to TF32 in matrix products.
        tolerances = {torch.finfo(torch.float64).eps: 1e-6, torch.finfo(torch.float32).eps: 1e-2}
        into += number * tolerances.get(eps, 0.1)
        return loss.detach()

    return surface.means(add, torch.zeros(1, device=surface.space.device))[1]


class _NoRuleError(RuntimeError):
    """A method cannot differentiate the loss."""


@cache
def _load_rules() -> None:
    """Import torch's forward-mode rules, whose use of torch.jit.script gives a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        import_module("torch._decomp.decompositions_for_jvp")


# torch's messages about an operator, or a custom function, without a derivative, and about losses
# that contain derivatives or checkpoints.
_NO_RULE = re.compile(
    "forward AD with|derivative for .* is not implemented|not implemented for"
    "|implement the jvp function|override the setup_context staticmethod|once_differentiable"
    "|transformed by a functorch transform|not have been used in the graph|saved tensor hooks"
)
