"""A run on image files checks them before its first step."""

import warnings
from pathlib import Path

import pytest

from surrogap.cli import main
from surrogap.experiments.trained import TrainedRun
from surrogap.training.config import Config
from surrogap.training.progress import LineDisplay
from surrogap.training.run import train
from tests.data import synthetic


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    synthetic.folder(tmp_path / "set")
    (tmp_path / "set" / "train" / "bee" / "3.png").write_bytes(b"")
    return Config().override(
        model="small_mlp",
        data=str(tmp_path / "set"),
        image_size=8,
        batch_size=3,
        epochs=1,
        num_workers=0,
        device="cpu",
        tensorboard=False,
        out=str(tmp_path / "run"),
    )


def test_a_damaged_file_is_found_before_the_first_step(config: Config) -> None:
    with pytest.raises(
        ValueError, match=r"^image files must be intact, got 1 damaged file in .*bee"
    ):
        train(config)
    assert not config.folder.exists()


def test_damaged_files_are_left_out(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UserWarning, match=r"^Left out 1 damaged file in .*3.png"):
        outcome = train(config.override(skip_damaged=True), progress=LineDisplay())
    assert outcome.step == 3  # of 9 images
    assert capsys.readouterr().out.startswith("checked 20 of 20 image files\nsmall_mlp")
    # Later readers leave out the same files, without another warning.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(TrainedRun.read(outcome.folder).splits().train) == 9


def test_evaluate_checks_the_test_files(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set" / "train" / "bee" / "3.png").unlink()
    run = str(train(config).folder)
    (tmp_path / "set" / "val" / "ant" / "1.png").write_bytes(b"")
    assert main(["evaluate", run, "--num-workers", "0"]) == 2
    assert "image files must be intact, got 1 damaged file in " in capsys.readouterr().err
    with pytest.warns(UserWarning, match=r"^Left out 1 damaged file in .*1.png"):
        assert main(["evaluate", run, "--num-workers", "0", "--skip-damaged"]) == 0
    assert " 9 " in capsys.readouterr().out
