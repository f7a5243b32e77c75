"""The groups of a configuration, without torch. Those of the objectives are in `objective_configs`.

The docstring of a field is the help of its flag.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, final, get_type_hints

from tyro.conf import arg

from surrogap.checks import check_seed, check_type, integer, number
from surrogap.errors import InvalidValueError
from surrogap.training.flags import OptionalFloat, OptionalInt, OptionalStr


class Group:
    """A group of fields. Each is checked against its annotation."""

    _group = ""  # by default the name of the class

    def __post_init__(self) -> None:
        group = self._group or type(self).__name__.removesuffix("Config").lower()
        for name, hint in get_type_hints(type(self)).items():
            check_type(group if name == "name" else name, getattr(self, name), hint)
        self._check()

    def _check(self) -> None:
        """Check the values. The types have been checked."""

    def _number(self, name: str, *, remedy: str, **bounds: float) -> None:
        if getattr(self, name) is not None:
            number(name, getattr(self, name), remedy=remedy, **bounds)

    def _integer(self, name: str, *, at_least: int, remedy: str) -> None:
        if getattr(self, name) is not None:
            integer(name, getattr(self, name), at_least=at_least, remedy=remedy)


@final
@dataclass(frozen=True)
class ModelConfig(Group):
    """The model."""

    name: Annotated[str, arg(name="model")] = "small_resnet18_narrow"
    """The model: a name that surrogap models lists, such as vit_s32, or any of timm's."""

    image_size: OptionalInt = None
    """The size in pixels that images are resized to. By default their own, or 224 for files."""

    drop: float = 0.0
    """The dropout probability, in all dropout layers except those of attention."""

    head_bias: OptionalFloat = None
    """The initial bias of the head. By default that of the model. With --loss sigmoid the authors
    use -10, so that all classes start with a low probability."""

    weights: OptionalStr = None
    """Weights to start from, for transfer learning: a run's folder, or a .safetensors file. A head
    for another number of classes is initialised at random."""

    def _check(self) -> None:
        self._integer("image_size", at_least=1, remedy="Pass a number of pixels, such as 32.")
        self._number("drop", below=1.0, remedy="Pass a probability, such as 0.1.")
        self._number("head_bias", above=-math.inf, remedy="Pass one such as -10, or None.")


