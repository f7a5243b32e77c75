"""The page about all recipes, `docs/recipes.md`, from the recipes themselves."""

from types import ModuleType

from surrogap.experiments.recipes import imagenet, small, transfer
from surrogap.experiments.recipes.recipe import Recipe
from surrogap.experiments.text_table import Table

_HEAD = """# Recipes

`surrogap recipes NAME` shows one in full, with all its settings and where it departs from its
source; `surrogap train --recipe NAME` trains it, and other flags change its settings. With
`--objective`, settings that both objectives share stay. The learning rate of a recipe is one for a
gradient: for `entropy-sgd` under SGD it is divided by `gamma`, since that direction is
`gamma * (w - mu)`. This page is the output of `surrogap recipes --markdown`.
"""

_COLUMNS = ("recipe", "network", "radius", "alpha", "expected")


def page() -> str:
    """The page, in Markdown.

    >>> print(page()[:9])
    # Recipes
    """
    return "\n".join([_HEAD, *map(_section, (small, imagenet, transfer))])


def _section(module: ModuleType) -> str:
    """Return the module's docstring, and a table of its recipes."""
    first, _, rest = (module.__doc__ or "").partition("\n\n")
    table = Table(_COLUMNS, [_row(recipe) for recipe in module.recipes()]).markdown()
    return f"## {first.partition(':')[0].rstrip('.')}\n\n{first}\n\n{rest.strip()}\n\n{table}\n"


def _row(recipe: Recipe) -> tuple[str, ...]:
    settings = recipe.config.flat()
    radius, alpha = (f"{settings[name]:g}" if name in settings else "" for name in ("rho", "alpha"))
    if settings.get("rho_min") is not None:
        radius += f" to {settings['rho_min']:g}"
    return (f"`{recipe.name}`", f"`{recipe.config.model.name}`", radius, alpha, recipe.expected)
