"""Imports point one way, and `import surrogap` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import surrogap

ROOT = Path(surrogap.__file__).parent

# The other packages that each package may import.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "core": set(),
    "models": set(),
    "data": set(),
    "analysis": {"core"},
    "integrations": {"core"},
    "evaluation": {"data"},
    "training": {"core", "models", "data", "evaluation"},
    "experiments": {"core", "models", "data", "evaluation", "training", "analysis"},
    "paper": {
        *("core", "models", "data", "evaluation", "training", "analysis", "experiments"),
    },
    "cli": {
        *("core", "models", "data", "analysis", "integrations", "evaluation", "training"),
        *("experiments", "paper"),
    },
}
# Modules outside the packages, which every package may import. They need no torch.
SHARED = {"atomic", "checks", "errors"}
CORE_MAY_IMPORT = {"torch", "surrogap"} | set(sys.stdlib_module_names)


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Return the full names of all modules that a file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def package_of(name: str) -> str | None:
    """Return the package of a name such as `surrogap.core.rho`."""
    parts = name.split(".")
    return parts[1] if parts[0] == "surrogap" and len(parts) > 2 else None


def wrong_imports(package: str, names: set[str]) -> set[str]:
    allowed = ALLOWED[package] | {package} | SHARED
    ours = {name for name in names if name.split(".")[0] == "surrogap"}
    return {name for name in ours - {"surrogap.__version__"} if package_of(name) not in allowed}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_direction(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    names = imported(path)
    if path.stem in SHARED:
        assert not wrong_imports("errors", names)
        assert {name.split(".")[0] for name in names} <= {"surrogap", *sys.stdlib_module_names}
        return
    if package == "__main__.py":
        assert names == {"sys", "surrogap.cli.main"}
        return
    if package.endswith(".py"):  # the public modules re-export names of the core
        ours = {name for name in names if name.split(".")[0] == "surrogap"}
        assert all(package_of(name) == "core" for name in ours)
        return
    assert package in ALLOWED, f"{package} is not in ALLOWED"
    assert not wrong_imports(package, names)


@pytest.mark.parametrize("path", sorted((ROOT / "core").rglob("*.py")), ids=lambda p: p.name)
def test_core_needs_only_torch_and_the_standard_library(path: Path) -> None:
    # The kernels are loaded only if Triton is installed, which comes with torch.
    has_kernels = path.parent.name == "fused" and path.name != "__init__.py"
    allowed = CORE_MAY_IMPORT | ({"triton"} if has_kernels else set())
    assert {name.split(".")[0] for name in imported(path)} <= allowed


def test_the_rule_finds_a_wrong_import() -> None:
    assert wrong_imports("core", {"surrogap.cli.train", "torch", "surrogap.core.rho"}) == {
        "surrogap.cli.train"
    }
    assert wrong_imports("training", {"surrogap.analysis.gap", "surrogap.core.rho"}) == {
        "surrogap.analysis.gap"
    }
    assert wrong_imports("core", {"surrogap.SAM"}) == {"surrogap.SAM"}


def loaded_after(statement: str) -> set[str]:
    """Return the top-level modules that are loaded in a new interpreter after a statement."""
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


def test_import_loads_nothing_heavier_than_torch() -> None:
    new = loaded_after("import surrogap, surrogap.rho") - loaded_after("import torch")
    assert new - set(sys.stdlib_module_names) == {"surrogap"}
