"""One training step: from a batch to new weights, and what was seen on the way."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from surrogap.core.entropy import EntropySGD
from surrogap.core.objective import Objective
from surrogap.core.report import Report
from surrogap.training.config import Config
from surrogap.training.losses import Loss, accuracy
from surrogap.training.processes import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Not cuDNN's, which torch 2.11 prefers on Hopper GPUs. Its gradient of the queries is NaN in rows
# whose log-sum-exp is below -88.7: the exponential of 88.8 is infinite (results/README.md).
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# What a step measures, in the order of its tensor.
MEASURES = (
    *("loss", "perturbed_loss", "gap", "grad_norm", "perturbed_grad_norm", "cosine"),
    "accuracy",
)


class NonFiniteLossError(Exception):
    """The loss of a pass is infinite or not a number."""


class Step(ABC):
    """Takes one step on a batch.

    Args:
        config: Precision, micro-batches and clipping.
        model: The network, as it is trained.
        objective: What is minimised.
        optimizer: What moves the weights.
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
        self._num_parts = config.execution.micro_batches
        self._shares_perturbation = config.execution.perturbation == "shared"
        self._clip_norm = config.optimizer.clip_norm
        self._is_channels_last = config.execution.channels_last

    @abstractmethod
    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """Takes a step, and returns what it saw: `MEASURES`, on the device.

        Raises:
            NonFiniteLossError: The loss is not finite. The weights are as they were; so are
                BatchNorm's statistics, but for what micro-batches with a perturbation of their own
                have moved before.
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

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        """See `Step`."""
        parts = list(
            zip(images.chunk(self._num_parts), targets.chunk(self._num_parts), strict=True)
        )
        reports = self._backward([self._closure(*part) for part in parts])
        self.scaler.unscale_(self.optimizer)
        if self._clip_norm is not None:
            clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return measured(reports, self._divisor)

    def _backward(self, closures: Sequence[Callable[[], tuple[Tensor, Tensor]]]) -> list[Report]:
        scaler = self.scaler if self.scaler.is_enabled() else None
        if self._shares_perturbation or len(closures) == 1:
            return [self.objective.backward(closures, scaler=scaler)]
        try:
            reports = [
                self.objective.backward(closure, scaler=scaler, sync=closure is closures[-1])
                for closure in closures
            ]
        except NonFiniteLossError:
            self.optimizer.zero_grad()  # what the micro-batches before have added
            raise
        if self._divisor == 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= len(closures)
        return reports

    @property
    def _divisor(self) -> int:
        """By what a micro-batch's loss is divided.

        EntropySGD's walk is not linear in the loss: where each micro-batch has a walk of its own,
        their directions are divided instead.
        """
        is_walk = isinstance(self.objective, EntropySGD) and not self._shares_perturbation
        return 1 if is_walk else self._num_parts

    def _closure(self, images: Tensor, targets: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        def closure() -> tuple[Tensor, Tensor]:
            loss, right = self._loss_and_accuracy(images, targets)
            # All processes leave the step, or none: else some would wait for the others.
            if self.world.largest(int(not loss.isfinite())):
                raise NonFiniteLossError
            return loss / self._divisor, right

        return closure


@final
class CapturedStep(Step):
    """A step that is recorded as a CUDA graph at the first batch, and replayed from then on.

    It cannot look at the loss before the weights have moved, so a loss that is not finite is found
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
                micro_batches=self._num_parts,
                shares_perturbation=self._shares_perturbation,
            )
        return measured([self._replay(images, targets)], 1)


def measured(reports: Sequence[Report], divisor: int) -> Tensor:
    """What the reports of one step measured, as one tensor on the device.

    Of several reports, the mean losses, and norms and cosine by the mean products.

    Args:
        reports: One for each call of the objective's.
        divisor: By what the losses had been divided, where there are several.
    """
    rows = torch.stack(
        [
            torch.stack(
                [
                    *(getattr(report, name) for name in MEASURES[:-1]),
                    torch.stack(_leaves(report.aux)).mean(),
                ]
            )
            for report in reports
        ]
    )
    if len(rows) == 1:
        return rows[0]
    *losses, g, g_p, cosine, right = rows.unbind(1)
    gg, gp, pp = ((a * b).mean() for a, b in ((g, g), (cosine * g, g_p), (g_p, g_p)))
    norms = (gg.sqrt() * divisor, pp.sqrt() * divisor, gp / (gg * pp).sqrt())
    return torch.stack([*(loss.mean() * divisor for loss in losses), *norms, right.mean()])


def _leaves(aux: object) -> list[Tensor]:
    if isinstance(aux, Tensor):
        return [aux]
    return [leaf for part in aux for leaf in _leaves(part)] if isinstance(aux, list) else []
