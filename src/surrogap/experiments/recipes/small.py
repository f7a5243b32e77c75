"""Small images: CIFAR, and the part of Fashion-MNIST inside the package.

None of this is in the paper. A single GPU finishes each recipe in minutes; those named
`fashion-mnist-OBJECTIVE`, without a network's name, are for a laptop's processor, and are what
`surrogap compare` trains unless told otherwise.
"""

from collections.abc import Iterator
from typing import NamedTuple

from surrogap.experiments.recipes.imagenet import OBJECTIVES
from surrogap.experiments.recipes.recipe import Recipe
from surrogap.training.config import (
    Config,
    DataConfig,
    ExecutionConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ScheduleConfig,
)


class Settings(NamedTuple):
    """What depends on the network."""

    model: str
    optimizer: OptimizerConfig
    warmup_epochs: float
    rho: float  # of SAM; GSAM's decays from there to a fifth
    alpha: float


_SGD = OptimizerConfig(name="sgd", lr=0.1, weight_decay=5e-4, nesterov=True)
_ADAMW = OptimizerConfig(name="adamw", lr=1e-3, weight_decay=0.1, clip_norm=1.0)

NETWORKS = {
    "resnet18": Settings("small_resnet18", _SGD, warmup_epochs=0.0, rho=0.1, alpha=0.1),
    "vit": Settings("small_vit", _ADAMW, warmup_epochs=5.0, rho=0.1, alpha=0.2),
    "mixer": Settings("small_mixer", _ADAMW, warmup_epochs=5.0, rho=0.1, alpha=0.2),
}
SETS = {"fashion-mnist": "embedded", "cifar10": "cifar10", "cifar100": "cifar100"}


def recipes() -> Iterator[Recipe]:
    """Three objectives: on a processor, and for three sets and three networks on a GPU.

    >>> len(list(recipes()))
    30
    """
    for objective in OBJECTIVES:
        yield _laptop(objective)
    for data in SETS:
        for network in NETWORKS:
            for objective in OBJECTIVES:
                yield _gpu(data, network, objective)


def _laptop(objective: str) -> Recipe:
    return Recipe(
        name=f"fashion-mnist-{objective}",
        config=Config(
            model=ModelConfig(name="small_mlp"),
            data=DataConfig(name="embedded", augmentation="light", batch_size=128),
            objective=_objective(objective, rho=0.2, alpha=0.2),
            optimizer=OptimizerConfig(name="sgd", lr=0.1),
            schedule=ScheduleConfig(epochs=30, decay="cosine"),
            execution=ExecutionConfig(device="cpu"),
        ),
        reproduces="nothing of the paper: a comparison that a laptop can make",
        expected="See results.",
    )


def _gpu(data: str, network: str, objective: str) -> Recipe:
    settings = NETWORKS[network]
    return Recipe(
        name=f"{data}-{network}-{objective}",
        config=Config(
            model=ModelConfig(name=settings.model),
            data=DataConfig(name=SETS[data], augmentation="light", batch_size=128),
            objective=_objective(objective, settings.rho, settings.alpha),
            optimizer=settings.optimizer,
            schedule=ScheduleConfig(
                epochs=100, warmup_epochs=settings.warmup_epochs, decay="cosine"
            ),
            execution=ExecutionConfig(
                precision="bf16", capture=True, channels_last=network == "resnet18"
            ),
        ),
        reproduces="nothing of the paper: its comparison on small images",
        expected="Not run here.",
    )


def _objective(name: str, rho: float, alpha: float) -> ObjectiveConfig:
    if name == "vanilla":
        return ObjectiveConfig(name="vanilla")
    if name == "sam":
        return ObjectiveConfig(name="sam", rho=rho)
    return ObjectiveConfig(name="gsam", rho=rho, rho_min=rho / 5, alpha=alpha)
