"""A trained run, read from its folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

import torch
from torch import nn

from surrogap.data import Splits
from surrogap.experiments.surfaces import model_with_weights
from surrogap.training.config import Config
from surrogap.training.folder import read_config
from surrogap.training.images import images_of


@final
@dataclass(frozen=True)
class TrainedRun:
    """The folder of a run, and its configuration.

    Attributes:
        folder: The folder.
        config: The configuration of the training.
    """

    folder: Path
    config: Config

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the run in a folder.

        Raises:
            ValueError: The folder is not the folder of a run.
        """
        return cls(folder, read_config(folder))

    def splits(self) -> Splits:
        """Return the dataset of the run.

        Raises:
            ValueError: The images are missing.
        """
        return images_of(self.config.data)

    def model(self, splits: Splits, device: torch.device | str = "cpu") -> nn.Module:
        """Return the model with the weights of the newest checkpoint, in evaluation mode.

        Raises:
            ValueError: There is no checkpoint, or its weights do not fit the model.
        """
        return model_with_weights(self.config.model, splits, self.folder).to(device).eval()
