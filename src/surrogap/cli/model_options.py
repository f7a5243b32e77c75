"""Options that select a model and training images: those of a run, or any by name."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from tyro.conf import Suppress

from surrogap.checks import check_seed, integer
from surrogap.errors import InvalidValueError
from surrogap.training.config import Config
from surrogap.training.flags import OptionalInt, OptionalPath, OptionalStr

if TYPE_CHECKING:
    from surrogap.experiments.surfaces import LoadedModel


@final
@dataclass(frozen=True)
class ModelOptions:
    """Model, training images and device."""

    run: Suppress[Path | None] = None
    """The folder of the run. Commands declare it themselves, so that it comes first."""

    model: OptionalStr = None
    """Instead of a run: the name of a model of surrogap or timm."""

    data: OptionalStr = None
    """With --model: the dataset, as a name or path as in surrogap train."""

    weights: OptionalPath = None
    """With --model: the weights, as a .safetensors file or the folder of a run. By default random
    weights."""

    image_size: OptionalInt = None
    """With --model: height and width of the images in pixels. By default 224 for image files."""

    data_root: OptionalStr = None
    """The folder of named datasets. By default that of the run, or data."""

    images: int = 1000
    """The number of training images, drawn at random. They are kept in memory: 1,000 images of 224
    pixels take 0.6 GB."""

    batch_size: int = 250
    """The number of images per batch."""

    num_workers: OptionalInt = None
    """The number of worker processes that read image files. By default the number of CPU cores, at
    most 8."""

    seed: int = 0
    """The seed of the drawn images, random directions and random weights."""

    device: str = "auto"
    """cpu, cuda, or another torch device. auto: cuda if available."""

    def config(self) -> Config:
        """Return the configuration of the run, or one with the given model and dataset.

        Raises:
            ValueError: The run does not exist, or the options do not fit together.
        """
        integer("images", self.images, at_least=1, remedy="Pass a number of images, such as 1000.")
        integer(
            "batch_size",
            self.batch_size,
            at_least=1,
            remedy="Pass a number of images, such as 250.",
        )
        check_seed(self.seed)
        given = {"data_root": self.data_root, "num_workers": self.num_workers}
        changes: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
        if self.run is not None:
            self._check_only_run()
            from surrogap.training.folder import read_config

            return read_config(self.run).override(**changes)
        if self.model is None or self.data is None:
            raise InvalidValueError(
                f"run must be the folder of a run, got neither a run nor a model with data "
                f"(model={self.model}, data={self.data}). Pass RUN, or --model and --data."
            )
        changes |= {"model": self.model, "data": self.data, "image_size": self.image_size}
        return Config().override(**changes)

    def _check_only_run(self) -> None:
        for name in ("model", "data", "weights", "image_size"):
            value = getattr(self, name)
            if value is not None:
                raise InvalidValueError(
                    f"{name} must be left out with a run, got {value}. The run has its own."
                )

    @property
    def title(self) -> str:
        """The run, or the model with its weights."""
        if self.run is not None:
            return str(self.run)
        return f"{self.model}, {'random weights' if self.weights is None else self.weights}"

    def folder(self, command: str) -> Path:
        """Return the default folder for results: the run, or a new one below `runs`."""
        if self.run is not None:
            return self.run
        return Path("runs") / f"{command}-{Path(self.data or '').stem}-{self.model}"

    def load(self) -> "LoadedModel":
        """Load the model and the images.

        Raises:
            ValueError: Weights or images are missing, or they do not fit together.
            RuntimeError: The model does not return the same loss twice.
        """
        config = self.config()
        from surrogap.experiments.surfaces import load_model
        from surrogap.training.processes import device_of

        return load_model(
            config,
            self.run or self.weights,
            num_images=self.images,
            batch_size=self.batch_size,
            seed=self.seed,
            device=device_of(self.device),
        )
