import math
from typing import Any

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from surrogap.analysis.bounds import Solution, gaussian_divergence, risk_bound

USUAL: dict[str, Any] = {
    "rho": 2.0,
    "num_weights": 9,
    "num_samples": 400,
    "divergence": 3.0,
    "noise": 0.1,
    "a": 0.1,
}


def test_the_corollary() -> None:
    bound = risk_bound(0.3, 0.05, **USUAL)
    complexity = 4 * math.sqrt((3.0 + math.log(2 * 400 / 0.1)) / 400)
    assert bound.value == pytest.approx(0.3 + 0.05 + complexity, rel=1e-12)
    exponent = (2.0 / (math.sqrt(2) * 0.1) - 3.0) ** 2
    assert bound.probability == pytest.approx(0.9 * (1 - math.exp(-exponent)), rel=1e-12)


def test_the_ball_holds_the_noise_as_often_as_the_corollary_says() -> None:
    """The second factor of the probability bounds how often `||delta|| <= rho`."""
    for rho in (0.45, 0.5, 0.6):
        promised = risk_bound(0.0, 0.0, **{**USUAL, "rho": rho, "a": 1e-12}).probability
        inside = (0.1 * torch.randn(20_000, 9)).norm(dim=1) <= rho
        assert float(inside.float().mean()) >= promised


def test_at_its_smallest_radius_the_corollary_promises_nothing() -> None:
    rho = 0.1 * math.sqrt(2 * 9)
    bound = risk_bound(0.0, 0.0, **{**USUAL, "rho": rho * (1 + 1e-12)})
    assert bound.probability == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(
        ValueError, match=r"rho must be at least noise \* sqrt\(2 .* below 0.424264"
    ):
        risk_bound(0.0, 0.0, **{**USUAL, "rho": 0.99 * rho})


def test_the_divergence_of_gaussians() -> None:
    w = torch.tensor([0.3, -0.4], dtype=torch.float64)
    covariance = 0.2**2 * torch.eye(2).double()
    posterior = MultivariateNormal(w, covariance)
    prior = MultivariateNormal(torch.zeros(2).double(), covariance)
    expected = float(kl_divergence(posterior, prior))
    assert gaussian_divergence(0.5, 0.2) == pytest.approx(expected, rel=1e-9)


def test_the_discussion() -> None:
    """Equal at rho_train; above it the flatter solution has the lower bound, below it the other."""
    sam, gsam = Solution(loss=0.05, sharpness=100.0), Solution(loss=0.30, sharpness=20.0)
    rho_train = sam.radius_of_equal_loss(gsam)
    assert rho_train == gsam.radius_of_equal_loss(sam)
    assert rho_train is not None
    assert sam.perturbed_loss(rho_train) == pytest.approx(gsam.perturbed_loss(rho_train))
    assert sam.perturbed_loss(2 * rho_train) > gsam.perturbed_loss(2 * rho_train)
    assert sam.perturbed_loss(rho_train / 2) < gsam.perturbed_loss(rho_train / 2)


def test_one_may_be_better_at_every_radius() -> None:
    better, worse = Solution(0.1, 10.0), Solution(0.2, 20.0)
    assert better.radius_of_equal_loss(worse) is None
    assert better.radius_of_equal_loss(Solution(0.2, 10.0)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rho": 0.0}, "rho must be above 0"),
        ({"num_weights": 0}, "num_weights must be at least 1"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"divergence": -1.0}, "divergence must be at least 0"),
        ({"noise": 0.0}, "noise must be above 0"),
        ({"a": 1.0}, "a must be above 0 and below 1, got 1.0"),
    ],
)
def test_refuses(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        risk_bound(0.0, 0.0, **{**USUAL, **changes})


def test_the_divergence_refuses() -> None:
    with pytest.raises(ValueError, match="distance must be at least 0"):
        gaussian_divergence(-1.0, 0.1)
    with pytest.raises(ValueError, match="noise must be above 0"):
        gaussian_divergence(1.0, 0.0)
