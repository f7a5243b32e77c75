"""A configuration is checked when it is built, and survives JSON."""

import json
import subprocess
import sys
from typing import Any, get_args, get_type_hints

import pytest

from surrogap.checks import check_type
from surrogap.data import AUGMENTATIONS
from surrogap.training.config import FIELDS, Config
from surrogap.training.groups import DataConfig
from surrogap.training.objective_configs import CONFIGS, NoEffectError


def test_json_round_trip_of_the_defaults_and_of_others() -> None:
    other = Config().override(objective="asam", rho=0.5, betas=(0.8, 0.9), compile=True, out="a/b")
    for config in (Config(), other):
        assert Config.from_dict(json.loads(config.to_json())) == config
    assert other != Config()


def test_what_is_left_out_has_its_default() -> None:
    assert Config.from_dict({"optimizer": {"lr": 0.3}}) == Config().override(lr=0.3)


def test_every_field_has_a_flag_of_its_own() -> None:
    for name in CONFIGS:
        config = Config().override(objective=name)
        assert len(config.flat()) == sum(map(len, config.to_dict().values()))
        assert set(config.flat()) <= set(FIELDS)
    assert set().union(*(Config().override(objective=n).flat() for n in CONFIGS)) == set(FIELDS)


def test_names_are_those_of_the_data() -> None:
    assert set(get_args(get_type_hints(DataConfig)["augmentation"])) == set(AUGMENTATIONS)


WALK = {"objective": "entropy-sgd"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rho": -0.1}, "rho must be at least 0 and finite, got -0.1"),
        ({"alpha": float("nan")}, "alpha must be at least 0 and finite, got nan"),
        (WALK | {"gamma": 0.0}, "gamma must be above 0 and finite, got 0.0"),
        (WALK | {"inner_lr": 0.0}, "inner_lr must be above 0 and finite, got 0.0"),
        (WALK | {"averaging": 1.0}, "averaging must be at least 0 and below 1, got 1.0"),
        (WALK | {"inner_steps": 0}, "inner_steps must be at least 1, got 0"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1, got 1.0"),
        ({"loss": "sigmoid", "label_smoothing": 0.1}, "label_smoothing must be 0 for the sigmoid"),
        ({"rho": 0.2, "rho_min": 0.1, "rho_inverse_sqrt": True}, "rho_min must be left out if"),
        (
            {"objective": "entropy-sgd", "capture": True}
            | {"micro_batches": 2, "perturbation": "each"},
            "perturbation must be shared for entropy-sgd with capture, got each",
        ),
        ({"rho_min": 0.2}, "rho_min must not exceed rho, got rho_min=0.2 and rho=0.1. Pass the"),
        ({"every": 0}, "every must be at least 1, got 0. Pass 1 to use the objective in every s"),
        ({"start_epoch": -1}, "start_epoch must be at least 0, got -1"),
        ({"climb_fraction": 0.0}, "climb_fraction must be above 0 and at most 1, got 0.0"),
        ({"climb_fraction": 1.5}, "climb_fraction must be above 0 and at most 1, got 1.5"),
        (
            {"climb_fraction": 0.5, "micro_batches": 2},
            "climb_fraction must be 1 with micro-batches, got 0.5 and micr",
        ),
        ({"perturb": "biases"}, "perturb must be one of norms, got 'biases'"),
        ({"objective": "asam", "eta": -1.0}, "eta must be at least 0 and finite, got -1.0"),
        ({"objective": "gap-penalty", "lam": -1.0}, "lam must be at least 0 and finite, got -1.0"),
        (WALK | {"noise": -1.0}, "noise must be at least 0 and finite, got -1.0"),
        ({"rho": 0.1, "rho_min": 0.05, "decay": "constant"}, "rho_min must be left out if the"),
        ({"rho": 0.1, "rho_min": 0.05, "lr_min": 0.1}, "rho_min must be left out if the learn"),
        ({"lr": 0.0}, "lr must be above 0 and finite, got 0.0"),
        ({"lr_min": 0.2}, "lr_min must not exceed lr, got lr_min=0.2 and lr=0.1"),
        ({"lr_min": -1.0}, "lr_min must be at least 0 and finite, got -1.0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ({"betas": (0.9, 1.0)}, "betas must be at least 0 and below 1, got 1.0"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0 and finite, got -1.0"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0 and finite, got 0.0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"warmup_epochs": -1.0}, "warmup_epochs must be at least 0 and finite, got -1.0"),
        ({"warmup_steps": 1, "warmup_epochs": 1.0}, "warmup_epochs must be 0 if warmup_steps"),
        ({"drop": 1.0}, "drop must be at least 0 and below 1, got 1.0"),
        ({"image_size": 0}, "image_size must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"eval_batch_size": 0}, "eval_batch_size must be at least 1, got 0"),
        ({"num_workers": -1}, "num_workers must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 2**63}, r"seed must be below 2\*\*63, got 9223372036854775808. Pass a smaller"),
        ({"micro_batches": 0}, "micro_batches must be at least 1, got 0"),
        ({"micro_batches": 3}, "micro_batches must divide batch_size, got 3 and batch_size=128"),
        ({"max_skipped": -1}, "max_skipped must be at least 0, got -1"),
        ({"capture": True, "precision": "fp16"}, "precision must be fp32 or bf16 with capture"),
        ({"record_every": 0}, "record_every must be at least 1, got 0"),
        ({"eval_every": 0}, "eval_every must be at least 1, got 0"),
        ({"checkpoint_every": -1}, "checkpoint_every must be at least 0, got -1"),
        ({"decay": "cosin"}, "decay must be one of constant, linear, cosine, got 'cosin'. The cl"),
        ({"objective": "zzz"}, "objective must be one of vanilla, .*got 'zzz'. Pass one of them."),
        ({"rhoo": 1.0}, "field must be known, got 'rhoo'. The closest is"),
    ],
)  # fmt: skip
def test_values_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config().override(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": "0.1"}, "lr must be a number, got '0.1'. Pass one, such as 0.1."),
        ({"rho": None}, "rho must be a number, got None. Pass one, such as 0.1."),
        ({"rho_min": "1"}, "rho_min must be a number, got '1'. Pass one, such as 0.1, or None."),
        ({"epochs": 1.5}, "epochs must be an integer, got 1.5"),
        ({"epochs": True}, "epochs must be an integer, got True"),
        ({"compile": 1}, "compile must be true or false, got 1"),
        ({"model": None}, "model must be a string, got None"),
        ({"betas": (0.9,)}, "betas must be 2 numbers, got "),
        ({"betas": (0.9, "x")}, "betas must be a number, got 'x'"),
    ],
)
def test_types_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Config().override(**changes)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"optimiser": {}}, ValueError, "group must be .*got 'optimiser'. The closest is 'optimi"),
        ({"zzz": {}}, ValueError, "group must be known, got 'zzz'. Known are data, execution"),
        (
            {"schedule": {"epoch": 1}},
            ValueError,
            "field of schedule must .*The closest is 'epochs'",
        ),
        (
            {"objective": {"name": "sam", "rhoo": 1}},
            ValueError,
            "field of objective must be known, got 'rhoo'. The closest is",
        ),
        (
            {"objective": {"name": "sma"}},
            ValueError,
            "objective must be one of .* closest is 'sam'",
        ),
        (
            {"objective": {"name": "sam", "lam": 1}},
            NoEffectError,
            "lam has no effect on sam. Leave",
        ),
        ({"objective": {"gamma": 1}}, NoEffectError, "gamma has no effect on gsam. "),
        ({"schedule": 3}, TypeError, "schedule must be a dictionary of fields, got 3"),
    ],
)
def test_dictionaries_that_are_refused(values: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Config.from_dict(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective": "sam", "alpha": 0.1},
            "alpha has no effect on sam. Leave it out, or choose .* that uses it: gsam, asam.$",
        ),
        ({"gamma": 0.1}, "gamma has no effect on gsam. .* uses it: entropy-sgd.$"),
        ({"objective": "vanilla", "rho_min": 0.1}, "rho_min has no effect on vanilla. "),
        ({"objective": "momentum-sam", "climb_fraction": 0.5}, "climb_fraction has no effect on m"),
        ({"objective": "momentum-sam", "memory": "low"}, "memory has no effect on momentum-sam"),
        ({"objective": "entropy-sgd", "every": 2}, "every has no effect on entropy-sgd"),
    ],
)
def test_a_setting_without_effect_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NoEffectError, match=message):
        Config().override(**changes)


