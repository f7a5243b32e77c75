"""The study's declaration: fair trials, valid configurations, and keys that tables share."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from surrogap.paper.artifacts import ARTIFACTS, stages
from surrogap.paper.ledger import Ledger
from surrogap.paper.methods import METHODS
from surrogap.paper.scales import GPU, LAPTOP, SCALES
from surrogap.paper.study import TUNING_SEED, Cell, Scale, study_run
from surrogap.paper.tuning import chosen, shared_settings, trials
from surrogap.training.config import Config

# Trained before plain training was tuned, with other values of lr and weight decay. No table shows
# them.
UNTUNED = {"743f6454eff0a1f6", "7c2d1861b9467d76"}
LEDGER = Ledger(Path(__file__).parents[2] / GPU.ledger)
scales = pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)


@scales
def test_every_method_has_as_many_trials_and_no_test_images(scale: Scale) -> None:
    for letter, setup in scale.setups.items():
        for method in setup.methods:
            tried = trials(scale, letter, method)
            assert len({run.key for run in tried}) == setup.num_trials(scale.num_trials)
            for run in tried:
                config = run.config()
                assert config.output.eval_on == "val"
                assert config.execution.seed == TUNING_SEED
                assert max(*scale.more_seeds.values(), *scale.num_seeds.values()) < TUNING_SEED


def test_the_trials_of_the_ledger_are_found() -> None:
    """A second setting was tried at the two radii that were best for the simpler method."""
    tried = {("A", "gsam"): (0.1, 0.2), ("A", "gsam-norms"): (0.5, 1.0), ("E", "gsam"): (0.2, 0.4)}
    for (setup, method), radii in tried.items():
        runs = trials(GPU, setup, method, LEDGER)
        settings = [{"rho": rho, "alpha": alpha} for rho in radii for alpha in (0.1, 0.3)]
        assert [run.settings for run in runs] == settings
        assert all(run.key in LEDGER for run in runs)


def test_methods_are_tuned_over_their_own_learning_rates() -> None:
    own = [run.config() for run in trials(LAPTOP, "N", "sam")]
    settings = {(c.optimizer.lr, c.optimizer.weight_decay, c.objective.rho) for c in own}
    rates, decays, radii = (0.025, 0.05, 0.1, 0.2), (1e-3, 4e-3, 1.6e-2), (0.1, 0.2, 0.4)
    assert settings == set(itertools.product(rates, decays, radii))
    plain = trials(LAPTOP, "N", "vanilla-short")
    assert {run.config().optimizer.lr for run in plain} > set(rates)
    assert len(plain) == len(own) == 36
    # GSAM's alpha is tried with half as many settings of SAM as it has trials.
    gsam = [run.settings for run in trials(LAPTOP, "N", "gsam")]
    assert len({tuple(one[name] for name in ("lr", "weight_decay", "rho")) for one in gsam}) == 18


@scales
def test_all_cells_can_be_configured(scale: Scale) -> None:
    for artifact in ARTIFACTS.values():
        for cell in artifact.cells:
            if cell.setup in scale.setups:
                settings = trials(scale, cell.setup, cell.method)[0].settings
                run = study_run(scale, cell, settings, seed=0, purpose="final")
                assert isinstance(run.config(), Config)


@scales
def test_pairs_name_cells(scale: Scale) -> None:
    for name, artifact in ARTIFACTS.items():
        titles = {cell.title for cell in artifact.cells}
        assert {title for pair in artifact.pairs for title in pair} <= titles, name


def test_set_up_a_is_what_the_study_says() -> None:
    run = study_run(GPU, Cell("A", "sam"), {"rho": 0.1}, seed=3, purpose="final")
    config = run.config(data_root="somewhere")
    assert (config.model.name, config.data.name) == ("small_resnet18", "cifar10")
    assert (config.data.train_per_class, config.data.val_per_class) == (1000, 500)
    assert config.optimizer.nesterov
    assert (config.schedule.epochs, config.schedule.decay) == (150, "cosine")
    assert (config.execution.precision, config.execution.seed) == ("bf16", 3)
    assert config.execution.capture
    assert config.output.eval_on == "both"


def test_methods_last_as_long_as_they_should() -> None:
    def epochs(method: str) -> int:
        return trials(GPU, "A", method)[0].config().schedule.epochs

    assert (epochs("vanilla"), epochs("vanilla-2x"), epochs("entropy-sgd")) == (150, 300, 60)
    late = trials(GPU, "A", "sam-late")[0]
    assert late.changes["start_epoch"] == 100


def test_entropy_sgd_has_the_learning_rate_of_its_direction() -> None:
    run = trials(GPU, "A", "entropy-sgd")[0]
    config, gamma = run.config(), run.settings["gamma"]
    lr, decay = (GPU.setups["A"].changes[name] for name in ("lr", "weight_decay"))
    assert config.optimizer.lr == pytest.approx(lr / gamma)
    assert config.optimizer.lr * config.optimizer.weight_decay == pytest.approx(lr * decay)


@pytest.mark.parametrize("method", ["vanilla", "sam"])
def test_a_factor_multiplies_the_learning_rate_that_plain_training_was_tuned_to(
    method: str,
) -> None:
    tuned = {"lr": 0.3, "weight_decay": 1e-3}
    settings, shared = (tuned, {}) if method == "vanilla" else ({"rho": 0.1}, tuned)
    cell = Cell("A", method, {"lr_factor": 2.0}, "2x lr")
    run = study_run(GPU, cell, settings, shared, seed=0, purpose="final")
    assert run.changes["lr"] == run.settings["lr"] == run.config().optimizer.lr == 0.6
    assert tuned["lr"] == 0.3
    assert "lr_factor" not in run.changes


def test_a_key_changes_with_all_that_changes_the_result_and_with_nothing_else() -> None:
    run = study_run(GPU, Cell("A", "sam"), {"rho": 0.1}, seed=0, purpose="final")
    same = replace(run, changes={**run.changes, "capture": False, "data_root": "elsewhere"})
    assert same.key == run.key
    others = [
        study_run(GPU, Cell("A", "sam"), {"rho": 0.1}, seed=1, purpose="final"),
        study_run(GPU, Cell("A", "sam"), {"rho": 0.1}, seed=0, purpose="tuning"),
        study_run(GPU, Cell("B", "sam"), {"rho": 0.1}, seed=0, purpose="final"),
        study_run(GPU, Cell("E", "sam"), {"rho": 0.1}, seed=0, purpose="final"),
        study_run(GPU, Cell("A", "sam-norms"), {"rho": 0.1}, seed=0, purpose="final"),
        study_run(GPU, Cell("A", "sam", {"rho_min": 0.0}), {"rho": 0.1}, seed=0, purpose="final"),
    ]
    assert len({run.key, *(other.key for other in others)}) == 7


def test_each_line_of_the_ledger_has_the_key_of_the_run_that_it_describes() -> None:
    """A changed key would make a finished run look unfinished, and train it again."""
    lines = [line for line in LEDGER if line["kind"] in ("run", "failure")]
    assert lines
    for line in lines:
        cell = Cell(line["setup"], line["method"])
        seed, purpose = line["seed"], line["purpose"]
        scale = SCALES[line["scale"]]
        shared = shared_settings(scale, cell.setup, cell.method, LEDGER)
        run = study_run(scale, cell, line["settings"], shared, seed=seed, purpose=purpose)
        if line["key"] in UNTUNED:
            run = replace(run, changes={**run.changes, "lr": 0.1, "weight_decay": 5e-4})
        assert (line["key"], line["title"]) == (run.key, run.title)
        assert line["source"] == (None if run.source is None else run.source.key)


@pytest.mark.parametrize("method", ["vanilla", "vanilla-2x"])
def test_plain_training_is_tuned_beyond_its_best_setting_in_a(method: str) -> None:
    settings = chosen(GPU, "A", method, LEDGER)
    assert settings is not None
    assert [run.settings for run in trials(GPU, "A", method, LEDGER)[GPU.num_trials :]] == [
        {"lr": lr * settings["lr"], "weight_decay": decay * settings["weight_decay"]}
        for lr, decay in ((2, 1), (2, 2), (1, 2))
    ]
    assert [letter for letter in GPU.setups if GPU.setups[letter].more_trials] == ["A", "C", "D"]


def test_a_run_that_several_tables_need_is_one_run() -> None:
    plain = study_run(
        GPU, Cell("A", "gap-penalty"), {"rho": 0.1, "lam": 0.5}, seed=0, purpose="final"
    )
    varied = Cell("A", "gap-penalty", {"lam": 0.5}, "f_p + 0.5 h")
    swept = study_run(GPU, varied, {"rho": 0.1, "lam": 0.1}, seed=0, purpose="final")
    assert swept.key == plain.key


def test_fine_tuning_starts_from_the_run_of_the_same_method_and_seed() -> None:
    run = study_run(GPU, Cell("F", "sam"), {"rho": 0.1}, seed=2, purpose="final")
    source = study_run(GPU, Cell("A", "sam"), {"rho": 0.1}, seed=2, purpose="final")
    assert run.source == source
    assert run.config().objective.name == "vanilla"
    other = study_run(GPU, Cell("F", "sam"), {"rho": 0.2}, seed=2, purpose="final")
    assert run.changes == other.changes
    assert run.key != other.key


def test_the_whole_study_holds_all_cells() -> None:
    cells = {(c.setup, c.method, c.label) for stage in stages("all") for c in stage.cells}
    for artifact in ARTIFACTS.values():
        assert {(c.setup, c.method, c.label) for c in artifact.cells} <= cells
    assert {("A", method, "") for method in METHODS if method != "vanilla-short"} <= cells
