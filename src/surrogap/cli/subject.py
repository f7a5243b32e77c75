"""What a command measures: a run, or any network with weights, on some training images."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

from tyro.conf import Positional, Suppress

from surrogap.checks import check_seed, integer
from surrogap.errors import InvalidValueError
from surrogap.training.config import Config
from surrogap.training.flags import OptionalInt, OptionalPath, OptionalStr, optional

if TYPE_CHECKING:
    from torch import nn

    from surrogap.analysis import Surface
    from surrogap.data import Splits
    from surrogap.training.processes import World

RunArgument = Annotated[Positional[Path | None], optional("RUN")]


@final
@dataclass(frozen=True)
class Subject:
    """What is measured."""

    run: Suppress[Path | None] = None
    """The run's folder, which commands take as an argument of their own: it comes first."""

    model: OptionalStr = None
    """Any network that surrogap train or timm has a name for, in place of a run."""

    data: OptionalStr = None
    """With --model: its images, a set's name or path as for surrogap train."""

    weights: OptionalPath = None
    """With --model: its weights, a .safetensors file or a run's folder. By default random ones."""

    image_size: OptionalInt = None
    """With --model: the side in pixels that images are resized to. By default 224 for files."""

    data_root: OptionalStr = None
    """The folder that holds the named sets. By default the run's own, or data."""

    images: int = 1000
    """How many training images to measure on, drawn at random; the same ones each time. They are
    kept in memory: 1,000 of 224 pixels take 0.6 GB."""

    batch_size: int = 250
    """How many images are computed at once."""

    num_workers: OptionalInt = None
    """How many worker processes read files. By default the processors that there are, 8 at most."""

    seed: int = 0
    """Of all that is drawn: images, directions, random weights."""

    device: str = "auto"
    """cpu, cuda, or another of torch's devices. By default cuda where there is one."""

    def config(self) -> Config:
        """The run's configuration, or one with the network and the images that were named.

        Raises:
            ValueError: There is no such run, or what was named does not go together.
        """
        integer("images", self.images, at_least=1, remedy="Pass how many to measure on, as 1000.")
        integer(
            "batch_size", self.batch_size, at_least=1, remedy="Pass a number of images, as 250."
        )
        check_seed(self.seed)
        own = {"data_root": self.data_root, "num_workers": self.num_workers}
        changes: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        if self.run is not None:
            self._check_alone()
            from surrogap.training.folder import read_config

            return read_config(self.run).override(**changes)
        if self.model is None or self.data is None:
            raise InvalidValueError(
                f"run must be a run's folder, or --model and --data in its place, got "
                f"model={self.model} and data={self.data}. Pass one or the others."
            )
        changes |= {"model": self.model, "data": self.data, "image_size": self.image_size}
        return Config().override(**changes)

    def _check_alone(self) -> None:
        for name in ("model", "data", "weights", "image_size"):
            value = getattr(self, name)
            if value is not None:
                raise InvalidValueError(
                    f"{name} must be left out where a run is measured, got {value}. "
                    "The run has its own."
                )

    @property
    def title(self) -> str:
        """What it is, in a few words."""
        if self.run is not None:
            return str(self.run)
        return f"{self.model}, {'random weights' if self.weights is None else self.weights}"

    def folder(self, command: str) -> Path:
        """Where results go unless told otherwise: to the run, or to a folder of their own."""
        if self.run is not None:
            return self.run
        return Path("runs") / f"{command}-{Path(self.data or '').stem}-{self.model}"

    def load(self) -> "Loaded":
        """Reads weights and images.

        Raises:
            ValueError: They are not there, or do not fit together.
            RuntimeError: The network does not give the same loss twice.
        """
        import torch

        from surrogap.experiments.surfaces import network_with, part_of, still_surface
        from surrogap.training.images import images_of
        from surrogap.training.processes import World, device_of

        config, world = self.config(), World(device_of(self.device))
        splits = images_of(config.data)
        torch.manual_seed(self.seed)
        model = network_with(config.model, splits, self.run or self.weights).to(world.device)
        few = part_of(splits, self.images, self.seed)
        surface = still_surface(config, model, few, world, self.batch_size)
        return Loaded(config, splits, world, surface, len(few.train))


@final
@dataclass(frozen=True)
class Loaded:
    """What is measured, in memory.

    Attributes:
        config: The run's, or one that says which network and images.
        splits: All images.
        world: This process and its device.
        surface: The loss over some training images, as they are, in evaluation mode.
        num_images: How many.
    """

    config: Config
    splits: "Splits"
    world: "World"
    surface: "Surface"
    num_images: int

    def described(self) -> dict[str, Any]:
        """What was measured, for JSON."""
        return {
            "model": self.config.model.name,
            "data": self.config.data.name,
            "loss_function": self.config.objective.loss,
            "num_images": self.num_images,
            "num_weights": self.surface.space.size,
            "device": str(self.world.device),
        }

    def network_of(self, run: Path) -> "nn.Module":
        """The network of another run, for the same images.

        Raises:
            ValueError: There is no such run, it has no checkpoint, or its images are others.
        """
        from surrogap.experiments.runs import Run

        return Run.read(run).network(self.splits, self.world.device)
