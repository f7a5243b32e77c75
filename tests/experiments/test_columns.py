"""The runs of a comparison."""

from pathlib import Path
from typing import Any

import pytest

from surrogap.experiments.columns import Column, column_runs, with_lr_of_gradient
from surrogap.experiments.planned import PlannedRun, num_passes
from surrogap.experiments.recipes import RECIPES
from surrogap.training.config import Config
from surrogap.training.objective_configs import CONFIGS, NoEffectError


def plan(recipe: str, *methods: str, **changes: object) -> list[PlannedRun]:
    return list(column_runs(recipe, changes, methods, (3,), Path("out")))


def test_an_objective_uses_its_own_recipe() -> None:
    vanilla, sam, gsam = plan("cifar10-vit-gsam", "vanilla", "sam", "gsam")
    for run in (vanilla, sam, gsam):
        out = str(Path("out") / f"{run.method}-3")
        own = RECIPES[f"cifar10-vit-{run.method}"].config
        assert run.config == own.override(seed=3, out=out)


def test_an_objective_without_a_recipe_uses_its_default_radius() -> None:
    (asam,) = plan("cifar10-vit-gsam", "asam")
    own = RECIPES["cifar10-vit-gsam"].config
    assert asam.config == own.override(objective="asam", seed=3, out="out/asam-3")
    (penalty,) = plan("fashion-mnist-gsam", "gap-penalty", loss="sigmoid")
    assert penalty.config.objective == CONFIGS["gap-penalty"](loss="sigmoid")


def test_changes_hold_for_all_columns() -> None:
    for run in plan("cifar10-vit-gsam", "vanilla", "sam", "asam", lr=0.5, epochs=7):
        assert (run.config.optimizer.lr, run.config.schedule.epochs) == (0.5, 7)


def test_twice_doubles_epochs_and_steps() -> None:
    once, twice = plan("cifar10-vit-gsam", "vanilla", "vanilla-2x", epochs=7)
    assert twice.config == once.config.override(epochs=14, out="out/vanilla-2x-3")
    once, twice = plan("cifar10-vit-gsam", "sam", "sam-2x", steps=9)
    assert (twice.config.schedule.steps, twice.cost) == (18, 2 * once.cost)


def test_costs_count_passes() -> None:
    costs = [run.cost for run in plan("fashion-mnist-gsam", "vanilla", "sam", "vanilla-2x")]
    assert costs[1] == costs[2] == 2 * costs[0]
    (walk,) = plan("fashion-mnist-gsam", "entropy-sgd", inner_steps=7, epochs=10)
    assert (walk.num_passes, walk.cost) == (7, 70)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"objective": "vanilla"}, 1),
        ({"objective": "momentum-sam"}, 1),
        ({"objective": "gsam"}, 2),
        ({"objective": "gsam", "perturb": "norms"}, 2),
        ({"objective": "sam", "climb_fraction": 0.25}, 1.25),
        ({"objective": "sam", "every": 5}, 1.2),
        ({"objective": "sam", "climb_fraction": 0.5, "every": 2}, 1.25),
        ({"objective": "momentum-sam", "every": 2}, 1),
        ({"objective": "entropy-sgd", "inner_steps": 7}, 7),
        ({"objective": "sam", "start_epoch": 8}, 1.2),
        ({"objective": "sam", "start_epoch": 12}, 1),
    ],
    ids=str,
)
def test_passes_follow_from_the_catalog(changes: dict[str, object], expected: float) -> None:
    """Per epoch, over ten epochs."""
    assert num_passes(Config().override(**changes).objective, 10) == pytest.approx(10 * expected)


