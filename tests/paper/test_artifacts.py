"""All tables and figures, drawn from a synthetic ledger with known numbers."""

import copy
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from surrogap.experiments.plotting import new_figure
from surrogap.paper import drawings
from surrogap.paper.artifacts import ARTIFACTS, drawn
from surrogap.paper.cost_figure import cost_figure
from surrogap.paper.intervals import t_quantile
from surrogap.paper.labels import place_labels
from surrogap.paper.learning_rates import own_rates_table
from surrogap.paper.ledger import Ledger
from surrogap.paper.methods import METHODS
from surrogap.paper.plan import final_runs
from surrogap.paper.scales import GPU, LAPTOP
from surrogap.paper.study import Cell
from surrogap.paper.study_page import write_page
from surrogap.paper.summaries import cell_legend, cell_table, comparisons, in_words, summaries
from surrogap.paper.tuning import chosen, trials
from tests.paper import synthetic_study


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return synthetic_study.ledger(tmp_path_factory.mktemp("study") / "study.jsonl", GPU)


def accuracies(method: str, num_seeds: int) -> list[float]:
    """The test accuracies of the synthetic ledger, in percent."""
    return [
        88.0
        + synthetic_study.GAINS[method]
        + 0.5 * math.sin(7.0 * seed)
        + 0.05 * math.cos(13.0 * seed + len(method))
        for seed in range(num_seeds)
    ]


@pytest.mark.parametrize("name", ARTIFACTS)
def test_all_are_drawn(name: str, ledger: Ledger, tmp_path: Path) -> None:
    found = drawn(name, GPU, ledger)
    cells = list(filter(GPU.has, ARTIFACTS[name].cells))
    assert len(found.table.rows) == len(cells)
    assert (ARTIFACTS[name].draw is not None) == bool(found.writers)
    for file, write in found.writers.items():
        write(tmp_path / file)
        with Image.open(tmp_path / file) as image:
            width, height = image.size
        assert 1000 < width < 1600
        assert 300 < height < 1000


@pytest.mark.parametrize("name", ARTIFACTS)
def test_all_are_drawn_of_nothing(name: str, tmp_path: Path) -> None:
    found = drawn(name, LAPTOP, Ledger(tmp_path / "study.jsonl"))
    assert not found.table.rows
    if ARTIFACTS[name].max_seeds == 0:  # it has no rows
        assert found.words == [ARTIFACTS[name].notes]
    else:
        number = len(found.numbers["cells"])
        (words,) = found.words  # the limits of conclusions would be those of other runs
        assert f"{number} of {number} planned rows are missing, because" in words
        assert words.endswith(": all.")
    for file, write in found.writers.items():
        write(tmp_path / file)


def test_a_table_has_means_and_intervals_over_seeds(ledger: Ledger) -> None:
    rows = {(row[0], row[1]): row for row in drawn("table-1", GPU, ledger).table.rows}
    for method, num_seeds in (("vanilla", 5), ("sam", 10)):
        values = accuracies(method, num_seeds)
        half = t_quantile(num_seeds - 1) * statistics.stdev(values) / math.sqrt(num_seeds)
        row = rows["A", METHODS[method].title]
        assert row[3:5] == (f"{METHODS[method].passes:.2f}", str(num_seeds))
        assert row[5] == f"{statistics.fmean(values):.2f} ± {half:.2f}"
    assert len(rows) == 12
    assert rows["A", "SAM"][2] == "rho 0.1"  # the second trial, which is the best


def test_comparisons_are_paired_and_counted(ledger: Ledger) -> None:
    found = drawn("table-epochs", GPU, ledger)
    pairs = [
        gsam - vanilla
        for gsam, vanilla in zip(accuracies("gsam", 5), accuracies("vanilla", 5), strict=True)
    ]
    made = {(one["first"], one["second"]): one for one in found.numbers["comparisons"]}
    difference = made["GSAM", "vanilla"]["difference"]
    assert difference["mean"] == pytest.approx(statistics.fmean(pairs))
    assert difference["num_seeds"] == 5
    assert made["GSAM", "vanilla"]["verdict"] == "better"
    assert found.numbers["num_comparisons"] == len(made) == 3
    assert "3 of 3 comparisons have at least 3 seeds." in found.words[4]
    assert "If no two methods differed, about 0.2 would do so by chance." in found.words[4]
    assert found.words[0].startswith("±: half the width of the 95 % interval")
    assert "Cost: " in found.words[0]
    assert "Top eigenvalue: " in found.words[0]
    assert "Cost: " not in cell_legend(replace(found.table, columns=("set-up", "method")))
    assert found.words[2].startswith("A: GSAM minus vanilla: +0.8")
    assert found.words[2].endswith("over 5 seeds, better. In the paper: better.")
    # The paper finds no improvement from longer training.
    longer = made["vanilla, 2x epochs", "vanilla"]
    assert (longer["verdict"], longer["in_paper"]) == ("better", "no difference shown")
    assert found.words[4].endswith("The paper makes 3 of these comparisons; 2 verdicts agree.")


