"""Checks of arguments and settings, and suggestions for misspelled names.

Every package may import this module. It does not import torch: the command line starts without it.
"""

import difflib
import math
from collections.abc import Iterable
from numbers import Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from surrogap.errors import InvalidTypeError, InvalidValueError

# The most names that an error message lists.
_MAX_LISTED = 24


def number(
    name: str,
    value: object,
    *,
    at_least: float = 0.0,
    above: float | None = None,
    at_most: float | None = None,
    below: float = math.inf,
    remedy: str,
) -> float:
    """Return `value` as a float if it is a finite number within its bounds.

    Args:
        name: The name of the argument, for the error message.
        value: The argument.
        at_least: The smallest value allowed. Ignored if `above` is given.
        above: An exclusive lower bound.
        at_most: The largest value allowed.
        below: An exclusive upper bound. Ignored if `at_most` is given.
        remedy: The last sentence of the error message: what to do instead.

    Raises:
        TypeError: `value` is not a real number.
        ValueError: `value` is NaN, infinite or out of bounds.

    >>> number("rho", 1, remedy="Pass a non-negative number, such as 0.1.")
    1.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidTypeError(f"{name} must be a number, got {type(value).__name__}. {remedy}")
    try:
        result = float(value)
    except OverflowError:  # an integer larger than any float
        result = math.inf
    is_large_enough = result >= at_least if above is None else result > above
    is_small_enough = result < below if at_most is None else result <= at_most
    if not (is_large_enough and is_small_enough):  # NaN fails every comparison
        lower = f"at least {at_least:g}" if above is None else f"above {above:g}"
        upper = "finite" if below == math.inf else f"below {below:g}"
        upper = upper if at_most is None else f"at most {at_most:g}"
        raise InvalidValueError(f"{name} must be {lower} and {upper}, got {value}. {remedy}")
    return result


def integer(
    name: str, value: object, *, at_least: int, at_most: int | None = None, remedy: str
) -> int:
    """Return `value` if it is an integer within its bounds.

    Raises:
        TypeError: `value` is not an integer.
        ValueError: `value` is out of bounds.

    >>> integer("batch_size", 128, at_least=1, remedy="Pass a number of images.")
    128
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(f"{name} must be an integer, got {value!r}. {remedy}")
    if value < at_least:
        raise InvalidValueError(f"{name} must be at least {at_least}, got {value}. {remedy}")
    if at_most is not None and value > at_most:
        raise InvalidValueError(f"{name} must be at most {at_most}, got {value}. {remedy}")
    return value


def check_seed(seed: int) -> None:
    """Check that torch accepts a seed.

    Raises:
        TypeError: `seed` is not an integer.
        ValueError: `seed` is negative, or 2**63 or more.

    >>> check_seed(0)
    """
    integer("seed", seed, at_least=0, remedy="Pass one such as 0.")
    if seed >= 2**63:
        raise InvalidValueError(
            f"seed must be below 2**63, got {seed}. Pass a smaller one, such as 0."
        )


def one_of(name: str, value: object, known: Iterable[str], *, remedy: str = "") -> str:
    """Return `value` if it is one of the known names.

    Raises:
        ValueError: `value` is not a known name. The message lists the known names, or their number
            if there are too many, and suggests the closest.

    >>> one_of("decay", "cosine", ["linear", "cosine"])
    'cosine'
    """
    names = list(known)
    if isinstance(value, str) and value in names:
        return value
    guess = closest(str(value), names)
    listed = ", ".join(names) if len(names) <= _MAX_LISTED else f"{len(names)} names"
    hint = f"The closest is {guess!r}." if guess else "Pass one of them."
    raise InvalidValueError(
        f"{name} must be one of {listed}, got {value!r}. {hint} {remedy}".rstrip()
    )


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to `name`, or None if none is similar.

    >>> closest("rho_mni", ["rho", "rho_min", "lam"])
    'rho_min'
    """
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.5)), None)


def check_type(name: str, value: object, hint: Any) -> None:
    """Check the value of a dataclass field against the field's annotation.

    Raises:
        TypeError: `value` has another type.
        ValueError: `value` is not one of the names that a `Literal` allows.

    >>> check_type("rho_min", None, float | None)
    """
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and type(None) in options:
        return
    kind = next(option for option in options if option is not type(None))
    if get_origin(kind) is Literal:
        one_of(name, value, get_args(kind))
    elif get_origin(kind) is tuple:
        _check_tuple(name, value, get_args(kind))
    elif not _is(value, kind):
        remedy = f"Pass {_EXAMPLES[kind]}" + (", or None." if len(options) > 1 else ".")
        raise InvalidTypeError(f"{name} must be {_NAMES[kind]}, got {value!r}. {remedy}")


_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_EXAMPLES = {bool: "one of the two", int: "one, such as 1", float: "one, such as 0.1", str: "one"}


def _is(value: object, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind)


def _check_tuple(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, tuple) or len(value) != len(kinds):
        raise InvalidTypeError(
            f"{name} must be {len(kinds)} numbers, got {value!r}. Pass exactly {len(kinds)}."
        )
    for item, kind in zip(value, kinds, strict=True):
        check_type(name, item, kind)
