"""The end of a run: its last step, a signal, a non-finite loss, a full disk."""

import errno
import io
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from surrogap.evaluation import evaluate
from surrogap.training.components import components_of
from surrogap.training.config import Config
from surrogap.training.failure import RunFailedError
from surrogap.training.images import images_of
from surrogap.training.processes import World, device_of
from surrogap.training.records import read_records
from surrogap.training.run import train
from surrogap.training.signals import stop_requests
from surrogap.training.step import EagerStep
from tests.data.synthetic import folder as image_folder
from tests.training import small_runs

WORLD = World(torch.device("cpu"))


def test_the_last_record_is_the_evaluation_of_the_last_weights(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, model="small_resnet18_narrow", eval_batch_size=5)
    outcome = train(config)
    assert (outcome.step, outcome.num_steps, outcome.signal) == (12, 12, None)
    components = components_of(config, WORLD)
    components.model.load_state_dict(small_runs.state(config.folder)["model"])
    scores = evaluate(components.model, components.eval_images["test"])
    assert outcome.record is not None
    assert outcome.record["test_loss"] == pytest.approx(scores.loss, rel=1e-6)
    assert outcome.record["test_accuracy"] == scores.accuracy
    assert outcome.record["epoch"] == 3


def test_steps_in_place_of_epochs(tmp_path: Path) -> None:
    outcome = train(small_runs.config(tmp_path, steps=6))
    assert outcome.record is not None
    assert (outcome.step, outcome.record["epoch"]) == (6, 2)
    assert "test_loss" in outcome.record


def test_files_are_trained_on_too(tmp_path: Path) -> None:
    images = image_folder(tmp_path / "images", per_class=4)
    config = small_runs.config(
        tmp_path / "run", data=str(images), image_size=8, batch_size=4, num_workers=0, epochs=1
    )
    assert train(config).step == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_ends(number: signal.Signals, tmp_path: Path) -> None:
    config, before = small_runs.config(tmp_path), signal.getsignal(number)
    outcome = train(config, progress=small_runs.Interrupting(5, number))
    assert (outcome.step, outcome.num_steps, outcome.signal) == (5, 12, number)
    assert small_runs.state(config.folder)["step"] == 5
    assert signal.getsignal(number) == before


def test_a_signal_during_the_last_step_is_passed_on(tmp_path: Path) -> None:
    """So that the next run of a study or a comparison does not start."""
    outcome = train(
        small_runs.config(tmp_path), progress=small_runs.Interrupting(12, signal.SIGTERM)
    )
    assert (outcome.is_finished, outcome.signal) == (True, signal.SIGTERM)


def test_a_second_interrupt_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_requests() as requests:
        assert requests.signal == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert requests.signal == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # which ends the process
    assert signal.getsignal(signal.SIGINT) == before


def test_sigterm_may_come_twice() -> None:
    """From the scheduler to all processes of a job, and from torchrun, which forwards it."""
    with stop_requests() as requests:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert requests.signal == signal.SIGTERM


def test_other_threads_hear_no_signals(tmp_path: Path) -> None:
    steps: list[int] = []
    thread = threading.Thread(target=lambda: steps.append(train(small_runs.config(tmp_path)).step))
    thread.start()
    thread.join()
    assert steps == [12]


