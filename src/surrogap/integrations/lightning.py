"""Sharpness-aware training with the Trainer of Lightning, as a callback.

It works with the packages `lightning` and `pytorch_lightning`. Each has its own classes, which are
therefore recognised by name.

The strategy's `training_step`, which calls the module's, becomes the closure of `objective.loss`.
Lightning does the rest: accumulation, precision, clipping and stepping.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from surrogap.core.objective import Objective
from surrogap.errors import InvalidValueError
from surrogap.integrations.build import BuildObjective, build_objective, check_builder
from surrogap.integrations.once import restoring_attributes, with_effects_once

_LOGGED = ("gap", "perturbed_loss", "rho")


@final
class SharpnessAware(Callback):
    """Sharpness-aware training for a module with automatic optimization.

    The module needs no changes. `gradient_clip_val`, `accumulate_grad_batches` (with one
    perturbation per batch), `precision` and the strategy work as usual. In the second pass,
    `self.log` does nothing, and torchmetrics and the module's own attributes keep their state.
    Checkpoints contain the state of the objective in the first process, and after resuming all
    processes load it.

    Args:
        objective: A function that builds the objective from the wrapped module and the optimizer.
            It is called when `fit` starts.
        log: Whether to log `gap`, `perturbed_loss` and `rho` of each training batch. Values that a
            step does not measure are NaN.

    Attributes:
        objective: The objective of the current or last call of `fit`; None before the first.

    Raises:
        TypeError: `objective` is not a function, or did not return an objective.
        ValueError: The module optimizes manually, which Lightning requires for several optimizers;
            `training_step` takes `dataloader_iter`; or the strategy is DeepSpeed's or FSDP1's.
    """

    def __init__(self, objective: BuildObjective, *, log: bool = True) -> None:
        check_builder(objective)
        self.objective: Objective | None = None
        self._logs = log  # not `log`, which is a method of Lightning's callbacks
        self._build = objective
        self._saved_state: dict[str, Any] | None = None
        self._is_fitting = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reject unsupported strategies and training steps."""
        if stage == "fit":
            _check_strategy(trainer.strategy)
            if not pl_module.automatic_optimization:
                raise InvalidValueError(
                    "automatic_optimization must be True, got False. For manual optimization, "
                    "leave out the callback, build an objective for each optimizer, and call "
                    "self.manual_backward(objective.loss(closure))."
                )
            if is_param_in_hook_signature(
                pl_module.training_step, "dataloader_iter", explicit=True
            ):
                raise InvalidValueError(
                    "training_step must take a batch, got dataloader_iter, from which each pass "
                    "would take another batch. Write training_step(self, batch, batch_idx)."
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the objective, and wrap the training step of the strategy."""
        strategy: Any = trainer.strategy
        self.objective = build_objective(self._build, strategy.model, trainer.optimizers[0])
        self._is_fitting = True
        if self._saved_state is not None:
            self.load_state_dict(self._saved_state)
        _restore(strategy)
        vars(strategy)["training_step"] = partial(
            self._training_step, trainer, strategy.training_step
        )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log the report of the batch."""
        if self._logs and self.objective is not None and self.objective.report is not None:
            report = self.objective.report
            pl_module.log_dict({name: getattr(report, name) for name in _LOGGED})

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: Any) -> None:
        """Restore the training step of the strategy."""
        self._end(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the training step of the strategy."""
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        _restore(trainer.strategy)
        # A state that was loaded for `test` is not that of the next `fit`.
        self._is_fitting, self._saved_state = False, None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the objective."""
        return {} if self.objective is None else self.objective.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the objective from a checkpoint."""
        if self.objective is not None and self._is_fitting:
            self.objective.load_state_dict(state_dict)
        else:  # most strategies restore callbacks before `fit` starts
            self._saved_state = state_dict

    def _training_step(
        self, trainer: Trainer, training_step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return the output of `training_step` with the loss of the objective."""
        assert self.objective is not None
        objective, module = self.objective, trainer.lightning_module
        is_last = not trainer.fit_loop._should_accumulate()

        def closure() -> tuple[Tensor, Any]:
            output = training_step(*args, **kwargs)
            if output is None:
                raise _SkippedError
            if isinstance(output, Mapping):
                return output["loss"], {k: v for k, v in output.items() if k != "loss"}
            return output, None

        try:
            loss = objective.loss(
                with_effects_once(closure, partial(_without_effects, module)),
                scaler=getattr(trainer.precision_plugin, "scaler", None),
                sync=is_last,
            )
        except _SkippedError:
            if is_last:  # Lightning steps with the gradients of the previous batches
                objective._advance()
            return None
        assert objective.report is not None
        extra = objective.report.aux
        return loss if extra is None else {"loss": loss, **extra}


class _SkippedError(Exception):
    """Raised if `training_step` returned None, which makes Lightning skip the batch."""


@contextmanager
def _without_effects(module: nn.Module) -> Iterator[None]:
    """Context manager that disables `self.log`, and restores attributes and metrics on exit."""
    modules = list(module.modules())
    metrics = [m for m in modules if isinstance(m, Metric | MetricCollection)]
    before = [vars(metric).copy() for metric in metrics]
    with ExitStack() as stack:
        for m in modules:
            if _is_a(m, "LightningModule"):
                stack.enter_context(restoring_attributes(m))
                vars(m)["log"] = _do_nothing
                stack.callback(vars(m).pop, "log")
        try:
            for metric in metrics:
                _set_new_states(metric)
            yield
        finally:
            for metric, attributes in zip(metrics, before, strict=True):
                vars(metric).clear()
                vars(metric).update(attributes)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _set_new_states(metric: nn.Module) -> None:
    """Replace the states of a metric, which are updated in place.

    `Metric.reset` cannot be used, since it also empties lists in place.
    """
    if isinstance(metric, Metric):
        for name, default in metric._defaults.items():
            state = getattr(metric, name)
            if isinstance(default, Tensor):
                device = state.device if isinstance(state, Tensor) else metric.device
                setattr(metric, name, default.detach().clone().to(device))
            else:
                setattr(metric, name, [])


def _is_a(value: object, name: str) -> bool:
    """Return whether `value` is an instance of a class of this name."""
    return any(kind.__name__ == name for kind in type(value).__mro__)


def _restore(strategy: object) -> None:
    vars(strategy).pop("training_step", None)


def _check_strategy(strategy: object) -> None:
    """Reject strategies with which the objective would have no effect, or a wrong one.

    Raises:
        ValueError: It is such a strategy.
    """
    if _is_a(strategy, "DeepSpeedStrategy"):
        raise InvalidValueError(
            "strategy must not be DeepSpeedStrategy, whose engine steps on its own and hides the "
            "weights. Use DDPStrategy or ModelParallelStrategy."
        )
    if _is_a(strategy, "FSDPStrategy"):
        raise InvalidValueError(
            "strategy must not be FSDPStrategy, since FSDP1 flattens the weights. Use "
            "ModelParallelStrategy, with fully_shard in configure_model."
        )
