"""The page about all recipes, `docs/recipes.md`, from the recipes themselves."""

from types import ModuleType

from surrogap.experiments.recipes import imagenet, small, transfer
from surrogap.experiments.recipes.recipe import Recipe
from surrogap.experiments.tables import Table

_HEAD = """# Recipes

`surrogap recipes NAME` shows one in full, with all its settings and where it departs from its
source; `surrogap train --recipe NAME` trains it, and takes other flags for what shall be otherwise.
This page is the output of `surrogap recipes --markdown`.
"""

_COLUMNS = ("recipe", "network", "radius", "alpha", "expected")


def page() -> str:
    """The page, in Markdown.

    >>> print(page()[:9])
    # Recipes
    """
    return "\n".join([_HEAD, *map(_section, (small, imagenet, transfer))])


def _section(module: ModuleType) -> str:
    """What the module's docstring says, and a table of its recipes."""
    first, _, rest = (module.__doc__ or "").partition("\n\n")
    table = Table(_COLUMNS, [_row(recipe) for recipe in module.recipes()]).markdown()
    return f"## {first.partition(':')[0].rstrip('.')}\n\n{first}\n\n{rest.strip()}\n\n{table}\n"


def _row(recipe: Recipe) -> tuple[str, ...]:
    objective = recipe.config.objective
    radius = "" if objective.rho is None else f"{objective.rho:g}"
    if objective.rho_min is not None:
        radius += f" to {objective.rho_min:g}"
    alpha = "" if objective.alpha is None else f"{objective.alpha:g}"
    return (f"`{recipe.name}`", f"`{recipe.config.model.name}`", radius, alpha, recipe.expected)
