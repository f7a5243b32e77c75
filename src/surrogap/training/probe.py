"""What a run measures of itself now and then, besides its steps.

How sharp the loss is around the weights is measured by another room, which this one does not know:
whoever starts a run brings the probe. `surrogap.experiments.probes` has it.
"""

from collections.abc import Callable

from surrogap.errors import InvalidValueError
from surrogap.training.components import Components
from surrogap.training.config import Config
from surrogap.training.processes import World

# Called between two steps, in all processes at once. It returns what was measured, by name, and
# leaves everything else as it was: the run goes on bit by bit as it would have without.
Probe = Callable[[], dict[str, float]]
MakeProbe = Callable[[Config, Components, World], Probe]


def probe_of(
    make: MakeProbe | None, config: Config, components: Components, world: World
) -> Probe | None:
    """The probe of a run; None if its configuration asks for none.

    Raises:
        ValueError: It asks for one, and there is none.
    """
    every = config.output.sharpness_every
    if every is None:
        return None
    if make is None:
        raise InvalidValueError(
            f"sharpness_every must come with a probe, got {every} without. "
            "Pass probe=surrogap.experiments.probes.sharpness_probe to train."
        )
    return make(config, components, world)
