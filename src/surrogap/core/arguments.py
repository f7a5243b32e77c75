"""Checks of numbers that a user passes."""

import math
from numbers import Real

from surrogap.errors import InvalidTypeError, InvalidValueError


def number(
    name: str,
    value: object,
    *,
    at_least: float = 0.0,
    above: float | None = None,
    below: float = math.inf,
    remedy: str,
) -> float:
    """Return `value` as a float if it is a finite number within its bounds.

    Args:
        name: The name of the argument, for the error message.
        value: The argument.
        at_least: The smallest value allowed. Ignored if `above` is given.
        above: An exclusive lower bound.
        below: An exclusive upper bound.
        remedy: The last sentence of the error message: what to do instead.

    Raises:
        TypeError: `value` is not a real number.
        ValueError: `value` is NaN, infinite or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidTypeError(f"{name} must be a number, got {type(value).__name__}. {remedy}")
    lower = f"at least {at_least:g}" if above is None else f"above {above:g}"
    upper = "finite" if below == math.inf else f"below {below:g}"
    try:
        result = float(value)
    except OverflowError:  # an integer larger than any float
        result = math.inf
    is_large_enough = result >= at_least if above is None else result > above
    if not (is_large_enough and result < below):  # NaN fails both comparisons
        raise InvalidValueError(f"{name} must be {lower} and {upper}, got {value}. {remedy}")
    return result
