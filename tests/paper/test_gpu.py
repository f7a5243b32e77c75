"""The study on a GPU: every method captured, in bf16."""

import math
from pathlib import Path

import pytest

from surrogap.paper.ledger import Ledger
from surrogap.paper.measuring import suggestions, timing
from surrogap.paper.methods import METHODS, ONLY_RADIUS
from surrogap.paper.running import Environment, train_and_score
from surrogap.paper.study import Scale
from surrogap.paper.tuning import trials
from tests.paper import synthetic_study

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def scale(tmp_path_factory: pytest.TempPathFactory) -> Scale:
    return synthetic_study.tiny(
        tmp_path_factory.mktemp("study"),
        model="small_resnet18_narrow",
        device="cuda",
        precision="bf16",
        capture=True,
        channels_last=True,
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_captured(method: str, scale: Scale, tmp_path: Path) -> None:
    line = train_and_score(trials(scale, "A", method)[0], Environment(scale, weights=str(tmp_path)))
    assert line["kind"] == "run"
    assert line["val"]["loss"] is not None


# torch 2.11 warns when its compiler is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_all_steps_are_timed(scale: Scale) -> None:
    times = timing("A", tuple(METHODS), Environment(scale))["seconds_per_step"]
    assert set(times) == {method.step for method in METHODS.values()}


def test_radii_are_suggested(scale: Scale, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "study.jsonl")
    found = suggestions("A", ONLY_RADIUS, Environment(scale), ledger)["suggestions"]
    assert list(found) == list(ONLY_RADIUS)
    for suggestion in found.values():
        assert all(math.isfinite(radius["cosine"]) for radius in suggestion["radii"])
