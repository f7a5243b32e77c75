"""The images of a configuration, and the splits that a run is evaluated on."""

from pathlib import Path

import numpy as np
import pytest
import torch

from surrogap.data import TensorSet
from surrogap.evaluation import evaluate
from surrogap.training.components import components_of
from surrogap.training.images import images_of
from surrogap.training.processes import World
from surrogap.training.records import read_records
from surrogap.training.run import train
from tests.training import small_runs

WORLD = World(torch.device("cpu"))
HELD_OUT = {"train_per_class": 4, "val_per_class": 2}


def test_a_configuration_chooses_images_and_labels(tmp_path: Path) -> None:
    small_runs.archive(tmp_path / "images.npz")
    with np.load(tmp_path / "images.npz") as archive:
        arrays = dict(archive)
    arrays["train_noisy_labels"] = (arrays["train_labels"] + 1) % 4
    np.savez(tmp_path / "images.npz", **arrays)
    config = small_runs.config(tmp_path, **HELD_OUT, train_labels="noisy")
    splits = images_of(config.data)
    assert (len(splits.train), len(splits.val or ())) == (16, 8)
    assert isinstance(splits.train, TensorSet)
    # The classes of the images are 0, 1, 2, 3, 0, ...
    assert splits.train.labels.tolist() == [1, 2, 3, 0] * 4
    assert len(components_of(config, WORLD).images) == 2


def test_a_run_is_evaluated_on_validation_and_test_images(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, **HELD_OUT, eval_on="both")
    outcome = train(config)
    last = read_records(outcome.folder)[-1]
    for split, loader in components_of(config, WORLD).eval_images.items():
        scores = evaluate(outcome.model, loader)
        assert last[f"{split}_accuracy"] == scores.accuracy
        assert last[f"{split}_loss"] == pytest.approx(scores.loss)


def test_test_images_are_not_scored_unless_asked_for(tmp_path: Path) -> None:
    outcome = train(small_runs.config(tmp_path, **HELD_OUT, eval_on="val"))
    records = read_records(outcome.folder)
    assert any("val_accuracy" in record for record in records)
    assert not any(name.startswith("test_") for record in records for name in record)


def test_validation_images_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which has no validation images, got both"):
        train(small_runs.config(tmp_path, eval_on="both"))


def test_a_run_may_keep_no_checkpoint(tmp_path: Path) -> None:
    kept, bare = (
        train(small_runs.config(tmp_path, checkpoint_every=every, out=str(tmp_path / name)))
        for name, every in (("kept", None), ("bare", 0))
    )
    assert (kept.folder / "checkpoints").exists()
    assert not (bare.folder / "checkpoints").exists()
    small_runs.assert_same(kept.model.state_dict(), bare.model.state_dict())
