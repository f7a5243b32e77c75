"""Measurements of a set-up: its lines of the ledger beside those of runs."""

import time
from collections.abc import Sequence
from typing import Any

from surrogap.experiments.radii import (
    components_for_sweep,
    sweep_radii,
    sweep_values,
    train_with_plain_gradient,
)
from surrogap.paper.ledger import LedgerLine
from surrogap.paper.plan import Measurement
from surrogap.paper.running import Environment, provenance
from surrogap.paper.timing import timing
from surrogap.paper.tuning import trials


def measured(measurement: Measurement, environment: Environment) -> LedgerLine:
    """Make a measurement, and return its line of the ledger.

    Raises:
        RunFailedError: The loss is not finite while training for find-rho.
        ValueError: The images are missing, or the configuration is not valid.
    """
    start = time.perf_counter()
    measure = {"timing": timing, "find-rho": suggestions}[measurement.kind]
    found = measure(measurement.setup, measurement.methods, environment)
    return {
        "key": measurement.key,
        "kind": measurement.kind,
        "scale": environment.scale.name,
        "setup": measurement.setup,
        **found,
        "seconds": round(time.perf_counter() - start, 2),
        **provenance(environment.device(measurement.setup), environment),
    }


def suggestions(setup: str, methods: Sequence[str], environment: Environment) -> dict[str, Any]:
    """The results of `surrogap find-rho` for some methods, with a new model for each.

    Args:
        setup: The set-up's letter.
        methods: The methods.
        environment: The study and its images.
    """
    num_steps, num_batches = environment.scale.find_rho
    found = {}
    for method in methods:
        config = trials(environment.scale, setup, method)[0].config(**environment.changes)
        components = components_for_sweep(config, None, num_steps)
        train_with_plain_gradient(components, _ignore)
        sweep = sweep_radii(config, components, (), num_batches, _ignore)
        found[method] = {"words": sweep.explain(), **sweep_values(sweep)}
    return {"train_steps": num_steps, "suggestions": found}


def _ignore(done: int, total: int) -> None:
    """Show no progress: it takes seconds."""
