"""One run of the study: its line has the results of training, scoring and measuring by hand."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from surrogap.evaluation import corrupted, evaluate
from surrogap.paper import running
from surrogap.paper.ledger import LedgerLine
from surrogap.paper.methods import METHODS
from surrogap.paper.running import Environment, train_and_score
from surrogap.paper.scales import GPU
from surrogap.paper.study import Cell, Scale, StudyRun, study_run
from surrogap.paper.tuning import trials
from surrogap.training.failure import RunFailedError
from surrogap.training.images import images_of
from surrogap.training.run import train
from tests.data.downloads import fake_pets
from tests.paper import synthetic_study


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def scale(folder: Path) -> Scale:
    return synthetic_study.tiny(folder)


@pytest.fixture(scope="module")
def environment(scale: Scale, folder: Path) -> Environment:
    return Environment(scale, weights=str(folder / "weights"))


@pytest.fixture(scope="module")
def run(scale: Scale) -> StudyRun:
    return study_run(scale, Cell("A", "gsam"), {"rho": 0.1, "alpha": 0.3}, seed=1, purpose="final")


@pytest.fixture(scope="module")
def line(run: StudyRun, environment: Environment) -> LedgerLine:
    return train_and_score(run, environment)


def test_scores_are_those_of_a_run_by_hand(line: LedgerLine, run: StudyRun, tmp_path: Path) -> None:
    config = run.config(out=str(tmp_path / "run"), tensorboard=False)
    model, splits = train(config).model, images_of(config.data)

    def accuracy(images: torch.Tensor, labels: torch.Tensor) -> float:
        mean, std = (
            255 * torch.tensor(values)[:, None, None] for values in (splits.mean, splits.std)
        )
        return evaluate(model, [((images.float() - mean) / std, labels)]).accuracy

    assert splits.val is not None
    parts = {"train": splits.train, "val": splits.val, "test": splits.test}
    found = {name: accuracy(part.images, part.labels) for name, part in parts.items()}  # type: ignore
    assert line["train"]["accuracy"] == found["train"]
    assert line["val"]["accuracy"] == found["val"]
    assert line["scores"]["test"]["accuracy"] == found["test"]
    assert line["scores"]["votes"]["accuracy"] == found["test"]  # the votes are unanimous
    darker = corrupted(splits.test.images, "contrast", 3)  # type: ignore[union-attr]
    assert line["scores"]["corrupted"]["accuracy"] == accuracy(darker, splits.test.labels)  # type: ignore
    assert line["scores"]["corrupted"]["num_sets"] == 1


def test_a_line_says_what_was_trained_and_on_what(line: LedgerLine, run: StudyRun) -> None:
    assert (line["kind"], line["key"], line["purpose"]) == ("run", run.key, "final")
    assert (line["setup"], line["method"], line["seed"]) == ("A", "gsam", 1)
    assert line["settings"] == {"rho": 0.1, "alpha": 0.3}
    assert line["config"]["objective"]["alpha"] == 0.3
    assert line["config"]["output"]["out"] is None
    assert line["versions"]["torch"] == torch.__version__
    assert {"date", "commit", "hardware", "seconds", "seconds_per_step"} <= line.keys()
    assert (line["num_epochs"], line["num_steps"], line["jobs"]) == (2, 8, 1)
    assert line["sharpness"]["eigenvalue"] is not None


def test_curves_are_those_of_the_records(line: LedgerLine) -> None:
    curves = line["curves"]
    assert curves["step"] == list(range(1, 9))
    assert all(len(curves[name]) == 8 for name in ("loss", "gap", "cosine", "accuracy"))
    assert curves["epoch"] == [1, 2]
    best = max(range(2), key=lambda epoch: curves["val_accuracy"][epoch])
    assert line["best"]["epoch"] == best + 1
    assert line["best"]["test_accuracy"] == pytest.approx(curves["test_accuracy"][best], rel=1e-4)


def test_a_trial_has_no_test_scores(scale: Scale, environment: Environment) -> None:
    line = train_and_score(trials(scale, "A", "sam")[0], environment)
    assert {"val", "train", "curves"} <= line.keys()
    assert not {"scores", "sharpness"} & line.keys()
    assert not [name for name in (*line["best"], *line["curves"]) if name.startswith("test")]


def test_a_run_whose_loss_is_not_finite_is_written_as_failed(
    run: StudyRun, environment: Environment
) -> None:
    line = train_and_score(replace(run, changes={**run.changes, "lr": 1e30}, seed=7), environment)
    assert line["kind"] == "failure"
    assert line["reason"].startswith("loss must be finite")


def test_a_full_disk_is_not_written_as_a_failure(
    run: StudyRun, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is tried again by the next command."""

    def full(*arguments: object, **more: object) -> None:
        raise RunFailedError("Cannot write records.jsonl: No space left on device.")

    monkeypatch.setattr(running, "train", full)
    with pytest.raises(RunFailedError, match="No space left on device"):
        train_and_score(replace(run, seed=8), environment)


def test_image_files_are_refused(tmp_path: Path) -> None:
    """Those of Flowers-102 and Pets-37, as torchvision downloads them, have various sizes."""
    fake_pets(tmp_path)
    run = study_run(GPU, Cell("P", "sam"), {"rho": 0.1}, seed=0, purpose="final")
    message = f"data_root must hold the archive pets37.npz, got {tmp_path}, which has image files."
    with pytest.raises(ValueError, match=re.escape(message)):
        train_and_score(run, Environment(GPU, data_root=str(tmp_path)))


def test_fine_tuning_starts_from_weights_that_are_trained_once(
    scale: Scale, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = study_run(scale, Cell("G", "sam"), {"rho": 0.1}, seed=0, purpose="final")
    assert run.source is not None
    source = train_and_score(run.source, environment)
    steps = []
    real = train.__globals__["_Trainer"]._take_step

    def counted(self: object, *batch: object) -> None:
        steps.append(1)
        real(self, *batch)

    monkeypatch.setattr(train.__globals__["_Trainer"], "_take_step", counted)
    line = train_and_score(run, environment)
    assert len(steps) == line["num_steps"]  # and none for the source
    assert line["source"] == source["key"] == run.source.key
    assert "val" not in line
    assert "sharpness" not in line
    fresh = train_and_score(run, replace(environment, weights=environment.weights + "-fresh"))
    assert len(steps) == 2 * line["num_steps"] + source["num_steps"]
    assert fresh["scores"] == line["scores"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method: str, scale: Scale, environment: Environment) -> None:
    """With a model that has norm layers, which some methods need."""
    run = trials(scale, "A", method)[0]
    changes = {**run.changes, "model": "small_resnet18_narrow", "train_per_class": 4}
    line = train_and_score(replace(run, changes=changes), environment)
    assert line["kind"] == "run"
    assert line["val"]["loss"] is not None
