"""The toys are what their captions say."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from surrogap.paper import toys
from surrogap.paper.toys import METHODS, START, Descent, GapToy, Hills


def test_the_first_figure_has_the_captions_relations() -> None:
    toy = GapToy()
    loss, perturbed, gap = (f(toy.minima) for f in (toy.loss, toy.perturbed_loss, toy.gap))
    assert perturbed[0] == pytest.approx(float(perturbed[2]))
    assert perturbed[0] < perturbed[1]
    assert loss[1] == loss[2]
    assert gap[0] > gap[1] > gap[2] > 0
    sharpness = torch.tensor([valley.sharpness for valley in toy.valleys]).double()
    torch.testing.assert_close(gap, sharpness * toy.rho**2 / 2)  # Lemma 3.3, exact for parabolas


def test_the_perturbed_loss_is_the_maximum_in_the_window() -> None:
    toy = GapToy()
    for w in torch.linspace(-4, 6, 37, dtype=torch.float64):
        window = torch.linspace(float(w) - toy.rho, float(w) + toy.rho, 20_001).double()
        assert float(toy.perturbed_loss(w)) == pytest.approx(
            float(toy.loss(window).max()), abs=1e-3
        )


def test_the_figure_draws_the_three_functions() -> None:
    toy = GapToy()
    lines = toys.gap_figure().axes[0].lines
    w = torch.as_tensor(lines[0].get_xdata())
    for line, function in zip(lines[:3], (toy.loss, toy.perturbed_loss, toy.gap), strict=True):
        torch.testing.assert_close(torch.as_tensor(line.get_ydata()), function(w))


def test_paths_and_ends_are_the_same_arithmetic() -> None:
    hills, descent = Hills(), Descent(num_steps=40)
    starts = torch.tensor([START, (-2.0, 0.3)], dtype=torch.float64)
    for method in METHODS:
        ends = toys.ends_from(method, hills, descent, starts)
        for start, end in zip(starts.tolist(), ends, strict=True):
            torch.testing.assert_close(toys.path(method, hills, descent, start)[-1], end)


def test_the_three_end_where_the_figure_says() -> None:
    hills = Hills()
    start = torch.tensor([START], dtype=torch.float64)
    places = {m: int(hills.place(toys.ends_from(m, hills, Descent(), start))) for m in METHODS}
    assert places["GSAM"] == -1
    assert places["SGD"] >= 0
    assert places["SAM"] >= 0
    assert places["SGD"] != places["SAM"]
    # And, as the module's docstring admits:
    wider = Descent(rho=0.34)
    assert int(hills.place(toys.ends_from("SAM", hills, wider, start))) == -1


def test_sharpness_is_that_of_the_bowl_far_from_wells_and_ridge() -> None:
    hills = Hills(wells=(), ridge=(0.0, 1.0, 0.0))
    point = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert hills.sharpness(point) == pytest.approx(2 * 0.26)
    assert int(hills.place(point)) == -2


@pytest.fixture
def short() -> toys.Trajectories:
    return toys.trajectories(descent=Descent(num_steps=12))


def test_the_figure_says_what_was_chosen_and_how_often(short: toys.Trajectories) -> None:
    figure = toys.trajectory_figure(short)
    assert "chosen so that the three end apart" in figure.get_suptitle()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    for label, method in zip(labels, METHODS, strict=True):
        assert label.startswith(f"{method}: {short.ends()[method][0]}, eigenvalue")
        assert f"flat from {short.reached_flat[method]:.0%} of 650 starts" in label
    assert len(figure.axes[0].lines[0].get_xdata()) == 13


def test_the_animation_has_its_pictures(short: toys.Trajectories, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = tmp_path / "descent.gif"
    toys.save_animation(short, path, num_frames=3, progress=lambda *count: seen.append(count))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    with Image.open(path) as image:
        assert image.n_frames == 3
