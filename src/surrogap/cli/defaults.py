"""Flags that are read before the others, since the defaults of the others depend on them.

`--recipe`, `--objective` and the run give the configuration with the defaults of all other flags.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from surrogap.checks import one_of
from surrogap.experiments.recipes import RECIPES
from surrogap.training.config import FIELDS, Config, check_effect, is_run


def base_config(arguments: Sequence[str], run: Path | None = None) -> Config:
    """Return the configuration with the defaults of a command's flags.

    It is the configuration of `--recipe`, of a run, or the default one, with the objective of
    `--objective`.

    Args:
        arguments: The arguments of the command.
        run: The folder of a run, which is used without a recipe.

    Raises:
        NoEffectError: A flag belongs to another objective.
        ValueError: The recipe, the run or the objective does not exist.
    """
    if _peek(arguments, "recipe") is not None:
        config = recipe_config(arguments)
    elif run is not None:
        from surrogap.training.folder import read_config

        config = read_config(run)
    else:
        config = Config()
    objective = _peek(arguments, "objective")
    if objective is not None:
        config = config.override(objective=objective)
    given = [FIELDS[flag] for flag in given_fields(arguments)]
    check_effect([field for group, field in given if group == "objective"], config.objective)
    return config


def recipe_config(arguments: Sequence[str], default: str = "") -> Config:
    """Return the configuration of `--recipe`, or of a default recipe without that flag.

    Raises:
        ValueError: The recipe does not exist.
    """
    name = _peek(arguments, "recipe") or default
    return RECIPES[one_of("recipe", name, RECIPES, remedy="surrogap recipes lists them.")].config


def resumed_run(arguments: Sequence[str]) -> Path | None:
    """Return the folder of the run that `--resume --out FOLDER` continues; None without one."""
    out = _peek(arguments, "out")
    folder = Path(out or "").expanduser()
    return folder if "--resume" in arguments and out and is_run(folder) else None


def run_argument(arguments: Sequence[str]) -> Path | None:
    """Return the run that precedes all options; None without one."""
    has_run = bool(arguments) and not arguments[0].startswith("-")
    return Path(arguments[0]) if has_run else None


def given_fields(arguments: Sequence[str], fields: Iterable[str] = FIELDS) -> list[str]:
    """Return the fields, by default of a configuration, that flags set, even to their default.

    >>> given_fields(["--rho=0.3", "--batch-size", "8", "--no-tensorboard", "--seeds", "2"])
    ['batch_size', 'rho', 'tensorboard']
    """
    words = (word[2:].partition("=")[0] for word in arguments if word.startswith("--"))
    names = {word.replace("-", "_") for word in words}
    return [field for field in fields if names & {field, f"no_{field}"}]


def _peek(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of a flag; None if the flag or its value is missing.

    A missing value is reported later, when all flags are read.

    >>> _peek(["--recipe=vit-s32-gsam", "--seed", "3", "--out"], "recipe")
    'vit-s32-gsam'
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", nargs="?")
    value: str | None = getattr(parser.parse_known_args(list(arguments))[0], name)
    return value
