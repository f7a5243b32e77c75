"""Models and batches for the benchmarks of a training step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.models.resnet import BasicBlock, ResNet
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torchvision.models import resnet18

from surrogap.models import create
from surrogap.models.architectures import vit


def cifar(build_resnet: Callable[..., nn.Module]) -> nn.Module:
    """The usual ResNet for 32 px images: the stem is a 3x3 convolution, without pooling."""
    model = build_resnet(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def papers(name: str) -> Callable[[], nn.Module]:
    """One of the paper's networks, for ImageNet."""
    return partial(create, name, num_classes=1000)


@dataclass(frozen=True)
class Case:
    """A model, its batch, and an optimizer that such models are trained with."""

    title: str
    build_model: Callable[[], nn.Module]
    batch_size: int
    optimizer: type[Optimizer]
    # Small enough for the weights to stay finite in all variants.
    settings: dict[str, float]
    image_size: int = 32
    num_classes: int = 10
    device: str = "cuda"
    # Convolutions in bfloat16 are faster in channels_last.
    memory_format: torch.memory_format = torch.contiguous_format


ADAMW: dict[str, Any] = {"optimizer": AdamW, "settings": {"lr": 1e-4}}
MOMENTUM: dict[str, Any] = {"optimizer": SGD, "settings": {"lr": 1e-3, "momentum": 0.9}}
CHANNELS_LAST: dict[str, Any] = {"memory_format": torch.channels_last}
IMAGENET: dict[str, Any] = {"image_size": 224, "num_classes": 1000}
vit_cifar = partial(vit, image_size=32, patch_size=4, in_channels=3, num_classes=10)
# As wide as ViT-Ti: its steps take longer to launch than to run.
vit_small = partial(vit_cifar, width=192, depth=12, num_heads=3)
vit_tiny = partial(vit_cifar, width=96, depth=6, num_heads=3)
resnet18_narrow = partial(ResNet, BasicBlock, (2, 2, 2, 2), channels=(16, 32, 64, 128))

# Most CUDA cases keep the GPU busy; the last ones are bound by the CPU.
CASES = {
    "vit_b32_128": Case("ViT-B/32", papers("vit_b32"), 128, **ADAMW, **IMAGENET),
    "vit_b32_512": Case("ViT-B/32", papers("vit_b32"), 512, **ADAMW, **IMAGENET),
    "resnet50_128": Case(
        "ResNet-50", papers("resnet50"), 128, **MOMENTUM, **IMAGENET, **CHANNELS_LAST
    ),
    "vit_b16_256": Case("ViT-B/16", papers("vit_b16"), 256, **ADAMW, **IMAGENET),
    "mixer_s16_256": Case("Mixer-S/16", papers("mixer_s16"), 256, **ADAMW, **IMAGENET),
    "resnet18_cifar_128": Case(
        "ResNet-18, 32 px", partial(cifar, resnet18), 128, **MOMENTUM, **CHANNELS_LAST
    ),
    "vit_small_cifar_128": Case("small ViT, 32 px", vit_small, 128, **ADAMW),
    "resnet18_narrow_cpu": Case(
        "narrow ResNet-18, 32 px", partial(cifar, resnet18_narrow), 32, **MOMENTUM, device="cpu"
    ),
    "vit_tiny_cpu": Case("tiny ViT, 32 px", vit_tiny, 32, **ADAMW, device="cpu"),
}


class Workload:
    """The model and the batch of a case, which all variants share.

    Attributes:
        network: The module that runs: the model, or the compiled model.
    """

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        with torch.device(case.device):  # random weights are initialized faster there
            self.model = case.build_model().to(memory_format=case.memory_format)
        self.network: nn.Module = self.model
        shape = (case.batch_size, 3, case.image_size, case.image_size)
        images = torch.randn(shape, device=case.device).to(memory_format=case.memory_format)
        labels = torch.randint(case.num_classes, (case.batch_size,), device=case.device)
        self.batch = (images, labels)

    @property
    def parameter_bytes(self) -> int:
        """The size of one copy of the parameters."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def optimizer(self, **settings: bool) -> Optimizer:
        """Create an optimizer, without state."""
        return self.case.optimizer(self.model.parameters(), **self.case.settings, **settings)

    def loss_of(self, images: Tensor, labels: Tensor) -> Tensor:
        """The forward pass: in bfloat16 on CUDA, in float32 on a CPU."""
        device = self.case.device
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            return nn.functional.cross_entropy(self.network(images), labels)

    def loss(self) -> Tensor:
        """The loss of the batch."""
        return self.loss_of(*self.batch)

    def forward_backward(self) -> Tensor:
        """Add the gradient of the loss to `.grad`."""
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
        if self.case.device == "cuda":
            torch.cuda.synchronize()
