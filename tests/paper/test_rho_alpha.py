"""The grid of rho and alpha: its runs, their measurements, and the figure."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from surrogap.analysis import Hessian, Surface, eigenvalues, surrogate_gaps
from surrogap.experiments import measurements
from surrogap.experiments.measurements import measure_sharpness, write_measurements
from surrogap.experiments.recipes import RECIPES, Recipe
from surrogap.experiments.trained import TrainedRun
from surrogap.paper.reproductions import ReproductionSettings
from surrogap.paper.rho_alpha import grid, grid_figure, grid_table, read_run, shared_config
from surrogap.training.failure import RunFailedError
from surrogap.training.records import read_records
from surrogap.training.run import train
from tests.paper import synthetic_grid
from tests.training import small_runs

CPU = torch.device("cpu")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReproductionSettings:
    """A recipe of 12 steps on grey noise, whose own radius decays."""
    config = small_runs.config(tmp_path, rho=0.3, rho_min=0.1, alpha=0.7, record_every=1)
    monkeypatch.setitem(RECIPES, "tiny", Recipe("tiny", config, reproduces="", expected=""))
    return ReproductionSettings(
        recipe="tiny", rhos=(0.2, 0.1), alphas=(0.4, 0.0), num_seeds=2, folder=tmp_path / "out"
    )


def test_a_run_is_the_recipe_with_a_constant_radius_and_an_alpha(
    settings: ReproductionSettings,
) -> None:
    runs = grid(settings)
    places = [(r.config.execution.seed, r.config.objective.rho, r.method) for r in runs]
    methods = {rho: (f"rho {rho}, alpha 0", f"rho {rho}, alpha 0.4") for rho in (0.1, 0.2)}
    expected = [(s, rho, method) for s in (0, 1) for rho in (0.1, 0.2) for method in methods[rho]]
    assert places == expected
    last = runs[-1].config
    changes: dict[str, Any] = {"rho": 0.2, "rho_min": None, "alpha": 0.4, "seed": 1}
    out = str(settings.folder / "rho-0.2-alpha-0.4-seed-1")
    assert last == RECIPES["tiny"].config.override(**changes, out=out)
    train(last)
    radii = {record["rho"] for record in read_records(last.folder) if record["kind"] == "step"}
    assert radii == {0.2}


def test_any_recipe_becomes_gsam_and_any_length_its_own() -> None:
    settings = ReproductionSettings(
        recipe="fashion-mnist-sam", rhos=(0.1,), alphas=(0.3,), num_seeds=1, num_steps=7
    )
    (run,) = grid(settings)
    assert (run.config.objective.name, run.config.objective.alpha) == ("gsam", 0.3)
    assert run.config.schedule.steps == 7
    own = shared_config(replace(settings, num_steps=None))
    assert own.schedule == RECIPES["fashion-mnist-sam"].config.schedule


def test_alpha_0_is_sam(settings: ReproductionSettings, tmp_path: Path) -> None:
    config = grid(settings)[0].config
    assert config.objective.alpha == 0
    train(config)
    train(config.override(objective="sam", out=str(tmp_path / "sam")))
    ours, sams = (small_runs.state(folder) for folder in (config.folder, tmp_path / "sam"))
    small_runs.assert_same(ours["model"], sams["model"])


def by_hand(run: TrainedRun) -> tuple[nn.Module, Callable[[], Tensor], list[Tensor]]:
    """The network in float64, its loss over all training images, and its parameters."""
    splits = run.splits()
    model = run.model(splits).double()
    (mean,), (std,) = splits.mean, splits.std
    images = (splits.train.images.double() / 255 - mean) / std  # type: ignore[union-attr]
    labels = torch.as_tensor(splits.train.labels)
    return model, lambda: cross_entropy(model(images), labels), list(model.parameters())


def one_step_gap(run: TrainedRun, rho: float) -> float:
    _, loss, parameters = by_hand(run)
    before = loss()
    gradients = torch.autograd.grad(before, parameters)
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    with torch.no_grad():
        for p, g in zip(parameters, gradients, strict=True):
            p += rho * g / norm
        return float(loss() - before)


def dominant(run: TrainedRun) -> float:
    """By power iteration, through a second backward pass."""
    _, loss, parameters = by_hand(run)
    gradients = torch.autograd.grad(loss(), parameters, create_graph=True)
    flat = torch.cat([g.flatten() for g in gradients])
    v = torch.randn(len(flat), dtype=torch.float64)
    for _ in range(60):
        v /= v.norm()
        parts = torch.autograd.grad(flat, parameters, v, retain_graph=True)
        product = torch.cat([part.flatten() for part in parts])
        value, v = float(v @ product), product
    return value


def test_the_numbers_are_those_of_the_run(settings: ReproductionSettings) -> None:
    planned = grid(settings)[-1]
    folder = train(planned.config).folder
    write_measurements(folder, 0.2, CPU, measure_sharpness)
    values, run = read_run(planned), TrainedRun.read(folder)
    last = [record for record in read_records(folder) if record["kind"] == "epoch"][-1]
    names = ("rho", "alpha", "seed", "num_images")
    assert [values[name] for name in names] == [0.2, 0.4, 1, 32]
    assert {name: values[name] for name in ("test_accuracy", "test_loss")}.items() <= last.items()
    gap = one_step_gap(run, 0.2)
    assert values["gap"] == pytest.approx(gap, rel=1e-3)
    assert values["sharpness"] == pytest.approx(2 * gap / 0.2**2, rel=1e-3)
    assert values["eigenvalue"] == pytest.approx(dominant(run), rel=1e-2)
    model, loss, _ = by_hand(run)
    surface = Surface(model, [torch.zeros(1)], lambda *_: loss())
    top = eigenvalues(Hessian(surface, "double-backward"), 1, "dominant").vectors[0]
    (worst,) = surrogate_gaps(surface, [0.2], num_ascent_steps=5, start=top).gaps
    assert values["worst_sharpness"] == pytest.approx(worst.worst_sharpness, rel=1e-2)
    assert values["worst_gap"] >= values["gap"]


def test_a_part_of_the_images_is_measured(
    settings: ReproductionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "NUM_IMAGES", 8)
    planned = grid(settings)[0]
    run = TrainedRun.read(train(planned.config).folder)
    assert measure_sharpness(run, 0.1, CPU)["num_images"] == 8


def test_a_network_that_is_lost_has_failed(
    settings: ReproductionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TrainedRun.read(train(grid(settings)[0].config).folder)
    model = run.model(run.splits())
    nn.init.constant_(next(model.parameters()), math.nan)
    monkeypatch.setattr(TrainedRun, "model", lambda *_: model)
    message = (
        r"loss must be finite at the end of a run, got nan in .*seed-0\. Train with a smaller rho"
    )
    with pytest.raises(RunFailedError, match=message):
        write_measurements(run.folder, 0.1, CPU, measure_sharpness)
    assert not (run.folder / "measurements.json").exists()


def test_without_a_finite_hessian_nothing_is_written(
    settings: ReproductionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TrainedRun.read(train(grid(settings)[0].config).folder)
    monkeypatch.setattr(measurements, "sharpness_at", lambda *_: {"loss": 1.0, "rho": 0.1})
    with pytest.raises(RunFailedError, match="eigenvalue must be finite at the end of a run"):
        write_measurements(run.folder, 0.1, CPU, measure_sharpness)
    assert not (run.folder / "measurements.json").exists()


def test_the_table_has_a_row_for_each_rho_and_alpha() -> None:
    shown = grid_table(
        synthetic_grid.runs(accuracy=0.01, sharpness=-5.0, eigenvalue=-6.0), "synthetic"
    )
    assert [row[:2] for row in shown.rows] == [
        (rho, alpha) for rho in ("0.1", "0.2") for alpha in ("0", "0.2", "0.4")
    ]
    # Means and deviations of three seeds, a point and a unit apart from each other.
    expected = ("82.00 ± 1.00", "14.00 ± 1.00", "40.00 ± 0.00", "21.00 ± 1.00")
    assert shown.rows[-1] == ("0.2", "0.4", *expected)


def test_the_figure_has_the_papers_panels() -> None:
    results = synthetic_grid.runs(accuracy=0.01, sharpness=-5.0, eigenvalue=-6.0)
    *panels, _ = grid_figure(results, "synthetic").axes
    labels = [panel.get_ylabel() for panel in panels]
    assert labels == ["test accuracy %", "2h/rho^2, one ascent step", "dominant eigenvalue"]
    for panel, ends in zip(panels, ((82, 82), (15, 14), (23, 21)), strict=True):
        lines = panel.get_lines()
        assert [line.get_label() for line in lines] == ["alpha 0", "alpha 0.2", "alpha 0.4"]
        expected = np.transpose([(0.1, 0.2), ends])
        assert lines[2].get_xydata() == pytest.approx(expected)
    assert [panel.get_yscale() for panel in panels] == ["linear", "log", "log"]


def test_a_single_rho_and_a_negative_eigenvalue_can_be_drawn(tmp_path: Path) -> None:
    results = synthetic_grid.runs(accuracy=0.01, sharpness=-5.0, eigenvalue=-60.0)
    drawn = grid_figure([run for run in results if run["rho"] == 0.1], "synthetic")
    assert [panel.get_yscale() for panel in drawn.axes] == ["linear"] * 4
    drawn.savefig(tmp_path / "figure.png")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "tiy"}, "recipe must be one of .* The closest is 'tiny'"),
        ({"rhos": (0.1, 0.0)}, "rhos must be above 0 and finite, got 0.0. Pass positive radii"),
        ({"rhos": (math.inf,)}, "rhos must be above 0 and finite, got inf"),
        ({"rhos": ()}, "rhos must be distinct, and at least one, got none. Pass each value once."),
        ({"rhos": (0.1, 0.2, 0.1)}, "rhos must be distinct, and at least one, got 0.1 0.2 0.1"),
        ({"alphas": (0.1, -0.1)}, "alphas must be at least 0 and finite, got -0.1. Pass 0 for SAM"),
        ({"alphas": ()}, "alphas must be distinct, and at least one, got none"),
        ({"alphas": (0.0, 0.0)}, "alphas must be distinct, and at least one, got 0 0"),
    ],
)
@pytest.mark.usefixtures("settings")
def test_mistakes(changes: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"recipe": "tiny", "rhos": (0.1,), "alphas": (0.0,), "num_seeds": 1}
    with pytest.raises(ValueError, match=message):
        grid(ReproductionSettings(**(right | changes)))
