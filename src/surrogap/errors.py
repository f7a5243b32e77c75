"""Types of errors that a user can correct.

Each is a subclass of the built-in error that `Raises` sections name, so `except ValueError` catches
it. The command line prints the message of a `UserError` and exits with 2. Any other error is a bug,
and keeps its traceback. Every package may import this module, which imports nothing.
"""


class UserError(Exception):
    """Base class of errors whose message says how to correct them."""


class InvalidValueError(UserError, ValueError):
    """Raised if the value of an argument, a setting or a file is not valid."""


class InvalidTypeError(UserError, TypeError):
    """Raised if an argument has the wrong type."""


class MissingPackageError(UserError, ImportError):
    """Raised if an optional package is not installed."""


class UnsupportedError(UserError, RuntimeError):
    """Raised if a model, a device or a server does not support an operation."""
