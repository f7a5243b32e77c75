"""Checks of arguments: each error message, and the values at the bounds."""

import math
from typing import Any, Literal

import pytest

from surrogap.checks import check_seed, check_type, closest, integer, number, one_of

REMEDY = "Pass 1."


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        ("1", {}, "x must be a number, got str. Pass 1."),
        (True, {}, "x must be a number, got bool. Pass 1."),
        (-1, {}, "x must be at least 0 and finite, got -1. Pass 1."),
        (math.nan, {}, "x must be at least 0 and finite, got nan. Pass 1."),
        (math.inf, {}, "x must be at least 0 and finite, got inf. Pass 1."),
        (0, {"above": 0}, "x must be above 0 and finite, got 0. Pass 1."),
        (1, {"below": 1}, "x must be at least 0 and below 1, got 1. Pass 1."),
        (1.5, {"at_most": 1}, "x must be at least 0 and at most 1, got 1.5. Pass 1."),
        (math.nan, {"at_most": 1}, "x must be at least 0 and at most 1, got nan. Pass 1."),
    ],
)
def test_not_a_valid_number(value: object, bounds: dict[str, float], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        number("x", value, **bounds, remedy=REMEDY)
    assert str(raised.value) == message


def test_an_integer_larger_than_any_float_is_not_finite() -> None:
    with pytest.raises(ValueError, match="x must be at least 0 and finite, got 1000"):
        number("x", 10**400, remedy=REMEDY)


def test_bounds_are_inclusive_or_exclusive() -> None:
    assert number("x", 0, remedy=REMEDY) == 0.0
    assert number("x", 1, at_most=1, remedy=REMEDY) == 1.0
    assert integer("x", 5, at_least=5, at_most=5, remedy=REMEDY) == 5


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.0, "x must be an integer, got 1.0. Pass 1."),
        (True, "x must be an integer, got True. Pass 1."),
        (0, "x must be at least 1, got 0. Pass 1."),
        (6, "x must be at most 5, got 6. Pass 1."),
    ],
)
def test_not_a_valid_integer(value: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        integer("x", value, at_least=1, at_most=5, remedy=REMEDY)
    assert str(raised.value) == message


def test_seeds() -> None:
    check_seed(2**63 - 1)
    with pytest.raises(ValueError, match=r"seed must be below 2\*\*63, got 9223372036854775808"):
        check_seed(2**63)


@pytest.mark.parametrize(
    ("value", "known", "message"),
    [
        ("tranh", ["train", "test"], "split must be one of train, test, got 'tranh'. The closest"),
        ("q", ["train", "test"], "split must be one of train, test, got 'q'. Pass one of them."),
        (3, ["train", "test"], "split must be one of train, test, got 3. Pass one of them."),
        ("a", [f"{n}" for n in range(30)], "split must be one of 30 names, got 'a'. Pass one of"),
    ],
)
def test_unknown_names(value: object, known: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_of("split", value, known)


def test_no_name_is_close() -> None:
    assert closest("qqqq", ["train", "test"]) is None


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (1, str, "x must be a string, got 1. Pass one."),
        (1, bool, "x must be true or false, got 1. Pass one of the two."),
        (None, int, "x must be an integer, got None. Pass one, such as 1."),
        ("1", float | None, "x must be a number, got '1'. Pass one, such as 0.1, or None."),
        ("c", Literal["a", "b"], "x must be one of a, b, got 'c'. Pass one of them."),
        ((1.0,), tuple[float, float], r"x must be 2 numbers, got \(1.0,\). Pass exactly 2."),
        ((1.0, "2"), tuple[float, float], "x must be a number, got '2'."),
    ],
)
def test_wrong_types(value: object, hint: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        check_type("x", value, hint)
