"""Sharpness-aware training with the Trainer of Hugging Face Transformers and its subclasses.

The trainer's `compute_loss` becomes the closure of `objective.loss`. The trainer does the rest:
dividing by the number of micro-batches, loss scaling, clipping and stepping.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from surrogap.core.objective import Objective
from surrogap.core.report import Report
from surrogap.errors import InvalidValueError, UnsupportedError
from surrogap.integrations.build import BuildObjective, build_objective, check_builder
from surrogap.integrations.once import restoring_attributes, with_effects_once

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:  # The mixin is used together with a trainer, so it has no base class.
    _Trainer = object

PerturbEach = Literal["step", "micro_batch"]

_LOGGED = ("gap", "perturbed_loss", "rho")


class SharpnessAwareMixin(_Trainer):
    """Sharpness-aware training for any subclass of `transformers.Trainer`.

    Put it before the trainer: `class MyTrainer(SharpnessAwareMixin, SFTTrainer): pass`. Do the same
    with your own trainer that overrides `compute_loss` or `training_step`. Losses weighted by
    tokens, label smoothing, `compute_loss_func`, mixed precision, PEFT, gradient checkpointing and
    compilation work as usual. The log has three more entries, averaged over steps like the loss:
    `gap`, `perturbed_loss` and `rho`.

    Args:
        objective: A function that builds the objective from the wrapped model and the optimizer.
            It is called when training starts.
        perturb_each: With gradient accumulation, "step" uses one perturbation for all micro-batches
            of an optimizer step, so the result does not depend on how a batch is split;
            "micro_batch" uses one perturbation per micro-batch, whose losses may have different
            weights.
        args: Positional arguments of the trainer.
        kwargs: Keyword arguments of the trainer.

    Attributes:
        objective: The objective of the current or last call of `train`; None before the first.

    Raises:
        TypeError: `objective` is not a function, or did not return an objective.
        ValueError: `perturb_each` is unknown, or the training arguments ask for DeepSpeed,
            Megatron-LM, FSDP1, DataParallel or an optimizer that steps during backward.
        RuntimeError: An override of `compute_loss` or `training_step` bypasses the objective.
    """

    def __init__(
        self,
        *args: Any,
        objective: BuildObjective,
        perturb_each: PerturbEach = "step",
        **kwargs: Any,
    ) -> None:
        check_builder(objective)
        if perturb_each not in get_args(PerturbEach):
            raise InvalidValueError(
                f'perturb_each must be "step" or "micro_batch", got {perturb_each!r}. '
                'Leave it out for "step".'
            )
        self.objective: Objective | None = None
        self.perturb_each = perturb_each
        self._build = objective
        self._saved_state: dict[str, Any] | None = None
        self._is_in_training_step = False
        self._micro_batches: list[_MicroBatch] = []  # of this step, so far
        self._means = _StepMeans()
        super().__init__(*args, **kwargs)
        _check(self)
        self.add_callback(_Callback(self))

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run one micro-batch. See `Trainer.training_step`."""
        self._is_in_training_step = True
        try:
            loss: Tensor = super().training_step(*args, **kwargs)
        finally:
            self._is_in_training_step = False
        return loss

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a micro-batch. In training, its gradient is the objective's direction.

        With `perturb_each="step"`, the loss is 0 for all micro-batches except the last, for which
        it is the sum of all losses. See `Trainer.compute_loss`.
        """
        compute_loss = super().compute_loss
        if not self._is_in_training_step:
            return compute_loss(model, inputs, *args, **kwargs)

        def closure() -> Tensor:
            # A copy, since trainers add and remove entries of their inputs.
            loss: Tensor = compute_loss(model, copy.copy(inputs), *args, **kwargs)
            return loss

        if kwargs.get("return_outputs", args[:1] == (True,)):
            raise InvalidValueError(
                "return_outputs must be False in training, got True. If a subclass asks for the "
                "outputs, put the mixin before it: class MyTrainer(SharpnessAwareMixin, ...)."
            )
        once = with_effects_once(closure, partial(restoring_attributes, self))
        self._micro_batches.append(_MicroBatch(once))
        is_last = bool(self.accelerator.sync_gradients)
        if self.perturb_each == "step" and not is_last:
            return self._postponed(model, self._micro_batches[-1])
        micro_batches, self._micro_batches = self._micro_batches, []
        if len(micro_batches) == 1:
            return self._loss(once, is_last=is_last)
        return self._loss_of_step(micro_batches)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the means of the reports since the last call with the loss. See `Trainer.log`."""
        if "loss" in logs:
            logs |= self._means.means(self.accelerator.gather)
        super().log(logs, *args, **kwargs)

    def _loss(self, closure: Callable[[], Tensor], *, is_last: bool) -> Tensor:
        """Return the loss of one micro-batch with its own perturbation."""
        assert self.objective is not None
        loss = self.objective.loss(closure, scaler=self.accelerator.scaler, sync=is_last)
        report = self.objective.report
        assert report is not None
        scale = self._scale(loss)

        def measure(factor: Tensor) -> None:
            self._means.add(report, factor / scale, is_last=is_last)

        # The trainer's factor of the loss is known only from the gradient of the loss.
        loss.register_hook(measure)  # type: ignore[no-untyped-call]
        return loss

    def _postponed(self, model: nn.Module, micro_batch: "_MicroBatch") -> Tensor:
        """Return 0 for a micro-batch whose passes run with those of the last micro-batch."""
        dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        zero = torch.zeros((), dtype=dtype, device=self.args.device, requires_grad=True)

        def note(factor: Tensor) -> None:
            micro_batch.factor = factor / self._scale(factor)

        zero.register_hook(note)  # type: ignore[no-untyped-call]
        return zero

    def _loss_of_step(self, micro_batches: "Sequence[_MicroBatch]") -> Tensor:
        """Add the direction of several micro-batches, and return the sum of their losses."""
        assert self.objective is not None
        *previous, last = micro_batches
        # The trainer scales the last loss after this call, presumably like the one before.
        factor = previous[-1].factor
        last.factor = factor
        report = self.objective.backward(
            [one.loss for one in micro_batches], scaler=self.accelerator.scaler
        )
        self._means.add(report, torch.ones_like(factor), is_last=True)

        def check(actual: Tensor) -> None:
            actual = actual / self._scale(actual)
            if not torch.isclose(actual, factor, rtol=1e-4):
                raise InvalidValueError(
                    'perturb_each must be "micro_batch" if micro-batches have different weights, '
                    f"got a factor of {actual:g} for the last loss of a step and {factor:g} for "
                    "the one before."
                )

        loss = (report.value / factor).requires_grad_()
        loss.register_hook(check)  # type: ignore[no-untyped-call]
        return loss

    def _scale(self, like: Tensor) -> Tensor:
        """Return the loss scale; 1 without loss scaling."""
        one = torch.ones_like(like, requires_grad=False)
        scaler = self.accelerator.scaler
        return one if scaler is None else scaler.scale(one)

    def _start(self) -> None:
        """Build the objective, and load its state from a checkpoint if there is one."""
        # Accelerate wraps the optimizer. Objectives read the momentum of the wrapped one.
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        objective = build_objective(self._build, self.model_wrapped, optimizer)
        state, self._saved_state = self._saved_state, None
        if state is not None:
            objective.load_state_dict(state)
        self.objective = objective
        self._micro_batches = []
        self._means = _StepMeans()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.objective is not None and (state := self.objective.state_dict()):
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            torch.save(state, _state_path(output_dir, self.args.process_index))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        paths = [_state_path(checkpoint, index) for index in (self.args.process_index, 0)]
        path = next(filter(Path.exists, paths), None)
        self._saved_state = None if path is None else torch.load(path, map_location="cpu")