def test_another_objective_keeps_what_both_share() -> None:
    config = Config().override(
        objective="gsam", rho=0.3, rho_min=0.1, alpha=0.2, loss="sigmoid", every=3, scope="global"
    )
    sam = config.override(objective="sam")
    shared = {k: v for k, v in config.flat().items() if k not in ("alpha", "minimize")}
    assert sam.flat() == shared | {"objective": "sam"}
    assert sam.override(objective="gsam").flat() == config.override(alpha=0.1).flat()
    assert config.override(objective="gsam") == config
    # The radius and alpha of ASAM have other scales and defaults, so they are not kept.
    own = Config().override(objective="asam", loss="sigmoid", every=3, scope="global")
    assert config.override(objective="asam") == own
    plain = Config().override(objective="vanilla", loss="sigmoid")
    assert config.override(objective="vanilla") == plain
    assert config.override(objective="sam", rho=0.4, rho_min=None).flat()["rho_min"] is None


def test_the_folder_is_named_by_what_is_trained() -> None:
    assert str(Config().folder) == "runs/embedded-small_resnet18_narrow-gsam-0"
    assert str(Config().override(data="a/b.npz", seed=3).folder).startswith("runs/b-small")
    assert str(Config().override(out="runs/a").folder) == "runs/a"


def test_none_is_allowed_where_the_annotation_says_so() -> None:
    check_type("rho", None, float | None)
    with pytest.raises(TypeError, match="rho must be a number, got None"):
        check_type("rho", None, float)


def test_it_needs_no_torch() -> None:
    code = "import sys, surrogap.training.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
