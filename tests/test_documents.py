"""The code blocks of README and docs run, links lead somewhere, and figures are the records'."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from step_cost import summary, summary_of_cheaper
from step_profile import COLOURS
from workloads import CASES

from surrogap import cli
from surrogap.data import load
from surrogap.experiments.eval_sets import archived_votes
from surrogap.experiments.recipes import RECIPES
from surrogap.paper.artifacts import ARTIFACTS
from surrogap.paper.intervals import Interval, paired_difference
from surrogap.paper.ledger import Ledger
from surrogap.paper.methods import MAIN, NOISY, SHORT
from surrogap.paper.plan import radius_suggestions
from surrogap.paper.scales import GPU, LAPTOP
from surrogap.paper.study import Cell, Scale
from surrogap.paper.study_page import write_page
from surrogap.paper.summaries import Summary, summaries, table
from surrogap.paper.tuning import chosen, trials
from surrogap.paper.tuning_sections import radii_section
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
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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
    eager, captured, plain = (
        f"{sections[section][variant]['median_ms']:.1f} ms"
        for section, variant in (
            ("eager", "GSAM"),
            ("captured", "captured GSAM"),
            ("captured", "captured vanilla"),
        )
    )
    assert (
        f"takes {eager} eagerly and {captured} captured. A captured plain step takes {plain}."
    ) in words_of("README.md")


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


@pytest.mark.parametrize(("page", "scale"), [("results.md", GPU), ("results-laptop.md", LAPTOP)])
def test_the_pages_of_results_are_those_of_the_ledgers(
    page: str, scale: Scale, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    write_page(tmp_path / page, scale, Ledger(Path(scale.ledger)))
    assert (ROOT / "docs" / page).read_text() == (tmp_path / page).read_text()


def in_setup(setup: str, names: Sequence[str], scale: Scale = GPU) -> dict[str, Summary]:
    """Methods by name, from the ledger."""
    found = summaries(scale, [Cell(setup, name) for name in names], Ledger(ROOT / scale.ledger))
    return dict(zip(names, found, strict=True))


@pytest.fixture(scope="module")
def methods() -> dict[str, Summary]:
    """The methods that README and the page on choosing speak of."""
    return in_setup("A", MAIN)


@pytest.fixture(scope="module")
def with_noisy_labels() -> dict[str, Summary]:
    """The same in set-up E."""
    return in_setup("E", NOISY)


def words_of(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


def rows_of(methods: dict[str, Summary], *scores: str) -> str:
    """A table of methods without the columns of set-ups and of seeds."""
    rows = [
        row.split("|") for row in table(GPU, list(methods.values()), scores).markdown().splitlines()
    ]
    seeds = [cell.strip() for cell in rows[0]].index("seeds")
    return "\n".join("|".join(["", *row[2:seeds], *row[seeds + 1 :]]) for row in rows)


def mean(summary: Summary, score: str = "test", decimals: int = 1) -> str:
    value = summary.interval(score)
    assert value is not None
    return f"{value.mean:.{decimals}f}"


def points(first: Summary, second: Summary, score: str = "test") -> Interval:
    difference = paired_difference(first.values(score), second.values(score))
    assert difference is not None
    return difference


def validation_accuracies(setup: str, method: str) -> list[float]:
    """Of the trials in percent, in the study's order."""
    ledger = Ledger(ROOT / GPU.ledger)
    runs = trials(GPU, setup, method, ledger)
    return [100 * ledger[run.key]["val"]["accuracy"] for run in runs if run.key in ledger]


def on_validation(first: Summary, second: Summary) -> Interval:
    values = (
        {seed: 100 * line["val"]["accuracy"] for seed, line in summary.lines.items()}
        for summary in (first, second)
    )
    difference = paired_difference(*values)
    assert difference is not None
    return difference