class SharpnessAwareTrainer(SharpnessAwareMixin, Trainer):
    """`transformers.Trainer` with a sharpness-aware objective.

    `SharpnessAwareMixin` documents the arguments `objective` and `perturb_each`. All others are
    those of `Trainer`.
    """


class _Callback(TrainerCallback):
    """Builds the objective when the model is wrapped, and checks that the first step uses it."""

    def __init__(self, trainer: SharpnessAwareMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer._start()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer.objective is None or self._trainer.objective.report is None:
            name = type(self._trainer).__name__
            raise UnsupportedError(
                f"{name} trained without the objective: its compute_loss or training_step does not "
                f"call super(). Put the mixin before the class that overrides it: "
                f"class {name}(SharpnessAwareMixin, ...)."
            )


@dataclass
class _MicroBatch:
    """The closure of a micro-batch, and the trainer's factor of its loss, known from backward."""

    closure: Callable[[], Tensor]
    factor: Tensor = field(default_factory=lambda: torch.ones(()))

    def loss(self) -> Tensor:
        return self.closure() * self.factor


class _StepMeans:
    """The means of the reports of steps, kept on the device until they are logged."""

    def __init__(self) -> None:
        self._micro_batches: list[Tensor] = []
        self._sums: Tensor | float = 0.0
        self._counts: Tensor | int = 0  # of the steps that measured a value

    def add(self, report: Report, factor: Tensor, *, is_last: bool) -> None:
        """Add the report of a micro-batch whose loss the trainer multiplies by `factor`."""
        row = [factor * report.gap, factor * report.perturbed_loss, report.rho]
        self._micro_batches.append(torch.stack([value.detach().float() for value in row]))
        if is_last:
            rows = torch.stack(self._micro_batches)
            self._micro_batches = []
            # The loss of the step is the sum of the losses of its micro-batches.
            step = torch.cat([rows[:, :2].sum(0), rows[:1, 2]])
            self._sums = self._sums + step.nan_to_num(0.0)
            self._counts = self._counts + ~step.isnan()

    def means(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return the means over steps and processes, and clear the steps.

        Values that no step has measured are left out.
        """
        if not isinstance(self._sums, Tensor):
            return {}
        rows, self._sums, self._counts = (self._sums / self._counts)[None], 0.0, 0
        means = gather(rows).nanmean(0).tolist()
        return {name: mean for name, mean in zip(_LOGGED, means, strict=True) if mean == mean}


def _state_path(folder: str, process_index: int) -> Path:
    return Path(folder) / f"objective_{process_index}.pt"


def _check(trainer: Any) -> None:
    """Reject training arguments with which the objective would have no effect, or a wrong one.

    Raises:
        ValueError: There is such an argument.
    """
    kind = str(trainer.accelerator.distributed_type).rpartition(".")[2]
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise InvalidValueError(
            f"args must not use {kind}, whose engine steps on its own and hides the weights. "
            "Use DDP, or FSDP2 with fsdp_config={'version': 2}."
        )
    if kind == "FSDP" and not trainer.accelerator.is_fsdp2:
        raise InvalidValueError(
            "args must use FSDP2, got FSDP1, which flattens the weights. Set "
            "fsdp_config={'version': 2}."
        )
    if trainer.args.n_gpu > 1:
        raise InvalidValueError(
            f"args must use one GPU per process, got {trainer.args.n_gpu} under DataParallel. "
            "Start the script with torchrun, or set CUDA_VISIBLE_DEVICES to one GPU."
        )
    if "lomo" in str(trainer.args.optim).lower():
        raise InvalidValueError(
            f"optim must step after backward, got {trainer.args.optim}, which steps during it. "
            "Choose another, such as adamw_torch."
        )
