"""Student's quantiles against published ones, and intervals against their definition."""

import math

import pytest

from surrogap.paper.intervals import Interval, interval, paired_difference, t_quantile

# From the tables of Student's distribution, two-sided: degrees of freedom, 95 % and 99 %.
QUANTILES = [
    (1, 12.706, 63.657),
    (2, 4.303, 9.925),
    (3, 3.182, 5.841),
    (4, 2.776, 4.604),
    (5, 2.571, 4.032),
    (9, 2.262, 3.250),
    (10, 2.228, 3.169),
    (29, 2.045, 2.756),
    (120, 1.980, 2.617),
]


@pytest.mark.parametrize(("degrees", "wide", "wider"), QUANTILES)
def test_quantiles_are_those_of_the_tables(degrees: int, wide: float, wider: float) -> None:
    assert t_quantile(degrees) == pytest.approx(wide, abs=6e-4)
    assert t_quantile(degrees, 0.99) == pytest.approx(wider, abs=6e-4)


def test_many_degrees_of_freedom_give_the_normal_quantile() -> None:
    assert t_quantile(5000) == pytest.approx(1.9604, abs=5e-4)


def test_an_interval_of_three_values() -> None:
    found = interval([3.0, 4.0, 5.0])
    assert found.mean == 4.0
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)


@pytest.mark.parametrize("values", [[2.0], [1.0, 3.0], [2.0, 2.0]])
def test_one_or_two_values_have_no_interval(values: list[float]) -> None:
    found = interval(values)
    assert found == Interval(2.0, None, len(values))
    assert not found.excludes_zero
    assert found.text() == "2.00"


def test_differences_are_paired_by_seed() -> None:
    # The seeds vary by far more than the methods differ.
    first, second = {0: 10.0, 1: 20.0, 2: 30.0}, {2: 29.0, 0: 9.1, 1: 18.9, 3: 0.0}
    found = paired_difference(first, second)
    assert found is not None
    assert found == interval([10.0 - 9.1, 20.0 - 18.9, 30.0 - 29.0])
    assert found.excludes_zero
    assert not paired_difference({0: 1.0, 1: -1.0}, {0: 0.0, 1: 0.0}).excludes_zero  # type: ignore[union-attr]
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
