"""The ascent step of each objective matches its definition."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surrogap.analysis.surface import Surface
from surrogap.experiments.radii import (
    ascent_step_of,
    components_for_sweep,
    sweep_cost,
    sweep_radii,
    train_with_plain_gradient,
)
from surrogap.training.components import Components
from surrogap.training.config import Config
from surrogap.training.run import train
from tests.training import small_runs

MODEL: dict[str, Any] = {"model": "small_resnet18_narrow", "batch_size": 8}


def components_of(config: Config, num_steps: int = 2) -> Components:
    components = components_for_sweep(config, None, num_steps)
    train_with_plain_gradient(components, lambda *_: None)
    return components


def climbed(config: Config, components: Components) -> tuple[Tensor, Tensor]:
    """Return the ascent step on a batch, and the gradient of the batch."""
    climb = ascent_step_of(config, components)
    assert climb is not None
    surface = Surface(components.model.train(), [next(iter(components.images))], is_checked=False)
    before = surface.position()
    delta, (_, g) = climb(surface), surface.gradient()
    assert torch.equal(surface.position(), before)
    assert all(parameter.grad is None for parameter in components.model.parameters())
    return delta, g


def are_norms(model: nn.Module) -> Tensor:
    """Return 1 for the weights of normalisation layers and 0 for others."""
    norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.BatchNorm2d)
        for parameter in module.parameters(recurse=False)
    }
    assert norms
    flats = [torch.full((p.numel(),), float(id(p) in norms)) for p in model.parameters()]
    return torch.cat(flats)


@pytest.mark.parametrize("name", ["sam", "gsam", "gap-penalty"])
def test_along_the_gradient(name: str, tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, **MODEL, objective=name)
    delta, g = climbed(config, components_of(config))
    torch.testing.assert_close(delta, g / g.norm(), rtol=1e-3, atol=1e-6)


def test_along_the_gradient_of_norm_layers(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, **MODEL, objective="sam", perturb="norms")
    components = components_of(config)
    delta, g = climbed(config, components)
    g *= are_norms(components.model)
    torch.testing.assert_close(delta, g / g.norm(), rtol=1e-3, atol=1e-6)


def test_along_the_gradient_of_a_fraction_of_the_batch(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, model="small_mlp", objective="sam", climb_fraction=0.25)
    components = components_of(config)
    images, targets = next(iter(components.images))
    components.images.load_state_dict(components.images.state_dict())
    surface = Surface(components.model.train(), [(images, targets)], is_checked=False)
    part = Surface(components.model, [(images[:2], targets[:2])], is_checked=False)
    climb = ascent_step_of(config, components)
    assert climb is not None
    _, g = part.gradient()
    torch.testing.assert_close(climb(surface), g / g.norm(), rtol=1e-3, atol=1e-6)


def test_along_the_momentum(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, **MODEL, objective="momentum-sam")
    components = components_of(config)
    delta, _ = climbed(config, components)
    buffers = [
        components.optimizer.state[p]["momentum_buffer"] for p in components.model.parameters()
    ]
    v = torch.cat([buffer.flatten() for buffer in buffers])
    torch.testing.assert_close(delta, -v / v.norm(), rtol=1e-3, atol=1e-6)


def test_the_momentum_of_a_run_is_loaded(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, objective="momentum-sam", steps=5)
    train(config)
    components = components_for_sweep(config, config.folder, num_steps=1)
    saved = small_runs.state(config.folder)["optimizer"]["state"]
    for name, parameter in components.model.named_parameters():
        momentum = components.optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(momentum, saved[name]["momentum_buffer"])
    sweep = sweep_radii(config, components, [0.1, 1.0], 2, lambda *_: None)
    assert [radius.rho for radius in sweep.radii] == [0.1, 1.0]


def test_without_momentum_there_is_no_ascent_step(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, objective="momentum-sam")
    components = components_for_sweep(config, None, num_steps=1)
    with pytest.raises(RuntimeError, match=r"neither it nor the ascent step may be zero"):
        sweep_radii(config, components, [0.1], 1, lambda *_: None)


def test_objectives_without_a_radius_are_swept_as_sam(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path, objective="vanilla")
    components = components_of(config)
    assert ascent_step_of(config, components) is None
    assert ascent_step_of(config.override(objective="entropy-sgd"), components) is None


@pytest.mark.parametrize(("name", "passes"), [("vanilla", 0), ("momentum-sam", 1), ("sam", 2)])
def test_the_cost_is_counted(name: str, passes: int) -> None:
    config = Config().override(objective=name)
    assert sweep_cost(config, [0.1, 0.2, 0.3], num_batches=4) == 4 * (1 + 3 + passes)
