"""Recipes by name: configurations with the result that they reproduce.

`surrogap recipes` lists them, and `surrogap train --recipe NAME` trains one.
"""

from surrogap.experiments.recipes import imagenet, small, transfer
from surrogap.experiments.recipes.recipe import Recipe

__all__ = ["RECIPES", "Recipe"]

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (*small.recipes(), *imagenet.recipes(), *transfer.recipes())
}
