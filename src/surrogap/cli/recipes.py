"""`surrogap recipes`: list the recipes, or show one.

surrogap recipes
surrogap recipes vit-b32-gsam
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional

from surrogap.checks import one_of
from surrogap.cli.options import options
from surrogap.experiments.recipes import RECIPES, Recipe
from surrogap.experiments.recipes.page import page
from surrogap.experiments.text_table import Table, filled
from surrogap.training.flags import optional


@dataclass(frozen=True)
class Recipes:
    """List the recipes, or show one."""

    name: Annotated[Positional[str | None], optional("[NAME]")] = None
    """The recipe to show with all settings. By default, list all recipes."""

    markdown: bool = False
    """Print the page of all recipes, docs/recipes.md, instead of the list."""


def main(arguments: Sequence[str]) -> int:
    """List the recipes or show one, and return the exit status.

    Raises:
        ValueError: The arguments are not valid, or the recipe does not exist.
    """
    chosen = options(Recipes, "recipes", arguments)
    if chosen.markdown:
        print(page(), end="")
        return 0
    if chosen.name is None:
        recipe_table().print()
        print("surrogap recipes NAME shows a recipe with all settings.")
        return 0
    name = one_of("recipe", chosen.name, RECIPES, remedy="surrogap recipes lists them.")
    print(description(RECIPES[name]))
    return 0


def recipe_table() -> Table:
    """Return a table of all recipes that fits into 80 columns."""
    rows = []
    for name, recipe in RECIPES.items():
        config = recipe.config
        rows.append((name, config.model.name, config.data.name, config.objective.name))
    return Table(("recipe", "model", "data", "objective"), rows)


def description(recipe: Recipe) -> str:
    """Return the description of a recipe, with its configuration."""
    paragraphs = {
        "Reproduces": recipe.reproduces + ".",
        "Command": recipe.command,
        "Expected": recipe.expected,
        "Notes": recipe.notes,
    }
    found = {title: f"{title}: {text}" for title, text in paragraphs.items() if text}
    lines = [  # users copy the command
        text if title == "Command" else filled(text, indent="  ") for title, text in found.items()
    ]
    return "\n".join([recipe.name, "", *lines, "", recipe.config.to_json().rstrip()])