@pytest.mark.parametrize(
    ("text", "objective", "is_twice", "settings"),
    [
        ("sam", "sam", False, {}),
        ("gap-penalty-2x", "gap-penalty", True, {}),
        ("momentum-sam", "momentum-sam", False, {}),
        ("sam@perturb=norms", "sam", False, {"perturb": "norms"}),
        ("gsam-norms-2x@rho=0.5", "gsam", True, {"perturb": "norms", "rho": 0.5}),
        ("sam@every=5,lr=1e-2", "sam", False, {"every": 5, "lr": 0.01}),
        ("sam@climb-fraction=0.25", "sam", False, {"climb_fraction": 0.25}),
        ("sam@rho-min=none,nesterov=true", "sam", False, {"rho_min": None, "nesterov": True}),
    ],
)
def test_columns(text: str, objective: str, is_twice: bool, settings: dict[str, object]) -> None:
    assert Column.parse(text) == Column(text, objective, is_twice, settings)


def test_a_column_has_its_own_settings() -> None:
    sam, rare, norms = plan("cifar10-vit-gsam", "sam", "sam@every=5,rho=0.2", "sam-norms", rho=0.3)
    assert rare.config == sam.config.override(every=5, rho=0.2, out="out/sam@every=5,rho=0.2-3")
    assert norms.config == sam.config.override(perturb="norms", out="out/sam-norms-3")
    assert sam.config.flat()["rho"] == 0.3


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            ["gsan"],
            r"objectives must be one of .* The closest is 'gsam'. Examples of columns: sam, ",
        ),
        (["sam-3x"], r"objectives must be one of .* The closest is 'sam'"),
        (["sam@every"], r"objectives must have settings of the form FIELD=VALUE, got 'sam@every'"),
        (["sam@"], r"objectives must have settings of the form FIELD=VALUE, got 'sam@'"),
        (
            ["sam@seed=3"],
            r"objectives must have settings .* Any field except objective, seed and out ",
        ),
        (["sam@everi=3"], r"setting of sam@everi=3 must be one of .*, got 'everi'. The closest"),
        (["sam@every=x"], r"every must be an integer, got 'x'"),
        (["sam@every=0"], r"every must be at least 1, got 0"),
        (["sam@alpha=0.1"], r"alpha has no effect on sam"),
        (["vanilla-norms"], r"perturb has no effect on vanilla"),
    ],
)
def test_columns_that_are_refused(methods: list[str], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        plan("fashion-mnist-gsam", *methods)


def test_a_change_holds_for_the_columns_that_use_it() -> None:
    vanilla, sam, gsam = plan("cifar10-vit-gsam", "vanilla", "sam", "gsam", alpha=0.3)
    assert gsam.config.flat()["alpha"] == 0.3
    assert "alpha" not in vanilla.config.flat() | sam.config.flat()
    with pytest.raises(NoEffectError, match=r"alpha has no effect on vanilla or sam. Leave it out"):
        plan("cifar10-vit-gsam", "vanilla", "sam", alpha=0.3)


def test_the_learning_rate_of_entropy_sgd_is_divided_by_gamma() -> None:
    recipe: dict[str, Any] = {"weight_decay": 1e-3, "clip_norm": 2.0, "lr_min": 0.01}
    default, other, given = plan(
        "fashion-mnist-gsam", "entropy-sgd", "entropy-sgd@gamma=0.5", "entropy-sgd@lr=7", **recipe
    )
    for run, gamma in ((default, 0.03), (other, 0.5)):
        optimizer, schedule = run.config.optimizer, run.config.schedule
        assert (optimizer.lr, schedule.lr_min) == pytest.approx((0.1 / gamma, 0.01 / gamma))
        # lr * weight_decay and lr * clip_norm are unchanged.
        assert optimizer.weight_decay * optimizer.lr == pytest.approx(1e-3 * 0.1)
        assert optimizer.clip_norm == pytest.approx(2.0 * gamma)
    assert given.config.optimizer.lr == 7
    assert given.config.optimizer.weight_decay == pytest.approx(1e-3 * 0.03)
    (capitals,) = plan("fashion-mnist-gsam", "entropy-sgd", optimizer="SGD", **recipe)
    assert capitals.config.optimizer.lr == default.config.optimizer.lr
    (adam,) = plan("cifar10-vit-gsam", "entropy-sgd")
    assert adam.config.optimizer == RECIPES["cifar10-vit-gsam"].config.optimizer
    config = Config().override(objective="sam")
    assert with_lr_of_gradient(config) is config