@final
@dataclass(frozen=True)
class DataConfig(Group):
    """The data."""

    name: Annotated[str, arg(name="data")] = "embedded"
    """The images: embedded, cifar10, cifar100, flowers102, pets37, imagenet, or the path of an .npz
    archive or of a folder with train and val in it."""

    data_root: str = "data"
    """The folder of named datasets."""

    download: bool = False
    """Download a named dataset that is missing."""

    skip_damaged: bool = False
    """Leave out damaged image files, with a warning. By default they are an error. The files are
    checked before the first step."""

    train_per_class: OptionalInt = None
    """The number of training images per class, from the start of the dataset. By default all."""

    val_per_class: OptionalInt = None
    """The number of training images of each class to hold out for validation. By default none."""

    train_labels: Literal["clean", "noisy"] = "clean"
    """The training labels: those of the dataset, or train_noisy_labels of an .npz archive."""

    augmentation: Literal["none", "light", "medium", "strong"] = "light"
    """light: crop and flip. medium: also mixup with probability 0.2, and RandAugment with magnitude
    10. strong: magnitude 15."""

    batch_size: int = 128
    """The number of images per step, over all processes."""

    eval_batch_size: OptionalInt = None
    """The batch size of evaluation in each process. By default four times that of training."""

    num_workers: OptionalInt = None
    """The number of worker processes that read files. By default the number of CPUs, at most 8."""

    def _check(self) -> None:
        self._integer("batch_size", at_least=1, remedy="Pass a number such as 128.")
        for name in ("train_per_class", "val_per_class"):
            self._integer(name, at_least=1, remedy="Pass a number such as 100.")
        self._integer("eval_batch_size", at_least=1, remedy="Pass a number such as 512.")
        self._integer("num_workers", at_least=0, remedy="Pass 0 to read in this process.")

    def batch_size_in_evaluation(self, num_processes: int = 1) -> int:
        """Return the batch size of evaluation in each of some processes.

        >>> DataConfig(batch_size=32).batch_size_in_evaluation()
        128
        """
        return self.eval_batch_size or 4 * (self.batch_size // num_processes)


@final
@dataclass(frozen=True)
class OptimizerConfig(Group):
    """The optimizer."""

    name: Annotated[str, arg(name="optimizer")] = "sgd"
    """The optimizer: sgd, adamw, any other of torch.optim except lbfgs and sparseadam (muon only if
    all parameters are matrices), or adabelief if its package is installed."""

    lr: float = 0.1
    """The peak learning rate."""

    momentum: float = 0.9
    """The momentum, for optimizers that have one."""

    nesterov: bool = False
    """Use Nesterov momentum; for sgd."""

    betas: tuple[float, float] = (0.9, 0.999)
    """The decay rates of the moments, for Adam and its variants."""

    weight_decay: float = 0.0
    """The weight decay: decoupled for adamw, added to the gradient for sgd."""

    decay_on: Literal["all", "matrices"] = "all"
    """The parameters that decay: all, or matrices only, without biases and normalisation layers."""

    clip_norm: OptionalFloat = None
    """The maximum norm of the gradients. By default they are not clipped."""

    def _check(self) -> None:
        self._number("lr", above=0.0, remedy="Pass a positive number, such as 0.1.")
        self._number("weight_decay", remedy="Pass a non-negative number, such as 5e-4.")
        self._number("momentum", below=1.0, remedy="Pass a number such as 0.9.")
        self._number("clip_norm", above=0.0, remedy="Pass a positive number, such as 1.0.")
        for beta in self.betas:
            number("betas", beta, below=1.0, remedy="Pass two numbers, such as 0.9 0.999.")


@final
@dataclass(frozen=True)
class ScheduleConfig(Group):
    """Training length and learning-rate schedule."""

    epochs: int = 20
    """The number of epochs."""

    steps: OptionalInt = None
    """The number of steps, instead of epochs."""

    warmup_steps: int = 0
    """The number of steps in which the learning rate rises linearly from 0 to lr."""

    warmup_epochs: float = 0.0
    """The length of the warm-up in epochs, instead of steps."""

    decay: Literal["constant", "linear", "cosine"] = "cosine"
    """The decay of the learning rate from lr to lr_min after the warm-up."""

    lr_min: float = 0.0
    """The final learning rate."""

    def _check(self) -> None:
        self._integer("epochs", at_least=1, remedy="Pass a number of epochs, such as 20.")
        self._integer("steps", at_least=1, remedy="Pass a number of steps, such as 1000.")
        self._integer("warmup_steps", at_least=0, remedy="Pass 0 for no warm-up.")
        self._number("warmup_epochs", remedy="Pass 0 for no warm-up.")
        self._number("lr_min", remedy="Pass a non-negative number, such as 0.")
        if self.warmup_steps and self.warmup_epochs:
            raise InvalidValueError(
                f"warmup_epochs must be 0 if warmup_steps is given, got {self.warmup_epochs} "
                f"and warmup_steps={self.warmup_steps}. Pass one of the two."
            )


@final
@dataclass(frozen=True)
class ExecutionConfig(Group):
    """Device, precision, parallelism and seed."""

    seed: int = 0
    """The seed of the initial weights, the order of the images, augmentation and dropout."""

    device: str = "auto"
    """cpu, cuda, or another torch device. By default cuda if it is available."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The precision of the passes. Weights are float32. fp16 uses loss scaling."""

    micro_batches: int = 1
    """The number of micro-batches that each process splits its batch into, to save memory."""

    perturbation: Literal["shared", "each"] = "shared"
    """One perturbation for all micro-batches (shared), or one for each (m-sharpness)."""

    compile: bool = False
    """Compile the model with torch.compile."""

    capture: bool = False
    """Capture the whole step as a CUDA graph and replay it."""

    channels_last: bool = False
    """Use the channels-last memory format, which is faster for convolutions on GPUs."""

    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """With several processes: replicate the weights (ddp) or shard them (fsdp2)."""

    max_skipped: int = 10
    """The maximum number of consecutive steps to skip because of a non-finite loss."""

    def _check(self) -> None:
        check_seed(self.seed)
        self._integer("micro_batches", at_least=1, remedy="Pass 1 for whole batches.")
        self._integer("max_skipped", at_least=0, remedy="Pass 0 to stop at the first.")
        if self.capture and self.precision == "fp16":
            raise InvalidValueError(
                "precision must be fp32 or bf16 with capture, got fp16. Loss scaling needs to read "
                "the gradients before the update: pass --precision bf16."
            )


@final
@dataclass(frozen=True)
class OutputConfig(Group):
    """Records, evaluations and checkpoints."""

    out: OptionalStr = None
    """The run's folder. By default runs/DATA-MODEL-OBJECTIVE-SEED."""

    record_every: int = 50
    """The number of steps between two records."""

    eval_every: int = 1
    """The number of epochs between two evaluations. The last epoch is always evaluated."""

    eval_on: Literal["test", "val", "both"] = "test"
    """The split for evaluation: test, val or both."""

    checkpoint_every: OptionalInt = None
    """The number of steps between two checkpoints. By default one is saved at the end of epochs, at
    most once a minute. The last step always saves one. 0 saves none at all."""

    tensorboard: bool = True
    """Also write the records for TensorBoard."""

    sharpness_every: OptionalInt = None
    """The number of steps between two measurements of the Hessian's dominant eigenvalue and of the
    surrogate gap. By default they are not measured."""

    sharpness_images: int = 1000
    """The number of random training images for these measurements, kept in memory."""

    def _check(self) -> None:
        self._integer("record_every", at_least=1, remedy="Pass a number of steps, such as 50.")
        self._integer("eval_every", at_least=1, remedy="Pass a number of epochs, such as 1.")
        self._integer("checkpoint_every", at_least=0, remedy="Pass 0 for none.")
        self._integer("sharpness_every", at_least=1, remedy="Pass a number such as 1000.")
        self._integer("sharpness_images", at_least=1, remedy="Pass a number such as 1000.")
