"""`surrogap models`: list the models that `--model` takes.

surrogap models
surrogap models convnext
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional

from surrogap.cli.options import options
from surrogap.training.flags import optional


@dataclass(frozen=True)
class Models:
    """List the models that --model takes."""

    name: Annotated[Positional[str | None], optional("NAME")] = None
    """A part of the name, by which timm's models are searched too. By default ours are listed: the
    paper's, and small ones."""


def main(arguments: Sequence[str]) -> int:
    """Lists models, and returns the exit status.

    Raises:
        ImportError: timm is not installed.
        ValueError: The arguments do not fit.
    """
    chosen = options(Models, "models", arguments)
    from surrogap.models import names

    if chosen.name is None:
        print(*names(), sep="\n")
        print("All of timm's models work too: surrogap models NAME searches them.")
        return 0
    from timm import list_models

    print(*(name for name in [*names(), *list_models()] if chosen.name in name), sep="\n")
    return 0
