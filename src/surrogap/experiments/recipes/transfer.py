"""The paper's transfer learning: networks trained on ImageNet, fine-tuned on smaller sets.

From the appendix: SGD without weight decay, the learning rate decays linearly, gradients are
clipped at norm 1; 10,000 steps with 500 to warm up on CIFAR, 500 with 100 on Oxford's sets. What
differs between the paper's columns is what the network was trained with before.
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
    OptimizerConfig,
    OutputConfig,
    ScheduleConfig,
)
from surrogap.training.objective_configs import VanillaConfig


class Task(NamedTuple):
    """A set to fine-tune on, for how long, and the paper's accuracies in percent.

    The accuracies are for weights trained under vanilla, SAM and GSAM.
    """

    steps: int
    warmup_steps: int
    eval_every: int  # epochs, of which the smallest set has 500
    vit_b16: tuple[float, float, float]
    vit_s16: tuple[float, float, float]


TASKS = {
    "cifar10": Task(10_000, 500, 10, (98.1, 98.6, 98.8), (97.6, 98.2, 98.4)),
    "cifar100": Task(10_000, 500, 10, (87.6, 89.1, 89.7), (85.7, 87.6, 88.1)),
    "flowers102": Task(500, 100, 50, (88.5, 91.8, 91.2), (86.4, 91.5, 90.3)),
    "pets37": Task(500, 100, 10, (91.9, 93.1, 94.4), (90.4, 92.9, 93.5)),
}

_NOTES = (
    "Train {source} first, or pass --weights with a run's folder or a .safetensors file. The paper "
    "searches the learning rate in 0.001, 0.003, 0.01 and 0.03 and does not tell which was best, "
    "nor the batch: these are 0.01 and 512, and images are of 224 pixels, as before."
)


def recipes() -> Iterator[Recipe]:
    """Four sets, from two networks that were trained under three objectives.

    >>> len(list(recipes()))
    24
    """
    for data, task in TASKS.items():
        for model in ("vit_b16", "vit_s16"):
            for objective, accuracy in zip(OBJECTIVES, getattr(task, model), strict=True):
                yield _recipe(data, task, model, objective, accuracy)


def _recipe(data: str, task: Task, model: str, objective: str, accuracy: float) -> Recipe:
    source = f"{model.replace('_', '-')}-{objective}"
    name = f"{data}-from-{source}"
    weights = f"runs/imagenet-{model}-{objective}-0"
    return Recipe(
        name=name,
        # A folder by name: by data, model and objective alone, the three sources would share one.
        config=_config(data, task, model, weights).override(out=f"runs/{name}"),
        reproduces=f"the paper's transfer table: {model} of {objective} on {data}",
        expected=f"Top-1 accuracy of {accuracy} % in the paper. Not run here.",
        notes=_NOTES.format(source=source),
    )


def _config(data: str, task: Task, model: str, weights: str) -> Config:
    return Config(
        model=ModelConfig(name=model, image_size=224, weights=weights),
        data=DataConfig(name=data, augmentation="light", batch_size=512),
        objective=VanillaConfig(),
        optimizer=OptimizerConfig(name="sgd", lr=0.01, momentum=0.9, clip_norm=1.0),
        schedule=ScheduleConfig(steps=task.steps, warmup_steps=task.warmup_steps, decay="linear"),
        execution=ExecutionConfig(precision="bf16", micro_batches=4),
        output=OutputConfig(eval_every=task.eval_every),
    )
