"""The order of work, the choice of settings, and estimates of time."""

from dataclasses import replace
from pathlib import Path

import pytest

from surrogap.paper.artifacts import stages
from surrogap.paper.ledger import Ledger
from surrogap.paper.plan import OVERHEAD, Stage, expected_seconds, todo
from surrogap.paper.scales import GPU
from surrogap.paper.study import Cell, study_run
from surrogap.paper.tuning import chosen, is_tuned, repeats, trials
from surrogap.paper.tuning_sections import trials_section
from tests.paper import synthetic_study

CELLS = [Cell("A", "vanilla"), Cell("A", "sam")]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "study.jsonl")


def tune(ledger: Ledger, method: str, *accuracies: float | None) -> None:
    """Tune a method, after plain training with the set-up's own settings as the best."""
    if method != "vanilla" and chosen(GPU, "A", "vanilla", ledger) is None:
        tune(ledger, "vanilla", 0.1, 0.1, 0.1, 0.2)
    for run, accuracy in zip(trials(GPU, "A", method, ledger), accuracies, strict=False):
        line = synthetic_study.line(run, GPU, val={"accuracy": accuracy})
        ledger.append(line | {"kind": "failure"} if accuracy is None else line)
    if method == "vanilla":  # the further trials are worse
        for run in trials(GPU, "A", method, ledger)[GPU.num_trials :]:
            ledger.append(synthetic_study.line(run, GPU, val={"accuracy": 0.0}))


def test_tuning_comes_first_then_seeds_in_turn(ledger: Ledger) -> None:
    items = todo(GPU, [Stage(CELLS)], ledger)
    assert [item.run.purpose for item in items] == 8 * ["tuning"] + 15 * ["final"]
    # SAM takes the learning rate of vanilla, once that is tuned.
    assert [item.is_ready for item in items] == 4 * [True] + 19 * [False]
    order = [(item.run.seed, item.run.method) for item in items[8:]]
    # Vanilla has five seeds, SAM ten.
    both = [(seed, method) for seed in range(5) for method in ("vanilla", "sam")]
    assert order == both + [(seed, "sam") for seed in range(5, 10)]


def test_a_method_is_ready_once_it_is_tuned(ledger: Ledger) -> None:
    tune(ledger, "vanilla", 0.1, 0.2, 0.1, 0.1)
    items = todo(GPU, [Stage(CELLS, max_seeds=1)], ledger)
    assert [(i.run.method, i.is_ready) for i in items] == [
        *4 * [("sam", True)],
        *(("vanilla", True), ("sam", False)),
    ]
    tune(ledger, "sam", 0.1, 0.3, 0.2, 0.2)
    items = todo(GPU, [Stage(CELLS, max_seeds=1)], ledger)
    assert [(i.run.method, i.is_ready) for i in items] == [("vanilla", True), ("sam", True)]
    assert items[-1].run.settings == {"rho": 0.1}
    ledger.append(synthetic_study.line(items[-1].run, GPU))
    assert len(todo(GPU, [Stage(CELLS, max_seeds=1)], ledger)) == 1


def test_all_methods_train_with_the_rate_and_decay_that_are_best_for_plain_training(
    ledger: Ledger,
) -> None:
    tune(ledger, "vanilla", 0.1, 0.2, 0.1, 0.1)
    tune(ledger, "sam", 0.1, 0.3, 0.2, 0.2)
    tune(ledger, "gsam", 0.3, 0.2, 0.1, 0.2)
    best = chosen(GPU, "A", "vanilla", ledger)
    assert best == {"lr": 0.1, "weight_decay": 1e-3}
    cells = [Cell("A", method) for method in ("sam", "gsam", "asam")]
    for item in todo(GPU, [Stage([*cells, Cell("F", "sam")])], ledger):
        run = item.run.source or item.run
        assert best.items() <= run.changes.items()
        # Fine-tuning has its own.
        own = item.run.source is None
        assert (item.run.changes["lr"] == 0.1) == own
    adamw = Cell("A", "sam", {"optimizer": "adamw", "lr": 1e-3})
    assert todo(GPU, [Stage([adamw])], ledger)[0].run.changes["lr"] == 1e-3


def test_the_best_validation_accuracy_is_chosen(ledger: Ledger) -> None:
    assert chosen(GPU, "A", "sam", ledger) is None
    tune(ledger, "sam", 0.1, 0.2, 0.2)
    assert chosen(GPU, "A", "sam", ledger) is None
    tune(ledger, "sam", 0.1, 0.2, 0.2, None)
    assert chosen(GPU, "A", "sam", ledger) == {"rho": 0.1}
    # Fine-tuning takes the settings of its source.
    assert chosen(GPU, "F", "sam", ledger) == {"rho": 0.1}


