"""The code blocks of README and docs run, links lead somewhere, and figures are the records'."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from step_cost import summary, summary_of_cheaper
from step_profile import COLOURS
from torch import nn
from workloads import CASES

from surrogap import cli
from surrogap.data import load
from surrogap.experiments.eval_sets import archived_votes
from surrogap.experiments.recipes import RECIPES
from surrogap.training.config import Config
from tests.data.downloads import fake_cifar, fake_flowers, fake_pets
from tests.distributed.torchrun import torchrun

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]
OUTPUT = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+\.\d+(?:e-\d+)?")
GAP = re.compile(r"gap (\d+\.\d+)")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIFF = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r"^python - <<'END'\n(.*?)^END$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_blocks_run(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
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
    # The output of the page on many GPUs is that of two processes, which a test below starts.
    if OUTPUT.search(text) and path.name != "many-gpus.md":
        assert_output_is_that_of(path, capsys.readouterr().out)


def assert_output_is_that_of(path: Path, printed: str) -> None:
    """Each line of the document's output was printed; numbers vary a little between machines."""
    expected = "".join(OUTPUT.findall(path.read_text())).splitlines()
    lines = iter(printed.splitlines())
    assert expected
    for line in expected:
        # Lines that the document leaves out, such as the Trainer's own, are skipped.
        found = next(
            (other for other in lines if NUMBER.sub("", other) == NUMBER.sub("", line)), ""
        )
        assert [float(number) for number in NUMBER.findall(found)] == pytest.approx(
            [float(number) for number in NUMBER.findall(line)], rel=0.1, abs=0.06
        ), line
        # Gaps are smaller than this tolerance, and proportional to the radius.
        assert [float(gap) for gap in GAP.findall(found)] == pytest.approx(
            [float(gap) for gap in GAP.findall(line)], rel=0.4
        ), line


def test_two_processes_print_the_output_of_the_page_on_many_gpus(tmp_path: Path) -> None:
    path = ROOT / "docs" / "tutorials" / "many-gpus.md"
    script = tmp_path / "train.py"
    script.write_text("\n".join(BLOCK.findall(path.read_text())))
    assert_output_is_that_of(path, torchrun(2, script, CUDA_VISIBLE_DEVICES=""))


def test_the_scripts_that_build_the_archives_of_the_study_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for num_classes in (10, 100):
        fake_cifar(Path("data"), monkeypatch, num_classes)
    fake_flowers(Path("data"), monkeypatch)
    fake_pets(Path("data"))
    noisy, counts = np.arange(10), np.full((2, 10), 5)
    Path("cifar-10-100n/data").mkdir(parents=True)
    torch.save({"worse_label": noisy}, "cifar-10-100n/data/CIFAR-10_human.pt")
    Path("cifar-10h/data").mkdir(parents=True)
    np.save("cifar-10h/data/cifar10h-counts.npy", counts)
    from_download = load("cifar10")
    page = (ROOT / "docs" / "how-to" / "reproduce.md").read_text()
    scripts = SCRIPT.findall(page)
    assert len(scripts) == 2
    for script in scripts:
        exec(script, {"__name__": "document"})
    assert {path.name for path in Path("data").glob("*.npz")} == {
        *("cifar10.npz", "flowers102.npz", "pets37.npz")
    }
    cifar, flowers, pets = map(load, ("cifar10", "flowers102", "pets37"))
    for split in ("train", "test"):
        ours, theirs = cifar.by_name[split], from_download.by_name[split]
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)
    assert cifar.train.noisy_labels.tolist() == noisy.tolist()
    assert archived_votes("cifar10", "data") == Path("data/cifar10.npz")
    assert flowers.train.labels.tolist() == [4, 101]
    assert flowers.test.labels.tolist() == [3, 5]
    assert pets.train.labels.tolist() == pets.test.labels.tolist() == list(range(37))
    assert (len(flowers.classes), pets.classes[1]) == (102, "Breed 01")
    image = Image.open("data/flowers-102/jpg/image_00005.jpg")
    assert image.size == (50, 40)
    resized = np.array(image.resize((80, 64), Image.Resampling.BILINEAR))
    assert np.array_equal(flowers.train.images[0].permute(1, 2, 0), resized[:, 8:72])
    assert pets.test.images.shape == (37, 3, 64, 64)


def test_the_first_command_of_the_guide_is_a_recipe_with_a_known_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs" / "how-to" / "train.md").read_text()
    _, *arguments = next(line for line in text.splitlines() if line.startswith("surrogap ")).split()
    assert cli.main([*arguments, "--print-config"]) == 0
    recipe = RECIPES["fashion-mnist-gsam"]
    shown = Config.from_dict(json.loads(capsys.readouterr().out))
    assert shown == recipe.config.override(out="runs/first")
    accuracy = re.search(r"test accuracy of about\s+([\d.]+) %", text)
    assert accuracy is not None
    assert f"{float(accuracy[1]):.1f}" == f"{float(recipe.expected.split()[2]):.1f}"


def test_scripts_take_the_same_steps_before_and_after_a_switch() -> None:
    text = (ROOT / "docs" / "how-to" / "switch.md").read_text()
    diffs = DIFF.findall(text)
    assert len(diffs) == 2
    for diff in diffs:
        # pytorch_optimizer computes some norms in float32.
        before, after = trained_by(diff, "-"), trained_by(diff, "+")
        torch.testing.assert_close(before, after, rtol=0, atol=1e-7)
    start = torch.nn.utils.parameters_to_vector(small_model().parameters())
    sam, gsam = (trained_by(diff, "+") for diff in diffs)
    assert all((one - other).norm() > 1e-3 for one, other in ((sam, start), (sam, gsam)))


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def trained_by(diff: str, sign: str) -> torch.Tensor:
    """Run the script before ("-") or after ("+") a change, and return the weights."""
    lines = [line[1:] for line in diff.splitlines() if line[:1] in (sign, " ")]
    model = small_model()
    x, y = torch.randn(20, 16, 8, dtype=torch.float64), torch.randint(3, (20, 16))
    names: dict[str, object] = {
        "torch": torch,
        "CosineAnnealingLR": torch.optim.lr_scheduler.CosineAnnealingLR,
        "model": model,
        "loader": list(zip(x, y, strict=True)),
        "loss_fn": nn.CrossEntropyLoss(),
    }
    exec("\n".join(lines), names)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


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
    _, _, *rows = (row.split(" | ") for row in summary(record).splitlines())
    for row, costs in zip(rows, record["cases"].values(), strict=True):
        # The page also has captured vanilla steps, the baseline of captured GSAM.
        plain = costs["sections"]["captured"]["captured vanilla"]["median_ms"]
        assert " | ".join([*row[:2], f"{plain:.1f}", *row[2:]]) in page
    for name, costs in record["cases"].items():
        cost = costs["arithmetic"]
        row = f"| {CASES[name].title} | {cost['bytes'] / 1e9:.2f} GB | {cost['ms']:.2f} ms |"
        assert row in page
    sections = record["cases"]["resnet18_cifar_128"]["sections"]
    gsam, captured_gsam, plain, captured_plain = (
        f"{sections[section][variant]['median_ms']:.1f}"
        for section, variant in (
            ("eager", "GSAM"),
            ("captured", "captured GSAM"),
            ("eager", "vanilla"),
            ("captured", "captured vanilla"),
        )
    )
    assert (
        f"takes {gsam} ms eagerly and {captured_gsam} ms captured; a plain step takes {plain} and "
        f"{captured_plain} ms."
    ) in " ".join((ROOT / "README.md").read_text().split())


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
