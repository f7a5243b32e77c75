"""Results for the tests."""

from dataclasses import replace

from surrogap.paper.rho_alpha import Result

RESULT = Result(
    *(0.1, 0.0, 0),
    test_accuracy=0.8,
    test_loss=0.5,
    num_images=1000,
    loss=0.1,
    grad_norm=0.1,
    gap=0.1,
    sharpness=20.0,
    worst_gap=0.2,
    worst_sharpness=40.0,
    eigenvalue=30.0,
    residual=0.1,
)


def grid(accuracy: float, sharpness: float, eigenvalue: float, num_seeds: int = 3) -> list[Result]:
    """Results that move by so much from alpha 0 to 0.4, and fall from rho 0.1 to 0.2."""
    return [
        replace(
            RESULT,
            rho=rho,
            alpha=alpha,
            seed=seed,
            test_accuracy=0.8 + seed / 100 + accuracy * alpha / 0.4,
            sharpness=20.0 + seed - 10 * rho + sharpness * alpha / 0.4,
            eigenvalue=30.0 + seed - 20 * rho + eigenvalue * alpha / 0.4,
        )
        for seed in range(num_seeds)
        for rho in (0.1, 0.2)
        for alpha in (0.0, 0.2, 0.4)
    ]
