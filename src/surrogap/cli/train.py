"""`surrogap train`: train a model, or continue a run.

surrogap train --recipe fashion-mnist-gsam --objective sam --rho 0.1 --seed 3 --out runs/a
surrogap train --resume --out runs/a
torchrun --nproc-per-node 8 -m surrogap.cli train --recipe vit-s32-gsam
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from surrogap.cli.defaults import base_config, given_fields, resumed_run
from surrogap.cli.options import ConfigOptions, RecipeName, options
from surrogap.errors import InvalidValueError
from surrogap.experiments.columns import with_lr_of_gradient
from surrogap.training.config import FREE, Config, is_run


@dataclass(frozen=True)
class Train:
    """Train a model, or continue a run.

    The folder of the run holds its configuration, library versions, records and checkpoints.
    """

    recipe: RecipeName = None
    """The recipe that sets the defaults of all settings below; surrogap recipes lists the recipes.
    This help shows the settings of one objective: add --objective NAME for those of another."""

    resume: bool = False
    """Continue the run in the folder --out, or start it if the folder is empty and settings are
    given. Without --recipe, the defaults of all settings below are those of the run."""

    print_config: bool = False
    """Print the configuration, and exit."""

    config: ConfigOptions = field(default_factory=Config)


def main(arguments: Sequence[str]) -> int:
    """Train a model, and return the exit status.

    Raises:
        RunFailedError: The run failed.
        ValueError: The arguments are not valid, or the folder holds another run.
    """
    base = base_config(arguments, resumed_run(arguments))
    chosen = options(Train, "train", arguments, default=Train(config=base))
    config = chosen.config
    given = given_fields(arguments)
    if chosen.recipe is not None:
        config = with_lr_of_gradient(config, given=given)
    elif chosen.resume and {*given} <= FREE and not is_run(config.folder):
        raise InvalidValueError(
            f"out must be the folder of a run, got {config.folder}, which has no config.json. "
            "Pass the folder of the run to continue, or settings for a new one, such as --recipe."
        )
    if chosen.print_config:
        print(config.to_json(), end="")
        return 0
    from surrogap.experiments.probes import sharpness_probe
    from surrogap.training.progress import display_for_stdout
    from surrogap.training.run import train

    progress = display_for_stdout()
    outcome = train(config, resume=chosen.resume, progress=progress, probe=sharpness_probe)
    folder = shlex.quote(str(outcome.folder))
    step = f"step {outcome.step} of {outcome.num_steps}"
    stopped_by = None if outcome.is_finished else outcome.signal
    if stopped_by is not None and outcome.is_first:
        saved = (
            "No checkpoint was saved, because of --checkpoint-every 0."
            if config.output.checkpoint_every == 0
            else f"Its checkpoint is saved. Continue with surrogap train --resume --out {folder}"
        )
        print(f"surrogap: {stopped_by.name} stopped the run after {step}. {saved}", file=sys.stderr)
    elif outcome.is_first:
        print(f"{outcome.folder}: finished, {step}. For its curves: surrogap show {folder}")
    return 0 if stopped_by is None else 128 + stopped_by
