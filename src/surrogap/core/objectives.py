"""Which way to go: the objectives, each a few lines about its direction."""

from collections.abc import Sequence
from typing import Literal, final

from torch import nn

from surrogap.core.arguments import number
from surrogap.core.arithmetic import Coefficients, Memory, Number
from surrogap.core.ascent import Ascent
from surrogap.core.objective import Objective, Predicate, TwoPass, single_pass_report
from surrogap.core.passes import Passes
from surrogap.core.replicas import Scope
from surrogap.core.report import Report
from surrogap.core.rho import Schedule
from surrogap.core.vectors import Gradients
from surrogap.core.weights import Weights


def _alpha(alpha: float) -> float:
    return number("alpha", alpha, remedy="Pass a non-negative number, such as 0.4; 0 is SAM.")


def _ascent(alpha: float) -> Coefficients:
    """Of `g_p - alpha * g_perp`."""
    # Not -alpha: at 0 that is -0.0, and SAM's bits would differ where g_p is -0.0.
    return Coefficients(a_0=0.0 - _alpha(alpha), b_0=1.0, b_1=alpha)


def _lam(lam: float) -> float:
    return number("lam", lam, remedy="Pass a non-negative number, such as 0.1; 0 is SAM.")


def _eps(eps: float) -> float:
    return number("eps", eps, remedy="Leave it out for 1e-12.")


@final
class Vanilla(Objective):
    """The plain gradient, `d = g`: one pass, to compare with.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> report = Vanilla(model).backward(lambda: model(torch.ones(2, 3)).square().mean())
    >>> bool(report.gap.isnan())
    True
    """

    def __init__(self, model: nn.Module, **unknown: object) -> None:
        if unknown:
            raise TypeError(
                f"Vanilla must get a model alone, got {', '.join(unknown)} too. It makes no second "
                "pass: for rho use SAM, for alpha use GSAM or ASAM."
            )
        super().__init__(model)

    def _direction(
        self, weights: Weights, passes: Passes, numbers: Sequence[Number]
    ) -> tuple[Gradients, Report]:
        loss, aux = passes.run(weights)
        g = self._gradients(weights)
        return g, single_pass_report(loss, aux, g, weights, passes.scale(loss.device))


@final
class SAM(TwoPass):
    """Minimises the perturbed loss `f_p`: `d = g_p` (Foret et al. 2021).

    Args:
        model: The model to train.
        rho: The radius: a number or a schedule of `surrogap.rho`. 0 gives the plain gradient.
        perturb: Which parameters climb, from a parameter's name and itself; None for all.
        scope: Under DistributedDataParallel, whose gradients the climb follows: "replica", this
            process's own, which is the default; "global", the mean of all; a process group, the
            mean of its members. Sharded weights have but "global".
        memory: "low" holds one copy of the parameters where "exact" holds two, on CUDA; see
            `surrogap.core.arithmetic.Memory`.
        eps: Added to the gradient's norm before dividing by it.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `rho` or `eps` is negative or not finite, the model has no trainable parameter,
            `perturb` selects none, or `scope` does not fit.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> report = SAM(model, rho=0.1).backward(lambda: model(torch.ones(2, 3)).square().mean())
    >>> bool(report.perturbed_loss > report.loss)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rho: float | Schedule = 0.05,
        perturb: Predicate | None = None,
        scope: Scope = None,
        memory: Memory = "exact",
        eps: float = 1e-12,
    ) -> None:
        super().__init__(model, rho, Ascent(eps=_eps(eps)), perturb, scope, memory)

    def _coefficients(self) -> Coefficients:
        return Coefficients(a_0=0.0, b_0=1.0)


@final
class GSAM(TwoPass):
    """Minimises the perturbed loss and the surrogate gap together: the paper's method.

    `minimize="perturbed"`, min(f_p, h): `d = g_p - alpha * g_perp`, where `g_perp` is the part of
    `g` orthogonal to `g_p`. It ascends along `g_perp`, which lowers the gap `h = f_p - f` and does
    not change `f_p` (section 4.2).

    `minimize="plain"`, min(f, h): `d = g + alpha * g_p_perp`, where `g_p_perp` is the part of `g_p`
    orthogonal to `g` (the ablation "min(f_p, h) vs. min(f, h)").

    Args:
        model: The model to train.
        rho: The radius: a number or a schedule of `surrogap.rho`. 0 gives the plain gradient.
        alpha: The weight of the gap. 0 gives SAM, or the plain gradient for "plain".
        minimize: "perturbed" or "plain".
        perturb: Which parameters climb, from a parameter's name and itself; None for all.
        scope: Under DistributedDataParallel, whose gradients the climb follows: "replica", this
            process's own, which is the default; "global", the mean of all; a process group, the
            mean of its members. Sharded weights have but "global".
        memory: "low" holds one copy of the parameters where "exact" holds two, on CUDA; see
            `surrogap.core.arithmetic.Memory`.
        eps: Added to the gradient's norm before dividing by it.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `rho`, `alpha` or `eps` is negative or not finite, `minimize` is unknown, the
            model has no trainable parameter, `perturb` selects none, or `scope` does not fit.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> objective = GSAM(model, rho=0.1, alpha=0.4)
    >>> report = objective.backward(lambda: model(torch.ones(2, 3)).square().mean())
    >>> bool(report.gap > 0)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rho: float | Schedule = 0.05,
        alpha: float = 0.4,
        minimize: Literal["perturbed", "plain"] = "perturbed",
        perturb: Predicate | None = None,
        scope: Scope = None,
        memory: Memory = "exact",
        eps: float = 1e-12,
    ) -> None:
        self.alpha = _alpha(alpha)
        self.minimize = minimize
        self._coefficients()  # refuses here what it would refuse at a step
        super().__init__(model, rho, Ascent(eps=_eps(eps)), perturb, scope, memory)

    def _coefficients(self) -> Coefficients:
        if self.minimize == "perturbed":
            return _ascent(self.alpha)
        if self.minimize == "plain":
            return Coefficients(a_0=1.0, b_0=_alpha(self.alpha), a_1=-self.alpha)
        raise ValueError(
            f'minimize must be "perturbed" or "plain", got {self.minimize!r}. '
            'Pass "perturbed" for min(f_p, h), the paper\'s method, "plain" for min(f, h).'
        )


