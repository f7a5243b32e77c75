"""The toy figures agree with their captions."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from surrogap.core.objectives import GSAM, SAM, Vanilla
from surrogap.paper import toys
from surrogap.paper.toys import START, TOY_METHODS, Descent, GapToy, Hills


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
    lines = toys.gap_figure(toy).axes[0].lines
    w = torch.as_tensor(lines[0].get_xdata())
    for line, function in zip(lines[:3], (toy.loss, toy.perturbed_loss, toy.gap), strict=True):
        torch.testing.assert_close(torch.as_tensor(line.get_ydata()), function(w))


@pytest.mark.parametrize("method", TOY_METHODS)
@pytest.mark.parametrize("start", [START, (-2.0, 0.3)])
def test_descents_are_those_of_the_librarys_objectives(
    method: str, start: tuple[float, float]
) -> None:
    hills, descent = Hills(), Descent(num_steps=40)
    model = nn.ParameterList([torch.tensor(start, dtype=torch.float64)])
    objective = {
        "SGD": lambda: Vanilla(model),
        "SAM": lambda: SAM(model, rho=descent.rho),
        "GSAM": lambda: GSAM(model, rho=descent.rho, alpha=descent.alpha),
    }[method]()
    optimizer = torch.optim.SGD(model.parameters(), lr=descent.lr)
    starts = torch.tensor([(0.0, 0.0), start], dtype=torch.float64)
    for point in toys.descend(method, hills, descent, starts)[:, 1]:
        torch.testing.assert_close(model[0].detach(), point)
        optimizer.zero_grad()
        objective.backward(lambda: hills(model[0]))
        optimizer.step()


def test_the_three_end_where_the_figure_says() -> None:
    hills = Hills()
    start = torch.tensor([START], dtype=torch.float64)

    def end(method: str, descent: Descent) -> int:
        return int(hills.region(toys.descend(method, hills, descent, start)[-1]))

    regions = {method: end(method, Descent()) for method in TOY_METHODS}
    assert regions["GSAM"] == -1
    assert regions["SGD"] >= 0
    assert regions["SAM"] >= 0
    assert regions["SGD"] != regions["SAM"]
    # And, as the module's docstring admits:
    assert end("SAM", Descent(rho=0.34)) == -1


def test_sharpness_is_that_of_the_bowl_far_from_wells_and_ridge() -> None:
    hills = Hills(wells=(), ridge=(0.0, 1.0, 0.0))
    point = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert hills.sharpness(point) == pytest.approx(2 * 0.26)
    assert int(hills.region(point)) == -2


SHORT = Descent(num_steps=12)


@pytest.fixture
def short() -> toys.Trajectories:
    return toys.trajectories(Hills(), SHORT)


def test_the_figure_says_what_was_chosen_and_how_often(short: toys.Trajectories) -> None:
    figure = toys.trajectory_figure(Hills(), SHORT, short)
    assert "chosen so that the three end apart" in figure.get_suptitle()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    for label, method in zip(labels, TOY_METHODS, strict=True):
        assert label.startswith(f"{method}: {short[method].end}, eigenvalue")
        assert f"flat from {short[method].reached_flat:.0%} of 650 starts" in label
    assert len(figure.axes[0].lines[0].get_xdata()) == 13


def test_the_animation_has_its_pictures(short: toys.Trajectories, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = tmp_path / "descent.gif"
    figure = toys.trajectory_figure(Hills(), SHORT, short)
    toys.save_animation(
        figure, short, path, num_frames=3, progress=lambda *count: seen.append(count)
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    with Image.open(path) as image:
        assert image.n_frames == 3
