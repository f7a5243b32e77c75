"""Results of a grid of rho and alpha with known trends."""

from surrogap.paper.rho_alpha import GridRun


def runs(accuracy: float, sharpness: float, eigenvalue: float, num_seeds: int = 3) -> list[GridRun]:
    """Values that change by these amounts from alpha 0 to 0.4, and fall from rho 0.1 to 0.2."""
    return [
        {
            "rho": rho,
            "alpha": alpha,
            "seed": seed,
            "test_accuracy": 0.8 + seed / 100 + accuracy * alpha / 0.4,
            "sharpness": 20.0 + seed - 10 * rho + sharpness * alpha / 0.4,
            "worst_sharpness": 40.0,
            "eigenvalue": 30.0 + seed - 20 * rho + eigenvalue * alpha / 0.4,
            "num_images": 1000,
        }
        for seed in range(num_seeds)
        for rho in (0.1, 0.2)
        for alpha in (0.0, 0.2, 0.4)
    ]
