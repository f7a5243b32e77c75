"""A run that was trained, read back from its folder."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import nn

from surrogap.data import Splits
from surrogap.errors import InvalidValueError
from surrogap.training.config import Config
from surrogap.training.folder import read_config
from surrogap.training.images import images_of
from surrogap.training.model import model_of, read_weights
from surrogap.training.records import read_records


@final
@dataclass(frozen=True)
class Run:
    """A run's folder, and its configuration.

    Attributes:
        folder: Where it is.
        config: What was trained.
    """

    folder: Path
    config: Config

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The run in a folder.

        Raises:
            ValueError: The folder holds no run.
        """
        return cls(folder, read_config(folder))

    def splits(self, data_root: str | None = None, *, download: bool = False) -> Splits:
        """The images that it was trained on, and those to test it on.

        Args:
            data_root: The folder that holds the named sets, if no longer the run's own.
            download: Whether to fetch a named set that is not there.

        Raises:
            ValueError: They are not where they were.
            RuntimeError: They cannot be fetched.
        """
        return images_of(self.config.data, data_root, download=download)

    def network(self, splits: Splits, device: torch.device | str = "cpu") -> nn.Module:
        """The network with the weights of the newest checkpoint, in evaluation mode.

        Raises:
            ValueError: There is no checkpoint, or not of this network.
        """
        weights = read_weights(self.folder)
        # What it started from may be gone, and does not matter any more.
        model = model_of(replace(self.config.model, weights=None), splits)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise InvalidValueError(
                f"run must have weights of its network for its images, got {self.folder}, whose "
                f"checkpoint differs ({str(error).splitlines()[-1].strip()}) Have its images "
                "changed?"
            ) from error
        return model.to(device).eval()

    def records(self) -> list[dict[str, Any]]:
        """Return its records: a dictionary for each line, as `training.records` describes them."""
        return read_records(self.folder)
