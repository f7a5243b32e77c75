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
from surrogap.paper.ledger import Ledger, LedgerLine
from surrogap.paper.plan import Measurement
from surrogap.paper.running import Environment, provenance
from surrogap.paper.timing import timing
from surrogap.paper.tuning import trials


def measured(measurement: Measurement, environment: Environment, ledger: Ledger) -> LedgerLine:
    """Make a measurement, and return its line of the ledger.

    Args:
        measurement: The measurement.
        environment: The study and its images.
        ledger: The finished runs, which the settings of find-rho depend on.

    Raises:
        RunFailedError: The loss is not finite while training for find-rho.
        ValueError: The images are missing, or the configuration is not valid.
    """
    start = time.perf_counter()
    if measurement.kind == "timing":
        found = timing(measurement.setup, measurement.methods, environment)
    else:
        found = suggestions(measurement.setup, measurement.methods, environment, ledger)
    return {
        "key": measurement.key(environment.scale, ledger),
        "kind": measurement.kind,
        "scale": environment.scale.name,
        "setup": measurement.setup,
        **found,
        "seconds": round(time.perf_counter() - start, 2),
        **provenance(environment.device(measurement.setup), environment),
    }


def suggestions(
    setup: str, methods: Sequence[str], environment: Environment, ledger: Ledger
) -> dict[str, Any]:
    """The results of `surrogap find-rho` for some methods, with a new model for each.

    It trains with the learning rate and weight decay that plain training was tuned to.

    Args:
        setup: The set-up's letter.
        methods: The methods.
        environment: The study and its images.
        ledger: The finished runs.
    """
    num_steps, num_batches = environment.scale.find_rho
    found = {}
    for method in methods:
        first = trials(environment.scale, setup, method, ledger)[0]
        config = first.config(**environment.changes)
        components = components_for_sweep(config, None, num_steps)
        train_with_plain_gradient(components, _ignore)
        sweep = sweep_radii(config, components, (), num_batches, _ignore)
        found[method] = {"words": sweep.explain(), **sweep_values(sweep)}
    return {"train_steps": num_steps, "suggestions": found}


def _ignore(done: int, total: int) -> None:
    """Show no progress: it takes seconds."""
