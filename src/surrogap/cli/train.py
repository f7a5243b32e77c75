"""`surrogap train`: train a network, or continue to.

surrogap train --recipe fashion-mnist-gsam --objective sam --rho 0.1 --seed 3 --out runs/a
surrogap train --resume --out runs/a
torchrun --nproc-per-node 8 -m surrogap.cli train --recipe vit-s32-gsam
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surrogap.cli.options import options
from surrogap.training.arguments import one_of
from surrogap.training.config import Config


@dataclass(frozen=True)
class Train:
    """Train a network, or continue to.

    Everything about the run is kept in its folder: the configuration, the versions, the records
    and the checkpoints.
    """

    recipe: str | None = None
    """The recipe that gives the defaults of all that follows; surrogap recipes lists them."""

    resume: bool = False
    """Whether to continue the run that the folder holds; if it holds none, it starts. Without
    --recipe, the defaults of all that follows are the run's own."""

    print_config: bool = False
    """Whether to show the configuration and do nothing."""

    config: Config = field(default_factory=Config)


def main(arguments: Sequence[str]) -> int:
    """Trains as the arguments say, and returns the exit status.

    Raises:
        ValueError: The arguments do not fit, or the run cannot be what they say.
    """
    chosen = options(Train, "train", arguments, default=Train(config=_defaults(arguments)))
    if chosen.print_config:
        print(chosen.config.to_json(), end="")
        return 0
    return _train(chosen.config, chosen.resume)


def _train(config: Config, resume: bool) -> int:
    from surrogap.experiments.probes import sharpness_probe
    from surrogap.training.progress import progress_for_stdout
    from surrogap.training.run import train

    progress = progress_for_stdout()
    outcome = train(config, resume=resume, progress=progress, probe=sharpness_probe)
    place = f"step {outcome.step} of {outcome.num_steps}"
    if outcome.signal is not None and outcome.is_first:
        print(
            f"surrogap: {outcome.signal.name} stopped the run after {place}, and its checkpoint is "
            f"saved. Continue by surrogap train --resume --out {outcome.folder}",
            file=sys.stderr,
        )
    elif outcome.is_first:
        print(f"{outcome.folder}: finished, {place}")
    return 0 if outcome.signal is None else 128 + outcome.signal


def _defaults(arguments: Sequence[str]) -> Config:
    """The recipe's configuration, or that of the run to resume, or the default one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--recipe")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out")
    try:
        first, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError:  # tyro will tell
        return Config()
    if first.recipe is not None:
        return recipe(first.recipe)
    path = Path(first.out or "").expanduser() / "config.json"
    if not (first.resume and first.out and path.is_file()):
        return Config()
    try:
        return Config.from_dict(json.loads(path.read_text()))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"configuration must be JSON, got {path} ({error}). Pass another --out."
        ) from error


def recipe(name: str) -> Config:
    """The configuration of a recipe.

    Raises:
        ValueError: There is no such recipe.
    """
    from surrogap.experiments.recipes import RECIPES

    return RECIPES[one_of("recipe", name, RECIPES, remedy="surrogap recipes lists them.")]()
