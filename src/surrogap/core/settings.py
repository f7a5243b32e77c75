"""The settings of an objective: those that objectives share, and those of their parts."""

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from surrogap.core.arithmetic import Memory
from surrogap.core.geometry import Perturb
from surrogap.core.replicas import Scope

if TYPE_CHECKING:
    from surrogap.core.objective import Objective


class Shared(TypedDict, total=False):
    """The keyword arguments that two-pass objectives share; `Objective` documents them."""

    perturb: Perturb
    scope: Scope
    memory: Memory
    eps: float


class PartSetting:
    """A setting of one of an objective's parts, as an attribute of the objective."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __set_name__(self, owner: "type[Objective]", name: str) -> None:
        self._name = name

    def __get__(self, objective: "Objective | None", owner: "type[Objective]") -> Any:
        return self if objective is None else getattr(getattr(objective, self._part), self._name)

    def __set__(self, objective: "Objective", value: object) -> None:
        setattr(getattr(objective, self._part), self._name, value)


def settings_of(part: object) -> dict[str, object]:
    """Return the settings of a part that differ from their defaults, or have none."""
    if not is_dataclass(part):
        own = getattr(part, "__dict__", {})
        return {name: value for name, value in own.items() if not name.startswith("_")}
    shown = (f for f in fields(part) if f.repr and getattr(part, f.name) != f.default)
    return {f.name: getattr(part, f.name) for f in shown}
