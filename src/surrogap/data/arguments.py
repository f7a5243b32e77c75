"""What a user passes, checked once and by one rule."""

import difflib
from collections.abc import Iterable

from surrogap.errors import InvalidTypeError, InvalidValueError


def whole(name: str, value: object, *, at_least: int, remedy: str) -> int:
    """`value`, if it is a whole number that is large enough.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is too small.

    >>> whole("batch_size", 128, at_least=1, remedy="Pass a count of images.")
    128
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(f"{name} must be a whole number, got {value!r}. {remedy}")
    if value < at_least:
        raise InvalidValueError(f"{name} must be at least {at_least}, got {value}. {remedy}")
    return value


def one_of(name: str, value: object, known: Iterable[str], *, remedy: str = "") -> str:
    """`value`, if it is one of the known names.

    Raises:
        ValueError: It is none; the message has the known ones and the closest.

    >>> one_of("split", "train", ["train", "test"])
    'train'
    """
    names = list(known)
    if isinstance(value, str) and value in names:
        return value
    closest = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    guess = f" The closest is {closest[0]!r}." if closest else ""
    ending = f" {remedy}" if remedy else ""
    raise InvalidValueError(
        f"{name} must be one of {', '.join(names)}, got {value!r}.{guess or ' Pass one of them.'}"
        f"{ending}"
    )
