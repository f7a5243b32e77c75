"""The code blocks of README and docs run, links lead somewhere, and figures are the records'."""

import json
import re
from pathlib import Path

import pytest
from step_cost import summary, summary_of_cheaper
from step_profile import COLOURS
from workloads import CASES

from surrogap import cli
from surrogap.experiments.recipes import RECIPES
from surrogap.paper.ledger import Ledger
from surrogap.paper.study import GPU
from surrogap.paper.study_page import write_page
from surrogap.training.config import Config

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_blocks_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    # What torchrun tells a single process, for the documents that speak of many.
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    namespace: dict[str, object] = {"__name__": "document"}
    text = path.read_text()
    for block in BLOCK.finditer(text):
        # Blank lines in front keep the line numbers of a traceback those of the document.
        padding = "\n" * (text.count("\n", 0, block.start()) + 1)
        exec(compile(padding + block[1], str(path), "exec"), namespace)


def test_the_first_command_of_the_guide_is_a_recipe_with_a_known_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs" / "how-to" / "train.md").read_text()
    _, *arguments = next(line for line in text.splitlines() if line.startswith("surrogap ")).split()
    assert cli.main([*arguments, "--print-config"]) == 0
    recipe = RECIPES["fashion-mnist-gsam"]
    shown = Config.from_dict(json.loads(capsys.readouterr().out))
    assert shown == recipe().override(out="runs/first")
    accuracy = re.search(r"test accuracy of about\s+([\d.]+) %", text)
    assert accuracy is not None
    assert f"{float(accuracy[1]):.1f}" == f"{float(recipe.expected.split()[2]):.1f}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`([\w./-]+(?:/|\.py|\.md|\.txt))`", text)) - {"cli/NAME.py"}
    package = ROOT / "src" / "surrogap"
    folders = (ROOT, package, package / "core")
    assert len(paths) > 30
    assert not [path for path in paths if not any((f / path).exists() for f in folders)]


def test_the_costs_of_a_step_are_those_of_the_record() -> None:
    record = json.loads((ROOT / "results" / "step_cost_h200.json").read_text())
    page = (ROOT / "docs" / "explanation" / "step-cost.md").read_text()
    assert summary(record) in page
    for name, costs in record["cases"].items():
        cost = costs["arithmetic"]
        row = f"| {CASES[name].title} | {cost['bytes'] / 1e9:.2f} GB | {cost['ms']:.2f} ms |"
        assert row in page


def test_the_costs_of_cheaper_steps_are_those_of_the_record() -> None:
    record = json.loads((ROOT / "results" / "step_cost_h200.json").read_text())
    page = (ROOT / "docs" / "how-to" / "cheaper-steps.md").read_text()
    assert summary_of_cheaper(record) in page


def test_the_profile_of_a_step_is_that_of_the_record() -> None:
    record = json.loads((ROOT / "results" / "step_profile_h200.json").read_text())
    page = (ROOT / "docs" / "explanation" / "step-cost.md").read_text()
    rows = [line.split(" | ")[1:] for line in page.splitlines() if line.startswith("| ")]
    for phase in COLOURS:
        times = [
            sum(length for _, length, other in kernels if other == phase)
            for kernels in record["timelines"].values()
        ]
        assert [f"{times[0]:.2f}", f"{times[1]:.2f}", f"{times[2]:.2f} |"] in rows


def test_the_page_of_results_is_that_of_the_ledger(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    write_page(tmp_path / "results.md", GPU, Ledger(Path(GPU.ledger)))
    assert (ROOT / "docs" / "results.md").read_text() == (tmp_path / "results.md").read_text()


def test_the_accuracies_in_the_readme_are_those_of_the_ledger() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    lines = map(json.loads, (ROOT / "results" / "study.jsonl").read_text().splitlines())
    runs = [line for line in lines if line["kind"] == "run" and line["purpose"] == "tuning"]
    best = {
        method: max(
            100 * run["val"]["accuracy"]
            for run in runs
            if (run["setup"], run["method"]) == ("A", method)
        )
        for method in ("vanilla", "vanilla-2x", "sam", "gsam", "sam-norms")
    }
    vanilla, twice, sam, gsam, norms = (f"{value:.1f} %" for value in best.values())
    assert (
        f"vanilla {vanilla}, twice the epochs {twice}, SAM {sam}, GSAM {gsam}, "
        f"SAM on norm layers {norms}."
    ) in text
