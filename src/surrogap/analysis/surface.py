"""The loss of a model over a set of batches, as a function of its weights.

All measurements of this package are made on such a surface: losses and gradients at the weights
`w`, or nearby at `w + delta`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel import DistributedDataParallel

from surrogap.analysis.batches import LossFn, cross_entropy, num_samples_of
from surrogap.analysis.space import Space
from surrogap.core import gradients
from surrogap.core.autograd_graph import leaves
from surrogap.core.buffers import Buffers
from surrogap.core.fsdp import FullySharded
from surrogap.core.random_state import RandomState
from surrogap.core.replicas import Replicas
from surrogap.core.vectors import Layout, wide
from surrogap.core.weights import Weights
from surrogap.errors import InvalidTypeError, InvalidValueError, UnsupportedError

# Takes a batch, its number of samples n and a vector; adds n times the batch's own vector to it,
# and returns the batch's mean loss.
Add = Callable[[Any, int, Tensor], Tensor]
# Called with the number of units done so far, and an upper bound on the total.
Progress = Callable[[int, int], object]


class Surface:
    """The mean loss `f(w) = sum_i n_i * f_i(w) / sum_i n_i` over batches of `n_i` samples.

    Modules run in their current mode. In evaluation mode, which suits most measurements, BatchNorm
    uses its running statistics: `f` is the loss of the deployed model, sample by sample. In
    training mode it uses the statistics of each batch, as in training, so `f` depends on how the
    samples are batched; the running statistics do not change.

    Measurements restore weights, gradients, buffers, modes and torch's random state exactly, also
    after an exception. Each pass starts from the same random state.

    Under DistributedDataParallel each process passes its share of the samples, and every process
    gets the result over all samples. The inner module runs, with the first process's buffers. With
    FSDP2 all processes must have the same number of batches, since their passes communicate. For a
    compiled model, the original module runs.

    Args:
        model: The model; its trainable parameters are the weights.
        batches: An iterable that can be read many times: a list, or a DataLoader without random
            augmentation. Shuffling is harmless, unless BatchNorm is in training mode.
        loss_fn: Maps the model and a batch to the mean loss of the batch.
        num_samples_of: Maps a batch to its number of samples.
        is_checked: Whether to check first that two forward passes over the batches give the same
            loss, which all measurements assume.

    Attributes:
        weights: The parameters.
        space: The vector space of `w`, gradients and directions, which are flat tensors.

    Raises:
        TypeError: `batches` can be read only once, a batch does not hold a tensor, or `loss_fn`
            does not return one.
        ValueError: There is no sample, or processes that communicate have different numbers of
            batches; or the model has no trainable parameter.
        RuntimeError: The loss differs between two passes, or is not a scalar.

    >>> model = nn.Linear(2, 3)
    >>> images, labels = torch.zeros(5, 2), torch.tensor([0, 1, 2, 0, 1])
    >>> surface = Surface(model, [(images[:4], labels[:4]), (images[4:], labels[4:])])
    >>> torch.allclose(surface.loss(), cross_entropy(model, (images, labels)).double())
    True
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        loss_fn: LossFn = cross_entropy,
        *,
        num_samples_of: Callable[[Any], int] = num_samples_of,
        is_checked: bool = True,
    ) -> None:
        if isinstance(batches, Iterator):
            raise InvalidTypeError(
                f"batches must be iterable many times, got {type(batches).__name__}, which can be "
                "read only once. Pass a list or a DataLoader."
            )
        self.model = unwrapped(model)
        self._outer = model
        self.batches = batches
        self.loss_fn = loss_fn
        self.num_samples_of = num_samples_of
        self.weights = weights = Weights(model)
        self.space = Space(weights)
        self._replicas = Replicas(weights, None)
        self._groups = [wrapper.process_group for wrapper in weights.wrappers[:1]]
        self._groups += _fsdp_groups(model)
        self._needs_graph = False
        if weights.are_sharded and isinstance(batches, Sized):
            self._check_number_of_batches(len(batches))
        if is_checked:
            self._probe()

    def batch_surfaces(self, num_batches: int) -> list["Surface"]:
        """A surface for each of the first batches, to measure them one by one.

        With several processes, each surface covers one batch of every process.

        Args:
            num_batches: The number of batches; fewer if the surface has fewer.

        Raises:
            ValueError: The processes have different numbers of batches.
        """
        with self._undisturbed():  # a loader draws random numbers
            batches = list(islice(self.batches, num_batches))
        self._check_number_of_batches(len(batches))
        settings: Any = {"num_samples_of": self.num_samples_of, "is_checked": False}
        return [Surface(self._outer, [batch], self.loss_fn, **settings) for batch in batches]

    def position(self) -> Tensor:
        """The weights `w` as a vector."""
        return self.space.vector(self.weights.tensors)

    def loss(self) -> Tensor:
        """`f(w)`, as a scalar in float64."""
        return self.means(self._add_nothing, torch.empty(0))[0]

    def gradient(self) -> tuple[Tensor, Tensor]:
        """`f(w)` as a scalar in float64, and its gradient as a vector."""
        with self.weights.fsdp.reducing():
            return self.means(self._add_gradient, self.space.zeros())

    @contextmanager
    def moved(self, delta: Tensor) -> Iterator[None]:
        """Context manager that moves the weights to `w + delta`, and restores `w` bit for bit.

        Args:
            delta: The displacement: a flat tensor with an entry for each trainable weight.
        """
        with self._weights_kept() as tensors:
            with torch.no_grad():
                for tensor, piece in zip(tensors, self.space.pieces(delta), strict=True):
                    there = tensor.to(wide(tensor.dtype)) + piece.to(tensor.device)
                    # Autograd graphs built before stay valid: the weights are restored.
                    with _unsafe_preserve_version_counter((tensor,)):
                        tensor.copy_(there)
            yield

    def means(self, add: Add, into: Tensor) -> tuple[Tensor, Tensor]:
        """The means of the loss and of a vector over the samples of all batches and processes.

        Args:
            add: A function of a batch, its number of samples `n`, and `into`. It adds `n` times the
                batch's vector to `into`, and returns the batch's mean loss.
            into: A vector of zeros, which is modified.

        Raises:
            ValueError: There is no sample.
        """
        with self._undisturbed():
            sums = self._sums(add, into)
        for group in self._groups:
            dist.all_reduce(sums, group=group)
            if not self.weights.are_sharded:
                dist.all_reduce(into, group=group)
        return _mean(sums), into.div_(sums[1].to(into))

    def loss_of(self, batch: Any) -> Tensor:
        """The mean loss of a batch on this process, with its autograd graph.

        Args:
            batch: The batch.

        Raises:
            TypeError: The loss function did not return a tensor.
            RuntimeError: It did not return a real scalar.
        """
        loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, Tensor):
            raise InvalidTypeError(
                f"loss_fn must return the loss as a tensor, got {type(loss).__name__}. "
                "Return the mean over the batch's samples."
            )
        if loss.numel() != 1 or not loss.is_floating_point():
            raise UnsupportedError(
                f"loss_fn must return a real scalar, got shape {tuple(loss.shape)} and dtype "
                f"{loss.dtype}. Return the mean over the batch's samples."
            )
        return loss.reshape(())

    def _add_nothing(self, batch: Any, number: int, into: Tensor) -> Tensor:
        try:
            with torch.set_grad_enabled(self._needs_graph):
                return self.loss_of(batch).detach()
        except RuntimeError as error:
            # torch's message if a loss that contains derivatives runs without a graph.
            if self._needs_graph or "does not require grad" not in str(error):
                raise
        self._needs_graph = True  # only from now on: graphs need memory
        return self._add_nothing(batch, number, into)

    def _add_gradient(self, batch: Any, number: int, into: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = self.loss_of(batch)
            # Also clears gradients of inputs and of other modules, and restores them.
            # torch.autograd.grad would leave them alone, but does not work with reentrant
            # checkpointing.
            with gradients.cleared(leaves(loss)):
                # FSDP takes the mean over processes, whose batches may differ in size.
                torch.autograd.backward(loss * number if self.weights.are_sharded else loss)
                taken = gradients.take(self.weights)
        factor = self._num_processes if self.weights.are_sharded else number
        for piece, gradient in zip(self.space.pieces(into), taken, strict=True):
            if gradient is not None:
                piece.add_(gradient.to(piece), alpha=factor)
        return loss.detach()

    def _sums(self, add: Add, into: Tensor) -> Tensor:
        """Sums over this process's batches: of loss times samples, and of samples."""
        (device, *_) = self.weights.devices
        # MPS does not support float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        sums = torch.zeros(2, dtype=dtype, device=device)
        for batch in self.batches:
            number = self.num_samples_of(batch)
            torch.clear_autocast_cache()  # it may hold casts of other weights
            loss = add(batch, number, into).to(sums)
            sums += torch.stack([loss * number, torch.full_like(loss, number)])
        return sums

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Context manager that restores gradients, buffers and random state after passes."""
        self.weights.refresh()
        # An embedding with max_norm writes to its weights in a forward pass.
        writes = any(getattr(m, "max_norm", None) is not None for m in self.weights.modules)
        with (
            self._weights_kept() if writes else nullcontext(),
            gradients.cleared(self.weights.parameters),
            RandomState(self.weights.devices).replayed(),
            Buffers().kept(self.weights.buffers),
            self._replicas.unsynchronised(),
        ):
            self._replicas.share_buffers(self.weights.buffers)
            yield
        self.weights.refresh()  # so that FSDP drops the weights that it gathered

    @contextmanager
    def _weights_kept(self) -> Iterator[list[Tensor]]:
        """Context manager that restores the weights, and yields their tensors."""
        self.weights.refresh()
        tensors = self.weights.tensors
        before = Layout(tensors).read(tensors)
        try:
            yield tensors
        finally:
            before.write_to_(tensors)
            self.weights.refresh()  # so that FSDP drops the perturbed weights that it gathered

    def _probe(self) -> None:
        """Raise if the loss of the model or of the batches differs between two passes."""
        # Above the effects of batch order, kernels and bfloat16, and below that of dropout.
        tolerance = 1e-9 if self.space.dtype is torch.float64 else 1e-3
        with self._undisturbed():  # around all passes, so that they draw different random numbers
            sums = [self._sums(self._add_nothing, torch.empty(0)) for _ in range(2)]
            batch = next(iter(self.batches), None)
            none = torch.empty(0)
            one, other = (
                sums[0][0] if batch is None else self._add_nothing(batch, 1, none) for _ in range(2)
            )
        do_differ = torch.zeros_like(sums[0][0]) + _differ(one, other, tolerance)
        for group in self._groups:
            for tensor in (*sums, do_differ):
                dist.all_reduce(tensor, group=group)
        if do_differ:
            raise UnsupportedError(
                "model must give the same loss for the same batch, got different ones. Dropout in "
                "training mode draws random numbers: call model.eval() first. If the loss changes "
                "the batch in place, as x.div_(2) does, let it change a copy."
            )
        first, second = map(_mean, sums)
        if _differ(first, second, tolerance):
            raise UnsupportedError(
                f"batches must hold the same samples each time, got a mean loss of {first:.6g} and "
                f"then {second:.6g}. Pass a loader that neither augments nor drops at random."
            )

    @property
    def _num_processes(self) -> int:
        return math.prod(dist.get_world_size(group) for group in self._groups)

    def _check_number_of_batches(self, number: int) -> None:
        """Raise if the processes have different numbers of batches."""
        (device, *_) = self.weights.devices
        numbers = torch.tensor([number, -number], device=device)
        for group in self._groups:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
        most, fewest = int(numbers[0]), -int(numbers[1])
        if most != fewest:
            raise InvalidValueError(
                f"number of batches must be the same in each process, got {fewest} to {most}. "
                "The number of samples may differ."
            )


def _mean(sums: Tensor) -> Tensor:
    """The mean loss, from the sums of loss times samples and of samples."""
    if not sums[1]:
        raise InvalidValueError(
            "batches must hold at least one sample, got none. Pass a list or a DataLoader."
        )
    return sums[0] / sums[1]


def _differ(x: Tensor, y: Tensor, tolerance: float) -> Tensor:
    return (x - y).abs() > tolerance * torch.maximum(x.abs(), y.abs())


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel and torch.compile."""
    if isinstance(model, DistributedDataParallel):
        return unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)  # of torch.compile
    return inner if isinstance(inner, nn.Module) else model


def _fsdp_groups(model: nn.Module) -> list[Any]:
    """The process groups over which FSDP averages gradients: one for each mesh dimension."""
    for module in FullySharded(model.modules()).modules:
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None:
            info = group.mesh_info
            names = ("shard_process_group", "replicate_process_group")
            return [getattr(info, name) for name in names if hasattr(info, name)]
    return []
