"""The groups of a configuration, each for one part of the system. None needs torch.

Those of the objectives are in `objective_configs`.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, final, get_type_hints

from tyro.conf import arg

from surrogap.checks import check_seed, check_type, integer, number
from surrogap.errors import InvalidValueError
from surrogap.training.flags import OptionalFloat, OptionalInt, OptionalStr


class Group:
    """Fields that belong together; each is checked against its annotation."""

    _group = ""  # by default as the class is called

    def __post_init__(self) -> None:
        group = self._group or type(self).__name__.removesuffix("Config").lower()
        for name, hint in get_type_hints(type(self)).items():
            check_type(group if name == "name" else name, getattr(self, name), hint)
        self._check()

    def _check(self) -> None:
        """Checks the values, once the types are right."""

    def _number(self, name: str, *, remedy: str, **bounds: float) -> None:
        if getattr(self, name) is not None:
            number(name, getattr(self, name), remedy=remedy, **bounds)

    def _integer(self, name: str, *, at_least: int, remedy: str) -> None:
        if getattr(self, name) is not None:
            integer(name, getattr(self, name), at_least=at_least, remedy=remedy)


@final
@dataclass(frozen=True)
class ModelConfig(Group):
    """The network."""

    name: Annotated[str, arg(name="model")] = "small_resnet18_narrow"
    """The model: one of those that surrogap models lists, such as vit_s32, or any of timm's."""

    image_size: OptionalInt = None
    """The side in pixels that images are resized to. By default their own; 224 for files."""

    drop: float = 0.0
    """The probability of dropout, in all of the network's dropout layers but attention's."""

    head_bias: OptionalFloat = None
    """What the biases of a new head start from; by default what the network starts them from. With
    --loss sigmoid, -10 has all classes start improbable, as the authors do."""

    weights: OptionalStr = None
    """Whose weights to start from, for transfer: a run's folder, or a .safetensors file. A head
    for another number of classes stays new."""

    def _check(self) -> None:
        self._integer("image_size", at_least=1, remedy="Pass a number of pixels, as 32.")
        self._number("drop", below=1.0, remedy="Pass a probability, such as 0.1.")
        self._number("head_bias", above=-math.inf, remedy="Pass one such as -10, or none.")


@final
@dataclass(frozen=True)
class DataConfig(Group):
    """The images."""

    name: Annotated[str, arg(name="data")] = "embedded"
    """The images: embedded, cifar10, cifar100, flowers102, pets37, imagenet, or the path of an .npz
    archive or of a folder with train and val in it."""

    data_root: str = "data"
    """The folder that holds the named sets."""

    download: bool = False
    """Whether to fetch a named set that is not there."""

    skip_damaged: bool = False
    """Leave damaged image files out, with a warning. By default they are an error: the headers of
    all files are checked before the first step."""

    train_per_class: OptionalInt = None
    """Train on the first so many images of each class, in the order of the set. By default all."""

    val_per_class: OptionalInt = None
    """Hold out the next so many training images of each class for validation. By default none."""

    train_labels: Literal["clean", "noisy"] = "clean"
    """The labels to train on: the set's own, or train_noisy_labels of an .npz archive."""

    augmentation: Literal["none", "light", "medium", "strong"] = "light"
    """light: crop and flip; medium: mixup with probability 0.2 and RandAugment 10 too; strong: 15.
    """

    batch_size: int = 128
    """How many images a step takes, on all processes together."""

    eval_batch_size: OptionalInt = None
    """How many images each process evaluates at once. By default four times its training batch."""

    num_workers: OptionalInt = None
    """How many worker processes read files. By default the processors that there are, 8 at most."""

    def _check(self) -> None:
        self._integer("batch_size", at_least=1, remedy="Pass a number of images, as 128.")
        for name in ("train_per_class", "val_per_class"):
            self._integer(name, at_least=1, remedy="Pass a number of images, as 100.")
        self._integer("eval_batch_size", at_least=1, remedy="Pass a number, as 512.")
        self._integer("num_workers", at_least=0, remedy="Pass 0 to read in this process.")


@final
@dataclass(frozen=True)
class OptimizerConfig(Group):
    """What moves the weights along the objective's direction."""

    name: Annotated[str, arg(name="optimizer")] = "sgd"
    """The optimizer: sgd, adamw, another of torch.optim (not lbfgs or sparseadam; muon for matrices
    alone), or adabelief where its package is."""

    lr: float = 0.1
    """The largest learning rate."""

    momentum: float = 0.9
    """The momentum, of optimizers that have one."""

    nesterov: bool = False
    """Whether the momentum is Nesterov's; for sgd."""

    betas: tuple[float, float] = (0.9, 0.999)
    """How slowly the moments follow the gradient, of Adam and its kin."""

    weight_decay: float = 0.0
    """The weight decay, as the optimizer means it: decoupled for adamw, added to g for sgd."""

    decay_on: Literal["all", "matrices"] = "all"
    """What decays: all weights, or those of two or more dimensions, and no bias or norm."""

    clip_norm: OptionalFloat = None
    """The largest global norm of the direction; longer ones are shortened. By default any."""

    def _check(self) -> None:
        self._number("lr", above=0.0, remedy="Pass a positive number, such as 0.1.")
        self._number("weight_decay", remedy="Pass a non-negative number, such as 5e-4.")
        self._number("momentum", below=1.0, remedy="Pass a number such as 0.9.")
        self._number("clip_norm", above=0.0, remedy="Pass a positive number, such as 1.0.")
        for beta in self.betas:
            number("betas", beta, below=1.0, remedy="Pass two numbers such as 0.9 0.999.")