def test_the_best_trials_are_repeated_and_the_best_mean_is_chosen(ledger: Ledger) -> None:
    scale = replace(GPU, setups={"A": replace(GPU.setups["A"], repeats=(2, 2))})
    tune(ledger, "sam", 0.1, 0.4)
    assert repeats(scale, "A", "sam", ledger) == []  # not all trials are finished
    tune(ledger, "sam", 0.1, 0.4, 0.3, 0.2)
    again = repeats(scale, "A", "sam", ledger)
    tried = [(run.settings["rho"], run.seed, run.purpose) for run in again]
    assert tried == [(rho, seed, "tuning") for seed in (1001, 1002) for rho in (0.1, 0.2)]
    assert {run.changes["eval_on"] for run in again} == {"val"}
    for run in repeats(scale, "A", "vanilla", ledger):
        ledger.append(synthetic_study.line(run, scale, val={"accuracy": 0.2}))
    wanted = [Stage([Cell("A", "sam")], max_seeds=1)]
    *first, final = todo(scale, wanted, ledger)
    assert [item.run.key for item in first] == [run.key for run in again]
    assert [item.is_ready for item in (*first, final)] == [*4 * [True], False]
    assert chosen(scale, "A", "sam", ledger) is None
    # The means are 0.33 and 0.3: a failed run counts as 0.
    for run, accuracy in zip(again, (0.3, None, 0.3, 0.6), strict=True):
        line = synthetic_study.line(run, scale, val={"accuracy": accuracy})
        ledger.append(line | {"kind": "failure"} if accuracy is None else line)
    assert is_tuned(scale, "A", "sam", ledger)
    assert chosen(scale, "A", "sam", ledger) == {"rho": 0.1}
    (item,) = todo(scale, wanted, ledger)
    assert item.run.settings == {"rho": 0.1}
    shown = "".join(trials_section(scale, ledger))
    assert "rho 0.05: 10.00; rho 0.1: **40.00**; rho 0.2: 30.00" in shown
    assert "| A | SAM | rho 0.1 | 3 | **33.33** |\n| A | SAM | rho 0.2 | 3 | 30.00 |\n" in shown


def test_a_mean_can_overturn_the_best_single_trial(ledger: Ledger) -> None:
    scale = replace(GPU, setups={"A": replace(GPU.setups["A"], repeats=(2, 1))})
    tune(ledger, "vanilla", 0.1, 0.4, 0.3, 0.2)
    first, second = repeats(scale, "A", "vanilla", ledger)
    ledger.append(synthetic_study.line(first, scale, val={"accuracy": 0.1}))
    assert chosen(scale, "A", "vanilla", ledger) is None
    ledger.append(synthetic_study.line(second, scale, val={"accuracy": 0.3}))
    assert chosen(GPU, "A", "vanilla", ledger) == first.settings
    assert chosen(scale, "A", "vanilla", ledger) == second.settings


def test_a_second_setting_is_tried_at_the_two_radii_that_are_best_without_it(
    ledger: Ledger,
) -> None:
    wanted = [Stage([Cell("A", "gsam")], max_seeds=1)]
    items = todo(GPU, wanted, ledger)
    assert [(item.run.method, item.is_ready) for item in items] == [
        *4 * [("vanilla", True)],
        *4 * [("sam", False)],
        *5 * [("gsam", False)],
    ]
    tune(ledger, "sam", 0.1, 0.3, 0.1)
    assert [item.is_ready for item in todo(GPU, wanted, ledger)] == [True] + 5 * [False]
    tune(ledger, "sam", 0.1, 0.3, 0.1, 0.2)
    *tuning, final = todo(GPU, wanted, ledger)
    assert [item.run.settings for item in tuning] == [
        {"rho": rho, "alpha": alpha} for rho in (0.1, 0.4) for alpha in (0.1, 0.3)
    ]
    assert [item.is_ready for item in (*tuning, final)] == 4 * [True] + [False]
    tune(ledger, "gsam", 0.2, 0.3, 0.3, 0.1)
    assert chosen(GPU, "A", "gsam", ledger) == {"rho": 0.1, "alpha": 0.3}


