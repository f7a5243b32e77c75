"""The study at each scale: its set-ups, their images and training, and the number of seeds.

This module does not import torch.
"""

from collections.abc import Sequence
from itertools import product

from surrogap.paper.methods import (
    CHEAPER,
    METHODS,
    NOISY,
    NOISY_OWN,
    SHORT,
    TRANSFERRED,
    Changes,
)
from surrogap.paper.study import Scale, Setup


def _trials(rates: Sequence[float], decays: Sequence[float]) -> list[Changes]:
    return [{"lr": lr, "weight_decay": decay} for lr, decay in product(rates, decays)]


# All methods of a set-up share the learning rate and the weight decay that plain training was tuned
# to, except where `own` is given. A test compares them with the ledger.
_SGD = {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "lr": 0.2, "weight_decay": 1e-3}
_ADAMW = {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0}
_SGD_TRIALS = _trials((0.1, 0.2), (5e-4, 1e-3))
_ADAMW_TRIALS = _trials((5e-4, 1e-3), (0.1, 0.3))
_MORE_ADAMW_TRIALS = _trials((2e-3,), (0.1,))

_A: Changes = {
    "model": "small_resnet18",
    "data": "cifar10",
    "train_per_class": 1000,
    "val_per_class": 500,
    "augmentation": "light",
    "batch_size": 128,
    **_SGD,
    "decay": "cosine",
    "epochs": 150,
    "precision": "bf16",
    "capture": True,
    "channels_last": True,
    "eval_batch_size": 1000,
}
_TOKENS: Changes = {**_ADAMW, "epochs": 200, "warmup_epochs": 5.0, "channels_last": False}
# The appendix of the paper: SGD without weight decay, a linear learning-rate decay, 500 steps.
_FINE_TUNING: Changes = {
    **{name: value for name, value in _A.items() if not name.endswith("_per_class")},
    "objective": "vanilla",
    "nesterov": False,
    "lr": 0.01,
    "weight_decay": 0.0,
    "clip_norm": 1.0,
    "decay": "linear",
    "warmup_steps": 100,
}