GAINING = ("sam", "gsam", "sam-norms", "vanilla-2x")
# The set-ups of the study on a CPU, by their names in tables.
ON_CPU = {
    "narrow ResNet-18": "A",
    "tiny ViT": "C",
    "tiny Mixer": "D",
    "narrow ResNet-18, 40 % wrong labels": "E",
}

CHEAPER = ("sam-quarter", "sam-norms-quarter", "sam-every-5", "sam-late", "sam-norms-late")

OTHERS = ("gsam-plain", "asam", "asam-ascent", "gap-penalty", "entropy-sgd")


def gains(found: dict[str, Summary], score: str = "test") -> str:
    """The cells of a row of gains over plain training."""
    return " | ".join(
        points(found[name], found["vanilla"], score).text(sign="+") for name in GAINING
    )


def test_the_gains_in_the_readme_are_those_of_the_ledgers(
    methods: dict[str, Summary], with_noisy_labels: dict[str, Summary]
) -> None:
    page = (ROOT / "README.md").read_text()
    titles = " | ".join(methods[name].cell.title for name in GAINING)
    assert f"| model | images | {titles} |\n" in page
    noisy = "CIFAR-10N, about 40 % of the labels wrong"
    assert f"| ResNet-18 | 10,000 of CIFAR-10 | {gains(methods)} |\n" in page
    assert f"| ResNet-18 | {noisy} | {gains(with_noisy_labels)} |\n" in page
    on_cpu = {name: in_setup(letter, SHORT, LAPTOP) for name, letter in ON_CPU.items()}
    for name, found in on_cpu.items():
        model, _, labels = name.partition(", ")
        images = f"Fashion-MNIST, {labels}" if labels else "1,500 of Fashion-MNIST"
        assert f"| {model} | {images} | {gains(found)} |\n" in page
    early = [
        points(found["vanilla-short"], found["vanilla"]).text(sign="+")
        for found in (with_noisy_labels, in_setup("E", NOISY, LAPTOP))
    ]
    assert (
        f"a quarter of the epochs gains {early[0]} points on CIFAR-10N, and {early[1]} on Fashion"
    ) in words_of("README.md")
    for found in (methods, with_noisy_labels, *on_cpu.values()):  # GSAM does not beat SAM
        gain = points(found["gsam"], found["sam"])
        assert gain.mean < 0 or not gain.excludes_zero


def test_the_numbers_of_the_page_on_choosing_are_those_of_the_ledger(
    methods: dict[str, Summary],
) -> None:
    text, page = words_of("docs/how-to/choose.md"), (ROOT / "docs/how-to/choose.md").read_text()
    assert rows_of(methods, "test", "calibration") in page
    assert {len(summary.lines) for summary in methods.values()} == {3}
    results = (ROOT / "docs" / "results.md").read_text().splitlines()
    vanilla, twice, sam, gsam, norms = (
        methods[name] for name in ("vanilla", "vanilla-2x", "sam", "gsam", "sam-norms")
    )
    for sentence in (
        f"SAM on norm layers gains {points(norms, vanilla).text()} points, "
        f"SAM {points(sam, vanilla).text()} and GSAM {points(gsam, vanilla).text()}.",
        f"SAM on norm layers gains {points(norms, twice).text()}.",
        f"the calibration error from {mean(vanilla, 'calibration')} % to 4 % or less. Twice the "
        f"epochs leave it at {mean(twice, 'calibration')} %.",
        f"gains {points(twice, vanilla).text()} points for twice the cost here",
        f"({mean(norms, 'corrupted')} and {mean(methods['gsam-norms'], 'corrupted')} %, plain "
        f"training {mean(vanilla, 'corrupted')} %)",
        f"GSAM minus SAM, in points: {points(gsam, sam).text()} with clean labels, "
        f"{points(methods['gsam-norms'], norms).text()} on norm layers; with noisy labels",
        f"costs {methods['momentum-sam'].cost:.2f} plain steps, but shows no gain here: the "
        "difference from plain training is "
        f"{points(methods['momentum-sam'], vanilla).text(sign='+')} points.",
    ):
        assert sentence in text
    assert max(methods, key=lambda name: float(mean(methods[name], "test", 3))) == "sam-norms"
    best_two = sorted(methods, key=lambda name: float(mean(methods[name], "corrupted", 3)))[-2:]
    assert set(best_two) == {"sam-norms", "gsam-norms"}
    for pair in ((gsam, sam), (methods["gsam-norms"], norms)):
        assert not on_validation(*pair).excludes_zero
    suggested = [line.split(" | ") for line in results if " to " in line and "; rho " in line]
    assert {(row[1], row[-1]) for row in suggested} == {
        (name, "yes |") for name in ("SAM", "SAM, norm layers", "Momentum-SAM")
    }