@final
class ASAM(TwoPass):
    """SAM in a ball that adapts to the weights (Kwon et al. 2021); with `alpha`, "ASAM + ascent".

    `delta = rho * T^2 g / (||T g|| + eps)`, where `T = |w| + eta` on tensors of two or more
    dimensions, and 1 on biases and the weights of norms. Its `rho` is about ten times SAM's.

    Args:
        model: The model to train.
        rho: The radius: a number or a schedule of `surrogap.rho`. 0 gives the plain gradient.
        eta: Added to the weights' magnitudes.
        alpha: The weight of the gap, as in GSAM: `d = g_p - alpha * g_perp`. 0 gives ASAM itself.
        perturb: Which parameters climb, from a parameter's name and itself; None for all.
        scope: Under DistributedDataParallel, whose gradients the climb follows: "replica", this
            process's own, which is the default; "global", the mean of all; a process group, the
            mean of its members. Sharded weights have but "global".
        memory: "low" holds one copy of the parameters where "exact" holds two, on CUDA; see
            `surrogap.core.arithmetic.Memory`.
        eps: Added to the norm before dividing by it.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `rho`, `eta`, `alpha` or `eps` is negative or not finite, the model has no
            trainable parameter, `perturb` selects none, or `scope` does not fit.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> report = ASAM(model, rho=0.5).backward(lambda: model(torch.ones(2, 3)).square().mean())
    >>> bool(report.gap > 0)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rho: float | Schedule = 0.5,
        eta: float = 0.01,
        alpha: float = 0.0,
        perturb: Predicate | None = None,
        scope: Scope = None,
        memory: Memory = "exact",
        eps: float = 1e-12,
    ) -> None:
        self.alpha = _alpha(alpha)
        eta = number("eta", eta, remedy="Pass a non-negative number, such as 0.01.")
        super().__init__(model, rho, Ascent(eta=eta, eps=_eps(eps)), perturb, scope, memory)

    def _coefficients(self) -> Coefficients:
        return _ascent(self.alpha)


@final
class GapPenalty(TwoPass):
    """Minimises `f_p + lam * h`: `d = g_p + lam * (g_p - g)`, the paper's baseline (section 4.1).

    Unlike GSAM's, this descent on `h` may raise `f_p`.

    Args:
        model: The model to train.
        rho: The radius: a number or a schedule of `surrogap.rho`. 0 gives the plain gradient.
        lam: The weight of the gap. 0 gives SAM.
        perturb: Which parameters climb, from a parameter's name and itself; None for all.
        scope: Under DistributedDataParallel, whose gradients the climb follows: "replica", this
            process's own, which is the default; "global", the mean of all; a process group, the
            mean of its members. Sharded weights have but "global".
        memory: "low" holds one copy of the parameters where "exact" holds two, on CUDA; see
            `surrogap.core.arithmetic.Memory`.
        eps: Added to the gradient's norm before dividing by it.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `rho`, `lam` or `eps` is negative or not finite, the model has no trainable
            parameter, `perturb` selects none, or `scope` does not fit.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> objective = GapPenalty(model, rho=0.1, lam=0.1)
    >>> report = objective.backward(lambda: model(torch.ones(2, 3)).square().mean())
    >>> bool(report.gap > 0)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rho: float | Schedule = 0.05,
        lam: float = 0.1,
        perturb: Predicate | None = None,
        scope: Scope = None,
        memory: Memory = "exact",
        eps: float = 1e-12,
    ) -> None:
        self.lam = _lam(lam)
        super().__init__(model, rho, Ascent(eps=_eps(eps)), perturb, scope, memory)

    def _coefficients(self) -> Coefficients:
        lam = _lam(self.lam)
        return Coefficients(a_0=0.0 - lam, b_0=1.0 + lam)
