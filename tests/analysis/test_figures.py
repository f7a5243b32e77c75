"""The figures show the measured values."""

import io
import math
import sys
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from surrogap.analysis import figures
from surrogap.analysis.find_rho import Radius, Sweep
from surrogap.analysis.gap import Gap, Gaps
from surrogap.analysis.landscape import Line, Plane
from surrogap.analysis.spectrum import Density
from tests.architecture.test_imports import loaded_after

LINES = [Line((0.0, 1.0), (2.0, 3.0), "one"), Line((0.0, 2.0), (2.0, 5.0), "other")]
PLANE = Plane((-1.0, 0.0, 1.0), (0.0, 2.0), ((1.0, 0.0, 1.0), (3.0, 2.0, 4.0)), ("x", "y"))
GAPS = Gaps((Gap(0.1, 1.0, 1.1, 1.2), Gap(0.2, 1.0, 1.5, 1.7)), 0.3)
RADII = tuple(Radius(10.0**i, 1.0, 1.0 + i, 0.9 / (i + 1)) for i in range(3))
DENSITY = Density(torch.tensor([[0.0, 4.0]]).double(), torch.tensor([[0.9, 0.1]]).double(), 2)


def shown(figure: Figure) -> list[list[float]]:
    """The y values of all lines, axes by axes; also draws the figure to a PNG."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")
    return [list(map(float, line.get_ydata())) for axes in figure.axes for line in axes.lines]


def test_curves() -> None:
    figure = figures.curves(LINES, title="a title")
    assert shown(figure) == [[2.0, 3.0], [2.0, 5.0]]
    assert figure.axes[0].get_title() == "a title"
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["one", "other"]
    assert figures.curves([Line((0.0,), (1.0,))]).axes[0].get_legend() is None


def test_long_names_leave_room_for_what_they_name() -> None:
    """With the names as they were, matplotlib warned that there was none, and warnings fail."""
    run, other = (f"/somewhere/{'far/away/' * 20}{name}" for name in ("a", "b"))
    figure = figures.curves([Line((0.0, 1.0), (2.0, 3.0), f"0: {run}\n1: {other}")], title=run)
    assert shown(figure) == [[2.0, 3.0]]
    assert shown(figures.gap_curves({run: GAPS}, title=run))
    assert figures.brief(run) == "/somewhere/…way/far/away/far/away/far/away/a"
    assert figure.axes[0].get_position().width > 0.5


@pytest.mark.parametrize("draw", [figures.contour, figures.relief])
def test_planes(draw: Any) -> None:
    figure = draw(PLANE, title="a title")
    shown(figure)
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("x", "y")
    assert figure.axes[0].get_title() == "a title"


def test_spectrum() -> None:
    (heights,) = shown(figures.spectrum(DENSITY))
    assert max(heights) == pytest.approx(0.9 / (0.04 * math.sqrt(2 * math.pi)), rel=1e-2)


def test_gap_curves() -> None:
    lines = shown(figures.gap_curves({"run": GAPS}, eigenvalues={"run": 25.0}))
    one_step, worst, sharpness, worst_sharpness, eigenvalue = lines
    assert one_step == pytest.approx([0.1, 0.5])
    assert worst == pytest.approx([0.2, 0.7])
    assert sharpness == pytest.approx([20.0, 25.0])
    assert worst_sharpness == pytest.approx([40.0, 35.0])
    assert eigenvalue == [25.0, 25.0]


def test_gap_curves_without_a_worst_case() -> None:
    gaps = Gaps((Gap(0.1, 1.0, 1.1, math.nan),), 0.3)
    assert len(shown(figures.gap_curves({"run": gaps}))) == 2


@pytest.mark.parametrize(("num_radii", "num_spans"), [(1, 0), (3, 2)])
def test_sweep_curves(num_radii: int, num_spans: int) -> None:
    """With the first radius alone, whose gap is 0, there is no range."""
    figure = figures.sweep_curves(Sweep(RADII[:num_radii], 1), rho=2.0)
    lines = shown(figure)
    assert lines[0] == [0.0, 1.0, 2.0][:num_radii]
    assert [0.9, 0.45, 0.3][:num_radii] in lines
    assert sum(len(axes.patches) for axes in figure.axes) == num_spans


def test_without_matplotlib_they_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"Figures need matplotlib .*surrogap\[train\]"):
        figures.curves(LINES)


def test_measuring_does_not_load_matplotlib() -> None:
    assert "matplotlib" not in loaded_after("import surrogap.analysis")


def test_the_labels_of_a_surface_are_inside_the_figure() -> None:
    figure = figures.relief(PLANE, title="a title", loss="cross-entropy, 1,000 images")
    shown(figure)
    axes: Any = figure.axes[0]
    assert axes.get_zlabel() == "cross-entropy, 1,000 images"
    whole = figure.bbox
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        box = axis.label.get_window_extent()
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1


def test_measured_radii_are_labelled() -> None:
    figure = figures.gap_curves({"a": GAPS}, title="a title")
    assert figure.get_suptitle() == "a title"
    for axes in figure.axes:
        labels = [label.get_text() for label in axes.get_xticklabels()]
        assert labels == [f"{gap.rho:g}" for gap in GAPS.gaps]
        assert not axes.get_xticks(minor=True).size
        assert axes.get_yticks(minor=True).size  # less than a decade has at most one major tick


@pytest.mark.parametrize(("first", "scale"), [(0.001, "log"), (-0.001, "symlog")])
def test_the_curve_of_a_sweep_fills_its_panel(first: float, scale: str) -> None:
    gaps = (first, 0.1, 100.0)
    radii = tuple(Radius(10.0**i, 1.0, 1.0 + gap, 0.5) for i, gap in enumerate(gaps))
    figure = figures.sweep_curves(Sweep(radii, 1))
    axes = figure.axes[0]
    assert axes.get_yscale() == scale
    ends = axes.transData.transform([(1.0, first), (1.0, 100.0)])[:, 1]
    _, (bottom, top) = zip(*axes.bbox.get_points(), strict=True)
    assert bottom < ends[0] < bottom + 0.1 * (top - bottom)
    assert top - 0.1 * (top - bottom) < ends[1] < top


def test_the_sweep_explains_its_band_and_lines() -> None:
    radii = tuple(Radius(rho, 1.0, 1.0 + rho, 1.0 - rho) for rho in (0.01, 0.1, 0.2))
    figure = figures.sweep_curves(Sweep(radii, 1), rho=0.05, title="a title")
    legend = figure.axes[0].get_legend()
    assert legend is not None
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["0.05 and 0.5", "suggested range", "rho = 0.05"]
