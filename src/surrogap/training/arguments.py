"""What a configuration holds, checked once and by one rule. It needs no torch."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tyro.conf import arg

from surrogap.errors import InvalidTypeError, InvalidValueError


def optional(metavar: str) -> Any:
    """The help of a flag that may be left out, in place of {None}|INT and (default: None).

    The flag's text says what happens without it.
    """
    return arg(metavar=metavar, help_behavior_hint=_default)


def _default(value: str) -> str:
    return "" if value == "None" else f"(default: {value})"


OptionalInt = Annotated[int | None, optional("INT")]
OptionalFloat = Annotated[float | None, optional("FLOAT")]
OptionalStr = Annotated[str | None, optional("STR")]
OptionalPath = Annotated[Path | None, optional("PATH")]

# Names in a sentence.
_READABLE = 20


def one_of(name: str, value: object, known: Iterable[str], *, remedy: str = "") -> str:
    """`value`, if it is one of the known names.

    Raises:
        ValueError: It is none; the message has the known ones, or how many if they are too many to
            read, and the closest.

    >>> one_of("decay", "cosine", ["linear", "cosine"])
    'cosine'
    """
    names = list(known)
    if isinstance(value, str) and value in names:
        return value
    guess = closest(str(value), names)
    ending = f" {remedy}" if remedy else ""
    listed = ", ".join(names) if len(names) <= _READABLE else f"{len(names)} names"
    raise InvalidValueError(
        f"{name} must be one of {listed}, got {value!r}. "
        f"{f'The closest is {guess!r}.' if guess else 'Pass one of them.'}{ending}"
    )


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, if one is like it at all.

    >>> closest("rho_mni", ["rho", "rho_min", "lam"])
    'rho_min'
    """
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.5)), None)


def check_type(name: str, value: object, hint: Any) -> None:
    """Checks that `value` is what a field's annotation says.

    Raises:
        TypeError: It has another type.
        ValueError: It is none of the names that a `Literal` allows.

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
        remedy = f"Pass {_EXAMPLES[kind]}" + (", or none." if len(options) > 1 else ".")
        raise InvalidTypeError(f"{name} must be {_NAMES[kind]}, got {value!r}. {remedy}")


def at_least(name: str, value: int, bound: int, *, remedy: str) -> None:
    """Checks a whole number.

    Raises:
        ValueError: It is below the bound.

    >>> at_least("epochs", 20, 1, remedy="Pass how often to go through the images.")
    """
    if value < bound:
        raise InvalidValueError(f"{name} must be at least {bound}, got {value}. {remedy}")


def check_seed(seed: int) -> None:
    """Checks a seed, which torch must be able to hold.

    Raises:
        ValueError: It is out of bounds.

    >>> check_seed(0)
    """
    at_least("seed", seed, 0, remedy="Pass a whole number, such as 0.")
    if seed >= 2**63:
        raise InvalidValueError(
            f"seed must be below 2**63, got {seed}. Pass a smaller one, such as 0."
        )


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
_EXAMPLES = {bool: "one of the two", int: "one, such as 1", float: "one, such as 0.1", str: "one"}


def _is(value: object, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(
        value, bool
    )


def _check_tuple(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, tuple) or len(value) != len(kinds):
        raise InvalidTypeError(f"{name} must be {len(kinds)} numbers, got {value!r}. Pass as many.")
    for part, kind in zip(value, kinds, strict=True):
        check_type(name, part, kind)
