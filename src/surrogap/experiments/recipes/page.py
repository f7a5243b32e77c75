"""The page of all recipes, `docs/recipes.md`, generated from the recipes."""

from types import ModuleType

from surrogap.experiments.recipes import imagenet, small, transfer
from surrogap.experiments.recipes.recipe import Recipe
from surrogap.experiments.text_table import Table

_HEAD = """# Recipes

A recipe is a configuration with its expected result. `surrogap recipes NAME` shows all settings of
a recipe, and where it differs from its source. `surrogap train --recipe NAME` trains it.

Other flags change its settings. `--objective` replaces the objective and keeps the settings that
both objectives have. With SGD, `--objective entropy-sgd` divides the recipe's learning rate by
`gamma`: the learning rate is chosen for gradients, and the direction of Entropy-SGD is
`gamma * (w - mu)`.

This page is the output of `surrogap recipes --markdown`.
"""

_CAPTION = "Top-1 accuracy in percent, from the paper. We have not run these recipes.\n\n"


def page() -> str:
    """Return the page, in Markdown.

    >>> print(page()[:9])
    # Recipes
    """
    return "\n".join([_HEAD, *map(_section, (small, imagenet, transfer))])


def _section(module: ModuleType) -> str:
    """Return the docstring of a module, and a table of its recipes without empty columns."""
    first, _, rest = (module.__doc__ or "").partition("\n\n")
    rows = [_row(recipe) for recipe in module.recipes()]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    table = Table(columns, [[row[name] for name in columns] for row in rows]).markdown()
    caption = "" if "expected" in columns else _CAPTION
    return f"## {first.rstrip('.')}\n\n{rest.strip()}\n\n{caption}{table}\n"


def _row(recipe: Recipe) -> dict[str, str]:
    settings = recipe.config.flat()
    radius, alpha = (f"{settings[name]:g}" if name in settings else "" for name in ("rho", "alpha"))
    if settings.get("rho_min") is not None:
        radius += f" to {settings['rho_min']:g}"
    scores = {name: str(accuracy) for name, accuracy in recipe.accuracies.items()}
    row = {"recipe": f"`{recipe.name}`", "rho": radius, "alpha": alpha}
    return row | (scores or {"expected": recipe.expected})
