"""Errors of the core are user errors, and subclasses of the built-in types."""

import ast
import builtins
from pathlib import Path

import pytest
import torch

import surrogap.core
from surrogap import SAM, errors
from tests import toy_models

FILES = sorted(Path(surrogap.core.__file__).parent.rglob("*.py"))
BUILT_IN = {name for name in vars(builtins) if name.endswith("Error")}


def raised(path: Path) -> set[tuple[str, str]]:
    calls = (n.exc for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Raise))
    names = (c.func.id for c in calls if isinstance(c, ast.Call) and isinstance(c.func, ast.Name))
    return {(path.name, name) for name in names}


def test_every_error_is_a_user_error() -> None:
    all_raised = set().union(*map(raised, FILES))
    assert not {(path, name) for path, name in all_raised if name in BUILT_IN}


def test_an_argument_and_a_step_raise_user_errors() -> None:
    model = toy_models.mlp()
    with pytest.raises(errors.UserError, match="rho must be at least 0"):
        SAM(model, rho=-1.0)
    with pytest.raises(errors.UserError, match="closure must return a loss with a graph"):
        SAM(model).backward(lambda: torch.zeros(()))