def losing(monkeypatch: pytest.MonkeyPatch, is_lost: Any) -> None:
    """Make the loss of pass n, from 1, NaN if `is_lost(n)`."""
    whole, num_passes = EagerStep._loss_and_accuracy, 0

    def loss_and_accuracy(self: EagerStep, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal num_passes
        num_passes += 1
        loss, right = whole(self, x, y)
        return loss * (math.nan if is_lost(num_passes) else 1.0), right

    monkeypatch.setattr(EagerStep, "_loss_and_accuracy", loss_and_accuracy)


def kinds(config: Config) -> list[tuple[str, int]]:
    return [(r["kind"], r["step"]) for r in read_records(config.folder)]


def test_a_loss_that_is_not_finite_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 is skipped: three steps give the weights of the other two."""
    config = small_runs.config(
        tmp_path, objective="vanilla", steps=3, decay="constant", momentum=0.0, record_every=3
    )
    losing(monkeypatch, lambda n: n == 2)
    train(config)
    assert kinds(config) == [("skip", 2), ("step", 3), ("epoch", 3)]
    monkeypatch.undo()
    components = components_of(config, WORLD)
    for step, (images, targets) in enumerate(components.images):
        if step in (0, 2):
            components.step(images, targets)
    small_runs.assert_same(small_runs.state(config.folder)["model"], components.model.state_dict())


def test_after_too_many_the_run_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_runs.config(tmp_path, objective="vanilla", max_skipped=2, checkpoint_every=1)
    losing(monkeypatch, lambda n: n == 2 or n >= 4)  # a single one does not stop the run
    with pytest.raises(RunFailedError, match="loss must be finite, got infinity or NaN in 3 steps"):
        train(config)
    skips = [record for record in kinds(config) if record[0] == "skip"]
    assert skips == [("skip", 2), ("skip", 4), ("skip", 5), ("skip", 6)]
    last = read_records(config.folder)[-1]
    assert last["kind"] == "failure"
    assert "in 3 steps in a row, up to step 6" in last["reason"]
    assert small_runs.state(config.folder)["step"] == 5


def test_a_run_ends_well_only_if_its_last_scores_are_finite(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, objective="vanilla", steps=2, decay="constant", lr=1e15)
    with pytest.raises(RunFailedError, match="got infinity or NaN when the model was evaluated"):
        train(config)
    assert read_records(config.folder)[-1]["kind"] == "failure"


def test_skips_in_a_row_are_counted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_runs.config(tmp_path, objective="vanilla", max_skipped=3)
    losing(monkeypatch, lambda n: True)
    train(config, resume=True, progress=small_runs.Interrupting(2))
    with pytest.raises(RunFailedError, match="in 4 steps in a row, up to step 4"):
        train(config, resume=True)


def test_images_that_have_changed(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path)
    train(config, resume=True, progress=small_runs.Interrupting(3))
    data = tmp_path / "images.npz"
    with np.load(data) as archive:
        arrays = dict(archive)
    np.savez(data, **arrays | {"classes": np.array([*arrays["classes"], "another"])})
    before = small_runs.state(config.folder)["step"]
    with pytest.raises(
        ValueError, match=r"whose checkpoint differs .* Check that the images are the same"
    ):
        train(config, resume=True)
    assert small_runs.state(config.folder)["step"] == before


@pytest.mark.parametrize("objective", ["vanilla", "gsam", "entropy-sgd"])
def test_an_overflow_lowers_the_scale_and_is_counted(tmp_path: Path, objective: str) -> None:
    changes = {"loss": "sigmoid", "head_bias": -10.0, "lr": 1e-3, "batch_size": 2, "epochs": 1}
    config = small_runs.config(tmp_path, precision="fp16", objective=objective, **changes)
    assert train(config).step == 16
    record = read_records(config.folder)[-1]
    assert record["overflows"] >= 1  # 2^16 times these gradients overflows fp16
    assert record["overflows"] < 16
    assert record["grad_norm"] > 0.1


def test_a_full_disk_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_runs.config(tmp_path)
    train(config, resume=True, progress=small_runs.Interrupting(3))
    save = torch.save

    class FullDisk(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda state, file: save(state, FullDisk()))
        with pytest.raises(RunFailedError, match=r"Cannot write a checkpoint to .*: No space"):
            train(config, resume=True)
    assert small_runs.state(config.folder)["step"] == 3
    assert train(config, resume=True).step == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"capture": True},
            "capture must be used with one process on a CUDA device, got device cpu",
        ),
        ({"device": "nonsense"}, "device must be available, got 'nonsense'"),
        ({"batch_size": 64}, "batch_size must leave a full batch"),
        (
            {"warmup_steps": 12},
            "warmup_steps must be fewer than the steps of the run, got 12 of 12",
        ),
    ],
)
def test_invalid_settings_are_refused_before_training(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = small_runs.config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        train(config)
    assert not config.folder.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_available() -> None:
    with pytest.raises(ValueError, match="device must be available, got 'cuda'"):
        device_of("cuda")
    assert device_of("auto") == torch.device("cpu")


def test_only_the_first_process_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = images_of.__globals__["load"]

    def load(name: str, root: str, **settings: Any) -> Any:
        asked.append(settings)
        return real(name, root)

    monkeypatch.setitem(images_of.__globals__, "load", load)
    components_of(small_runs.config(tmp_path, download=True), WORLD)
    assert asked == [{"download": True}]
