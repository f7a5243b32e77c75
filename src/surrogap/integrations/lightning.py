"""Sharpness-aware training in the Trainer of Lightning, as a callback.

The strategy's `training_step`, with the module's inside, becomes the closure of `objective.loss`.
Everything after it stays Lightning's: accumulation, precision, clipping and stepping.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from surrogap.core.objective import Objective
from surrogap.integrations.once import acting_once

_LOGGED = ("gap", "perturbed_loss", "rho")


@final
class SharpnessAware(Callback):
    """Sharpness-aware training for a module with automatic optimization.

    The module stays as it is. `gradient_clip_val`, `accumulate_grad_batches` (a perturbation for
    each batch), `precision` and the strategy stay Lightning's. In the second pass `self.log` does
    nothing, and metrics of torchmetrics keep their state. The objective's state is in the
    checkpoints.

    Args:
        objective: Builds the objective from the wrapped module and the optimizer, when `fit`
            starts.
        log: Whether to log `gap`, `perturbed_loss` and `rho` of each training batch; NaN if a step
            does not measure them.

    Attributes:
        objective: The objective of the current or last call of `fit`; None before the first.

    Raises:
        TypeError: `objective` is not a function, or did not return an objective.
        ValueError: The module optimizes manually, which Lightning requires for several optimizers,
            or the strategy is that of DeepSpeed or FSDP1.
    """

    def __init__(
        self, objective: Callable[[nn.Module, Optimizer], Objective], *, log: bool = True
    ) -> None:
        if isinstance(objective, Objective) or not callable(objective):
            raise TypeError(
                "objective must be a function of the model and the optimizer, got "
                f"{type(objective).__name__}. Pass one such as lambda model, optimizer: SAM(model)."
            )
        self.objective: Objective | None = None
        self._logs = log  # Lightning gives callbacks a method `log`
        self._build = objective
        self._saved_state: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies and modules that step by themselves."""
        if stage == "fit":
            _check_strategy(trainer.strategy)
            if not pl_module.automatic_optimization:
                raise ValueError(
                    "automatic_optimization must be True, got False. In manual optimization leave "
                    "out the callback, build an objective for each optimizer, and call "
                    "self.manual_backward(objective.loss(closure))."
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the objective, and have the strategy's training step use it."""
        strategy: Any = trainer.strategy
        objective = self._build(strategy.model, trainer.optimizers[0])
        if not isinstance(objective, Objective):
            raise TypeError(
                f"objective must return an objective, got {type(objective).__name__}. "
                "Return one such as SAM(model)."
            )
        self.objective = objective
        if self._saved_state is not None:
            self.load_state_dict(self._saved_state)
        _restore(strategy)
        vars(strategy)["training_step"] = partial(
            self._training_step, trainer, strategy.training_step
        )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log the measurements of the batch."""
        if self._logs and self.objective is not None and self.objective.report is not None:
            report = self.objective.report
            pl_module.log_dict({name: getattr(report, name) for name in _LOGGED})

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: Any) -> None:
        """Give the strategy its own training step back."""
        _restore(trainer.strategy)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the strategy its own training step back."""
        _restore(trainer.strategy)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the objective."""
        return {} if self.objective is None else self.objective.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        if self.objective is None:  # Most strategies restore callbacks before `fit` starts.
            self._saved_state = state_dict
        else:
            self._saved_state = None
            self.objective.load_state_dict(state_dict)

    def _training_step(
        self, trainer: Trainer, training_step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return the output of `training_step`, with the objective's loss in place of its loss."""
        assert self.objective is not None
        objective, module = self.objective, trainer.lightning_module

        def closure() -> tuple[Tensor, Any]:
            output = training_step(*args, **kwargs)
            if output is None:
                raise _SkippedError
            if isinstance(output, Mapping):
                return output["loss"], {k: v for k, v in output.items() if k != "loss"}
            return output, None

        try:
            loss = objective.loss(
                acting_once(closure, partial(_silent, module)),
                scaler=getattr(trainer.precision_plugin, "scaler", None),
                sync=not trainer.fit_loop._should_accumulate(),
            )
        except _SkippedError:
            return None
        assert objective.report is not None
        extra = objective.report.aux
        return loss if extra is None else {"loss": loss, **extra}


class _SkippedError(Exception):
    """Raised when `training_step` returned None, which asks Lightning to skip the batch."""


@contextmanager
def _silent(module: nn.Module) -> Iterator[None]:
    """Context in which `self.log` does nothing, and after which metrics have their state back."""
    modules = list(module.modules())
    loggers = [vars(m) for m in modules if isinstance(m, LightningModule)]
    metrics = [m for m in modules if isinstance(m, Metric | MetricCollection)]
    before = [vars(metric).copy() for metric in metrics]
    try:
        for attributes in loggers:
            attributes["log"] = _do_nothing
        for metric in metrics:
            _begin_again(metric)
        yield
    finally:
        for attributes in loggers:
            del attributes["log"]
        for metric, attributes in zip(metrics, before, strict=True):
            vars(metric).clear()
            vars(metric).update(attributes)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _begin_again(metric: nn.Module) -> None:
    """Give a metric new states, since it updates those that it has in place.

    `Metric.reset` would not do: it empties the lists among them.
    """
    if isinstance(metric, Metric):
        for name, default in metric._defaults.items():
            state = getattr(metric, name)
            if isinstance(default, Tensor):
                device = state.device if isinstance(state, Tensor) else metric.device
                setattr(metric, name, default.detach().clone().to(device))
            else:
                setattr(metric, name, [])


def _restore(strategy: object) -> None:
    vars(strategy).pop("training_step", None)


def _check_strategy(strategy: object) -> None:
    """Refuse strategies that would run, and train another objective or none.

    Raises:
        ValueError: It is one of those.
    """
    if isinstance(strategy, DeepSpeedStrategy):
        raise ValueError(
            "strategy must not be DeepSpeed's, got it. Its engine steps by itself, and hides the "
            "weights: use DDPStrategy or ModelParallelStrategy."
        )
    if isinstance(strategy, FSDPStrategy):
        raise ValueError(
            "strategy must not be FSDPStrategy, got it. FSDP1 keeps flattened weights: use "
            "ModelParallelStrategy, with fully_shard in configure_model."
        )
