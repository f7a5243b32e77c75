"""Run timm's unedited `train.py` with a sharpness-aware objective.

    python -m surrogap.integrations.timm train.py --sharpness gsam --rho 0.1 (timm's arguments)

The script computes its loss with `timm.task`, which here returns `objective.loss`. The script does
the rest: accumulation, loss scaling, clipping, the optimizer step and EMA.
"""

import argparse
import logging
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from surrogap.core.catalog import OBJECTIVES, create_objective
from surrogap.core.objective import Objective
from surrogap.errors import InvalidTypeError, UnsupportedError

_logger = logging.getLogger(__name__)

# `scoping` counts steps, and the script does not save the count.
_EXCLUDED = {"scoping"}
_CHOICES = {
    "memory": ("exact", "low"),
    "minimize": ("perturbed", "plain"),
    "perturb": ("norms",),
    "scope": ("replica", "global"),
}
_HELP = {
    "alpha": "weight of the gap; 0 to ignore it",
    "averaging": "decay of the running average of the inner steps",
    "eps": "added to the norm of the gradient before dividing by it",
    "eta": "added to the magnitudes of the weights",
    "gamma": "strength of the pull towards the weights; divide the lr of sgd by it",
    "inner_lr": "learning rate of the inner steps",
    "inner_steps": "number of inner steps, one pass each",
    "lam": "weight of the gap in f_p + lam * h",
    "memory": "copies that a step holds on a GPU: weights and gradient (exact) or weights (low)",
    "minimize": "perturbed for min(f_p, h), plain for min(f, h)",
    "noise": "scale of the noise in the inner steps",
    "perturb": "norms: perturb only the affine parameters of normalisation layers",
    "rho": "radius of the perturbation",
    "scope": "under DDP, perturb along each process's own gradient (replica) or the mean (global)",
}


@final
class SharpnessAwareTasks:
    """Makes timm's `ClassificationTask` return the loss of an objective.

    Args:
        name: The name of the objective in `surrogap.core.catalog`.
        arguments: Keyword arguments of the objective.

    Attributes:
        objective: The objective of the last training batch; None before the first.
    """

    def __init__(self, name: str, **arguments: Any) -> None:
        self._name = name
        self._arguments = arguments
        self._optimizer: Optimizer | None = None
        self._scaler: GradScaler | None = None
        self.objective: Objective | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager in which timm's tasks return the loss of the objective."""
        import timm.optim
        from timm.task import TrainingTask
        from timm.utils import NativeScaler

        create_optimizer, prepare = timm.optim.create_optimizer_v2, NativeScaler.__init__

        def create_and_note(*args: Any, **kwargs: Any) -> Optimizer:
            self._optimizer = optimizer = create_optimizer(*args, **kwargs)
            assert isinstance(optimizer, Optimizer)
            return optimizer

        def prepare_and_note(scaler: Any, *args: Any, **kwargs: Any) -> None:
            prepare(scaler, *args, **kwargs)
            self._scaler = scaler._scaler

        def call(task: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(task, *args, **kwargs)

        timm.optim.create_optimizer_v2 = create_and_note
        NativeScaler.__init__ = prepare_and_note
        TrainingTask.__call__ = call
        try:
            yield
        finally:
            timm.optim.create_optimizer_v2 = create_optimizer
            NativeScaler.__init__ = prepare
            del TrainingTask.__call__

    def _call(self, task: Any, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        from timm.task import ClassificationTask

        if not isinstance(task, ClassificationTask):
            raise InvalidTypeError(
                f"task must be a ClassificationTask, got {type(task).__name__}. Leave out the "
                "arguments for distillation."
            )
        model = task.get_trainable_module()
        if self.objective is None or self.objective.model is not model:
            self.objective = self._create(model)
            _logger.info("Training with %r", self.objective)

        def closure() -> tuple[Tensor, Mapping[str, Any]]:
            result = nn.Module.__call__(task, *args, **kwargs)
            return result["loss"], {k: v for k, v in result.items() if k != "loss"}

        loss = self.objective.loss(closure, scaler=self._scaler)
        assert self.objective.report is not None
        return {"loss": loss, **self.objective.report.aux}

    def _create(self, model: nn.Module) -> Objective:
        if OBJECTIVES[self._name].takes_optimizer and self._optimizer is None:
            raise UnsupportedError(
                f"{self._name} needs the optimizer, but the script did not create it with "
                "timm.optim.create_optimizer_v2. Choose another objective."
            )
        # Only objectives that read its momentum use the optimizer.
        optimizer: Any = self._optimizer
        return create_objective(self._name, model, optimizer, **self._arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run timm's training script.

    Args:
        arguments: The arguments after the name of the program.
    """
    script, name, settings, rest = _parsed(arguments)
    # As Python does for a script. Before timm is imported, since a checkout of timm has its own.
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *rest]
    with SharpnessAwareTasks(name, **settings).installed():
        runpy.run_path(os.fspath(script), run_name="__main__")


def _parsed(arguments: Sequence[str] | None) -> tuple[Path, str, dict[str, Any], list[str]]:
    """Return the script, the objective's name and arguments, and the script's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m surrogap.integrations.timm",
        usage="%(prog)s SCRIPT [--sharpness NAME] [options] [arguments of the script]",
        description="Run timm's train.py with a sharpness-aware objective.",
        epilog="All other arguments go to the script. python SCRIPT --help lists them.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        type=Path,
        help="path to timm's train.py, which is in the repository of timm, not in the package",
    )
    parser.add_argument(
        "--sharpness",
        metavar="NAME",
        choices=list(OBJECTIVES),
        default="gsam",
        help=f"objective: {', '.join(OBJECTIVES)} (default: gsam)",
    )
    for option, defaults in sorted(_options().items()):
        default = next(iter(defaults.values()))
        parser.add_argument(
            f"--{option.replace('_', '-')}",
            type=str if default is None else type(default),
            choices=_CHOICES.get(option),
            help=f"{_HELP[option]} ({_listed(defaults)})",
        )
    known, rest = parser.parse_known_args(arguments)
    settings = vars(known)
    script, name = settings.pop("script"), settings.pop("sharpness")
    if not script.is_file():
        parser.error(f"script must be a file, got {script}. Pass the path to timm's train.py.")
    unused = set(settings) - set(OBJECTIVES[name].arguments)
    if unused:
        listed = ", ".join(f"--{option.replace('_', '-')}" for option in sorted(unused))
        parser.error(f"{listed} has no effect on {name}. Leave it out.")
    return script, name, settings, rest


def _options() -> dict[str, dict[str, Any]]:
    """Return the arguments of the objectives, with their default for each objective."""
    options: dict[str, dict[str, Any]] = {}
    for name, entry in OBJECTIVES.items():
        for argument, default in entry.arguments.items():
            if argument not in _EXCLUDED:
                options.setdefault(argument, {})[name] = default
    return options


def _listed(defaults: Mapping[str, Any]) -> str:
    """Return the objectives that have an argument, with its default if it has one.

    >>> _listed({"sam": 0.1, "gsam": 0.1, "asam": 0.5})
    'sam, gsam: default 0.1; asam: default 0.5'
    """
    names: dict[Any, list[str]] = {}
    for name, default in defaults.items():
        names.setdefault(default, []).append(name)
    return "; ".join(
        ", ".join(users) + ("" if default is None else f": default {default}")
        for default, users in names.items()
    )


if __name__ == "__main__":
    main()
