"""Small images: CIFAR, and the subset of Fashion-MNIST in the package.

The paper's comparison, with smaller images and models. Each recipe takes minutes on one GPU. The
recipes `fashion-mnist-vanilla`, `-sam` and `-gsam` train an MLP on the CPU of a laptop;
`surrogap compare` runs these by default.

± is the standard deviation over seeds. Recipes with one seed are not tuned and do not rank the
methods; [Results](results.md) does.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from surrogap.experiments.recipes.recipe import RECIPE_OBJECTIVES, Recipe, recipe_objective
from surrogap.training.config import Config


class ModelSettings(NamedTuple):
    """The settings that depend on the model."""

    changes: dict[str, Any]
    rho: float  # of SAM, and of GSAM at the start; it decays to a fifth
    alpha: float
    num_epochs: dict[str, int]


_SGD = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 5e-4, "nesterov": True}
_ADAMW = {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0}

# Fashion-MNIST in the package has 5,000 images. ViTs and Mixers need many epochs on so few.
_VIT = ModelSettings(
    {"model": "small_vit", **_ADAMW, "warmup_epochs": 5.0},
    rho=0.05,
    alpha=0.2,
    num_epochs={"fashion-mnist": 200, "cifar10": 100, "cifar100": 100},
)
MODELS = {
    "resnet18": ModelSettings(
        {"model": "small_resnet18", **_SGD, "channels_last": True},
        rho=0.1,
        alpha=0.1,
        num_epochs={"fashion-mnist": 40, "cifar10": 100, "cifar100": 100},
    ),
    "vit": _VIT,
    "mixer": _VIT._replace(changes=_VIT.changes | {"model": "small_mixer"}),
}
DATA_SETS = {"fashion-mnist": "embedded", "cifar10": "cifar10", "cifar100": "cifar100"}

_TUNED = (
    "rho and alpha were tuned on 1,000 held-out training images, with five seeds each: rho of SAM "
    "in 0.1, 0.15, 0.2 and 0.3, rho of GSAM in 0.2 and 0.3 with alpha from 0.05 to 0.4. The best "
    "few differ by less than the spread over seeds. 25 epochs were preferred to 20, at which the "
    "objectives differ less."
)
# From results/compare_fashion_mnist.txt. A test compares them.
EXPECTED_ON_LAPTOP = {
    "vanilla": "Test accuracy 85.33 ± 0.23 %, test loss 0.6480, calibration error 9.34 %; 3 seeds.",
    "sam": "Test accuracy 85.92 ± 0.24 %, test loss 0.4365, calibration error 3.65 %; 3 seeds.",
    "gsam": "Test accuracy 85.77 ± 0.18 %, test loss 0.4455, calibration error 3.97 %; 3 seeds.",
}
# From results/recipes_h200.txt and results/recipes_h200_mixer.txt.
EXPECTED_ON_GPU = {
    "fashion-mnist-resnet18-vanilla": "Test accuracy 90.65 %, test loss 0.2792, calibration error "
    "2.00 %; one seed, 0.1 minutes on an H200.",
    "fashion-mnist-resnet18-sam": "Test accuracy 90.40 %, test loss 0.2839, calibration error "
    "1.65 %; one seed, 0.2 minutes on an H200.",
    "fashion-mnist-resnet18-gsam": "Test accuracy 89.60 %, test loss 0.2913, calibration error "
    "1.59 %; one seed, 0.2 minutes on an H200.",
    "fashion-mnist-vit-gsam": "Test accuracy 85.35 %, test loss 0.3992, calibration error "
    "3.20 %; one seed, 2.5 minutes on an H200.",
    "fashion-mnist-mixer-gsam": "Test accuracy 87.75 %, test loss 0.5861, calibration error "
    "8.52 %; one seed, 2.5 minutes on an H200.",
    "cifar10-resnet18-gsam": "Not run here; 4.3 minutes on an H200, estimated from three epochs.",
    "cifar10-vit-gsam": "Not run here; 14.2 minutes on an H200, estimated from three epochs.",
    "cifar10-mixer-gsam": "Not run here; 12.0 minutes on an H200, estimated from three epochs.",
}
_NOT_TUNED = (
    "For one GPU: the step is captured as a CUDA graph, in bf16. On a CPU, pass --no-capture "
    "--precision fp32. rho and alpha are common values that have not been tuned."
)


def recipes() -> Iterator[Recipe]:
    """Yield the recipes: three objectives on a CPU, and on a GPU for three datasets and models.

    >>> len(list(recipes()))
    30
    """
    for objective in RECIPE_OBJECTIVES:
        yield _laptop(objective)
    for data in DATA_SETS:
        for model in MODELS:
            for objective in RECIPE_OBJECTIVES:
                yield _gpu(data, model, objective)


def _laptop(objective: str) -> Recipe:
    return Recipe(
        name=f"fashion-mnist-{objective}",
        config=Config().override(
            model="small_mlp",
            data="embedded",
            augmentation="none",
            batch_size=128,
            **recipe_objective(objective, 0.2 if objective == "sam" else 0.3, 0.06, alpha=0.1),
            optimizer="sgd",
            lr=0.1,
            epochs=25,
            decay="cosine",
            device="cpu",
            # The run takes seconds, so one checkpoint at the end is enough.
            checkpoint_every=1000,
            tensorboard=False,
        ),
        reproduces="the paper's comparison, on a small dataset and model",
        expected=EXPECTED_ON_LAPTOP[objective],
        notes="" if objective == "vanilla" else _TUNED,
    )


def _gpu(data: str, model: str, objective: str) -> Recipe:
    settings, name = MODELS[model], f"{data}-{model}-{objective}"
    rho = settings.rho
    return Recipe(
        name=name,
        config=Config().override(
            **settings.changes,
            data=DATA_SETS[data],
            augmentation="light",
            batch_size=128,
            **recipe_objective(objective, rho, round(rho / 5, 4), settings.alpha),
            epochs=settings.num_epochs[data],
            decay="cosine",
            precision="bf16",
            capture=True,
        ),
        reproduces="the paper's comparison, on small images",
        expected=EXPECTED_ON_GPU.get(name, "Not run here."),
        notes=_NOT_TUNED,
    )
