"""A probe measures the same in two processes as in one, and does not change the run."""

from pathlib import Path
from typing import Any

import pytest

from surrogap.experiments import probes
from surrogap.experiments.probes import sharpness_probe
from surrogap.training.run import train
from tests.distributed.processes import Processes
from tests.training import small_runs

SETTINGS: dict[str, Any] = {"objective": "gsam", "rho": 0.1, "scope": "global", "steps": 4}
PROBED = {"sharpness_every": 2, "sharpness_images": 13, "eval_batch_size": 4}


def run(folder: Path, changes: dict[str, Any]) -> int:
    return train(small_runs.config(folder, **(SETTINGS | changes)), probe=sharpness_probe).step


def sharpness_of(folder: Path) -> list[dict[str, Any]]:
    records = small_runs.timeless_records(folder / "run")
    return [r for r in records if r.pop("kind") == "sharpness"]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes(
    parallel: str, tmp_path: Path, two: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "plain"):
        small_runs.config(tmp_path / name)  # creates the images before both processes need them
    changes = {"parallel": parallel, **PROBED}
    if parallel == "fsdp2":  # the only method for sharded weights; one process selects it
        monkeypatch.setattr(probes, "PRODUCT_METHODS", ("finite-differences",))
    run(tmp_path / "one", changes | {"sharpness_images": 12})
    # Two processes use 12 of 13 images, so that both have the same number.
    assert two.run(run, tmp_path / "two", changes) == [4, 4]
    assert two.run(run, tmp_path / "plain", {"parallel": parallel, "eval_batch_size": 4}) == [4, 4]
    mine, theirs = sharpness_of(tmp_path / "one"), sharpness_of(tmp_path / "two")
    assert len(mine) == 2
    for a, b in zip(mine, theirs, strict=True):
        a.pop("residual"), b.pop("residual")
        assert a == pytest.approx(b, rel=2e-2, abs=1e-4)
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    small_runs.assert_same(
        small_runs.state(tmp_path / "two" / "run"), small_runs.state(tmp_path / "plain" / "run")
    )
