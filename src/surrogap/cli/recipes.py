"""`surrogap recipes`: list the recipes, or show one.

surrogap recipes
surrogap recipes vit-b32-gsam
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional

from surrogap.cli.options import options
from surrogap.experiments.recipes import RECIPES, Recipe
from surrogap.experiments.recipes.page import page
from surrogap.experiments.text_table import Table
from surrogap.training.arguments import one_of, optional


@dataclass(frozen=True)
class Recipes:
    """List the recipes, or show one."""

    name: Annotated[Positional[str | None], optional("NAME")] = None
    """The recipe to show in full. By default all are listed, a line each."""

    markdown: bool = False
    """Whether to print the page about all recipes, docs/recipes.md, in place of the list."""


def main(arguments: Sequence[str]) -> int:
    """Lists the recipes or shows one, and returns the exit status.

    Raises:
        ValueError: The arguments do not fit, or there is no such recipe.
    """
    chosen = options(Recipes, "recipes", arguments)
    if chosen.markdown:
        print(page(), end="")
        return 0
    if chosen.name is None:
        listed().print()
        print("surrogap recipes NAME shows a recipe in full.")
        return 0
    name = one_of("recipe", chosen.name, RECIPES, remedy="surrogap recipes lists them.")
    print(described(RECIPES[name]))
    return 0


def listed() -> Table:
    """A line for each recipe, which fits into 80 columns."""
    rows = []
    for name, recipe in RECIPES.items():
        config = recipe.config
        rows.append((name, config.model.name, config.data.name, config.objective.name))
    return Table(("recipe", "model", "data", "objective"), rows)


def described(recipe: Recipe) -> str:
    """All there is to know about a recipe."""
    parts = {
        "Reproduces": recipe.reproduces + ".",
        "Command": recipe.command,
        "Expected": recipe.expected,
        "Notes": recipe.notes,
    }
    lines = [
        textwrap.fill(f"{part}: {text}", width=100, subsequent_indent="  ")
        for part, text in parts.items()
        if text
    ]
    return "\n".join([recipe.name, "", *lines, "", recipe.config.to_json().rstrip()])
