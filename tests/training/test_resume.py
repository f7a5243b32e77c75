"""A run that was interrupted and resumed is bit-identical to one that was not."""

import signal
from pathlib import Path
from typing import Any

import pytest

from surrogap.training.folder import read_config
from surrogap.training.run import train
from tests.data.synthetic import folder as image_folder
from tests.training import small_runs

# Every objective, with its settings that have a state or use random numbers.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "sam": {"rho": 0.1},
    "sam, falling radius": {"rho": 0.1, "rho_inverse_sqrt": True},
    "gsam": {"rho": 0.1, "rho_min": 0.02, "alpha": 0.4},
    "gsam, plain": {"rho": 0.1, "minimize": "plain"},
    "asam": {"rho": 0.5},
    "gap-penalty": {"rho": 0.1, "lam": 0.3},
    "momentum-sam": {"rho": 0.5, "rho_inverse_sqrt": True},
    "sam, on norms": {"rho": 0.5, "perturb": "norms"},
    "gsam, on a part": {"rho": 0.1, "climb_fraction": 0.5},
    "gsam, at some steps": {"rho": 0.1, "rho_inverse_sqrt": True, "every": 2, "start_epoch": 1},
    "entropy-sgd": {"inner_steps": 2, "noise": 0.1, "scoping": 0.01},
}
# Mixup, RandAugment, dropout, BatchNorm and shuffling: everything with a state or randomness.
HARD = {"model": "small_resnet18_narrow", "augmentation": "medium", "drop": 0.3}


def objective(name: str) -> dict[str, Any]:
    return {"objective": name.partition(",")[0], **OBJECTIVES[name]}


def interrupted(folder: Path, at: list[int], **changes: Any) -> Path:
    """Train a run that is stopped after some of its steps, and resumed each time."""
    config = small_runs.config(folder, **changes)
    for step in at:
        outcome = train(config, resume=True, progress=small_runs.Interrupting(step))
        assert (outcome.step, outcome.signal) == (step, signal.SIGTERM)
    outcome = train(config, resume=True)
    assert (outcome.step, outcome.signal) == (outcome.num_steps, None)
    return config.folder


def whole(folder: Path, **changes: Any) -> Path:
    config = small_runs.config(folder, **changes)
    assert train(config).signal is None
    return config.folder


def check(tmp_path: Path, at: list[int], **changes: Any) -> None:
    one, other = whole(tmp_path / "a", **changes), interrupted(tmp_path / "b", at, **changes)
    small_runs.assert_same(small_runs.state(one), small_runs.state(other))
    assert small_runs.timeless_records(one) == small_runs.timeless_records(other)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective(name: str, tmp_path: Path) -> None:
    check(tmp_path, [5], epochs=2, **HARD, **objective(name))


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adamw", "weight_decay": 0.1, "decay_on": "matrices", "lr": 1e-3},
        {"momentum": 0.0, "clip_norm": 0.1, "warmup_epochs": 1.0},
        {"precision": "fp16", "micro_batches": 2, "perturbation": "each"},
        {"precision": "bf16", "micro_batches": 2, "loss": "sigmoid"},
        {"steps": 7, "epochs": 1, "decay": "linear", "lr_min": 0.01},
        {"optimizer": "adabelief", "lr": 1e-3},
        {"optimizer": "rmsprop", "lr": 1e-3},
        {"optimizer": "adafactor", "lr": 1e-3},
        {"optimizer": "nadam", "lr": 1e-3},
    ],
    ids=str,
)
def test_every_way_to_compute(changes: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, [3], augmentation="medium", **changes)


def test_files_on_disk(tmp_path: Path) -> None:
    images = image_folder(tmp_path / "images", per_class=8)
    changes = {"data": str(images), "image_size": 8, "num_workers": 0, "batch_size": 4}
    check(tmp_path, [5], augmentation="medium", epochs=2, **changes)


def test_again_and_again_and_at_the_ends_of_epochs(tmp_path: Path) -> None:
    check(tmp_path, [1, 4, 7, 11], augmentation="medium")


def test_checkpoints_between_epochs_change_nothing(tmp_path: Path) -> None:
    one = whole(tmp_path / "a")
    other = whole(tmp_path / "b", checkpoint_every=1)
    small_runs.assert_same(small_runs.state(one), small_runs.state(other))
    assert small_runs.timeless_records(one) == small_runs.timeless_records(other)


def test_what_it_started_from_may_be_gone(tmp_path: Path) -> None:
    source = whole(tmp_path / "source", seed=1)
    changes = {"weights": str(source), "augmentation": "medium"}
    one = whole(tmp_path / "a", **changes)
    config = small_runs.config(tmp_path / "b", **changes)
    train(config, resume=True, progress=small_runs.Interrupting(5))
    source.rename(tmp_path / "gone")
    assert train(config, resume=True).step == 12
    small_runs.assert_same(small_runs.state(one), small_runs.state(config.folder))
    assert read_config(config.folder).model.weights == str(source)


def test_what_it_starts_from_must_be_there(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, weights=str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="weights must be a run's folder with a checkpoint, or a"):
        train(config, resume=True)


def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    outcome = train(small_runs.config(tmp_path), resume=True)
    assert outcome.step == outcome.num_steps == 12
    assert outcome.record is not None
    assert outcome.record["epoch"] == 3
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    one, other = whole(tmp_path / "a"), whole(tmp_path / "b", seed=1)
    with pytest.raises(AssertionError):
        small_runs.assert_same(small_runs.state(one)["model"], small_runs.state(other)["model"])


def test_records_after_the_checkpoint_are_written_once(tmp_path: Path) -> None:
    """Killed after the record of step 4, with a checkpoint of step 3: step 4 is recorded once."""
    config = small_runs.config(tmp_path, record_every=1, checkpoint_every=3)
    train(config, resume=True, progress=small_runs.Interrupting(3))
    records = config.folder / "records.jsonl"
    with records.open("a") as file:
        file.write('{"kind": "step", "step": 4, "loss": 9.9}\n{"kind": "st')
    train(config, resume=True)
    steps = [r for r in small_runs.timeless_records(config.folder) if r["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert steps[3]["loss"] != 9.9
