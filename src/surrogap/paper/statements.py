"""The paper's statements beside what was measured: a row each, for a table."""

from collections.abc import Iterator, Sequence

from surrogap.analysis.bounds import Solution
from surrogap.experiments.text_table import Table
from surrogap.paper.theory import Convergence, Decrease, Disagreement, Estimate, Signs

Row = tuple[str, str, str, str, str]
COLUMNS = ("statement", "where", "measured", "stated", "holds")

# Two trained models as the discussion of Corollary 5.2.1 has them, with numbers made up: the same
# perturbed loss at rho_train = 0.1, and one flatter than the other.
SHARP, FLAT = Solution(loss=0.1, sharpness=40.0), Solution(loss=0.2, sharpness=20.0)


def statements(
    lemma_3_1: Disagreement,
    lemma_3_2: Sequence[Signs],
    lemma_3_3: Sequence[Estimate],
    theorem_5_1: Convergence,
    theorem_5_3: Sequence[Decrease],
) -> Table:
    """All of them, in the paper's order."""
    rows = [
        _disagreement(lemma_3_1),
        *map(_signs, lemma_3_2),
        *map(_estimate, lemma_3_3),
        *_convergence(theorem_5_1),
        *_corollary(),
        *map(_decrease, theorem_5_3),
    ]
    return Table(COLUMNS, rows)


def _disagreement(found: Disagreement) -> Row:
    sharp, flat = found.sharp_perturbed_loss, found.flat_perturbed_loss
    eigenvalues = f"eigenvalues {found.sharp.sharpness:g}, {found.flat.sharpness:g}"
    measured = f"f_p {sharp:.3g}, {flat:.3g}"
    stated = "the lower f_p may be the sharper one's"
    return "Lemma 3.1", f"rho {found.rho:g}, {eigenvalues}", measured, stated, _yes(found.is_shown)


def _signs(found: Signs) -> Row:
    holds = "yes" if found.part == 1.0 else "this rho is not small"
    measured = f"at {found.part:.1%} of points"
    return "Lemma 3.2", f"rho {found.rho:g}", measured, "h >= 0 for small rho", holds


def _estimate(found: Estimate) -> Row:
    # The case's own series is 1 + rho / 3 + ..., so the error stays below rho.
    measured = f"2h/rho^2 = {found.sharpness:.4f}"
    return (
        *("Lemma 3.3", f"rho {found.rho:g}", measured, "1, the eigenvalue, up to O(rho)"),
        _yes(found.error < found.rho),
    )


def _convergence(found: Convergence) -> Iterator[Row]:
    columns = (found.steps, found.loss, found.perturbed_loss, found.bound, found.scaled())
    for step, loss, perturbed_loss, bound, (_, scaled) in zip(*columns, strict=True):
        measured = f"mean |grad f|^2 {loss:.3g}, |grad f_p|^2 {perturbed_loss:.3g}"
        stated = f"the second below {bound:.3g}; it is {scaled:.2g} of the rate"
        yield "Theorem 5.1", f"T = {step}", measured, stated, _yes(perturbed_loss <= bound)


def _corollary() -> Iterator[Row]:
    rho_train = SHARP.radius_of_equal_loss(FLAT)
    assert rho_train is not None
    for rho in (rho_train / 2, 1.5 * rho_train):
        sharp, flat = SHARP.perturbed_loss(rho), FLAT.perturbed_loss(rho)
        better = "flatter" if rho > rho_train else "sharper"
        where = f"rho_true {rho:.2g}, rho_train {rho_train:.2g}"
        holds = (flat < sharp) == (rho > rho_train)
        measured = f"bounds {sharp:.3g} (sharp), {flat:.3g} (flat)"
        yield "Corollary 5.2.1", where, measured, f"the {better} one's is lower", _yes(holds)


def _decrease(found: Decrease) -> Row:
    where = f"eigenvalues {', '.join(f'{value:g}' for value in found.spectrum)}"
    stated = f"from {found.lower:.3g} to {found.upper:.3g}"
    holds = _yes(found.is_between)
    if not found.is_between and len(set(found.spectrum)) == 1:
        holds += ": g_p is parallel to g, which the proof of the lower bound leaves out"
    return "Theorem 5.3", where, f"sum of decreases {found.total:.3g}", stated, holds


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