def test_nothing_is_called_better_where_the_interval_holds_zero(tmp_path: Path) -> None:
    ledger = synthetic_study.ledger(tmp_path / "study.jsonl", GPU, "fig-cosine")
    cells = [Cell("A", "sam"), Cell("A", "gsam")]
    sam, gsam = summaries(GPU, cells, ledger)
    # GSAM is better in every other seed, and worse in the others.
    lines = {}
    for seed, line in gsam.lines.items():
        accuracy = sam.values("test")[seed] / 100 + (0.01 if seed % 2 else -0.01)
        lines[seed] = line | {"scores": {"test": {"accuracy": accuracy}}}
    (one,) = comparisons([sam, replace(gsam, lines=lines)], [("GSAM", "SAM")])
    assert one.verdict == "no difference shown"
    assert in_words([one])[-1].endswith("0 verdicts agree.")
    (one,) = comparisons([gsam, sam], [("SAM", "GSAM")])
    assert one.verdict == "worse"
    worse = {seed: line | {"scores": {"test": {"accuracy": 0.0}}} for seed, line in lines.items()}
    (one,) = comparisons([sam, replace(gsam, lines=worse)], [("GSAM", "SAM")])
    assert one.sentence.endswith(", worse. In the paper: better.")
    assert in_words([]) == []


def test_two_seeds_decide_nothing(tmp_path: Path) -> None:
    ledger = synthetic_study.ledger(tmp_path / "study.jsonl", GPU, "fig-cosine")
    first, second = (
        replace(one, lines={seed: one.lines[seed] for seed in range(2)})
        for one in summaries(GPU, [Cell("A", "sam"), Cell("A", "gsam")], ledger)
    )
    (one,) = comparisons([first, second], [("GSAM", "SAM")])
    assert one.difference.half_width is None
    assert one.verdict == "too few seeds"
    assert in_words([one])[-1].endswith("0 of 1 comparisons have at least 3 seeds.")
    mean = statistics.fmean(accuracies("sam", 2))
    assert cell_table(GPU, [first], ("test",)).rows[0][-1] == f"{mean:.2f}"


def test_failed_runs_are_left_out(tmp_path: Path) -> None:
    whole = synthetic_study.ledger(tmp_path / "whole.jsonl", GPU, "fig-cosine")
    ledger = Ledger(tmp_path / "study.jsonl")
    for line in whole:
        is_failed = (line["kind"], line.get("purpose"), line.get("seed")) == ("run", "final", 3)
        ledger.append(line | {"kind": "failure"} if is_failed else line)
    (found,) = summaries(GPU, [Cell("A", "sam")], ledger)
    assert sorted(found.lines) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_names_in_the_figure_of_costs_do_not_cover_each_other(ledger: Ledger) -> None:
    found = summaries(GPU, ARTIFACTS["fig-cost"].cells, ledger)
    figure = cost_figure(GPU, found, ledger)
    figure.draw_without_rendering()
    (axis,) = figure.axes
    labels: list[Any] = [text for text in axis.texts if text.get_text()]
    names = {" ".join(label.get_text().split()) for label in labels}  # some have two lines
    assert names == {one.cell.title for one in found}
    boxes = [Text.get_window_extent(label) for label in labels]  # without the lines
    inside = axis.get_window_extent()
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])
        assert inside.x0 <= box.x0
        assert box.x1 <= inside.x1


def test_a_name_is_nearer_to_its_own_point_than_to_another() -> None:
    figure, (axis,) = new_figure(1, 1, "")
    axis.set(xlim=(0, 1), ylim=(0, 1))
    # To the left and right of the first point, its name would be beside the others.
    points = [(0.5, 0.5), (0.36, 0.5), (0.64, 0.5)]
    place_labels(figure, axis, points, [0.0] * 3, ["a long name", "b", "c"])
    figure.draw_without_rendering()
    centres = axis.transData.transform(points)
    for index, label in enumerate(axis.texts):
        box, own = Text.get_window_extent(label), points.index(label.xy)
        x, y = centres.T
        gaps = np.hypot(
            np.clip(x, box.x0, box.x1) - x,
            np.clip(y, box.y0, box.y1) - y,
        )
        assert gaps.argmin() == own, index


