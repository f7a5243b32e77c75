"""The training step: from a batch to new weights and metrics."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from surrogap.core.buffers import Buffers
from surrogap.core.entropy import EntropySGD
from surrogap.core.objective import Objective
from surrogap.core.passes import Closure
from surrogap.core.report import Report
from surrogap.data import Batch
from surrogap.training import losses
from surrogap.training.config import Config
from surrogap.training.losses import Criterion
from surrogap.training.processes import World

# The dtype of autocast for each precision; None for no autocast.
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

# All but cuDNN's, which torch 2.11 prefers on Hopper GPUs. Its gradient of the queries is NaN in
# rows whose log-sum-exp is below -88.7: the exponential of 88.8 is infinite (results/README.md).
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# The elements of a step's tensor. `value` is `Report.value`, which is finite in every step that is
# not skipped. Others are NaN if a step does not measure them. `overflow` is 1 or 0.
METRICS = (
    *("loss", "perturbed_loss", "gap", "grad_norm", "perturbed_grad_norm", "cosine"),
    *("accuracy", "value", "overflow"),
)


class NonFiniteLossError(Exception):
    """Raised if the loss of a pass is infinite or NaN."""


class Step(ABC):
    """Abstract training step on a batch.

    Args:
        config: Precision, micro-batches and clipping.
        model: The model, wrapped for its processes.
        objective: The objective.
        optimizer: The optimizer.
        loss: The loss f of logits and targets.
        world: The processes.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        objective: Objective,
        optimizer: Optimizer,
        loss: Criterion,
        world: World,
    ) -> None:
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.world = world
        self._loss = loss
        self._autocast = AUTOCAST[config.execution.precision]
        self._num_micro_batches = config.execution.micro_batches
        self._shares_perturbation = config.execution.perturbation == "shared"
        self._clip_norm = config.optimizer.clip_norm
        self._is_channels_last = config.execution.channels_last
        self._climb_fraction: float = getattr(config.objective, "climb_fraction", 1.0)

    @abstractmethod
    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """Take a step, and return its `METRICS` as a tensor on the device.

        Raises:
            NonFiniteLossError: The loss of a pass is not finite in one of the processes. Weights,
                buffers and the states of optimizer and objective are unchanged.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the gradient scaler; empty without one."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the gradient scaler, if there is one."""

    def _loss_and_accuracy(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self._is_channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        device, dtype = self.world.device.type, self._autocast
        with sdpa_kernel(_ATTENTION), torch.autocast(device, dtype, enabled=dtype is not None):
            logits = self.model(images)
        logits = logits.float()
        return self._loss(logits, targets), losses.accuracy(logits.detach(), targets)


@final
class EagerStep(Step):
    """An eager step, which launches its kernels one by one."""

    @cached_property
    def scaler(self) -> GradScaler:
        """The gradient scaler, which is enabled for fp16 only."""
        return GradScaler(self.world.device.type, enabled=self._autocast == torch.float16)

    @cached_property
    def _buffers(self) -> Buffers:
        return Buffers()

    @cached_property
    def _buffers_of_modules(self) -> list[dict[str, Tensor | None]]:
        # Found once: a walk over the modules of a ResNet-18 takes 0.2 ms.
        return [module._buffers for module in self.model.modules()]

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """See `Step`."""
        self._losses: list[Tensor] = []
        state = self.objective.state_dict()
        with self._buffers.kept(self._buffers_of_modules, on_error_only=True):
            report = self._backward(images, targets)
            if self._has_non_finite_loss():
                self.objective.load_state_dict(state)
                self.optimizer.zero_grad()
                raise NonFiniteLossError
        return step_metrics(report, has_overflown=self._update())

    def state_dict(self) -> dict[str, Any]:
        """See `Step`."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Step`."""
        if state:  # a captured step has none
            self.scaler.load_state_dict(dict(state))

    def _backward(self, images: Tensor, targets: Tensor) -> Report:
        scaler = self.scaler if self.scaler.is_enabled() else None
        chunks = (tensor.chunk(self._num_micro_batches) for tensor in (images, targets))
        closures = [self._closure(*batch) for batch in zip(*chunks, strict=True)]
        if self._shares_perturbation or len(closures) == 1:
            climb = self._climb(images, targets)
            return self.objective.backward(closures, climb=climb, scaler=scaler)
        reports = [
            self.objective.backward(closure, scaler=scaler, sync=closure is closures[-1])
            for closure in closures
        ]
        if self._divisor == 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= len(closures)
        return Report.mean(reports, divisor=self._divisor)

    def _climb(self, images: Tensor, targets: Tensor) -> Closure | None:
        """Return the closure of the first pass if it uses a fraction of the batch, else None."""
        if self._climb_fraction == 1:
            return None
        return self._closure(*climb_batch((images, targets), self._climb_fraction))

    def _has_non_finite_loss(self) -> bool:
        """Return True, in all processes, if a loss of the step is not finite in one of them.

        This is the only point where a step waits for the device: it reads the losses of all passes.
        """
        is_finite = torch.stack(self._losses).isfinite().all()
        return bool(self.world.largest(int(not is_finite)))

    def _update(self) -> bool:
        """Clip, step and clear the gradients; return True if the scaler skipped the step."""
        scale = self.scaler.get_scale()
        self.scaler.unscale_(self.optimizer)
        if self._clip_norm is not None:
            clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.scaler.get_scale() < scale

    @property
    def _divisor(self) -> int:
        """The divisor of a micro-batch's loss.

        EntropySGD's direction is not linear in the loss: if each micro-batch has its own
        perturbation, the directions are divided instead.
        """
        is_walk = isinstance(self.objective, EntropySGD) and not self._shares_perturbation
        return 1 if is_walk else self._num_micro_batches

    def _closure(self, images: Tensor, targets: Tensor) -> Closure:
        def closure() -> tuple[Tensor, Tensor]:
            loss, accuracy = self._loss_and_accuracy(images, targets)
            self._losses.append(loss.detach())
            return loss / self._divisor, accuracy

        return closure


@final
class CUDAGraphStep(Step):
    """A step that is captured as a CUDA graph at the first batch, and then replayed.

    The loss cannot be read before the weights are updated, so a non-finite loss is found only at
    the next record or checkpoint.
    """

    _replay: Callable[..., Report] | None = None

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """See `Step`."""
        if self._replay is None:
            # Not in __init__: loading a checkpoint replaces the tensors of the optimizer.
            from surrogap.core.capture import capture

            self._replay = capture(
                self.objective,
                self.optimizer,
                self._loss_and_accuracy,
                (images, targets),
                clip_norm=self._clip_norm,
                micro_batches=self._num_micro_batches,
                shares_perturbation=self._shares_perturbation,
                climb_fraction=self._climb_fraction,
            )
        return step_metrics(self._replay(images, targets))


def climb_batch(batch: Batch, fraction: float) -> Batch:
    """Return the first rows of a batch, at least one, for a first pass on a fraction of it.

    >>> climb_batch((torch.arange(8), torch.arange(8)), 0.25)
    (tensor([0, 1]), tensor([0, 1]))
    """
    images, targets = batch
    num_images = max(1, round(fraction * len(images)))
    return images[:num_images], targets[:num_images]


def step_metrics(report: Report, *, has_overflown: bool = False) -> Tensor:
    """Return the metrics of a step as one tensor on the device, in the order of `METRICS`."""
    values = [getattr(report, name) for name in METRICS[:6]]
    mean_accuracy = torch.stack(tree_leaves(report.aux)).mean()
    overflow = torch.full_like(mean_accuracy, float(has_overflown))
    return torch.stack([*values, mean_accuracy, report.value, overflow])
