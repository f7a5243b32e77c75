"""`surrogap recipes`."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from surrogap.cli import main
from surrogap.experiments.recipes import RECIPES

ROOT = Path(__file__).parent.parent.parent


def test_each_recipe_is_listed_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    heading, *lines, last = capsys.readouterr().out.splitlines()
    assert heading.split() == ["recipe", "model", "data", "objective"]
    assert last == "surrogap recipes NAME shows a recipe with all settings."
    assert [line.split()[0] for line in lines] == list(RECIPES)
    (line,) = (line for line in lines if line.startswith("vit-b32-gsam "))
    assert line.split()[1:] == ["vit_b32", "imagenet", "gsam"]


def test_names_are_not_truncated_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(RECIPES) + 5  # borders, header and hint: no row wraps
    assert set(RECIPES) <= {word for line in lines for word in line.split()}


def test_a_recipe_is_shown_with_all_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "resnet50-sam"]) == 0
    text = capsys.readouterr().out
    recipe = RECIPES["resnet50-sam"]
    assert text.endswith(recipe.config.to_json())
    words = " ".join(text.split())
    for part in (recipe.reproduces, recipe.command, recipe.expected, recipe.notes):
        assert " ".join(part.split()) in words


def test_markdown_is_the_page_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--markdown"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "recipes.md").read_text()


def test_an_unknown_recipe_has_a_closest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "vit-b23-gsam"]) == 2
    error = capsys.readouterr().err
    # A list of all ninety recipes would hide it.
    assert error.startswith(f"surrogap: recipe must be one of {len(RECIPES)} names, got")
    assert error.endswith(
        "got 'vit-b23-gsam'. The closest is 'vit-b32-gsam'. surrogap recipes lists them.\n"
    )


def test_the_reader_of_the_output_may_stop() -> None:
    command = f"{sys.executable} -m surrogap.cli recipes"
    reading = ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"]
    result = subprocess.run(reading, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert result.stdout.startswith("recipe ")
    assert result.returncode in (0, 128 + signal.SIGPIPE)  # 0 if all was written before


def test_as_a_program() -> None:
    command = [sys.executable, "-m", "surrogap.cli", "recipes", "mixer-s8-gsam"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("mixer-s8-gsam\n\nReproduces: Table 1 of the paper")


def test_help_and_recipes_need_no_torch() -> None:
    code = """
import sys
from surrogap.cli import main
for command in ("recipes", "compare", "evaluate", "show", "export"):
    try:
        main([command, "--help"])
    except SystemExit as exit:
        assert exit.code == 0
    else:
        raise AssertionError(command)
main(["recipes"])
assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
