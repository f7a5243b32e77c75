"""`surrogap evaluate`: images in memory, and ImageNet's test sets in their published layout."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from surrogap.cli import main, terminal
from surrogap.data import FileSet, Splits, TensorSet
from surrogap.evaluation import CORRUPTIONS, IMAGENET_C, corrupted, evaluate
from surrogap.experiments.eval_sets import EvalSetPaths, batch_maker, eval_sets
from surrogap.experiments.trained import TrainedRun
from surrogap.training.records import read_records
from surrogap.training.run import train
from tests.training.small_runs import config

# Classes 0, 1 and 207 of ImageNet. The first is not in ImageNet-R.
CLASSES = ("n01440764", "n01443537", "n02099601")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MLP on grey noise."""
    return train(config(tmp_path_factory.mktemp("grey"), epochs=1)).folder


def result_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "evaluation.json").read_text())
    return found


def test_the_clean_test_set_has_the_scores_of_the_last_record(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), "--no-corruptions"]) == 0
    last = [record for record in read_records(run) if record["kind"] == "epoch"][-1]
    found = result_of(run)
    assert set(found) == {"command", "figures", "sets", "versions"}
    for name in ("accuracy", "top5", "loss", "calibration_error"):
        assert found["sets"]["test"][name] == pytest.approx(last[f"test_{name}"], rel=1e-6)
    out = capsys.readouterr().out
    assert f"{100 * last['test_accuracy']:.2f}" in out
    assert out.splitlines()[1].split("  ")[0] == "test set"


def test_scores_that_are_not_finite_are_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surrogap.training.run._Trainer._fail", lambda *_: None)
    folder = train(config(tmp_path, objective="vanilla", steps=2, decay="constant", lr=1e15)).folder
    monkeypatch.undo()
    assert main(["evaluate", str(folder), "--no-corruptions"]) == 0
    assert result_of(folder)["sets"]["test"]["loss"] is None


