"""The public names with their arguments, one per line.

python -m tests.public_names > tests/public_names.txt
"""

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_args

MODULES = {
    "surrogap": None,
    "surrogap.rho": None,
    "surrogap.parts": None,
    "surrogap.analysis": None,
    "surrogap.integrations.huggingface": ["SharpnessAwareMixin", "SharpnessAwareTrainer"],
    "surrogap.integrations.lightning": ["SharpnessAware"],
}

_CALLED = ("__call__", "__matmul__")


def lines() -> list[str]:
    """Return a line for each public name, and for each public member of a class of ours."""
    found = []
    for path, names in MODULES.items():
        module = import_module(path)
        for name in sorted(module.__all__ if names is None else names):
            found += _lines(f"{path}.{name}", getattr(module, name))
    return found


def _lines(path: str, value: Any) -> list[str]:
    if not inspect.isclass(value):
        return [path + _arguments(value)]
    # Members of base classes are listed with these, where they are public.
    own = sorted(name for name in vars(value) if not name.startswith("_") or name in _CALLED)
    members = [(f"{path}.{name}", getattr(value, name)) for name in own]
    return [
        path + _arguments(value),
        *(name + (_arguments(m) if callable(m) else "") for name, m in members),
    ]


def _arguments(function: Any) -> str:
    """Return names, kinds and defaults; annotations name internal modules, which may change."""
    parameters = [
        p.replace(annotation=inspect.Parameter.empty, default=_default(p.default))
        for p in _parameters(function)
        if not p.name.startswith("_")
    ]
    return str(inspect.Signature(parameters))


def _parameters(function: Any) -> Iterator[inspect.Parameter]:
    """Yield the parameters, with those of the base class in place of `**shared: Unpack[...]`."""
    for parameter in inspect.signature(function).parameters.values():
        unpacked = get_args(parameter.annotation)
        if parameter.kind is parameter.VAR_KEYWORD and unpacked:
            base = inspect.signature(function.__base__).parameters
            yield from (base[name] for name in unpacked[0].__annotations__)
        else:
            yield parameter


class _Written:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _default(value: Any) -> Any:
    return _Written(value.__name__) if inspect.isroutine(value) else value


if __name__ == "__main__":
    print("\n".join(lines()))
