"""`surrogap models`: list the models that `--model` takes.

surrogap models
surrogap models convnext
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional

from surrogap.checks import closest
from surrogap.cli.options import options
from surrogap.errors import InvalidValueError
from surrogap.training.flags import optional


@dataclass(frozen=True)
class Models:
    """List the models that --model takes."""

    name: Annotated[Positional[str | None], optional("[NAME]")] = None
    """A substring to search for in the names of all models, including timm's. By default, list the
    models of surrogap: those of the paper, and small ones."""


def main(arguments: Sequence[str]) -> int:
    """List models, and return the exit status.

    Raises:
        ImportError: timm is not installed.
        ValueError: The arguments are not valid, or no name contains the substring.
    """
    chosen = options(Models, "models", arguments)
    from surrogap.models import names

    if chosen.name is None:
        print(*names(), sep="\n")
        print("All models of timm can be used too: surrogap models NAME searches them.")
        return 0
    from timm import list_models

    known = [*names(), *list_models()]
    found = [name for name in known if chosen.name in name]
    if not found:
        guess = closest(chosen.name, known)
        hint = f"The closest name is {guess!r}." if guess else "Pass another substring."
        raise InvalidValueError(f"name must be part of a model's name, got {chosen.name!r}. {hint}")
    print(*found, sep="\n")
    return 0
