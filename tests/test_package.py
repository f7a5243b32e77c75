"""The package as it is published: metadata, and the wheel beside torch alone."""

import os
import re
import subprocess
import sys
import textwrap
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import surrogap

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_version_is_the_same_everywhere() -> None:
    version = re.escape(surrogap.__version__)
    assert re.search(rf"^version: {version}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert re.search(rf"^## \[?{version}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_package_runs_as_a_module() -> None:
    words = [sys.executable, "-m", "surrogap", "--version"]
    assert subprocess.check_output(words, text=True) == f"surrogap {surrogap.__version__}\n"


def test_workflow_runs_the_oldest_and_the_newest_python_and_the_oldest_torch() -> None:
    listed = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    (oldest,) = (Requirement(d).specifier for d in PROJECT["dependencies"] if "torch" in d)
    assert PROJECT["requires-python"] == f">={listed[0]}"
    assert f'"{listed[0]}"' in WORKFLOW
    assert f'"{listed[-1]}"' in WORKFLOW
    assert f"torch=={str(oldest).removeprefix('>=')}." in WORKFLOW


CHANGES, RELEASED = "## [0.1.0] - 2026-01-31\n", "Run pip install surrogap.\n"


@pytest.mark.parametrize(
    ("changelog", "page", "is_ready"),
    [
        (CHANGES, RELEASED, True),
        ("## [0.1.0] - not released yet\n", RELEASED, False),
        (CHANGES.replace("0.1.0", "0.2.0"), RELEASED, False),
        (CHANGES, "There is no\nrelease yet.\n", False),
    ],
)
@pytest.mark.parametrize("path", ["README.md", "docs/get-started.md", "docs/how-to/train.md"])
def test_release_needs_a_date_and_documents_of_a_release(
    tmp_path: Path, path: str, changelog: str, page: str, is_ready: bool
) -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    step = re.compile(r"describe the release\n +run: \|\n(.*?)^ +- ", re.MULTILINE | re.DOTALL)
    (script,) = step.findall(workflow)
    (tmp_path / "docs" / "how-to").mkdir(parents=True)
    for other in ("README.md", "docs/get-started.md", "docs/how-to/train.md"):
        (tmp_path / other).write_text(RELEASED)
    (tmp_path / path).write_text(page)
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    result = subprocess.run(
        ["bash", "-e", "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        env=os.environ | {"GITHUB_REF_NAME": "v0.1.0"},
        capture_output=True,
        check=False,
    )
    assert (result.returncode == 0) == is_ready


def run_without_extras(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `surrogap` as if the extra `train` were not installed; the command itself is."""
    extras = ("tyro", "rich", "timm", "torchvision", "matplotlib", "numpy")
    code = f"import sys; sys.modules |= dict.fromkeys({extras}); from surrogap import cli; "
    command = [sys.executable, "-c", code + f"sys.exit(cli.main({list(arguments)}))"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_version_needs_no_extra() -> None:
    result = run_without_extras("--version")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("command", ["train", "find-rho"])
def test_commands_name_the_missing_extra(command: str) -> None:
    result = run_without_extras(command)
    assert result.returncode == 2
    start = f"surrogap: the extra train must be installed for surrogap {command}, got "
    assert result.stderr.startswith(start)
    assert result.stderr.endswith(" Run pip install 'surrogap[train]'.\n")
    assert result.stderr.count("\n") == 1


def with_dependencies(name: str) -> set[str]:
    """Return the names of a package and of all that it requires without extras."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            required = map(Requirement, metadata.requires(current) or ())
            # Platform packages, such as CUDA's, may be missing on this one.
            waiting += [
                r.name
                for r in required
                if (r.marker is None or r.marker.evaluate({"extra": ""})) and is_installed(r.name)
            ]
    return found


def is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An environment with torch, what torch requires, and the wheel in dist/."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for name in with_dependencies("torch"):
        files = metadata.files(name) or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            target = packages / top
            if not target.exists():
                target.symlink_to(metadata.distribution(name).locate_file(top))
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", wheel]
    subprocess.run(command, check=True)
    return python


@pytest.mark.dist
def test_the_wheel_needs_torch_alone(python: Path, tmp_path: Path) -> None:
    (block,) = re.findall(
        r"\A.*?^```python\n(.*?)^```$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def output(*command: object) -> str:
        result = subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert output(python.parent / "surrogap", "--version") == f"surrogap {surrogap.__version__}\n"
    assert "venv" in output(python, "-c", "import surrogap; print(surrogap.__file__)")
    assert output(python, "-c", "import surrogap.analysis, surrogap.parts, surrogap.rho") == ""
    assert output(python, "-c", block).startswith("loss ")
    for package in ("tyro", "timm", "numpy"):
        result = subprocess.run(
            [python, "-c", f"import {package}"], capture_output=True, check=False
        )
        assert result.returncode == 1, f"{package} is there too"
