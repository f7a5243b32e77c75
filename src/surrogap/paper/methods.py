"""The methods that the study compares: objectives with their settings and trials.

This module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from surrogap.experiments.planned import num_passes
from surrogap.training.config import Config

Changes = Mapping[str, Any]


@final
@dataclass(frozen=True)
class Method:
    """An objective with its settings.

    Attributes:
        title: Its name in tables and figures.
        changes: Values of the configuration.
        trials: The settings that it is tuned over; empty for the set-up's own trials, or for a
            method with a second setting.
        epochs: The length of training relative to the set-up's.
        start: The fraction of the epochs after which the objective starts; plain training before.
        simpler: For a method with a second setting besides the radius, the method without it.
        second: The second setting and its values, which are tried with the settings that are best
            for the simpler method in the same set-up.
    """

    title: str
    changes: Changes
    trials: Sequence[Changes] = ()
    epochs: float = 1.0
    start: float = 0.0
    simpler: str | None = None
    second: tuple[str, Sequence[float]] = ("", ())

    @cached_property
    def passes(self) -> float:
        """Forward-backward passes per step, averaged over the run: an estimate of the cost.

        >>> METHODS["sam-quarter"].passes, round(METHODS["sam-late"].passes, 2)
        (1.25, 1.33)
        """
        each = num_passes(Config().override(**self.changes).objective, epochs=1)
        return self.start + (1 - self.start) * each

    @property
    def is_plain(self) -> bool:
        """True for plain training, of any length."""
        return self.changes == METHODS["vanilla"].changes

    @property
    def step(self) -> str:
        """The first method with the same step; the number of steps may differ.

        >>> METHODS["sam-late"].step, METHODS["asam-ascent"].step
        ('sam', 'asam-ascent')
        """
        own = (self.changes, self.second)
        return next(name for name, one in METHODS.items() if (one.changes, one.second) == own)

    def with_second(self, settings: Sequence[Changes]) -> list[Changes]:
        """Settings of the simpler method with each value of the second setting.

        >>> METHODS["gsam"].with_second([{"rho": 0.2}])
        [{'rho': 0.2, 'alpha': 0.1}, {'rho': 0.2, 'alpha': 0.3}]
        """
        name, values = self.second
        return [{**one, name: value} for one in settings for value in values]


def _radii(*rhos: float) -> list[Changes]:
    return [{"rho": rho} for rho in rhos]


_VANILLA, _SAM, _GSAM = ({"objective": name} for name in ("vanilla", "sam", "gsam"))
_NORMS, _QUARTER = {"perturb": "norms"}, {"climb_fraction": 0.25}
_MOMENTUM = {"objective": "momentum-sam"}
_RHOS, _NORM_RHOS = _radii(0.05, 0.1, 0.2, 0.4), _radii(0.25, 0.5, 1.0, 2.0)
_ALPHAS = ("alpha", (0.1, 0.3))

METHODS: dict[str, Method] = {
    "vanilla": Method("vanilla", _VANILLA),
    "vanilla-2x": Method("vanilla, 2x epochs", _VANILLA, epochs=2.0),
    "vanilla-short": Method("vanilla, 1/4 of the epochs", _VANILLA, epochs=0.25),
    "sam": Method("SAM", _SAM, _RHOS),
    "gsam": Method("GSAM", _GSAM, simpler="sam", second=_ALPHAS),
    "sam-norms": Method("SAM, norm layers", _SAM | _NORMS, _NORM_RHOS),
    "gsam-norms": Method("GSAM, norm layers", _GSAM | _NORMS, simpler="sam-norms", second=_ALPHAS),
    "momentum-sam": Method("Momentum-SAM", _MOMENTUM, _radii(0.5, 1.0, 2.0, 4.0)),
    "gsam-plain": Method(
        "GSAM, min(f, h)",
        _GSAM | {"minimize": "plain"},
        simpler="sam",
        second=("alpha", (0.3, 1.0)),
    ),
    "asam": Method("ASAM", {"objective": "asam"}, _radii(0.5, 1.0, 2.0, 4.0)),
    "asam-ascent": Method("ASAM + ascent", {"objective": "asam"}, simpler="asam", second=_ALPHAS),
    "gap-penalty": Method(
        "f_p + lambda h", {"objective": "gap-penalty"}, simpler="sam", second=("lam", (0.1, 0.5))
    ),
    # Five passes a step: for two fifths of the epochs it runs as many passes as SAM.
    "entropy-sgd": Method(
        "Entropy-SGD",
        {"objective": "entropy-sgd", "inner_steps": 5},
        [{"gamma": gamma, "scoping": scoping} for gamma in (0.03, 0.3) for scoping in (0.0, 1e-3)],
        epochs=0.4,
    ),
    "sam-quarter": Method("SAM, climb on 1/4 batch", _SAM | _QUARTER, _RHOS),
    "sam-norms-quarter": Method(
        "SAM, norm layers, climb on 1/4 batch", _SAM | _NORMS | _QUARTER, _NORM_RHOS
    ),
    "sam-every-5": Method("SAM, every 5th step", _SAM | {"every": 5}, _radii(0.1, 0.2, 0.4, 0.8)),
    "sam-late": Method("SAM, last third", _SAM, _RHOS, start=2 / 3),
    "sam-norms-late": Method(
        "SAM, norm layers, last third", _SAM | _NORMS, _NORM_RHOS, start=2 / 3
    ),
    "momentum-sam-2x": Method(
        "Momentum-SAM, 2x epochs", _MOMENTUM, _radii(0.5, 1.0, 2.0, 4.0), epochs=2.0
    ),
}

# The most important methods, which are tuned and trained first.
MAIN = ("vanilla", "vanilla-2x", "sam", "gsam", "sam-norms", "gsam-norms", "momentum-sam")
SHORT = ("vanilla", "vanilla-2x", "sam", "gsam", "sam-norms")
# The cheaper methods that did best with a ResNet, and one of them at the cost of SAM.
CHEAPER = ("momentum-sam", "momentum-sam-2x", "sam-every-5", "sam-late", "sam-norms-late")
# With noisy labels, plain training may do better if it ends before it memorises them.
NOISY = ("vanilla", "vanilla-short", *SHORT[1:])
NOISY_OWN = tuple(method for method in NOISY if method != "vanilla-2x")
TRANSFERRED = ("vanilla", "sam", "gsam")

# The methods that are tuned over the radius alone, and use it in every step on the whole batch.
ONLY_RADIUS = ("sam", "sam-norms", "momentum-sam", "asam")
