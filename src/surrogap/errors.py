"""Errors that a user can correct, marked by their type.

Each is also the built-in error that its `Raises` section names, so `except ValueError` catches it.
The command line prints the message of a `UserError` and exits with 2. Any other error is a bug, and
keeps its traceback. Every package may import this module, which imports nothing.
"""


class UserError(Exception):
    """Base class of errors whose message says what the user can do about them."""


class InvalidValueError(UserError, ValueError):
    """Raised where an argument, a file or a setting has a value that cannot be used."""


class InvalidTypeError(UserError, TypeError):
    """Raised where an argument has the wrong type."""


class MissingPackageError(UserError, ImportError):
    """Raised where an optional package is not installed."""


class UnsupportedError(UserError, RuntimeError):
    """Raised where a model, a device or a server does not do what a function needs."""