@final
@dataclass(frozen=True)
class ScheduleConfig(Group):
    """How long, and how fast when."""

    epochs: int = 20
    """How often to go through the images."""

    steps: OptionalInt = None
    """How many steps to take in all, in place of epochs."""

    warmup_steps: int = 0
    """Over how many steps the learning rate rises from 0 to lr."""

    warmup_epochs: float = 0.0
    """The same in epochs, in place of steps."""

    decay: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate goes from lr to lr_min after the warm-up."""

    lr_min: float = 0.0
    """The last learning rate."""

    def _check(self) -> None:
        self._integer("epochs", at_least=1, remedy="Pass how often to go through the images.")
        self._integer("steps", at_least=1, remedy="Pass how many steps to take.")
        self._integer("warmup_steps", at_least=0, remedy="Pass 0 for no warm-up.")
        self._number("warmup_epochs", remedy="Pass 0 for no warm-up.")
        self._number("lr_min", remedy="Pass a non-negative number, such as 0.")
        if self.warmup_steps and self.warmup_epochs:
            raise InvalidValueError(
                f"warmup_epochs must be 0 where warmup_steps is given, got {self.warmup_epochs} "
                f"and warmup_steps={self.warmup_steps}. Pass one of the two."
            )


@final
@dataclass(frozen=True)
class ExecutionConfig(Group):
    """How it is computed, and from which random numbers."""

    seed: int = 0
    """Of the first weights, the order of the images, their augmentation and dropout."""

    device: str = "auto"
    """cpu, cuda, or another of torch's devices. By default cuda where there is one."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the passes. Weights are float32; fp16 scales the loss."""

    micro_batches: int = 1
    """In how many parts a process computes its batch, to save memory."""

    perturbation: Literal["shared", "each"] = "shared"
    """Whether the micro-batches share one perturbation, or take one each (m-sharpness)."""

    compile: bool = False
    """Whether to compile the network with torch.compile."""

    capture: bool = False
    """Whether to record a whole step as a CUDA graph and replay it."""

    channels_last: bool = False
    """Whether images and convolutions lie in memory with channels last, which GPUs prefer."""

    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """Under torchrun: whole weights in each process, or a piece of them in each."""

    max_skipped: int = 10
    """After how many steps in a row with a loss that is not finite the run stops."""

    def _check(self) -> None:
        check_seed(self.seed)
        self._integer("micro_batches", at_least=1, remedy="Pass 1 for whole batches.")
        self._integer("max_skipped", at_least=0, remedy="Pass 0 to stop at the first.")
        if self.capture and self.precision == "fp16":
            raise InvalidValueError(
                "precision must be fp32 or bf16 where a step is captured, got fp16. "
                "Whether a step overflowed is known only after it: pass --precision bf16."
            )


@final
@dataclass(frozen=True)
class OutputConfig(Group):
    """What the run leaves behind, and how often."""

    out: OptionalStr = None
    """The run's folder. By default runs/DATA-MODEL-OBJECTIVE-SEED."""

    record_every: int = 50
    """Every how many steps a line is recorded."""

    eval_every: int = 1
    """Every how many epochs the network is evaluated; after the last it always is."""

    eval_on: Literal["test", "val", "both"] = "test"
    """The images it is evaluated on: the test split, the validation split, or both."""

    checkpoint_every: OptionalInt = None
    """Save a checkpoint every so many steps and after the last. By default at the ends of epochs,
    at most once a minute. 0 saves none."""

    tensorboard: bool = True
    """Whether to write the records for TensorBoard too."""

    sharpness_every: OptionalInt = None
    """Every how many steps the dominant eigenvalue of the Hessian and the surrogate gap are
    measured and recorded. By default never."""

    sharpness_images: int = 1000
    """On how many training images, drawn at random and kept in memory."""

    def _check(self) -> None:
        self._integer("record_every", at_least=1, remedy="Pass a number of steps, as 50.")
        self._integer("eval_every", at_least=1, remedy="Pass a number of epochs, as 1.")
        self._integer("checkpoint_every", at_least=0, remedy="Pass 0 for none.")
        self._integer("sharpness_every", at_least=1, remedy="Pass a number, as 1000.")
        self._integer("sharpness_images", at_least=1, remedy="Pass a number, as 1000.")
