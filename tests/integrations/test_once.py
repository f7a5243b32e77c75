"""Attributes of trainers and modules see the first pass only."""

import torch
from torch import nn

from surrogap.integrations.once import restoring_attributes


class Trainer:
    """A trainer with data, counters and metrics among its attributes."""

    def __init__(self) -> None:
        self.data, self.model = torch.zeros(10**6), nn.Linear(2, 2)
        self.samples = {index: [] for index in range(10**4 + 1)}
        self.total, self.losses = torch.zeros(3), [1.0]
        self.metrics = {"train": {"loss": [1.0]}}


def test_small_tensors_and_containers_are_restored_and_data_is_not_copied() -> None:
    trainer = Trainer()
    total, losses = trainer.total, trainer.losses
    data, model, samples = trainer.data, trainer.model, trainer.samples[0]
    with restoring_attributes(trainer):
        assert trainer.data is data
        assert trainer.model is model
        assert trainer.samples[0] is samples
        trainer.total += 1
        trainer.losses.append(2.0)
        trainer.metrics["train"]["loss"].append(2.0)
    assert trainer.total is total
    assert trainer.losses is losses
    assert total.tolist() == [0.0] * 3
    assert losses == trainer.metrics["train"]["loss"] == [1.0]
