"""Each objective has its own configuration, with the arguments of the catalog."""

from dataclasses import fields

import pytest

from surrogap.core.catalog import DEFAULT_RHO, OBJECTIVES
from surrogap.training.objective_configs import (
    CONFIGS,
    ASAMConfig,
    GSAMConfig,
    MomentumSAMConfig,
    ObjectiveConfig,
    SAMConfig,
    VanillaConfig,
)

# Fields that are not arguments of an objective's class.
OF_ALL = {"name", "loss", "label_smoothing"}
OF_RADII = {"rho_min", "rho_inverse_sqrt", "every", "start_epoch"}
# Arguments that are not settings of a run.
LEFT_OUT = {"eps"}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_fields_and_defaults_are_those_of_the_catalog(name: str) -> None:
    arguments = {k: v for k, v in OBJECTIVES[name].arguments.items() if k not in LEFT_OUT}
    own = {field.name: field.default for field in fields(CONFIGS[name])}
    assert own.items() >= arguments.items()
    more = OF_ALL | (OF_RADII if "rho" in arguments else set())
    more |= {"climb_fraction"} if "memory" in arguments else set()
    assert own.keys() == arguments.keys() | more
    assert own["name"] == name
    assert CONFIGS[name]().arguments() == arguments


def test_there_is_one_for_each() -> None:
    assert list(CONFIGS) == list(OBJECTIVES)


def test_a_name_must_be_its_own() -> None:
    with pytest.raises(
        ValueError, match=r"name must be the objective of SAMConfig, got 'gsam'. Lea"
    ):
        SAMConfig(name="gsam")
    with pytest.raises(ValueError, match=r"objective must be one of vanilla, sam, .*, got ''"):
        ObjectiveConfig()


def test_a_gap_is_measured_at_the_own_radius_in_the_ball_of_all_weights() -> None:
    assert SAMConfig(rho=0.3).gap_rho == 0.3
    assert GSAMConfig().gap_rho == GSAMConfig().rho
    others = (SAMConfig(rho=0.0), SAMConfig(rho=0.5, perturb="norms"), ASAMConfig(rho=0.5))
    for config in (*others, MomentumSAMConfig(), VanillaConfig()):
        assert config.gap_rho == DEFAULT_RHO