def test_find_rho_does_as_well_as_the_pages_say() -> None:
    ledger, ratios, factors = Ledger(ROOT / LAPTOP.ledger), dict[str, list[float]](), list[float]()
    for scale, found in ((GPU, Ledger(ROOT / GPU.ledger)), (LAPTOP, ledger)):
        section = "\n".join(radii_section(scale, found))
        factors += map(float, re.findall(r"a factor of (\d+) to (\d+)", section)[0])
    assert (min(factors), max(factors)) == (4, 12)
    for one in radius_suggestions(LAPTOP, ledger):
        for method in one.methods:
            best = chosen(LAPTOP, one.setup, method, ledger)
            suggestion = ledger[one.key(LAPTOP, ledger)]["suggestions"][method]
            assert best is not None
            assert best["rho"] > suggestion["low"]
            name = one.setup if method in ("sam", "sam-norms") else "others"
            ratios.setdefault(name, []).append(best["rho"] / suggestion["high"])
    assert max(*ratios["A"], *ratios["E"]) <= 1  # the ResNets
    assert len(ratios["others"]) == 2  # Momentum-SAM and ASAM
    assert min(ratios["others"]) > 1
    assert all(1.5 < ratio < 2.5 for setup in "CD" for ratio in ratios[setup])
    for path in ("docs/how-to/choose.md", "docs/how-to/sharpness.md"):
        assert "about twice" in words_of(path)
    assert "spans a factor of 4 to 12" in words_of("docs/how-to/choose.md")


def test_the_numbers_with_noisy_labels_are_those_of_the_ledger(
    with_noisy_labels: dict[str, Summary],
) -> None:
    text, page = words_of("docs/how-to/choose.md"), (ROOT / "docs/how-to/choose.md").read_text()
    assert rows_of(with_noisy_labels, "test", "best", "calibration") in page
    assert {len(summary.lines) for summary in with_noisy_labels.values()} == {3}
    vanilla, short, _, sam, gsam, norms = with_noisy_labels.values()
    for title, baseline, score in (
        ("over vanilla", vanilla, "test"),
        ("over vanilla, both at the best epoch", vanilla, "best"),
        ("over vanilla, 1/4 of the epochs", short, "test"),
    ):
        gains = [points(one, baseline, score).text() for one in (sam, norms, gsam)]
        assert f"| {title} | {' | '.join(gains)} |\n" in page
    assert "| | SAM | SAM, norm layers | GSAM |\n" in page
    assert mean(vanilla, "train", 0) == "100"
    errors = [mean(one, "calibration") for one in (vanilla, gsam, norms, sam, short)]
    for sentence in (
        "GSAM and SAM on norm layers reduce it from {} % to {} % and {} %, but SAM leaves it at "
        "{} %. Plain training for a quarter of the epochs reduces it most, to {} %.".format(
            *errors
        ),
        f"with noisy labels {points(gsam, sam).text()} after the last epoch and "
        f"{points(gsam, sam, 'best').text(sign='+')} at the best epoch.",
    ):
        assert sentence in text
    assert all(points(one, sam, "best").excludes_zero for one in (gsam, norms))
    assert not any(
        points(*pair).excludes_zero for pair in ((gsam, sam), (norms, sam), (norms, gsam))
    )


