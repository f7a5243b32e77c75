"""`surrogap train`: train a network, or continue to.

surrogap train --recipe fashion-mnist-gsam --objective sam --rho 0.1 --seed 3 --out runs/a
surrogap train --resume --out runs/a
torchrun --nproc-per-node 8 -m surrogap.cli train --recipe vit-s32-gsam
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surrogap.cli.configured import base_config, given_fields
from surrogap.cli.options import options, peek
from surrogap.experiments.methods import with_lr_of_gradient
from surrogap.training.config import Config
from surrogap.training.flags import OptionalStr


@dataclass(frozen=True)
class Train:
    """Train a network, or continue to.

    Everything about the run is kept in its folder: the configuration, the versions, the records
    and the checkpoints.
    """

    recipe: OptionalStr = None
    """The recipe that gives the defaults of all that follows; surrogap recipes lists them. Flags
    are those of one objective: add --objective NAME to --help for another's."""

    resume: bool = False
    """Continue the run that the folder holds; if it holds none, it starts. Without --recipe, the
    defaults of all that follows are the run's own."""

    print_config: bool = False
    """Show the configuration and do nothing else."""

    config: Config = field(default_factory=Config)


def main(arguments: Sequence[str]) -> int:
    """Trains as the arguments say, and returns the exit status.

    Raises:
        ValueError: The arguments do not fit, or the run cannot be what they say.
    """
    chosen = options(Train, "train", arguments, default=Train(config=_defaults(arguments)))
    config = chosen.config
    if chosen.recipe is not None and "lr" not in given_fields(arguments):
        config = with_lr_of_gradient(config)
    if chosen.print_config:
        print(config.to_json(), end="")
        return 0
    return _train(config, chosen.resume)


def _train(config: Config, resume: bool) -> int:
    from surrogap.experiments.probes import sharpness_probe
    from surrogap.training.progress import display_for_stdout
    from surrogap.training.run import train

    progress = display_for_stdout()
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
    (out,) = peek(arguments, "out")
    folder = Path(out or "").expanduser()
    is_resumed = "--resume" in arguments and out and (folder / "config.json").is_file()
    return base_config(arguments, folder if is_resumed else None)
