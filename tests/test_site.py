"""The documentation site builds without a warning, and its reference has every public name."""

import doctest
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
PRELUDE = re.compile(
    r"^The examples on this page assume:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
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
    text = (tmp_path / "reference" / "objectives.html").read_text()
    assert "<code" in text.partition("<table")[2].partition("</table>")[0]
    assert "shared" not in text.partition('id="surrogap.SAM"')[2].partition("</dl>")[0]


@pytest.mark.parametrize("module", PUBLIC)
def test_reference_has_every_public_name(module: str) -> None:
    text = "".join(page.read_text() for page in REFERENCE)
    found = set(
        re.findall(rf"auto(?:class|function):: {re.escape(module)}\.(\w+)$", text, re.MULTILINE)
    )
    assert found == set(import_module(module).__all__)


def examples(page: Path, names: dict[str, Any]) -> list[doctest.DocTest]:
    """Return the examples in the docstrings that a page of the reference shows."""
    found = []
    for path in re.findall(r"auto(?:class|function):: ([\w.]+)$", page.read_text(), re.MULTILINE):
        module, _, name = path.rpartition(".")
        finder = doctest.DocTestFinder()
        found += finder.find(getattr(import_module(module), name), path, globs=names)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_examples_of_the_reference_need_only_the_imports_at_its_top(page: Path) -> None:
    preludes = PRELUDE.findall(page.read_text())
    assert len(preludes) == bool(examples(page, {}))
    names: dict[str, Any] = {"__name__": "page"}
    for prelude in preludes:
        exec(prelude, names)
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    for test in examples(page, names):
        runner.run(test, out=report.append)
    assert not report, "".join(report)


def test_every_page_is_in_the_navigation() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text()
    pages = {str(path.relative_to(docs).with_suffix("")) for path in docs.rglob("*.md")}
    listed = {line.strip() for line in index.splitlines()}
    assert pages - {"index"} <= listed
