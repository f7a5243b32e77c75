"""Entropy-SGD: descent on the local entropy, estimated by Langevin steps around the weights."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from surrogap.checks import integer, number
from surrogap.core.combine import Number
from surrogap.core.gradients import total_squared_norm
from surrogap.core.objective import Objective
from surrogap.core.passes import Passes
from surrogap.core.report import Report
from surrogap.core.rho import num_steps
from surrogap.core.shards import has_copies
from surrogap.core.vectors import Gradients, Layout, Vector, chunks, scalar_for, widened
from surrogap.errors import InvalidValueError


@final
class EntropySGD(Objective):
    """Descend the local entropy (Chaudhari et al. 2019): `d = gamma * (w - mu)`.

    `mu` averages `inner_steps` Langevin steps from `v = mu = w`:
    `v += -inner_lr * (grad f(v) + gamma * (v - w)) + sqrt(inner_lr) * noise * N(0, I)`,
    `mu = averaging * mu + (1 - averaging) * v`. The closure runs once per inner step, and may draw
    a new batch each time. Every pass draws new random numbers; BatchNorm's statistics are updated
    in the first pass only. Any optimizer can be used.

    **Learning rate.** The direction is much shorter than the gradient: 0.003 to 0.006 times its
    norm in our runs with the defaults. Take the learning rate that suits the plain gradient, and
    divide it by `gamma`: 0.1 becomes 0.1 / 0.03 = 3.3, which moves `w` a tenth of the way to `mu`.

    **The authors' code** steps along `w - mu`, without `gamma`, so its learning rate is `gamma`
    times ours. Its noise is `sqrt(2 * inner_lr) * noise`, sqrt(2) times ours for the same `noise`.
    Its Lua version counts `t` from 1 in `gamma_t`; its Python version never increments `t`, so
    scoping has no effect there.

    Args:
        model: The model to train.
        gamma: The strength of the pull of the inner steps towards the weights.
        inner_steps: The number of inner steps, one pass each.
        inner_lr: The learning rate of the inner steps.
        noise: The scale of the noise in the inner steps; with 0 they are gradient descent.
        averaging: The decay of the average `mu`, in [0, 1).
        scoping: The growth rate of `gamma`: `gamma_t = gamma * (1 + scoping)^t`, t from 0. If it is
            not 0, save the `state_dict` with the optimizer's.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or the model has no trainable parameter.

    >>> model = nn.Linear(3, 1)
    >>> objective = EntropySGD(model, inner_steps=1, averaging=0.0, noise=0.0, inner_lr=0.1)
    >>> report = objective.backward(lambda: model(torch.ones(2, 3)).square().mean())
    >>> share = (3 / 4) ** 0.5  # three of the gradient's four equal entries are the weight's
    >>> torch.allclose(model.weight.grad.norm(), 0.03 * 0.1 * share * report.grad_norm)
    True
    """

    _fixed = ("model", "inner_steps", "inner_lr", "noise", "averaging")

    def __init__(
        self,
        model: nn.Module,
        *,
        gamma: float = 0.03,
        inner_steps: int = 5,
        inner_lr: float = 0.1,
        noise: float = 1e-4,
        averaging: float = 0.75,
        scoping: float = 0.0,
    ) -> None:
        self.inner_steps = integer("inner_steps", inner_steps, at_least=1, remedy="Pass 5.")
        self.gamma = _gamma(gamma)
        self.inner_lr = number("inner_lr", inner_lr, above=0, remedy="Pass a number such as 0.1.")
        self.noise = number("noise", noise, remedy="Pass a number such as 1e-4, or 0 for none.")
        self.averaging = number("averaging", averaging, below=1, remedy="Pass 0.75, say.")
        self.scoping = number("scoping", scoping, remedy="Pass a number such as 1e-3, or 0.")
        self.num_steps = 0
        super().__init__(model)

    @property
    def gamma_now(self) -> float:
        """`gamma_t` of the current step."""
        return _gamma(self.gamma) * (1.0 + self.scoping) ** self.num_steps

    @property
    def num_passes(self) -> int:
        """The number of forward-backward passes of a step."""
        return self.inner_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps taken, for scoping; empty without scoping."""
        return {"num_steps": self.num_steps} if self.scoping else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Objective`."""
        if self.scoping or state:
            self.num_steps = num_steps(state)

    def __repr__(self) -> str:
        names = ("gamma", "inner_steps", "inner_lr", "noise", "averaging", "scoping")
        return f"EntropySGD({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def _advance(self) -> None:
        self.num_steps += 1

    def _numbers(self) -> list[Number]:
        return [self.gamma_now]

    def _direction(self, passes: Passes, numbers: Sequence[Number]) -> tuple[Gradients, Report]:
        workspace, weights = self._workspace, self._workspace.weights
        if self.noise and any(map(has_copies, weights.parameters)):
            raise InvalidValueError(
                f"noise must be 0 if processes hold replicas of shards, as with HSDP, got "
                f"{self.noise}. Each would draw different noise: pass noise=0, or use plain FSDP."
            )
        loss, aux = passes.run(weights)
        scale = passes.scale(loss.device)
        tensors = weights.tensors
        layout = Layout(tensors)
        gradients = workspace.take()
        is_reached = [gradient is not None for gradient in gradients]
        g = layout.read(gradients)
        report = Report._plain(loss, aux, total_squared_norm(weights, gradients), scale)
        w = layout.read(tensors)
        inner = _LangevinSteps(self, numbers[0], w, scale)
        with workspace.buffers_after_first.kept(weights.written()):
            try:
                inner.step_(g)
                for _ in range(self.inner_steps - 1):
                    inner.v.write_to_(tensors)
                    passes.run(weights)
                    gradients = workspace.take()
                    for index, gradient in enumerate(gradients):
                        is_reached[index] |= gradient is not None
                    inner.step_(layout.read(gradients))
            finally:
                # As in `AscentStep`: Ctrl-C may interrupt this too.
                try:
                    w.write_to_(tensors)
                except BaseException:
                    w.write_to_(tensors)
                    raise
        views = inner.direction().views()
        return [
            v if reached else None for v, reached in zip(views, is_reached, strict=True)
        ], report


def _gamma(gamma: float) -> float:
    return number("gamma", gamma, above=0, remedy="Pass a number such as 0.03.")


class _LangevinSteps:
    """The Langevin steps `v` from `w` and their running average `mu`, in at least float32."""

    def __init__(
        self, settings: EntropySGD, gamma: Number, w: Vector, scale: Tensor | None
    ) -> None:
        self._settings = settings
        self._gamma = gamma
        self._scale = scale
        self._w = w
        self.v = w.widened()
        self._mu = w.widened()

    def step_(self, gradient: Vector) -> None:
        """Take one step along `gradient`.

        Where `gradient` is not finite, `mu` is not finite from then on, so that the caller sees it.
        `v` is reset to `w` there, so that the next passes have a finite loss.
        """
        lr, averaging = self._settings.inner_lr, self._settings.averaging
        for flats in zip(self._w.flats, gradient.flats, self.v.flats, strict=True):
            unscale = 1.0 if self._scale is None else 1.0 / scalar_for(flats[0], self._scale)
            for w, g, v in chunks(*flats):
                force = (v - widened(w)).mul_(self._gamma).add_(widened(g) * unscale)
                v.sub_(force, alpha=lr)
        if self._settings.noise:
            # One tensor at a time, so that the random numbers do not depend on the layout.
            for piece in self.v.views():
                piece.add_(torch.randn_like(piece), alpha=lr**0.5 * self._settings.noise)
        for flats in zip(self._w.flats, self.v.flats, self._mu.flats, strict=True):
            for w, v, mu in chunks(*flats):
                mu.mul_(averaging).add_(v, alpha=1.0 - averaging)
                torch.where(v.isfinite(), v, widened(w), out=v)

    def direction(self) -> Vector:
        """Return `gamma * (w - mu)` times the scale, which the caller divides by."""
        flats = []
        for w, mu in zip(self._w.flats, self._mu.flats, strict=True):
            factor = (
                self._gamma if self._scale is None else self._gamma * scalar_for(w, self._scale)
            )
            flats.append(mu.neg_().add_(w).mul_(factor).to(w.dtype))
        return Vector(self._w.layout, flats)
