"""Which runs a comparison has."""

from pathlib import Path

import pytest

from surrogap.experiments.methods import Planned, planned
from surrogap.experiments.recipes import RECIPES
from surrogap.training.config import Config


def plan(recipe: str, *methods: str, **changes: object) -> list[Planned]:
    return list(planned(recipe, changes, methods, (3,), Path("out")))


def test_an_objective_has_the_settings_of_its_own_recipe() -> None:
    vanilla, sam, gsam = plan("cifar10-vit-gsam", "vanilla", "sam", "gsam")
    for run in (vanilla, sam, gsam):
        out = str(Path("out") / f"{run.method}-3")
        own = RECIPES[f"cifar10-vit-{run.method}"]()
        assert run.config == own.override(seed=3, out=out)


def test_an_objective_without_a_recipe_has_its_default_radius_and_all_else() -> None:
    (asam,) = plan("cifar10-vit-gsam", "asam")
    own = RECIPES["cifar10-vit-gsam"]()
    assert asam.config == own.override(
        objective="asam", rho=None, rho_min=None, alpha=None, seed=3, out="out/asam-3"
    )


def test_changes_are_for_all() -> None:
    for run in plan("cifar10-vit-gsam", "vanilla", "sam", "asam", lr=0.5, epochs=7):
        assert (run.config.optimizer.lr, run.config.schedule.epochs) == (0.5, 7)


def test_twice_is_twice_the_epochs_and_the_steps() -> None:
    once, twice = plan("cifar10-vit-gsam", "vanilla", "vanilla-2x", epochs=7)
    assert twice.config == once.config.override(epochs=14, out="out/vanilla-2x-3")
    once, twice = plan("cifar10-vit-gsam", "sam", "sam-2x", steps=9)
    assert (twice.config.schedule.steps, twice.cost) == (18, 2 * once.cost)


def test_costs_are_passes() -> None:
    costs = [run.cost for run in plan("fashion-mnist-gsam", "vanilla", "sam", "vanilla-2x")]
    assert costs[1] == costs[2] == 2 * costs[0]
    (walk,) = plan("fashion-mnist-gsam", "entropy-sgd", inner_steps=7, epochs=10)
    assert (walk.num_passes, walk.cost) == (7, 70)


def test_an_unknown_method_has_a_closest_one() -> None:
    with pytest.raises(ValueError, match=r"objectives must be one of .* The closest is 'gsam'"):
        plan("fashion-mnist-gsam", "gsan")


def test_configurations_are_the_default_ones_where_nothing_is_said() -> None:
    (entropy,) = plan("fashion-mnist-gsam", "entropy-sgd")
    assert entropy.config.objective.gamma == Config().objective.gamma
