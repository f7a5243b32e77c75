"""Numbers that a user passes, checked once and by one rule."""

import math
from numbers import Real


def number(
    name: str,
    value: object,
    *,
    at_least: float = 0.0,
    above: float | None = None,
    below: float = math.inf,
    remedy: str,
) -> float:
    """`value` as a float, if it is a finite number within its bounds.

    Args:
        name: What the caller's argument is called.
        value: What the caller passed.
        at_least: The smallest value allowed. Not looked at where `above` is given.
        above: A bound that the value must exceed.
        below: A bound that the value must stay under.
        remedy: What to do instead, as a sentence; it ends the error's message.

    Raises:
        TypeError: `value` is not a real number.
        ValueError: `value` is NaN, infinite or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}. {remedy}")
    lower = f"at least {at_least:g}" if above is None else f"above {above:g}"
    upper = "finite" if below == math.inf else f"below {below:g}"
    try:
        result = float(value)
    except OverflowError:  # an integer beyond all floats
        result = math.inf
    is_large_enough = result >= at_least if above is None else result > above
    if not (is_large_enough and result < below):  # NaN fails both comparisons
        raise ValueError(f"{name} must be {lower} and {upper}, got {value}. {remedy}")
    return result
