"""The fused arithmetic against the plain one. Without a GPU it runs in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surrogap.core.arithmetic import Arithmetic, Flat, Memory, Task
from surrogap.core.combine import Coefficients, Number
from surrogap.core.fused import arithmetic as fused
from surrogap.core.fused import choose
from surrogap.core.fused.arithmetic import Fused
from surrogap.core.geometry import Kind
from surrogap.core.shards import WHOLE
from surrogap.core.vectors import Gradients, apart
from tests import equality

# Triton 3.6's interpreter, which comes with torch 2.11.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

COEFFICIENTS = {
    "SAM": Coefficients(0.0, 1.0),
    "GSAM": Coefficients(-0.4, 1.0, b_1=0.4),
    "GSAM-plain": Coefficients(1.0, 0.4, a_1=-0.4),
    "GapPenalty": Coefficients(-0.3, 1.3),
}
KINDS = {
    "plain": [Kind.PLAIN] * 6,
    "scaled": [Kind.PLAIN, Kind.PLAIN, Kind.SCALED, Kind.SCALED, Kind.PLAIN, Kind.PLAIN],
    "partly still": [Kind.FIXED, Kind.PLAIN, Kind.SCALED, Kind.FIXED, Kind.PLAIN, Kind.PLAIN],
}


def task(parameters: list[Tensor], kinds: list[Kind] | None = None, **settings: object) -> Task:
    kinds = kinds or [Kind.PLAIN] * len(parameters)
    return Task(parameters, kinds, [WHOLE] * len(parameters), **settings)


def tensors(dtype: torch.dtype, device: torch.device, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(), (7,), (33, 50), (2, 3, 4, 5), (0, 3), (9001,)]
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    made[3] = made[3].to(memory_format=torch.channels_last)
    return made


def step(
    cls: type[Arithmetic],
    w: list[Tensor],
    g: Gradients,
    g_p: Gradients,
    kinds: list[Kind],
    coefficients: Coefficients,
    scale: Tensor | None = None,
    memory: Memory = "exact",
    rho: Number = 0.3,
    along: Gradients | None = None,
) -> tuple[list[Tensor], Gradients, Tensor]:
    """The perturbed weights, the direction and the products of an arithmetic, on copies."""
    weights = [t.clone() for t in w]
    arithmetic = cls(task(weights, kinds, eta=0.01, eps=1e-3, memory=memory))
    g = [None if t is None else t.clone() for t in g]
    if along is None:
        arithmetic.climb(g, rho, scale)
    else:
        arithmetic.climb(along, rho, scale, g)
    moved = [t.clone() for t in weights]
    copies: Gradients = [None if t is None else t.clone() for t in g_p]
    direction, products = arithmetic.combination(copies, coefficients)
    assert equality.same_bits(w, weights)
    arithmetic.restore()  # there is nothing left to restore
    assert equality.same_bits(w, weights)
    return moved, direction, products()


def assert_close(actual: Gradients, expected: Gradients, dtype: torch.dtype) -> None:
    # One unit in the last place: the two may round ties, or fuse multiply-adds, differently.
    tolerance = 2 * torch.finfo(dtype).eps
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.stride() == other.stride()
            assert one.dtype == dtype
            torch.testing.assert_close(
                one, other, rtol=tolerance, atol=2 * tolerance, equal_nan=True
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("objective", COEFFICIENTS)
def test_fused_is_flat(
    dtype: torch.dtype, kinds: str, objective: str, device: torch.device
) -> None:
    w, g, g_p = (tensors(dtype, device, seed) for seed in (1, 2, 3))
    arguments = (w, g, g_p, KINDS[kinds], COEFFICIENTS[objective])
    moved, direction, products = step(Fused, *arguments)
    expected_point, expected, expected_products = step(Flat, *arguments)
    assert_close(moved, expected_point, dtype)
    assert not torch.equal(moved[2], w[2])
    assert_close(direction, expected, dtype)
    torch.testing.assert_close(products, expected_products, rtol=2e-6, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", KINDS)
def test_a_climb_along_another_vector(dtype: torch.dtype, kinds: str, device: torch.device) -> None:
    w, g, g_p, v = (tensors(dtype, device, seed) for seed in (1, 2, 3, 4))
    v[1] = None
    arguments = (w, g, g_p, KINDS[kinds], COEFFICIENTS["GSAM"])
    for cls in (Fused, Flat):
        moved, direction, products = step(cls, *arguments, along=v)
        point, *_ = step(Flat, w, v, g_p, *arguments[3:])
        _, expected, expected_products = step(Flat, *arguments)
        assert_close(moved, point, dtype)
        assert torch.equal(moved[1], w[1])
        assert_close(direction, expected, dtype)
        torch.testing.assert_close(products, expected_products, rtol=2e-6, atol=1e-3)


@pytest.mark.parametrize("objective", COEFFICIENTS)
def test_two_parameters_may_share_a_gradient(objective: str, device: torch.device) -> None:
    """Autograd gives two parameters the same memory if the loss adds views of them."""
    w, g, g_p = (2 * [torch.randn(9, device=device)] for _ in range(3))
    empty = 2 * [torch.empty(0, device=device)]
    results = []
    for cls, gradients in ((Flat, [t.clone() for t in g_p]), (Fused, 2 * [g_p[0].clone()])):
        weights = [t.clone() for t in w] + empty
        arithmetic = cls(task(weights))
        arithmetic.climb([*g, *empty], 0.3, None)
        results.append(arithmetic.combination([*gradients, *empty], COEFFICIENTS[objective])[0])
    assert_close(*results, torch.float32)


def test_empty_gradients_are_not_copied(device: torch.device) -> None:
    """As for shards of small tensors in most of many processes."""
    gradients = [torch.randn(3, device=device), *(torch.empty(0, device=device) for _ in range(2))]
    assert apart(gradients) is gradients


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("cls", [Flat, Fused])
@pytest.mark.parametrize("are_there", [False, True], ids=["numbers", "on the device"])
@pytest.mark.parametrize("objective", ["SAM", "GapPenalty"])
def test_a_norm_that_overflows_float32(
    cls: type[Arithmetic], are_there: bool, objective: str, device: torch.device
) -> None:
    numbers = COEFFICIENTS[objective]
    if are_there:
        numbers = Coefficients(*(torch.tensor(n, device=device) for n in numbers))
    w, g, g_p = ([torch.randn(9, device=device)] for _ in range(3))
    rho = torch.tensor(0.3, device=device) if are_there else 0.3
    arguments = (w, [1e20 * g[0]], [1e20 * g_p[0]], [Kind.PLAIN], numbers)
    _, direction, _ = step(cls, *arguments, rho=rho)
    a, b = COEFFICIENTS[objective][:2]
    torch.testing.assert_close(direction[0], a * 1e20 * g[0] + b * 1e20 * g_p[0])


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("objective", COEFFICIENTS)
def test_low_memory_recovers_the_gradient(kinds: str, objective: str, device: torch.device) -> None:
    """Up to the rounding of the weights: a climb of 0.3 over 10,000 weights is 0.003 in each."""
    w, g, g_p = (tensors(torch.float32, device, seed) for seed in (1, 2, 3))
    arguments = (w, g, g_p, KINDS[kinds], COEFFICIENTS[objective])
    moved, direction, products = step(Fused, *arguments, memory="low")
    expected_point, expected, expected_products = step(Fused, *arguments)
    assert equality.same_bits(moved, expected_point)
    torch.testing.assert_close(products, expected_products, rtol=1e-4, atol=1e-2)
    for ours, theirs, weight, kind in zip(direction, expected, w, KINDS[kinds], strict=True):
        assert ours is not None
        scaling = weight.abs() + 0.01 if kind == Kind.SCALED else torch.ones_like(weight)
        # The step is 0.3 / ||T g||, and ||T g|| is below 200.
        slope = 0.3 / 200 * scaling**2
        tolerance = torch.finfo(torch.float32).eps * (1 + weight.abs() / slope)
        assert bool(((ours - theirs).abs() <= 4 * tolerance).all())


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, in the interpreter
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("poison", [float("inf"), float("nan"), 0.0])
def test_low_memory_without_a_climb(poison: float, device: torch.device) -> None:
    """Then both passes run at the same weights, and the gradients are equal."""
    w, g = (tensors(torch.float32, device, seed) for seed in (1, 2))
    g[2][3, 4] = poison
    g = [t * 0.0 for t in g] if poison == 0.0 else g
    arguments = (w, g, g, KINDS["scaled"], COEFFICIENTS["GapPenalty"])
    moved, direction, _ = step(Fused, *arguments, memory="low")
    assert equality.same_bits(moved, w)
    assert_close(direction, step(Fused, *arguments)[1], torch.float32)


@pytest.mark.parametrize("memory", ["exact", "low"])
@pytest.mark.parametrize("cls", [Flat, Fused])
def test_numbers_may_be_on_the_device(
    cls: type[Arithmetic], memory: Memory, device: torch.device
) -> None:
    w, g, g_p = (tensors(torch.float32, device, seed) for seed in (1, 2, 3))
    there = torch.tensor([0.3, -0.4, 1.0, 0.1, 0.4], dtype=torch.float64, device=device).unbind()
    results = [
        step(cls, w, g, g_p, KINDS["scaled"], Coefficients(*coefficients), None, memory, rho)
        for rho, *coefficients in (there, (0.3, -0.4, 1.0, 0.1, 0.4))
    ]
    assert equality.same_bits(results[0][0], results[1][0])
    assert equality.same_bits(results[0][1], results[1][1])


def test_missing_gradients_are_zero(device: torch.device) -> None:
    w, g, g_p = (tensors(torch.float32, device, seed) for seed in (1, 2, 3))
    some: Gradients = [None, *g[1:5], None]
    others: Gradients = [None, None, *g_p[2:]]
    arguments = (w, some, others, KINDS["plain"], COEFFICIENTS["GSAM"])
    moved, direction, products = step(Fused, *arguments)
    expected_point, expected, expected_products = step(Flat, *arguments)
    assert_close(moved, expected_point, torch.float32)
    assert_close(direction, expected, torch.float32)
    assert direction[0] is None
    assert direction[1] is not None
    torch.testing.assert_close(products, expected_products, rtol=2e-6, atol=1e-3)


@pytest.mark.parametrize("offsets", [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 2, 3)])
def test_tensors_need_not_be_aligned(offsets: tuple[int, ...], device: torch.device) -> None:
    """A view may start anywhere in memory; aligned blocks have a faster path."""
    plain = [[torch.randn(2 * fused.BLOCK + 3, device=device)] for _ in range(3)]
    moved = [
        [torch.cat([t.new_zeros(offset), t])[offset:] for t in some]
        for some, offset in zip(plain, offsets, strict=True)
    ]
    coefficients = COEFFICIENTS["GSAM"]
    w, g, g_p = moved
    weights = [t.clone() for t in w]
    arithmetic = Fused(task(w))
    arithmetic.climb(list(g), 0.3, None)
    point = [t.clone() for t in w]
    direction, _ = arithmetic.combination(list(g_p), coefficients)
    assert equality.same_bits(w, weights)
    expected_point, expected, _ = step(Fused, *plain, [Kind.PLAIN], coefficients)
    assert_close(point, expected_point, torch.float32)
    assert_close(direction, expected, torch.float32)


BOTH = pytest.mark.parametrize("cls", [Flat, Fused])


@BOTH
def test_a_scale_multiplies_eps(cls: type[Arithmetic], device: torch.device) -> None:
    """With a large eps: a tenth of the norm."""
    w, g = torch.randn(2, 50, device=device)
    points = []
    for scale in (None, torch.tensor(2.0**14, device=device)):
        parameter = w.clone()
        arithmetic = cls(task([parameter], eps=0.1 * float(g.norm())))
        arithmetic.climb([g if scale is None else g * scale], 0.3, scale)
        points.append(parameter)
    assert torch.equal(*points)
    assert float((points[0] - w).norm()) == pytest.approx(0.3 / 1.1, rel=1e-5)


@BOTH
def test_gradients_in_another_memory_format(cls: type[Arithmetic], device: torch.device) -> None:
    w, g, g_p = (tensors(torch.float32, device, seed) for seed in (1, 2, 3))
    arguments = (KINDS["plain"], COEFFICIENTS["GSAM"])
    expected = step(cls, w, g, g_p, *arguments)
    g[3], g_p[3] = g[3].contiguous(), g_p[3].contiguous()
    actual = step(cls, w, g, g_p, *arguments)
    assert equality.same_bits(actual[0], expected[0])
    assert equality.same_bits(actual[1], expected[1])
    assert actual[1][3].stride() == w[3].stride()


def test_a_gradient_in_the_same_order_is_not_copied(device: torch.device) -> None:
    """Whatever strides its dimensions of size 1 have, as in 1x1 convolutions."""
    w = torch.randn(4, 3, 1, 1, device=device)
    g_p = torch.randn(4, 3, device=device).as_strided((4, 3, 1, 1), (3, 1, 3, 3))
    assert g_p.stride() != w.stride()
    arithmetic = Fused(task([w]))
    arithmetic.climb([torch.randn_like(w)], 0.1, None)
    (direction,), _ = arithmetic.combination([g_p], COEFFICIENTS["GSAM"])
    assert direction is g_p


@BOTH
@pytest.mark.parametrize("is_whole", [False, True], ids=["cut short", "whole"])
def test_weights_are_restored_in_the_memory_that_a_pass_assigned(
    cls: type[Arithmetic], is_whole: bool, device: torch.device
) -> None:
    """For models whose forward pass assigns to `p.data`, for example to normalise it."""
    w, g, g_p = (tensors(torch.float32, device, seed) for seed in (1, 2, 3))
    expected = step(Flat, w, g, g_p, KINDS["plain"], COEFFICIENTS["GSAM"])[1]
    parameters = [t.clone() for t in w]
    arithmetic = cls(task(parameters, eta=0.01, eps=1e-3))
    arithmetic.climb(g, 0.3, None)
    places = [parameter.detach() for parameter in parameters]
    climbed = [place.clone() for place in places]
    for parameter in parameters:
        parameter.data = 2 * parameter.data
    if is_whole:
        direction, _ = arithmetic.combination(g_p, COEFFICIENTS["GSAM"])
        assert_close(direction, expected, torch.float32)
    else:
        arithmetic.restore()
    assert equality.same_bits(w, parameters)
    assert equality.same_bits(climbed, places)  # which may belong to another tensor by now


def test_weights_that_a_pass_has_reshaped_are_refused(device: torch.device) -> None:
    weights = [torch.randn(3, 4, device=device) for _ in range(2)]
    parameters = [weight.clone() for weight in weights]
    arithmetic = Fused(task(parameters))
    arithmetic.climb([torch.ones_like(weight) for weight in weights], 0.3, None)
    parameters[0].data = torch.zeros(2, device=device)
    with pytest.raises(RuntimeError, match="closure must not replace the data of parameters"):
        arithmetic.restore()
    assert not torch.equal(parameters[1], weights[1])
    arithmetic.restore()  # as an objective does
    assert torch.equal(parameters[1], weights[1])
    assert parameters[0].tolist() == [0.0, 0.0]


def test_an_interrupt_while_weights_are_found(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(3, 4, device=device)
    parameters = [weight.clone()]
    arithmetic = Fused(task(parameters))
    arithmetic.climb([torch.ones_like(weight)], 0.3, None)
    old, parameters[0].data = parameters[0].detach(), parameters[0].data.clone()
    climbed = old.clone()

    def struck(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fused.TensorGroup, "find", struck)
        with pytest.raises(KeyboardInterrupt):
            arithmetic.restore()
    arithmetic.restore()
    assert torch.equal(parameters[0], weight)
    assert torch.equal(old, climbed)


def test_new_parameters_in_the_same_memory_are_adopted(device: torch.device) -> None:
    weight = torch.randn(3, 4, device=device)
    old, new = weight.clone(), torch.empty(0, device=device)
    new.data = old.data
    arithmetic = Fused(task([old]))
    assert arithmetic.adopts(task([new]))
    old.data = torch.zeros(3, 4, device=device)
    arithmetic.climb([torch.ones_like(weight)], 0.3, None)
    arithmetic.restore()
    assert torch.equal(new, weight)
    assert not old.any()


@BOTH
def test_weights_are_restored_after_an_interrupted_climb(
    cls: type[Arithmetic], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, g = (tensors(torch.float32, device, seed) for seed in (1, 2))
    parameters = [t.clone() for t in w]
    arithmetic = cls(task(parameters))
    arithmetic.restore()  # before there is a copy, it does nothing

    def failing(*arguments: object) -> None:
        parameters[0].add_(1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(arithmetic, "_move" if cls is Fused else "_point", failing)
    with pytest.raises(KeyboardInterrupt):
        arithmetic.climb(g, 0.3, None)
    assert not equality.same_bits(w, parameters)
    arithmetic.restore()
    assert equality.same_bits(w, parameters)


@BOTH
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_non_finite_gradient_of_a_fixed_parameter_does_not_stop_the_climb(
    cls: type[Arithmetic], device: torch.device
) -> None:
    w, g, g_p = (tensors(torch.float32, device, seed) for seed in (1, 2, 3))
    arguments = (KINDS["partly still"], COEFFICIENTS["SAM"])
    expected = step(cls, w, g, g_p, *arguments)[0]
    g[3][0, 0, 0, 0] = float("inf")
    assert equality.same_bits(step(cls, w, g, g_p, *arguments)[0], expected)


def test_the_default_dtype_does_not_matter(device: torch.device) -> None:
    w, g, g_p = (tensors(torch.float32, device, seed) for seed in (1, 2, 3))
    arguments = (w, g, g_p, KINDS["plain"], COEFFICIENTS["GSAM"])
    expected = step(Fused, *arguments)[1]
    torch.set_default_dtype(torch.float64)
    assert equality.same_bits(step(Fused, *arguments)[1], expected)


@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.SCALED])
def test_the_climb_in_half_precision_is_rounded_once(kind: Kind, device: torch.device) -> None:
    w, g = torch.randn(2, 5000, device=device).bfloat16()
    scaling = w.double().abs() + 0.01 if kind == Kind.SCALED else torch.ones_like(w).double()
    delta = 0.3 * scaling**2 * g.double() / (scaling * g.double()).norm()
    parameter = w.clone()
    Flat(task([parameter], [kind], eta=0.01)).climb([g], 0.3, None)
    nearest = (w.double() + delta).to(torch.bfloat16)
    assert float((parameter != nearest).double().mean()) < 1e-3


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, in the interpreter
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("poison", [float("inf"), float("nan"), 0.0])
def test_no_climb_along_a_zero_or_non_finite_vector(poison: float, device: torch.device) -> None:
    w, g, g_p = (tensors(torch.float32, device, seed) for seed in (1, 2, 3))
    g[2][3, 4] = poison
    g = [t * 0.0 for t in g] if poison == 0.0 else g
    arguments = (w, g, g_p, KINDS["scaled"], COEFFICIENTS["SAM"])
    moved, direction, _ = step(Fused, *arguments)
    assert equality.same_bits(moved, w)
    assert_close(direction, step(Flat, *arguments)[1], torch.float32)
    assert bool(direction[2].isfinite().all()) == (poison == 0.0)


def test_mixed_dtypes(device: torch.device) -> None:
    mixed = [
        [*tensors(torch.float32, device, seed)[:3], *tensors(torch.bfloat16, device, seed)[3:]]
        for seed in (1, 2, 3)
    ]
    arguments = (*mixed, KINDS["plain"], COEFFICIENTS["GSAM"])
    moved, direction, products = step(Fused, *arguments)
    expected_point, expected, expected_products = step(Flat, *arguments)
    for ours, theirs in ((moved, expected_point), (direction, expected)):
        assert_close(ours[:3], theirs[:3], torch.float32)
        assert_close(ours[3:], theirs[3:], torch.bfloat16)
    torch.testing.assert_close(products, expected_products, rtol=2e-6, atol=1e-3)


@pytest.mark.gpu
def test_rounded_once_on_the_device() -> None:
    """Needs a GPU: the interpreter truncates bfloat16, where a GPU rounds to nearest."""
    device = torch.device("cuda")
    w, g, g_p = (tensors(torch.bfloat16, device, seed) for seed in (1, 2, 3))
    direction = step(Fused, w, g, g_p, KINDS["plain"], Coefficients(-0.40371, 1.40513))[1]
    for d, x, y in zip(direction, g, g_p, strict=True):
        exact = -0.40371 * x.double() + 1.40513 * y.double()
        nearest = exact.to(torch.bfloat16)
        assert d is not None
        assert float((d != nearest).double().mean().nan_to_num()) < 1e-3


def chosen(parameters: list[Tensor], last: Arithmetic | None = None) -> Arithmetic:
    return choose(task(parameters), last=last)


@pytest.mark.gpu
def test_choice() -> None:
    cuda = [torch.ones(3, device="cuda"), torch.ones(2, 2, device="cuda").bfloat16()]
    assert isinstance(chosen(cuda), Fused)
    assert isinstance(chosen([cuda[0], torch.ones(2)]), Flat)
    assert isinstance(chosen([cuda[0], cuda[0].double()]), Flat)
    assert isinstance(chosen([cuda[0], torch.ones(4, 4, device="cuda")[:, ::2]]), Flat)


@pytest.mark.gpu
def test_the_last_arithmetic_is_reused_if_compatible() -> None:
    cuda = [torch.ones(3, device="cuda"), torch.ones(2, 2, device="cuda")]
    last = chosen(cuda)
    assert chosen(cuda, last) is last
    for other in (
        [cuda[0], cuda[1].clone()],
        [cuda[0], cuda[1].view(-1)[:3]],
        [cuda[0], cuda[1].view(torch.int32).view(torch.bfloat16)],
        cuda[:1],
    ):
        assert chosen(other, last) is not last
    assert choose(task(cuda, [Kind.FIXED, Kind.PLAIN]), last=last) is not last


def test_a_warning_if_kernels_cannot_be_compiled(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoCompiler:
        def __getitem__(self, _: object) -> object:
            raise RuntimeError("Failed to find C compiler")

    device = torch.ones(1, device=device).device  # with its index, like a parameter's device
    fused.can_launch.cache_clear()
    assert fused.can_launch(device)
    fused.can_launch.cache_clear()
    monkeypatch.setattr(fused, "restore_kernel", NoCompiler())
    message = "Triton must be able to compile kernels for .*, got RuntimeError: Failed to find C co"
    with pytest.warns(UserWarning, match=message):
        assert not fused.can_launch(device)
    if device.type == "cuda":
        assert isinstance(chosen([torch.ones(3, device=device)]), Flat)
    fused.can_launch.cache_clear()


def test_the_cpu_uses_the_plain_arithmetic() -> None:
    assert isinstance(chosen([torch.ones(3)]), Flat)


@BOTH
def test_settings_may_change_from_step_to_step(cls: type[Arithmetic], device: torch.device) -> None:
    """Also from integers, on which Triton would specialise a kernel, to other numbers."""
    w, g, g_p = (tensors(torch.float32, device, seed) for seed in (1, 2, 3))
    parameters = [t.clone() for t in w]
    kept = cls(task(parameters, eps=1))
    for rho, scale, coefficients in (
        (1.0, None, Coefficients(1, 1, 1, 1)),
        (0.3, torch.tensor(8.0, device=device), Coefficients(-0.4, 1, 0, 0.4)),
        (0.0, None, Coefficients(0.5, 2, 0.25, 16)),
    ):
        new = cls(task(parameters, eps=1))
        results = []
        for arithmetic in (kept, new):
            arithmetic.climb([t.clone() for t in g], rho, scale)
            moved = [t.clone() for t in parameters]
            results.append((moved, arithmetic.combination([t.clone() for t in g_p], coefficients)))
        (moved, (direction, _)), (expected_moved, (expected, _)) = results
        assert equality.same_bits(moved, expected_moved)
        assert equality.same_bits(direction, expected)


def test_kernels_compile_for_a_gpu() -> None:
    """Also without a GPU: the interpreter accepts code that the compiler does not."""
    script = Path(__file__).with_name("build_kernels.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["climb", "combine", "copy", "products", "restore"]
