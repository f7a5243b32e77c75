"""One long vector made of many tensors: exact copies, precise sums, one rounding."""

import pytest
import torch
from torch import Tensor

from surrogap.core.vectors import Layout, Vector, combine_, dot, total
from tests import zoo

CPU = torch.device("cpu")
HALVES = [torch.bfloat16, torch.float16]


def pieces(dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Tensor]:
    """Shapes of all kinds: no dimension, none at all, odd sizes, channels last, a transpose."""
    tensors = [
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(7),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 5).t(),
        torch.randn(6, 10)[:, ::3],
        torch.randn(70_001),
    ]
    return [t.to(device, dtype) for t in tensors]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64, torch.int64])
def test_copies_are_exact(dtype: torch.dtype, device: torch.device) -> None:
    tensors = pieces(dtype, device)
    vector = Vector(Layout(tensors)).read_(tensors)
    others = [torch.zeros_like(t) for t in tensors]
    vector.write_to_(others)
    assert zoo.same_bits(tensors, others)
    assert zoo.same_bits(tensors, vector.views)


def test_none_reads_as_zero() -> None:
    tensors = pieces(torch.float32)
    vector = Vector(Layout(tensors)).read_(tensors)
    vector.read_([None, *tensors[1:-1], None])
    assert float(vector.views[0]) == 0
    assert float(vector.views[-1].norm()) == 0
    assert zoo.same_bits(tensors[1:-1], vector.views[1:-1])


def test_buffers_are_one_per_device_dtype_and_kind() -> None:
    tensors = [torch.ones(3, dtype=dtype) for dtype in (torch.float32, torch.float64) * 2]
    assert len(Layout(tensors).groups) == 2
    layout = Layout(tensors, ["x", "x", "y", "x"])
    assert [(g.dtype, g.kind) for g in layout.groups] == [
        (torch.float32, "x"),
        (torch.float64, "x"),
        (torch.float32, "y"),
    ]
    assert layout.members == [[0], [1, 3], [2]]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_dot(dtype: torch.dtype, device: torch.device) -> None:
    x, y = pieces(dtype, device), pieces(dtype, device)
    layout = Layout(x)
    actual = total(dot(Vector(layout).read_(x), Vector(layout).read_(y)), CPU)
    expected = flat(x).double().cpu() @ flat(y).double().cpu()
    scale = float(flat(x).double().norm() * flat(y).double().norm())
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert actual.dtype == wide
    assert abs(float(actual) - float(expected)) < 4 * torch.finfo(wide).eps * scale


@pytest.mark.parametrize("dtype", HALVES)
def test_dot_over_many_elements_in_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    """10^8 elements with a mean, as the sums that lose digits have: right to 1e-5 relative."""
    size = 10**8
    tensor = torch.empty(size, dtype=dtype, device=device)
    tensor.normal_(0.02, 0.01, generator=torch.Generator(device).manual_seed(0))
    expected = sum(float(part.double() @ part.double()) for part in tensor.split(10**6))
    vector = Vector(Layout([tensor])).read_([tensor])
    assert float(total(dot(vector, vector), CPU)) == pytest.approx(expected, rel=1e-6)


def test_dot_over_many_elements_in_single_precision(device: torch.device) -> None:
    size = 3 * 10**7
    tensor = torch.empty(size, device=device)
    tensor.normal_(0.02, 0.01, generator=torch.Generator(device).manual_seed(0))
    expected = sum(float(part.double() @ part.double()) for part in tensor.split(10**6))
    vector = Vector(Layout([tensor])).read_([tensor])
    assert float(total(dot(vector, vector), CPU)) == pytest.approx(expected, rel=3e-7)


@pytest.mark.parametrize("dtype", HALVES)
def test_combination_is_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    """Within half a unit of the float32 value; products rounded on the way would exceed it."""
    x, y = pieces(dtype, device), pieces(dtype, device)
    a, b = torch.tensor(-0.40371), torch.tensor(1.40513)
    terms = float(a) * flat(x).double(), float(b) * flat(y).double()
    exact = terms[0] + terms[1]
    layout = Layout(x)
    result = combine_(a, Vector(layout).read_(x), b, Vector(layout).read_(y))
    error = (flat(result.views).double() - exact).abs()
    _, exponent = torch.frexp(exact)
    unit = torch.finfo(dtype).eps * 0.5 * torch.exp2(exponent.double())
    unit = unit.clamp(min=torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    single = torch.finfo(torch.float32).eps * (terms[0].abs() + terms[1].abs())
    assert bool((error <= 0.5 * unit + single).all())
    products = (a * flat(x)).to(dtype), (b * flat(y)).to(dtype)
    error_of_two = ((products[0] + products[1]).double() - exact).abs()
    assert not bool((error_of_two <= 0.5 * unit + single).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_combination(dtype: torch.dtype, device: torch.device) -> None:
    x, y = pieces(dtype, device), pieces(dtype, device)
    a, b = torch.tensor(-0.4, dtype=torch.float64), torch.tensor(1.4, dtype=torch.float64)
    expected = -0.4 * flat(x).double() + 1.4 * flat(y).double()
    layout = Layout(x)
    result = combine_(a, Vector(layout).read_(x), b, Vector(layout).read_(y))
    assert zoo.relative_error(flat(result.views), expected) < torch.finfo(dtype).eps
