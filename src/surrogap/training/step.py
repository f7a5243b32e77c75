"""One training step: from a batch to new weights and measurements."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from surrogap.core.buffers import Buffers
from surrogap.core.entropy import EntropySGD
from surrogap.core.objective import Objective
from surrogap.core.report import Report
from surrogap.data import Batch
from surrogap.training.config import Config
from surrogap.training.losses import Loss, accuracy
from surrogap.training.processes import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Not cuDNN's, which torch 2.11 prefers on Hopper GPUs. Its gradient of the queries is NaN in rows
# whose log-sum-exp is below -88.7: the exponential of 88.8 is infinite (results/README.md).
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Closure = Callable[[], tuple[Tensor, Tensor]]

# The columns of a step's tensor. `value` is `Report.value`, which is finite in every step that is
# not lost; others are NaN where a step does not measure them. `overflow` is 1 or 0.
METRICS = (
    *("loss", "perturbed_loss", "gap", "grad_norm", "perturbed_grad_norm", "cosine"),
    *("accuracy", "value", "overflow"),
)


class NonFiniteLossError(Exception):
    """Raised where the loss of a pass is infinite or NaN."""


class Step(ABC):
    """Takes one step on a batch.

    Args:
        config: Precision, micro-batches and clipping.
        model: The network, as it is trained.
        objective: The objective.
        optimizer: The optimizer.
        loss: f, of logits and targets.
        world: The processes.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        objective: Objective,
        optimizer: Optimizer,
        loss: Loss,
        world: World,
    ) -> None:
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.world = world
        self._loss = loss
        self._dtype = DTYPES[config.execution.precision]
        self._num_micro_batches = config.execution.micro_batches
        self._shares_perturbation = config.execution.perturbation == "shared"
        self._clip_norm = config.optimizer.clip_norm
        self._is_channels_last = config.execution.channels_last
        self._climb_fraction: float = getattr(config.objective, "climb_fraction", 1.0)

    @abstractmethod
    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """Takes a step, and returns what it measured: `METRICS`, on the device.

        Raises:
            NonFiniteLossError: The loss of a pass is not finite, in any of the processes. Weights,
                buffers, the optimizer's state and the objective's are as they were.
        """

    def _loss_and_accuracy(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self._is_channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        is_narrow = self._dtype != torch.float32
        with (
            sdpa_kernel(_ATTENTION),
            torch.autocast(self.world.device.type, self._dtype, enabled=is_narrow),
        ):
            logits = self.model(images)
        logits = logits.float()
        return self._loss(logits, targets), accuracy(logits.detach(), targets)


@final
class EagerStep(Step):
    """A step that is launched kernel by kernel."""

    @cached_property
    def scaler(self) -> GradScaler:
        """Scales the loss for fp16, and does nothing otherwise."""
        return GradScaler(self.world.device.type, enabled=self._dtype == torch.float16)

    @cached_property
    def _buffers(self) -> Buffers:
        return Buffers()

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """See `Step`."""
        self._losses: list[Tensor] = []
        state = self.objective.state_dict()
        dictionaries = [module._buffers for module in self.model.modules()]
        with self._buffers.kept(dictionaries, on_error_only=True):
            report = self._backward(images, targets)
            if self._is_lost():
                self.objective.load_state_dict(state)
                self.optimizer.zero_grad()
                raise NonFiniteLossError
        return step_metrics(report, has_overflown=self._update())

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
        """Return the closure of a first pass on the start of the batch, if it is to be one."""
        if self._climb_fraction == 1:
            return None
        return self._closure(*climb_batch((images, targets), self._climb_fraction))

    def _is_lost(self) -> bool:
        """Return True if a loss of the step is not finite, in all processes or in none.

        This is a step's one wait for the device: every pass adds to the list that it reads.
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
        """By what a micro-batch's loss is divided.

        EntropySGD's walk is not linear in the loss: where each micro-batch has a walk of its own,
        their directions are divided instead.
        """
        is_walk = isinstance(self.objective, EntropySGD) and not self._shares_perturbation
        return 1 if is_walk else self._num_micro_batches

    def _closure(self, images: Tensor, targets: Tensor) -> Closure:
        def closure() -> tuple[Tensor, Tensor]:
            loss, right = self._loss_and_accuracy(images, targets)
            self._losses.append(loss.detach())
            return loss / self._divisor, right

        return closure


@final
class CUDAGraphStep(Step):
    """A step that is captured as a CUDA graph at the first batch, and replayed from then on.

    It cannot read the loss before the weights have moved, so a loss that is not finite is found
    only when the records are read.
    """

    _replay: Callable[..., Report] | None = None

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """See `Step`."""
        if self._replay is None:
            # Not before: a checkpoint that is loaded moves the optimizer's state.
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
    """Return the measurements of a step as one tensor on the device, in the order of `METRICS`."""
    values = [getattr(report, name) for name in METRICS[:6]]
    right = torch.stack(_leaves(report.aux)).mean()
    overflow = torch.full_like(right, float(has_overflown))
    return torch.stack([*values, right, report.value, overflow])


def _leaves(aux: object) -> list[Tensor]:
    if isinstance(aux, Tensor):
        return [aux]
    return [leaf for item in aux for leaf in _leaves(item)] if isinstance(aux, list) else []
