"""The paper's trends in grids with known values."""

import pytest

from surrogap.paper.rho_alpha import Trend, trends, trends_as_numbers, trends_in_words
from tests.paper.synthetic_grid import runs


def test_the_papers_trends_where_they_are() -> None:
    found = trends_in_words(runs(accuracy=0.01, sharpness=-5.0, eigenvalue=-6.0))
    # Means over the three seeds: 30 + 1 - 2 and 20 + 1 - 1 at alpha 0, and so on.
    assert found[1] == (
        "From alpha 0 to 0.4, at rho 0.1: dominant eigenvalue 29.00 to 23.00, falls; "
        "2h/rho^2 20.00 to 15.00, falls; test accuracy % 81.00 to 82.00, rises."
    )
    assert found[3] == (
        "So along alpha, of 2 radii: dominant eigenvalue falls at 2, 2h/rho^2 falls at 2, "
        "test accuracy rises at 2; all of it, as in the paper, at 2."
    )
    assert found[4] == (
        "From rho 0.1 to 0.2, at alpha 0: dominant eigenvalue 29.00 to 27.00, falls; "
        "2h/rho^2 20.00 to 19.00, falls."
    )
    assert found[-1] == (
        "So along rho, of 3 alphas: dominant eigenvalue falls at 3, 2h/rho^2 falls at 3; "
        "all of it, as in the paper, at 3."
    )


def test_the_contrary() -> None:
    found = trends_in_words(runs(accuracy=-0.01, sharpness=5.0, eigenvalue=6.0))
    assert found[1] == (
        "From alpha 0 to 0.4, at rho 0.1: dominant eigenvalue 29.00 to 35.00, rises; "
        "2h/rho^2 20.00 to 25.00, rises; test accuracy % 81.00 to 80.00, falls."
    )
    assert found[3] == (
        "So along alpha, of 2 radii: dominant eigenvalue falls at 0, 2h/rho^2 falls at 0, "
        "test accuracy rises at 0; all of it, as in the paper, at 0."
    )


def test_one_trend_without_the_other() -> None:
    found = trends_in_words(runs(accuracy=-0.01, sharpness=-5.0, eigenvalue=-6.0))
    assert found[3] == (
        "So along alpha, of 2 radii: dominant eigenvalue falls at 2, 2h/rho^2 falls at 2, "
        "test accuracy rises at 0; all of it, as in the paper, at 0."
    )


def test_seeds_that_differ_decide_nothing() -> None:
    results = runs(accuracy=0.0, sharpness=-5.0, eigenvalue=-6.0)
    results = [
        {**run, "eigenvalue": 50.0} if (run["seed"], run["alpha"]) == (2, 0.4) else run
        for run in results
    ]
    first = trends(results, "alpha")[0.1]["eigenvalue"]
    assert first == Trend("eigenvalue", 29.0, first.last, 2, 1, 3)
    assert first.last == pytest.approx((22 + 23 + 50) / 3)
    found = trends_in_words(results)
    assert "31.67, undecided (falls in 2 and rises in 1 of 3 seeds)" in found[1]
    # Seeds without a change are not a trend either.
    assert "81.00 to 81.00, undecided (falls in 0 and rises in 0 of 3 seeds)." in found[1]
    assert "dominant eigenvalue falls at 0, 2h/rho^2 falls at 2, test acc" in found[3]


def test_what_the_table_is() -> None:
    legend = trends_in_words(runs(0.0, 0.0, 0.0))[0]
    assert legend.startswith(
        "Mean ± standard deviation over 3 seeds, after the last step; rho is constant"
    )
    assert "on 1,000 training images" in legend
    assert legend.endswith("all seeds would agree with the paper by chance in one of 8 cases.")
    assert trends_in_words(runs(0.0, 0.0, 0.0, num_seeds=1))[0].startswith(
        "One seed, after the last step"
    )


def test_one_value_has_no_trend() -> None:
    found = trends_in_words([run for run in runs(0.01, -5.0, -6.0) if run["rho"] == 0.1])
    assert found[-1] == "With one rho, there is no trend along rho."
    assert found[2].startswith("So along alpha, of 1 radii: dominant eigenvalue falls at 1")
    found = trends_in_words([run for run in runs(0.01, -5.0, -6.0) if run["alpha"] == 0.2])
    assert found[1] == "With one alpha, there is no trend along alpha."


def test_numbers_say_the_same() -> None:
    found = trends_as_numbers(runs(accuracy=0.01, sharpness=-5.0, eigenvalue=-6.0))
    assert [len(found[along]) for along in ("along_alpha", "along_rho")] == [2 * 3, 3 * 2]
    assert found["along_alpha"][0] == {
        "at": 0.1,
        "name": "eigenvalue",
        "first": 29.0,
        "last": 23.0,
        "num_falling": 3,
        "num_rising": 0,
        "num_seeds": 3,
        "direction": "falls",
    }
