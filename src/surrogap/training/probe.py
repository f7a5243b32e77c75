"""Probes: measurements between two steps of a run, such as the sharpness of the loss.

This package does not import `surrogap.analysis`, so the caller of `train` passes the probe.
`surrogap.experiments.probes` has the one for sharpness.
"""

from collections.abc import Callable

from surrogap.errors import InvalidValueError
from surrogap.training.components import Components
from surrogap.training.config import Config
from surrogap.training.processes import World

# Called between two steps, in all processes at once. It returns measurements by name and must not
# affect the run, which continues bit for bit as without it.
Probe = Callable[[], dict[str, float]]
MakeProbe = Callable[[Config, Components, World], Probe]


def probe_of(
    make: MakeProbe | None, config: Config, components: Components, world: World
) -> Probe | None:
    """Return the probe of a run; None if its configuration has no `sharpness_every`.

    Raises:
        ValueError: The configuration has it, and no probe was passed.
    """
    every = config.output.sharpness_every
    if every is None:
        return None
    if make is None:
        raise InvalidValueError(
            f"sharpness_every must come with a probe, got {every} without one. "
            "Pass probe=surrogap.experiments.probes.sharpness_probe to train."
        )
    return make(config, components, world)