GPU = Scale(
    name="gpu",
    page=(
        "Results",
        "Models trained on CIFAR with one GPU. [Results on a CPU](results-laptop.md) has the same "
        "tables and figures for small models on Fashion-MNIST, with all methods.",
    ),
    setups={
        "A": Setup(
            "ResNet-18, 10,000 images of CIFAR-10",
            _A,
            trials=_SGD_TRIALS,
            seconds=0.25,
            methods=tuple(name for name in METHODS if name != "momentum-sam-2x"),
            more_trials=[*_trials((0.4,), (1e-3, 2e-3)), *_trials((0.2,), (2e-3,))],
        ),
        "B": Setup(
            "ResNet-18, 10,000 images of CIFAR-100",
            {**_A, "data": "cifar100", "train_per_class": 100, "val_per_class": 50},
            trials=_SGD_TRIALS,
            seconds=0.25,
            methods=SHORT,
            remark="Images were read from JPEG of quality 97, which is near lossless.",
        ),
        "C": Setup(
            "ViT, 10,000 images of CIFAR-10",
            {**_A, **_TOKENS, "model": "small_vit_half", "compile": True},
            trials=_ADAMW_TRIALS,
            seconds=0.13,
            methods=(*SHORT, "momentum-sam"),
            more_trials=_MORE_ADAMW_TRIALS,
        ),
        "D": Setup(
            "Mixer, 10,000 images of CIFAR-10",
            {**_A, **_TOKENS, "model": "small_mixer_half", "compile": True},
            trials=_ADAMW_TRIALS,
            seconds=0.1,
            methods=(*SHORT, "momentum-sam"),
            more_trials=_MORE_ADAMW_TRIALS,
        ),
        "E": Setup(
            "ResNet-18, CIFAR-10N labels",
            {**_A, "train_labels": "noisy", "lr": 0.1},
            trials=_SGD_TRIALS,
            seconds=0.25,
            methods=NOISY,
            remark="A's images; about 40 % of the labels are wrong. Validation labels are clean.",
        ),
        "N": Setup(
            "ResNet-18, CIFAR-10N labels, own learning rates",
            {**_A, "train_labels": "noisy", "lr": 0.1},
            trials=_trials((0.025, 0.05, 0.1, 0.2), (1e-3, 4e-3, 1.6e-2)),
            seconds=0.25,
            methods=NOISY_OWN,
            remark="E's images and labels. Each method has 12 trials, which also vary the "
            "learning rate and weight decay.",
            own=_trials((0.05, 0.1), (1e-3, 4e-3)),
            shared="E",
        ),
        "F": Setup(
            "A's weights fine-tuned to Flowers-102",
            {**_FINE_TUNING, "data": "flowers102", "epochs": 72},
            seconds=0.15,
            methods=TRANSFERRED,
            source="A",
            remark="Images of 64 px, read from JPEG of quality 95.",
        ),
        "P": Setup(
            "A's weights fine-tuned to Pets-37",
            {**_FINE_TUNING, "data": "pets37", "epochs": 18},
            seconds=0.6,
            methods=TRANSFERRED,
            source="A",
            remark="Images of 64 px, read from JPEG of quality 95.",
        ),
    },
    num_seeds={"A": 5, **dict.fromkeys("BCDENFP", 3)},
    more_seeds=dict.fromkeys(("vanilla-2x", "sam", "gsam", "sam-norms", "gsam-norms"), 10),
    num_ablation_seeds=3,
    num_trials=4,
    num_evaluations=30,
    corruptions=(
        *("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "gaussian_blur"),
        *("defocus_blur", "fog", "brightness", "contrast", "saturate", "pixelate"),
        "jpeg_compression",
    ),
    severities=(3,),
    sharpness_images=500,
    timing=(7, 40),
    find_rho=(200, 4),  # the defaults of surrogap find-rho
    ledger="results/study.jsonl",
    left_out=("fig-rho", "fig-lr"),
)

# Without augmentation, 20 epochs are enough to memorise the images.
_SMALL: Changes = {
    **_A,
    "model": "small_resnet18_narrow",
    "image_size": 14,  # half the size of the images: a quarter of the time
    "data": "embedded",
    "train_per_class": 150,
    "val_per_class": 200,
    "augmentation": "none",
    "batch_size": 50,
    "lr": 0.1,
    "epochs": 20,
    "precision": "fp32",
    "capture": False,
    "device": "cpu",
}
_SMALL_TOKENS: Changes = {
    **_SMALL,
    **_ADAMW,
    "image_size": None,
    "epochs": 40,
    "warmup_epochs": 3.0,
    "channels_last": False,
}
_SMALL_SGD_TRIALS = _trials((0.05, 0.1), (1e-3, 4e-3))
# For methods with their own learning rates and weight decays: 36 trials each.
_SMALL_WIDE_TRIALS = _trials(
    (6.25e-3, 0.0125, 0.025, 0.05, 0.1, 0.2), (1e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
)
_SMALL_OWN = _trials((0.025, 0.05, 0.1, 0.2), (1e-3, 4e-3, 1.6e-2))
_SMALL_MORE_TRIALS = _trials((0.025, 0.2), (1e-3,))
_SMALL_ADAMW_TRIALS = _trials((1e-3, 2e-3), (0.1, 0.3))
_SMALL_MORE_ADAMW_TRIALS = _trials((5e-4,), (0.1, 0.3))

LAPTOP = Scale(
    name="laptop",
    page=(
        "Results on a CPU",
        "Small models, trained on 1,500 of the Fashion-MNIST images that come with the package, so "
        "that anyone can repeat every run without a GPU. [Results](results.md) has larger "
        "models, trained on CIFAR. Some seeds and trials were added after the first scores were "
        "known ([details](../results/README.md#study_laptopjsonl)).",
    ),
    setups={
        "A": Setup(
            "narrow ResNet-18, Fashion-MNIST",
            _SMALL,
            trials=_SMALL_SGD_TRIALS,
            seconds=0.6,
            methods=tuple(METHODS),
            remark="1,500 images of 14 px.",
            more_trials=_SMALL_MORE_TRIALS,
        ),
        "C": Setup(
            "tiny ViT, Fashion-MNIST",
            {**_SMALL_TOKENS, "model": "small_vit_tiny"},
            trials=_SMALL_ADAMW_TRIALS,
            seconds=0.5,
            methods=(*SHORT, *CHEAPER),
            remark="A's images, of 28 px.",
            more_trials=_SMALL_MORE_ADAMW_TRIALS,
        ),
        "D": Setup(
            "tiny Mixer, Fashion-MNIST",
            {**_SMALL_TOKENS, "model": "small_mixer_tiny"},
            trials=_SMALL_ADAMW_TRIALS,
            seconds=0.4,
            methods=(*SHORT, *CHEAPER),
            remark="A's images, of 28 px.",
            more_trials=_SMALL_MORE_ADAMW_TRIALS,
        ),
        "E": Setup(
            "narrow ResNet-18, 40 % wrong labels",
            {**_SMALL, "train_labels": "noisy"},
            trials=_SMALL_SGD_TRIALS,
            seconds=0.6,
            methods=NOISY,
            remark="A's images, with labels replaced at random. Validation labels are clean.",
            more_trials=_SMALL_MORE_TRIALS,
        ),
        "N": Setup(
            "narrow ResNet-18, 40 % wrong labels, own learning rates",
            {**_SMALL, "train_labels": "noisy", "lr": 0.025},
            trials=_SMALL_WIDE_TRIALS,
            seconds=0.6,
            methods=NOISY_OWN,
            remark="E's images and labels. Each method has 36 trials, which also vary the "
            "learning rate and weight decay.",
            own=_SMALL_OWN,
            shared="E",
            repeats=(4, 4),
        ),
        "S": Setup(
            "narrow ResNet-18, strong augmentation",
            {**_SMALL, "augmentation": "strong"},
            trials=_SMALL_SGD_TRIALS,
            seconds=0.8,
            methods=SHORT,
            remark="A's images, so strongly augmented that plain training does not fit them.",
            more_trials=_SMALL_MORE_TRIALS,
        ),
        "G": Setup(
            "A's weights fine-tuned to 500 of its images",
            {**_SMALL, "objective": "vanilla", "lr": 0.01, "weight_decay": 0.0}
            | {"train_per_class": 50, "decay": "linear", "epochs": 5},
            seconds=0.2,
            methods=TRANSFERRED,
            source="A",
            remark="To try the command: it says nothing about transfer to other images.",
        ),
    },
    num_seeds={**dict.fromkeys("ACDEN", 10), "S": 5, "G": 3},
    more_seeds={},
    num_ablation_seeds=5,
    num_trials=4,
    num_evaluations=10,
    corruptions=GPU.corruptions,
    severities=(3,),
    sharpness_images=100,
    timing=(7, 10),
    find_rho=GPU.find_rho,
    ledger="results/study_laptop.jsonl",
)

SCALES = {scale.name: scale for scale in (LAPTOP, GPU)}