def test_corruptions_and_their_mean(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--batch-size", "7"]) == 0
    found = result_of(run)["corruptions"]
    by_severity = found["by_severity"]
    assert list(by_severity) == [
        name for name in CORRUPTIONS if name != "saturate"
    ]  # no effect on grey images
    assert "mean of 11 corruptions" in capsys.readouterr().out

    trained = TrainedRun.read(run)
    splits = trained.splits()
    assert isinstance(splits.test, TensorSet)
    images = corrupted(splits.test.images, "contrast", 5).float()
    normal = (images / 255 - splits.mean[0]) / splits.std[0]
    scores = evaluate(trained.model(splits), [(normal, splits.test.labels)])
    for name in ("accuracy", "loss", "calibration_error"):
        score = by_severity["contrast"]["5"][name]
        assert score == pytest.approx(getattr(scores, name), rel=1e-5)
    for measure in ("accuracy", "top5", "loss", "calibration_error"):
        values = [s[measure] for severities in by_severity.values() for s in severities.values()]
        assert len(values) == 55
        assert found["mean"][measure] == pytest.approx(np.mean(values))
        fog = np.mean([s[measure] for s in by_severity["fog"].values()])
        assert found["by_corruption"]["fog"][measure] == pytest.approx(fog)


def test_without_a_terminal_lines_show_the_progress(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "LINE_INTERVAL", 0.0)
    assert main(["evaluate", str(run)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["evaluate, test: 0%", "evaluate, gaussian_noise 1: 2%"]
    assert len(lines) == 56


def test_unanimous_votes_give_the_scores_of_the_labels(run: Path, tmp_path: Path) -> None:
    labels = np.asarray(TrainedRun.read(run).splits().test.labels)
    votes = 7 * np.eye(4, dtype=np.uint8)[labels]
    np.save(tmp_path / "votes.npy", votes)
    np.savez(tmp_path / "votes.npz", counts=votes)
    np.save(tmp_path / "fractions.npy", votes / np.float32(7))
    for name in ("votes.npy", "votes.npz", "fractions.npy"):
        words = ["evaluate", str(run), "--no-corruptions", "--votes", str(tmp_path / name)]
        assert main(words) == 0
        sets = result_of(run)["sets"]
        assert sets["votes"] == pytest.approx(sets["test"])


def test_votes_in_the_archive_of_the_data_set_are_found(tmp_path: Path) -> None:
    settings = config(tmp_path, epochs=1)
    data = tmp_path / "images.npz"
    with np.load(data) as archive:
        arrays = dict(archive)
    votes = np.ones((16, 4), np.uint8)
    np.savez(data, **arrays, test_human_counts=votes)
    run = train(settings).folder
    assert main(["evaluate", str(run), "--no-corruptions"]) == 0
    found = result_of(run)["sets"]["votes"]
    assert found["accuracy"] == 1.0  # all classes are tied
    assert found["num_samples"] == 16


@pytest.mark.parametrize(
    ("votes", "message"),
    [
        (np.ones((16, 3)), "votes must have a row for each test image and a column for each class"),
        (None, "votes must be an .npy file of counts, or an .npz archive with test_human_counts"),
        (np.full((16, 4), np.nan), "votes must be at least 0"),
        (np.full((16, 4), "many"), "votes must be an .npy file of counts"),
    ],
)
def test_invalid_votes_are_refused(
    votes: Any, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if votes is not None:
        np.save(tmp_path / "votes.npy", votes)
    before = [path for path in run.iterdir() if path.name == "evaluation.json"]
    assert main(["evaluate", str(run), "--votes", str(tmp_path / "votes.npy")]) == 2
    assert message in capsys.readouterr().err
    assert [path for path in run.iterdir() if path.name == "evaluation.json"] == before


def test_votes_can_be_fractions(run: Path, tmp_path: Path) -> None:
    """Rounded down they would all be 0, and no image would have votes."""
    np.save(tmp_path / "votes.npy", np.full((16, 4), 0.25))
    words = ["evaluate", str(run), "--no-corruptions", "--votes", str(tmp_path / "votes.npy")]
    assert main(words) == 0
    assert result_of(run)["sets"]["votes"]["num_samples"] == 16


@pytest.mark.parametrize(
    ("kept", "reason"), [(0.5, "is not a zip file"), (1.0, "its arrays are labels, images")]
)
def test_invalid_archives_of_votes_are_refused(
    kept: float, reason: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "votes.npz"
    np.savez(path, labels=np.ones((16, 4)), images=np.ones(3))
    path.write_bytes(path.read_bytes()[: round(kept * path.stat().st_size)])
    assert main(["evaluate", str(run), "--votes", str(path)]) == 2
    assert reason in capsys.readouterr().err


def write_images(folder: Path, names: tuple[str, ...], *, seed: int, number: int = 2) -> None:
    """Write noise images to a folder per class. The same seed gives the same images."""
    rng = np.random.default_rng(seed)
    for place, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(number):
            pixels = rng.integers(256, size=(16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{place}_{i}.png")


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three classes of ImageNet, and test sets with these and one more."""
    root = tmp_path_factory.mktemp("imagenet")
    write_images(root / "images" / "train", CLASSES, seed=0, number=4)
    write_images(root / "images" / "val", CLASSES, seed=1)
    write_images(root / "v2", ("0", "1", "207", "2"), seed=1)  # the first are the images of val
    write_images(root / "r", (*CLASSES[1:], "n01484850"), seed=2)
    for name in IMAGENET_C:
        for severity in range(1, 6):
            write_images(root / "c" / name / str(severity), (*CLASSES, "n01484850"), seed=1)
    real = [[0], [], [1], [1, 2], [2], [0, 1, 2]]  # in the order of the file names
    (root / "real.json").write_text(json.dumps(real))
    settings = {"data": str(root / "images"), "image_size": 8, "num_workers": 0, "batch_size": 4}
    run = train(config(root, epochs=1, **settings)).folder
    assert run == root / "run"
    return root


def evaluated(root: Path, *sets: str) -> dict[str, Any]:
    words = ["evaluate", str(root / "run"), "--num-workers", "0", "--batch-size", "5"]
    for name in sets:
        words += [f"--{name}", str(root / ("real.json" if name == "real" else name))]
    assert main(words) == 0
    return result_of(root / "run")


def test_published_test_sets_of_imagenet(imagenet: Path) -> None:
    found = evaluated(imagenet, "v2", "r", "c")
    sets = found["sets"]
    assert list(sets) == ["test", "ImageNet-V2", "ImageNet-R"]
    assert sets["ImageNet-V2"] == sets["test"]  # the same images
    assert sets["test"]["num_samples"] == 6
    assert sets["ImageNet-R"]["num_samples"] == 4
    assert list(found["corruptions"]["by_severity"]) == list(IMAGENET_C)
    mean = found["corruptions"]["mean"]
    assert mean == pytest.approx({name: sets["test"][name] for name in mean})


def test_published_test_sets_need_a_run_on_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path, epochs=1)
    data = tmp_path / "images.npz"
    with np.load(data) as archive:
        names = {"classes": np.array([*CLASSES, "n01484850"])}
        arrays = dict(archive) | names
    np.savez(data, **arrays)
    run = train(settings).folder
    assert main(["evaluate", str(run), "--v2", str(tmp_path)]) == 2
    assert "whose images are in memory. Leave them out." in capsys.readouterr().err


def test_real_accepts_each_of_its_labels(imagenet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("evaluation.imagenet", "experiments.eval_sets"):
        monkeypatch.setattr(f"surrogap.{module}.imagenet_synsets", lambda: CLASSES)
    sets = evaluated(imagenet, "real")["sets"]
    run = TrainedRun.read(imagenet / "run")
    splits = run.splits()
    files = sorted((imagenet / "images" / "val").rglob("*.png"), key=lambda path: path.name)
    batches = batch_maker(6, torch.device("cpu"), size=8, num_workers=0)(splits)
    ((images, _),) = list(batches)
    by_name = dict(zip(splits.test.paths, images, strict=True))  # type: ignore[union-attr]
    with torch.no_grad():
        best = run.model(splits)(torch.stack([by_name[str(f)] for f in files])).argmax(1)
    real = json.loads((imagenet / "real.json").read_text())
    right = [int(k) in labels for k, labels in zip(best, real, strict=True) if labels]
    assert sets["ImageNet-ReaL"]["num_samples"] == 5  # one image is unlabelled
    assert sets["ImageNet-ReaL"]["accuracy"] == pytest.approx(np.mean(right))


def test_imagenet_r_is_scored_on_its_own_classes(imagenet: Path) -> None:
    found = evaluated(imagenet, "r")["sets"]["ImageNet-R"]
    run = TrainedRun.read(imagenet / "run")
    splits = run.splits()
    assert splits.classes == CLASSES
    kept = [1, 2]  # without n01440764, the first
    paths = [path for k in kept for path in sorted((imagenet / "r" / CLASSES[k]).iterdir())]
    subset = FileSet([str(path) for path in paths], [1, 1, 2, 2])
    loading = batch_maker(4, torch.device("cpu"), size=8, num_workers=0)
    ((images, labels),) = list(loading(replace(splits, test=subset)))
    with torch.no_grad():
        logits = run.model(splits)(images)[:, kept]
    loss = torch.nn.functional.cross_entropy(logits, labels - 1)
    assert found["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_test_sets_are_found_in_the_data_root(run: Path, tmp_path: Path) -> None:
    for name in ("cifar10h-counts.npy", "real.json", "imagenet-r", "imagenet-c"):
        (tmp_path / name).mkdir()

    def found(data: str) -> EvalSetPaths:
        return EvalSetPaths(c=Path("mine")).or_found(data, tmp_path)

    assert found("cifar10") == EvalSetPaths(votes=tmp_path / "cifar10h-counts.npy", c=Path("mine"))
    real, r = tmp_path / "real.json", tmp_path / "imagenet-r"
    assert found("imagenet") == EvalSetPaths(real=real, r=r, c=Path("mine"))
    assert found("cifar100") == EvalSetPaths(c=Path("mine"))
    np.savez(tmp_path / "cifar100.npz", test_human_counts=np.eye(2))
    assert found("cifar100") == EvalSetPaths(votes=tmp_path / "cifar100.npz", c=Path("mine"))


def test_test_sets_of_imagenet_are_refused_for_other_runs(
    run: Path, imagenet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), "--v2", str(imagenet / "v2")]) == 2
    assert "ImageNet's test sets require a run on ImageNet" in capsys.readouterr().err
    words = ["evaluate", str(imagenet / "run"), "--v2", str(imagenet / "r")]
    assert main(words) == 2
    assert "root must hold the 3 folders 0, 1, 207, got" in capsys.readouterr().err


def test_real_is_refused_for_some_classes_of_imagenet(
    imagenet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = imagenet / "real.json"
    assert main(["evaluate", str(imagenet / "run"), "--real", str(real)]) == 2
    message = (
        "ImageNet-ReaL requires a run on all 1,000 classes of ImageNet, got "
        f"{imagenet / 'images'} with 3. Leave {real} out."
    )
    assert message in " ".join(capsys.readouterr().err.split())


def test_classes_of_imagenet_21k_are_refused() -> None:
    images = FileSet(["n00005787/1.png"], [0])
    splits = Splits("21k", ("n00005787", *CLASSES), images, images)
    message = (
        "ImageNet's test sets require a run on ImageNet-1k, or on some of its 1,000 synsets, got "
        "21k, whose classes include n00005787. Leave them out."
    )
    with pytest.raises(ValueError, match=message):
        list(eval_sets(splits, EvalSetPaths(v2=Path("v2"))))


def test_refusals(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "run must be a folder with a readable config.json" in capsys.readouterr().err

    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "weights must be a run's folder with a checkpoint" in capsys.readouterr().err

    assert main(["evaluate", str(run), "--batch-size", "0"]) == 2
    assert "batch_size must be at least 1, got 0" in capsys.readouterr().err

    gone = json.loads((run / "config.json").read_text())
    gone["data"]["name"] = str(tmp_path / "gone.npz")
    (tmp_path / "config.json").write_text(json.dumps(gone))
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "name_or_path must be one of" in capsys.readouterr().err
    assert not (tmp_path / "evaluation.json").exists()


def test_a_data_set_with_other_classes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(config(tmp_path, epochs=1)).folder
    with np.load(tmp_path / "images.npz") as archive:
        arrays = dict(archive)
    arrays["classes"] = np.array([*arrays["classes"], "eel"])
    np.savez(tmp_path / "images.npz", **arrays)
    assert main(["evaluate", str(run)]) == 2
    error = capsys.readouterr().err
    assert "weights must fit the model, got" in error
    assert "size mismatch for 5.bias" in error


def test_a_folder_that_is_not_writable_is_refused_before_the_evaluation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("surrogap.experiments.eval_scores.evaluate_run", None)
    assert main(["evaluate", str(run), "--out", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert f"out must be a writable folder, got {tmp_path / 'file'} (File" in error


def test_scores_are_printed_even_if_they_cannot_be_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f".evaluation.{os.getpid()}.unfinished.json").mkdir()  # the temporary file
    words = ["evaluate", str(run), "--no-corruptions", "--out", str(tmp_path)]
    assert main(words) == 2
    output = capsys.readouterr()
    assert "calibration error" in output.out
    assert f"out must be a writable folder, got {tmp_path} (Is a dir" in output.err


def test_scores_are_written_to_out(run: Path, tmp_path: Path) -> None:
    assert main(["evaluate", str(run), "--no-corruptions", "--out", str(tmp_path / "new")]) == 0
    assert result_of(tmp_path / "new")["sets"]["test"]["num_samples"] > 0