def test_the_line_of_a_name_crosses_no_bar_of_another_point() -> None:
    figure, (axis,) = new_figure(1, 1, "")
    axis.set(xlim=(0, 1), ylim=(0, 1))
    # To the left is the bar of the second point, to the right that of the third.
    points, errors = [(0.5, 0.5), (0.44, 0.8), (0.56, 0.8)], [0.1, 0.4, 0.4]
    place_labels(figure, axis, points, errors, ["a name", "b", "c"])
    label = next(text for text in axis.texts if text.get_text() == "a name")
    assert label.get_position()[0] == 0  # straight up or down, beyond its own bar


def test_single_seeds_are_rings_if_they_are_few(ledger: Ledger) -> None:
    found = summaries(GPU, ARTIFACTS["fig-cost"].cells, ledger)
    for num_seeds in (4, 5):
        few = [replace(one, lines=dict(list(one.lines.items())[:num_seeds])) for one in found]
        (axis,) = cost_figure(GPU, few, ledger).axes
        rings = [line for line in axis.lines if line.get_markerfacecolor() == "white"]
        expected = sum(len(one.lines) for one in few if len(one.lines) < 5 and one.cost is not None)
        assert len(rings) == expected


def test_costs_are_those_of_the_timing(ledger: Ledger) -> None:
    found = summaries(GPU, ARTIFACTS["fig-cost"].cells, ledger)
    (axis,) = cost_figure(GPU, found, ledger).axes
    points = {label.get_text(): label.xy for label in axis.texts if label.get_text()}
    twice = [points[name][0] for name in ("SAM", "vanilla, 2x epochs", "Entropy-SGD")]
    *_, band = axis.patches  # around methods of equal cost, which are side by side
    assert band.get_x() + band.get_width() / 2 == pytest.approx(2.0)
    assert all(abs(x - 2.0) < band.get_width() / 2 for x in twice)
    assert min(abs(x - y) for x in twice for y in twice if x is not y) > 0.03
    costs = {one.cell.title: one.cost for one in found}
    names = sorted((n for n in points if n in costs), key=lambda name: points[name][0])
    assert [costs[name] for name in names] == sorted(costs[name] or 0.0 for name in names)
    assert points["vanilla"][0] == pytest.approx(1.0, abs=0.06)
    assert points["SAM"][1] == pytest.approx(statistics.fmean(accuracies("sam", 10)))


def test_gap_curves_have_a_panel_for_each_radius_and_a_line_for_each_alpha(
    ledger: Ledger,
) -> None:
    found = summaries(GPU, ARTIFACTS["fig-gap-curves"].cells, ledger)
    axes = drawings.gap_curves_figure(GPU, found, ledger).axes
    assert [axis.get_title() for axis in axes] == [
        "rho 0.05 (tuning run, 1 seed)",
        "rho 0.1 (tuning run, 1 seed)",
    ]
    for axis in axes:
        labels = [line.get_label() for line in axis.lines]
        assert labels == ["alpha 0 (SAM)", "alpha 0.1", "alpha 0.3"]
        assert axis.lines[0].get_xdata()[-1] == 150  # epochs
        assert axis.get_ylim() == (0.0, axes[0].get_ylim()[1])


def test_accuracy_curves_are_in_percent_and_show_the_end_of_training(ledger: Ledger) -> None:
    cells = [Cell("A", "sam"), Cell("E", "sam")]
    curves = {"epoch": [10, 60, 90, 120, 150], "test_accuracy": [0.3, 0.5, 0.8, 0.85, 0.9]}
    found = [
        replace(one, lines={seed: line | {"curves": curves} for seed, line in one.lines.items()})
        for one in summaries(GPU, cells, ledger)
    ]
    axes = drawings.accuracy_curves_figure(GPU, found, ledger).axes
    assert [axis.get_title() for axis in axes] == [GPU.setups[letter].title for letter in "AE"]
    for axis in axes:
        (line,) = axis.lines
        assert line.get_ydata() == pytest.approx([30, 50, 80, 85, 90])
        assert axis.get_ylim()[0] == pytest.approx(80 - 2)  # from the second half


