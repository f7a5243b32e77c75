"""The documentation site builds without a warning, and its reference has every public name."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PUBLIC = ("surrogap", "surrogap.rho", "surrogap.parts", "surrogap.analysis")


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    # Links to pages and headings that do not exist are among the warnings.
    command = (sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet")
    result = subprocess.run(
        [*command, "docs", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "reference" / "command-line.html").read_text()
    assert 'id="find-rho"' in text
    assert "--print-config" in text
    text = (tmp_path / "reference" / "configuration.html").read_text()
    assert 'id="momentum-sam"' in text
    assert "--climb-fraction" in text


@pytest.mark.parametrize("module", PUBLIC)
def test_reference_has_every_public_name(module: str) -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    text = "".join(page.read_text() for page in pages)
    found = set(
        re.findall(rf"auto(?:class|function):: {re.escape(module)}\.(\w+)$", text, re.MULTILINE)
    )
    assert found == set(import_module(module).__all__)


def test_every_page_is_in_the_navigation() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text()
    pages = {str(path.relative_to(docs).with_suffix("")) for path in docs.rglob("*.md")}
    listed = {line.strip() for line in index.splitlines()}
    assert pages - {"index"} <= listed