def test_the_numbers_of_small_models_are_those_of_the_ledger() -> None:
    text, page = words_of("docs/how-to/choose.md"), (ROOT / "docs/how-to/choose.md").read_text()
    for name, letter in ON_CPU.items():
        assert f"| {name} | {gains(in_setup(letter, SHORT, LAPTOP))} |\n" in page
    vit, mixer = (in_setup(letter, SHORT, LAPTOP) for letter in "CD")
    noisy = in_setup("E", NOISY, LAPTOP)
    assert {len(one.lines) for found in (vit, mixer, noisy) for one in found.values()} == {5}

    def gain(found: dict[str, Summary], first: str, second: str) -> str:
        return points(found[first], found[second]).text(sign="+")

    errors = (mean(vit[name], "calibration") for name in ("vanilla", "sam", "vanilla-2x"))
    for sentence in (
        f"SAM gains most, over twice the epochs too ({gain(mixer, 'sam', 'vanilla-2x')}).",
        f"gains less than SAM ({gain(mixer, 'sam-norms', 'sam')}).",
        "SAM also reduces the calibration error from {} % to {} %; twice the epochs leave it at "
        "{} %.".format(*errors),
        f"with a larger learning rate, gains {gain(noisy, 'vanilla-short', 'vanilla')} over plain "
        f"training. Over that, at eight times the cost, SAM gains only "
        f"{gain(noisy, 'sam', 'vanilla-short')}, GSAM {gain(noisy, 'gsam', 'vanilla-short')}, and "
        f"SAM on norm layers shows no gain ({gain(noisy, 'sam-norms', 'vanilla-short')}).",
        f"raise the calibration error, from {mean(noisy['vanilla'], 'calibration')} % to 28 % or",
    ):
        assert sentence in text
    resnet = in_setup("A", [*MAIN, *CHEAPER], LAPTOP)
    late = resnet["sam-norms-late"]
    differences = [gain(found, "gsam", "sam") for found in (resnet, vit, mixer, noisy)]
    for sentence in (
        "small models on a CPU: {} (ResNet-18), {} (ViT), {} (Mixer) and {} (wrong labels).".format(
            *differences
        ),
        f"narrow ResNet-18 on a CPU, it gains {gain(resnet, 'momentum-sam', 'vanilla')} points.",
        f"last third of the epochs gains {gain(resnet, 'sam-norms-late', 'vanilla')} points for "
        f"{late.cost:.2f} times the cost of plain training.",
    ):
        assert sentence in text
    others = in_setup("A", ["vanilla", *OTHERS], LAPTOP)
    assert (
        f"ASAM gains {gain(others, 'asam', 'vanilla')} points, and Entropy-SGD loses "
        f"({gain(others, 'entropy-sgd', 'vanilla')})."
    ) in text
    for name in OTHERS:
        is_clear = points(others[name], others["vanilla"]).excludes_zero
        assert is_clear == (name in ("asam", "entropy-sgd"))
        assert len(others[name].lines) == 3
    for name in CHEAPER:
        is_clear = points(resnet[name], resnet["vanilla"]).excludes_zero
        assert is_clear == (name == "sam-norms-late")
        assert len(resnet[name].lines) == 3
    assert not points(vit["sam"], vit["vanilla-2x"]).excludes_zero
    ledger = Ledger(ROOT / LAPTOP.ledger)
    tried = {
        line["config"]["optimizer"]["lr"]: line["val"]["accuracy"]
        for line in sorted(
            ledger.of_kind("run", setup="E", method="sam", purpose="tuning"),
            key=lambda line: float(line["val"]["accuracy"]),
        )
    }  # the best trial at each learning rate
    assert chosen(LAPTOP, "E", "vanilla", ledger) == {"lr": 0.025, "weight_decay": 1e-3}
    best = [f"{100 * tried[lr]:.1f} %" for lr in (0.05, 0.025)]
    sentence = "with twice that rate, SAM reached {} on validation images, and {} with it."
    assert sentence.format(*best) in text
    errors_with_noise = [float(mean(noisy[m], "calibration")) for m in ("sam", "gsam", "sam-norms")]
    assert min(errors_with_noise) >= 28
    assert max(mixer, key=lambda name: float(mean(mixer[name], "test", 3))) == "sam"
    assert float(mean(noisy["vanilla-2x"], "train")) == 100