def test_gains_against_rho_are_paired_and_stand_above_the_range_of_find_rho(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawings, "suggested_ranges", lambda *_: {("A", "sam"): (0.03, 0.3)})
    found = summaries(GPU, ARTIFACTS["fig-rho"].cells, ledger)
    axes = drawings.rho_figure(GPU, found, ledger).axes
    assert [axis.get_title() for axis in axes] == [GPU.setups[letter].title for letter in "ACDE"]
    assert [0.03, 0.3] in [list(line.get_xdata()) for line in axes[0].lines]
    sam = axes[0].containers[0][0]
    assert sam.get_xdata() == pytest.approx([0.05, 0.1, 0.2, 0.4], rel=0.05)
    # The second radius is the best, by one point on validation images.
    own, plain = accuracies("sam", 3), accuracies("vanilla", 3)
    gain = statistics.fmean(x - y for x, y in zip(own, plain, strict=True))
    offset = 0.0 if GPU.setups["A"].trials[1] == chosen(GPU, "A", "vanilla", ledger) else 1.0
    first, second, third, _ = sam.get_ydata()
    assert second - first == second - third == pytest.approx(1.0)
    assert first == pytest.approx(gain - 1.0 + offset)


def test_gains_against_the_learning_rate_are_over_vanilla_at_its_best_one(ledger: Ledger) -> None:
    found = copy.deepcopy(summaries(GPU, ARTIFACTS["fig-lr"].cells, ledger))
    for one in found:
        if one.cell.changes.get("lr_factor") == 2.0:  # all lose two points
            for line in one.lines.values():
                line["scores"]["test"]["accuracy"] -= 0.02
    axes = drawings.lr_figure(GPU, found, ledger).axes
    assert [axis.get_title() for axis in axes] == [GPU.setups[letter].title for letter in "ACDE"]
    vanilla, sam, *_ = (bars[0] for bars in axes[0].containers)
    for curve in (vanilla, sam):  # a little apart
        assert curve.get_xdata() == pytest.approx([0.5, 1.0, 2.0], rel=0.05)
    assert vanilla.get_ydata() == pytest.approx([0.0, 0.0, -2.0])
    own, plain = accuracies("sam", 5), accuracies("vanilla", 5)
    gains = [x - y for x, y in zip(own, plain, strict=True)]
    common = statistics.fmean(gains[:3])  # those of the varied cells
    assert sam.get_ydata() == pytest.approx([common, common, common - 2.0])


def test_each_method_has_the_learning_rate_that_is_best_on_validation_images(
    ledger: Ledger,
) -> None:
    found = copy.deepcopy(summaries(GPU, ARTIFACTS["fig-lr"].cells, ledger))
    for one in found:
        if one.cell.title in ("SAM, 2x lr", "vanilla, 1/2 lr"):
            for line in one.lines.values():
                line["val"]["accuracy"] += 0.02
                line["scores"]["test"]["accuracy"] += 0.03
    rows = {(row[0], row[1]): row for row in own_rates_table(found).rows}
    assert len(rows) == 12
    gains = {
        name: statistics.fmean(
            own - plain
            for own, plain in zip(accuracies(name, 3), accuracies("vanilla", 3), strict=True)
        )
        for name in ("sam", "gsam")
    }
    for name, best, gain in (("sam", "2", gains["sam"]), ("gsam", "1", gains["gsam"] - 3.0)):
        _, _, own, plain, at_own, shared, seeds = rows["A", METHODS[name].title]
        assert (own, plain, seeds) == (best, "0.5", "3")
        assert float(at_own.split(" ")[0]) == pytest.approx(gain, abs=0.005)
        assert float(shared.split(" ")[0]) == pytest.approx(gains[name], abs=0.005)
    # With a learning rate missing, or without a seed that all have, there is no best one yet.
    for lines in ({}, {9: found[1].lines[0]}):
        found[1] = replace(found[1], lines=lines)
        assert {row[0] for row in own_rates_table(found).rows} == {"C", "D", "E"}


def test_the_paper_compares_a_method_with_itself_for_a_decaying_radius_only(
    ledger: Ledger,
) -> None:
    for name, artifact in ARTIFACTS.items():
        made = comparisons(summaries(GPU, artifact.cells, ledger), artifact.pairs)
        same = [one for one in made if one.first.cell.method == one.second.cell.method]
        if name == "table-rho-schedule":
            assert [one.in_paper for one in same] == ["no difference shown", "better"]
        else:
            assert not any(one.in_paper for one in same)


