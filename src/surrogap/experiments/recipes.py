"""Recipes by name: functions without arguments that return a configuration."""

from collections.abc import Callable

from surrogap.training.config import Config

RECIPES: dict[str, Callable[[], Config]] = {}
