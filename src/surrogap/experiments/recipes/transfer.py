"""The paper's transfer learning: models trained on ImageNet, fine-tuned on smaller datasets.

The settings are from the paper's appendix: SGD without weight decay, linear decay of the learning
rate, and gradients clipped at norm 1. CIFAR takes 10,000 steps, 500 of them warm-up; Flowers and
Pets take 500 steps, 100 of them warm-up. Fine-tuning is always vanilla: the objective in a
recipe's name is the one used for pretraining on ImageNet.
"""

from collections.abc import Iterator
from typing import NamedTuple

from surrogap.experiments.recipes.recipe import RECIPE_OBJECTIVES, Recipe
from surrogap.training.config import Config


class TransferTask(NamedTuple):
    """A dataset to fine-tune on: the number of steps, and the paper's accuracies in percent.

    The accuracies are for weights that were trained with vanilla, SAM and GSAM.
    """

    steps: int
    warmup_steps: int
    eval_every: int  # epochs; the smallest dataset takes 500
    vit_b16: tuple[float, float, float]
    vit_s16: tuple[float, float, float]


TASKS = {
    "cifar10": TransferTask(10_000, 500, 10, (98.1, 98.6, 98.8), (97.6, 98.2, 98.4)),
    "cifar100": TransferTask(10_000, 500, 10, (87.6, 89.1, 89.7), (85.7, 87.6, 88.1)),
    "flowers102": TransferTask(500, 100, 50, (88.5, 91.8, 91.2), (86.4, 91.5, 90.3)),
    "pets37": TransferTask(500, 100, 10, (91.9, 93.1, 94.4), (90.4, 92.9, 93.5)),
}

_NOTES = (
    "Train {source} first, or pass --weights with the folder of a run or a .safetensors file. The "
    "paper searches the learning rate in 0.001, 0.003, 0.01 and 0.03, but does not report the best "
    "one, nor the batch size: here they are 0.01 and 512. Images have 224 pixels, as in the "
    "training on ImageNet."
)


def recipes() -> Iterator[Recipe]:
    """Yield the recipes: four datasets, and two models trained with three objectives.

    >>> len(list(recipes()))
    24
    """
    for data, task in TASKS.items():
        for model in ("vit_b16", "vit_s16"):
            for objective, accuracy in zip(RECIPE_OBJECTIVES, getattr(task, model), strict=True):
                yield _recipe(data, task, model, objective, accuracy)


def _recipe(data: str, task: TransferTask, model: str, objective: str, accuracy: float) -> Recipe:
    source = f"{model.replace('_', '-')}-{objective}"
    name = f"{data}-from-{source}"
    return Recipe(
        name=name,
        config=Config().override(
            model=model,
            image_size=224,
            weights=f"runs/imagenet-{model}-{objective}-0",
            data=data,
            augmentation="light",
            batch_size=512,
            objective="vanilla",
            optimizer="sgd",
            lr=0.01,
            momentum=0.9,
            clip_norm=1.0,
            steps=task.steps,
            warmup_steps=task.warmup_steps,
            decay="linear",
            precision="bf16",
            micro_batches=4,
            eval_every=task.eval_every,
            out=f"runs/{name}",  # the default folder would be the same for all three sources
        ),
        reproduces=f"the paper's transfer table: {model}, trained with {objective}, on {data}",
        expected=f"Top-1 accuracy of {accuracy} %, from the paper. Not run here.",
        notes=_NOTES.format(source=source),
        accuracies={"accuracy": accuracy},
    )