def test_the_loss_with_strong_augmentation_is_that_of_the_ledger() -> None:
    cells = [c for c in ARTIFACTS["fig-ablation"].cells if c.changes == {"augmentation": "strong"}]
    found = summaries(LAPTOP, cells, Ledger(ROOT / LAPTOP.ledger))
    twice, sam = (next(s for s in found if s.cell.method == m) for m in ("vanilla-2x", "sam"))
    assert (
        f"fits only {mean(sam, 'train', 0)} % of its training images with SAM, which then loses "
        f"{points(twice, sam).text()} points against plain training for twice the epochs."
    ) in words_of("docs/how-to/choose.md")


def test_the_radii_with_noisy_labels_are_those_of_the_ledger() -> None:
    page, ledger = words_of("docs/how-to/choose.md"), Ledger(ROOT / GPU.ledger)

    def accuracies(method: str) -> list[str]:
        return [f"{accuracy:.1f} %" for accuracy in validation_accuracies("E", method)]

    _, *larger = accuracies("sam")
    sentence = "SAM reaches {} with rho 0.1, {} with 0.2, {} with 0.4 and {} with 0.8."
    assert sentence.format(*larger) in page
    weak, best, _, worst = accuracies("gsam")
    assert (
        f"GSAM reaches {weak} with rho 0.2 and alpha 0.1, {best} with rho 0.2 and alpha 0.3, and "
        f"{worst} with rho 0.4 and alpha 0.3."
    ) in page
    for method, radii in (("sam", (0.1, 0.4)), ("sam-norms", (0.5, 2.0))):
        found = [chosen(GPU, setup, method, ledger) for setup in "AE"]
        assert found == [{"rho": rho} for rho in radii]


def test_the_gains_of_the_trials_are_those_of_the_ledger() -> None:
    page = words_of("docs/how-to/choose.md")
    vanilla = max(validation_accuracies("A", "vanilla"))
    half, best, _, four = (accuracy - vanilla for accuracy in validation_accuracies("A", "sam"))
    norms = [accuracy - vanilla for accuracy in validation_accuracies("A", "sam-norms")]
    assert f"{half:.1f}" == f"{four:.1f}"
    assert (
        f"SAM gains {best:.1f} points of validation accuracy over plain training at its best rho, "
        f"and {half:.1f} points at half and at four times that rho. On norm layers it gains "
        f"{min(norms):.1f} to {max(norms):.1f} points at every rho tried."
    ) in page
    for method in ("gsam", "gsam-norms"):
        pairs = validation_accuracies("A", method)
        assert max(abs(pairs[0] - pairs[1]), abs(pairs[2] - pairs[3])) < 0.5
    assert "alpha 0.1 and 0.3 differ by less than half a point" in page


def test_plain_training_beyond_its_best_setting_loses_as_much_as_the_page_says() -> None:
    ledger = Ledger(ROOT / GPU.ledger)
    for method in ("vanilla", "vanilla-2x"):
        runs = trials(GPU, "A", method, ledger)
        first, more = (
            [100 * ledger[run.key]["val"]["accuracy"] for run in part if run.key in ledger]
            for part in (runs[: GPU.num_trials], runs[GPU.num_trials :])
        )
        assert max(first) - max(more) >= 1.3 - 1e-9
    assert "lose 1.3 points or more" in words_of("docs/how-to/choose.md")
