"""Vectors of many tensors: exact copies, accurate sums, one rounding."""

import pytest
import torch
from torch import Tensor

from surrogap.core.vectors import Layout, combine_, dot, squared_norm, total
from tests import equality

HALVES = [torch.bfloat16, torch.float16]


def pieces(dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Tensor]:
    """Tensors of all shapes: zero-dimensional, empty, odd sizes, channels last, transposed."""
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
    vector = Layout(tensors).read(tensors)
    others = [torch.zeros_like(t) for t in tensors]
    vector.write_to_(others)
    assert equality.same_bits(tensors, others)
    assert equality.same_bits(tensors, vector.views())
    for tensor, view in zip(tensors, vector.views(), strict=True):
        assert view.shape == tensor.shape
        assert view.stride() == torch.empty_like(tensor).stride()
        assert view.data_ptr() != tensor.data_ptr() or tensor.numel() == 0


@pytest.mark.parametrize("index", range(7))
def test_a_single_tensor_is_copied_too(index: int) -> None:
    tensors = pieces(torch.float32)[index : index + 1]
    vector, before = Layout(tensors).read(tensors), tensors[0].clone()
    tensors[0].zero_()
    assert equality.same_bits([before], vector.views())


def test_tensors_in_another_memory_format_are_read_right() -> None:
    tensors = pieces(torch.float32)
    vector = Layout(tensors).read([t.contiguous() for t in tensors])
    assert equality.same_bits(tensors, vector.views())


def test_none_reads_as_zero() -> None:
    tensors = pieces(torch.float32)
    views = Layout(tensors).read([None, *tensors[1:-1], None]).views()
    assert float(views[0]) == 0
    assert float(views[-1].norm()) == 0
    assert equality.same_bits(tensors[1:-1], views[1:-1])


def test_groups_are_one_per_device_dtype_and_label() -> None:
    tensors = [torch.ones(3, dtype=dtype) for dtype in (torch.float32, torch.float64) * 2]
    assert Layout(tensors).members == [[0, 2], [1, 3]]
    layout = Layout(tensors, ["x", "x", "y", "x"])
    assert layout.members == [[0], [1, 3], [2]]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_dot(dtype: torch.dtype, device: torch.device) -> None:
    x, y = pieces(dtype, device), pieces(dtype, device)
    layout = Layout(x)
    actual = total(dot(layout.read(x), layout.read(y))).cpu()
    expected = flat(x).double().cpu() @ flat(y).double().cpu()
    scale = float(flat(x).double().norm() * flat(y).double().norm())
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert actual.dtype == wide
    assert abs(float(actual) - float(expected)) < 4 * torch.finfo(wide).eps * scale


@pytest.mark.parametrize("dtype", HALVES)
def test_dot_over_many_elements_in_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    """The relative error is 1e-5 for 10^8 elements of nonzero mean, where sums lose digits."""
    size = 10**8
    tensor = torch.empty(size, dtype=dtype, device=device)
    tensor.normal_(0.02, 0.01, generator=torch.Generator(device).manual_seed(0))
    expected = sum(float(part.double() @ part.double()) for part in tensor.split(10**6))
    vector = Layout([tensor]).read([tensor])
    assert float(total(dot(vector, vector))) == pytest.approx(expected, rel=1e-6)
    assert float(squared_norm([tensor], tensor)) == pytest.approx(expected, rel=1e-6)


def test_dot_over_many_elements_in_single_precision(device: torch.device) -> None:
    size = 3 * 10**7
    tensor = torch.empty(size, device=device)
    tensor.normal_(0.02, 0.01, generator=torch.Generator(device).manual_seed(0))
    expected = sum(float(part.double() @ part.double()) for part in tensor.split(10**6))
    vector = Layout([tensor]).read([tensor])
    assert float(total(dot(vector, vector))) == pytest.approx(expected, rel=3e-7)
    assert float(squared_norm([tensor], tensor)) == pytest.approx(expected, rel=3e-7)


def test_the_norm_of_no_gradients(device: torch.device) -> None:
    like = torch.ones(3, dtype=torch.bfloat16, device=device)
    for gradients in ([], [None], [like[:0]]):
        result = squared_norm(gradients, like)
        assert result.dtype == squared_norm([like], like).dtype  # processes add up their sums
        assert result.device == like.device
        assert float(result) == 0.0
    assert float(squared_norm([None, like, like[:0]], like)) == pytest.approx(3.0)


@pytest.mark.parametrize("dtype", HALVES)
def test_combination_is_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    """Within half a unit of the float32 value. Rounded intermediate products would exceed it."""
    x, y = pieces(dtype, device), pieces(dtype, device)
    a, b = torch.tensor(-0.40371), torch.tensor(1.40513)
    terms = float(a) * flat(x).double(), float(b) * flat(y).double()
    exact = terms[0] + terms[1]
    layout = Layout(x)
    result = combine_(a, layout.read(x), b, layout.read(y))
    error = (flat(result.views()).double() - exact).abs()
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
    result = combine_(a, layout.read(x), b, layout.read(y))
    assert equality.relative_error(flat(result.views()), expected) < torch.finfo(dtype).eps