def test_the_page_holds_all_of_it(ledger: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "docs" / "results.md"
    write_page(path, GPU, ledger)
    text = path.read_text()
    for name, artifact in ARTIFACTS.items():
        assert f"## {artifact.title.removesuffix('.')}\n" in text
        assert f"`surrogap reproduce {name} --scale gpu`" in text
        assert artifact.notes in text
        if artifact.draw is not None:
            assert f"(results/{name}.png)" in text
            assert (tmp_path / "docs" / "results" / f"{name}.png").exists()
    value = drawn("table-1", GPU, ledger).table.rows[0][4]
    assert value in text
    assert "| A | GSAM minus SAM |" in text
    assert "rho 0.1: **" in text  # the chosen trial
    # Where methods have their own learning rates, a grid of trials for each.
    assert "Set-up N, vanilla:\n\n| settings | weight_decay 0.001 | weight_decay 0.004 |" in text
    columns = "rho 0.1 | rho 0.2 | rho 0.4 |"
    assert f"Set-up N, SAM:\n\n| settings | {columns}\n| --- " in text
    assert len(re.findall(r"^\| lr 0.05, weight_decay 0.004( \| [*\d.]+){3} \|$", text, re.M)) == 2
    for name, artifact in ARTIFACTS.items():
        if artifact.pairs:  # in full
            assert drawn(name, GPU, ledger).table.markdown() in text
    assert "Set-up A: 150 epochs, batch size 128, SGD with Nesterov momentum 0.9" in text
    assert "bf16, 10,000 training images, 5,000 validation images, 10,000 test images." in text
    assert "Set-up E: as A." in text
    # The standard error of 88.3 % on 5,000 images.
    assert "(5,000 in A, for a standard error of about 0.5 points)" in text
    assert "Entropy-SGD | five passes" in text
    assert "Superseded" not in text
    assert "A SAM (rho 0.1)" not in text  # at the edge of its range
    assert "A vanilla (lr 0.1);" in text  # of its two weight decays, both are edges
    assert "Not trained yet" not in text


def test_the_page_says_what_wider_tuning_of_plain_training_gains(tmp_path: Path) -> None:
    ledger = synthetic_study.ledger(tmp_path / "study.jsonl", GPU, "table-setups")
    due = "So part of E's gains over "
    for points, better in (
        (0.0, ""),
        (-2.0, ""),
        (2.0, f'{due}"vanilla, 1/4 of the epochs" comes'),
    ):
        for run in final_runs(GPU, Cell("N", "vanilla-short"), ledger) or []:
            (plain,) = accuracies("vanilla-short", run.seed + 1)[run.seed :]
            ledger[run.key]["scores"]["test"]["accuracy"] = (plain + points) / 100
        write_page(tmp_path / "results.md", GPU, ledger)
        text = (tmp_path / "results.md").read_text()
        assert f"its accuracy by +0.000 ± 0.000 (vanilla) and {points:+.2f}" in text
        assert better in text
        assert (due in text) == bool(better)


def test_a_page_of_few_runs_says_what_is_missing(tmp_path: Path) -> None:
    ledger = synthetic_study.ledger(tmp_path / "study.jsonl", GPU, "fig-cosine")
    tried = trials(GPU, "A", "asam", ledger)
    ledger.append(synthetic_study.line(tried[0], GPU, jobs=4, seconds=24000.0))
    former = replace(tried[0], settings={"rho": 8.0}, changes={**tried[0].changes, "rho": 8.0})
    ledger.append(synthetic_study.line(former, GPU))
    write_page(tmp_path / "results.md", GPU, ledger)
    text = (tmp_path / "results.md").read_text()
    assert re.search(r"\| A \| ASAM \| rho 0.5: [\d.]+; unfinished \|", text)
    _, _, superseded = text.partition("Superseded trials, ")
    assert re.search(r"\| A \| ASAM \| lr 0.1, weight_decay 0.001 \| rho 8: [\d.]+ \|", superseded)
    assert "Not trained yet: ResNet-18, 10,000 images of CIFAR-100 (B); ViT, " in text
    assert text.count("planned rows are missing") == 1
    assert "`surrogap reproduce all --scale gpu --dry-run` lists the runs.\n" in text
    assert "Entropy-SGD | five passes" not in text  # the page does not mention it
    (minutes,) = re.findall(r"^\| A \| ResNet-18, 10,000 .* \| (\d+) \| - \|", text, re.MULTILINE)
    seconds = sum(line["seconds"] for line in ledger.of_kind("run")) - 0.75 * 24000
    assert minutes == f"{seconds / 60:.0f}"


def test_a_page_of_nothing_says_so(tmp_path: Path) -> None:
    write_page(tmp_path / "results.md", GPU, Ledger(tmp_path / "study.jsonl"))
    _, _, waiting = (tmp_path / "results.md").read_text().partition("## Not trained yet\n")
    assert waiting.count("\n* `") == len(ARTIFACTS) - len(GPU.left_out)
    with pytest.raises(ValueError, match="page must be a writable file, got"):
        write_page(tmp_path / "results.md" / "page.md", GPU, Ledger(tmp_path / "study.jsonl"))