@pytest.mark.parametrize(
    ("accuracies", "more"), [((0.1, 0.2, 0.2, 0.3), 0.8), ((0.2, 0.2, 0.1, None), 0.025)]
)
def test_a_best_radius_at_the_edge_gets_one_more_trial(
    accuracies: tuple[float | None, ...], more: float, ledger: Ledger
) -> None:
    wanted = [Stage([Cell("A", "sam"), Cell("A", "gsam")], max_seeds=1)]
    tune(ledger, "sam", *accuracies)
    first = todo(GPU, wanted, ledger)
    assert [(item.run.settings, item.is_ready) for item in first[:1]] == [({"rho": more}, True)]
    # The radii of GSAM and the final runs wait for it.
    assert [item.is_ready for item in first[1:]] == 6 * [False]
    best = trials(GPU, "A", "sam")[-1 if more == 0.8 else 0].settings
    assert chosen(GPU, "A", "sam", ledger) == best
    tune(ledger, "sam", *accuracies, 0.9)
    assert chosen(GPU, "A", "sam", ledger) == {"rho": more}
    assert len(trials(GPU, "A", "sam", ledger)) == 5
    *tuning, sam, gsam = todo(GPU, wanted, ledger)
    assert {item.run.settings["rho"] for item in tuning} == {more, best["rho"]}
    assert [item.is_ready for item in (*tuning, sam, gsam)] == [*5 * [True], False]


def test_few_trials_try_a_second_setting_at_the_best_radius(ledger: Ledger, tmp_path: Path) -> None:
    scale = synthetic_study.tiny(tmp_path)
    for method in ("vanilla", "sam"):
        for run in trials(scale, "A", method, ledger):
            ledger.append(synthetic_study.line(run, scale))
    assert [run.settings for run in trials(scale, "A", "gsam", ledger)] == [
        {"rho": 0.1, "alpha": 0.1},
        {"rho": 0.1, "alpha": 0.3},
    ]


def test_no_seeds_leave_the_tuning(ledger: Ledger) -> None:
    assert len(todo(GPU, [Stage(CELLS, max_seeds=0)], ledger)) == 8


def test_set_ups_that_a_scale_lacks_are_left_out(ledger: Ledger, tmp_path: Path) -> None:
    scale = synthetic_study.tiny(tmp_path)
    assert todo(scale, [Stage([Cell("B", "sam")])], ledger) == []


def test_setups_follow_each_other(ledger: Ledger) -> None:
    setups = [item.run.setup for item in todo(GPU, stages("table-setups"), ledger)]
    assert setups == sorted(setups)
    assert set(setups) == set("ABCDEN")


def test_the_whole_study_starts_with_the_most_telling_runs(ledger: Ledger) -> None:
    left = [item.run for item in todo(GPU, stages("all"), ledger) if item.run.purpose == "final"]
    order = dict.fromkeys(
        (run.setup, run.changes["augmentation"] if run.label else run.method) for run in left
    )
    telling = [
        *(("A", "sam"), ("E", "sam"), ("N", "vanilla"), ("C", "sam"), ("A", "sam-norms-late")),
        *(("D", "sam"), ("B", "sam"), ("A", "sam-every-5"), ("N", "sam")),
        *(("A", "strong"), ("A", "asam"), ("F", "sam")),
    ]
    assert [one for one in order if one in telling] == telling
    # Further seeds of the same rows come late, and last the settings of fig-rho and fig-lr.
    *others, end = (
        i for i, r in enumerate(left) if ", rho " not in r.label and " lr" not in r.label
    )
    assert end == len(others)
    assert all(
        run.setup == "A" and not run.label and run.seed >= 3 for run in left[end - 34 : end + 1]
    )


def test_estimates_come_from_the_closest_runs(ledger: Ledger) -> None:
    vanilla, sam = (trials(GPU, "A", method)[0] for method in ("vanilla", "sam"))
    guess = OVERHEAD + GPU.setups["A"].seconds * 2 * 150
    assert expected_seconds(GPU, sam, ledger, jobs=1) == guess
    # A pass over the images took 0.2 s in plain training.
    ledger.append(synthetic_study.line(vanilla, GPU, seconds=OVERHEAD + 30.0))
    assert expected_seconds(GPU, sam, ledger, jobs=1) == pytest.approx(OVERHEAD + 60.0)
    # Among three others it is expected to take two and a half times as long.
    assert expected_seconds(GPU, sam, ledger, jobs=4) == pytest.approx(OVERHEAD + 150.0)
    ledger.append(synthetic_study.line(sam, GPU, seconds=71.0))
    assert expected_seconds(GPU, trials(GPU, "A", "sam")[1], ledger, jobs=1) == 71.0


def test_fine_tuning_takes_as_long_as_its_source_on_top(ledger: Ledger) -> None:
    run = study_run(GPU, Cell("F", "sam"), {"rho": 0.1}, seed=0, purpose="final")
    assert run.source is not None
    source = expected_seconds(GPU, run.source, ledger, jobs=1)
    own = OVERHEAD + 72 * GPU.setups["F"].seconds
    assert expected_seconds(GPU, run, ledger, jobs=1) == pytest.approx(source + own)
    # The source is not counted twice if it is trained before.
    left = todo(GPU, [Stage([Cell("A", "sam"), Cell("F", "sam")], max_seeds=1)], ledger)
    assert left[-1].run.setup == "F"
    assert left[-1].seconds == pytest.approx(own)
