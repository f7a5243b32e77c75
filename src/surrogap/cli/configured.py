"""The configuration that a command's flags start from: a recipe's, a run's, or the default one."""

from collections.abc import Sequence
from pathlib import Path

from surrogap.checks import one_of
from surrogap.cli.options import peek
from surrogap.experiments.recipes import RECIPES
from surrogap.training.config import FIELDS, Config, check_effect


def recipe(name: str) -> Config:
    """Return the configuration of a recipe.

    Raises:
        ValueError: There is no such recipe.
    """
    return RECIPES[one_of("recipe", name, RECIPES, remedy="surrogap recipes lists them.")]()


def base_config(arguments: Sequence[str], run: Path | None = None) -> Config:
    """Return the configuration that gives the defaults of a command's flags.

    It is that of `--recipe`, or of a run, or the default one, under the objective of `--objective`.

    Args:
        arguments: Those of the command.
        run: The folder of a run to take it from, unless there is a recipe.

    Raises:
        NoEffectError: A flag is one of another objective's.
        ValueError: There is no such recipe, run or objective.
    """
    name, objective = peek(arguments, "recipe", "objective")
    if name is not None:
        config = recipe(name)
    elif run is not None:
        from surrogap.training.folder import read_config

        config = read_config(run)
    else:
        config = Config()
    if objective is not None:
        config = config.override(objective=objective)
    given = [FIELDS[flag] for flag in given_fields(arguments)]
    check_effect([field for group, field in given if group == "objective"], config.objective)
    return config


def given_fields(arguments: Sequence[str]) -> list[str]:
    """Return the fields of a configuration that the arguments name.

    Their values do not show it: a value that is given may be the default one.

    >>> given_fields(["--rho=0.3", "--batch-size", "8", "--no-tensorboard", "--seeds", "2"])
    ['batch_size', 'rho', 'tensorboard']
    """
    words = (word[2:].partition("=")[0] for word in arguments if word.startswith("--"))
    names = {word.replace("-", "_") for word in words}
    return [field for field in FIELDS if names & {field, f"no_{field}"}]
