"""Small folders with the layout of ImageNet's test sets."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surrogap.evaluation import (
    IMAGENET_C,
    evaluate,
    imagenet_c,
    imagenet_r,
    imagenet_r_synsets,
    imagenet_real,
    imagenet_synsets,
    imagenet_v2,
    label_sets,
)

SYNSETS = ["n01440764", "n01443537", "n01484850", "n01491361"]


def folders(root: Path, images: Mapping[str, Sequence[str]]) -> Path:
    """Create each folder with empty files of these names."""
    for folder, names in images.items():
        (root / folder).mkdir(parents=True)
        for name in names:
            (root / folder / name).touch()
    return root


def val_name(number: int) -> str:
    return f"ILSVRC2012_val_{number:08d}.JPEG"


def val(root: Path) -> Path:
    """Eight images, spread over the classes as the real ones are: class `number % 4`."""
    return folders(root, {s: [val_name(n) for n in (k + 4, k or 8)] for k, s in enumerate(SYNSETS)})


def test_the_lists_that_come_with_the_package() -> None:
    synsets = imagenet_synsets()
    assert len(synsets) == len(set(synsets)) == 1000
    assert list(synsets) == sorted(synsets)
    assert all(re.fullmatch(r"n\d{8}", synset) for synset in synsets)
    # Known positions: tench, great white shark, golden retriever, toilet tissue.
    known = {0: "n01440764", 2: "n01484850", 207: "n02099601", 999: "n15075141"}
    assert {k: synsets[k] for k in known} == known
    assert len(set(imagenet_r_synsets())) == 200
    assert set(imagenet_r_synsets()) <= set(synsets)


def test_the_lists_equal_timms() -> None:
    from timm import data

    info = data.ImageNetInfo("imagenet-1k")
    assert info.label_names() == list(imagenet_synsets())


def test_labels_follow_the_order_of_the_synsets(tmp_path: Path) -> None:
    val(tmp_path / "fog" / "1")
    samples = imagenet_c(tmp_path, "fog", 1, SYNSETS, num_images=8)
    assert [(path.name, label) for path, label in samples] == [
        (val_name(n), k)
        for n, k in ((4, 0), (8, 0), (1, 1), (5, 1), (2, 2), (6, 2), (3, 3), (7, 3))
    ]
    backwards = imagenet_c(tmp_path, "fog", 1, SYNSETS[::-1], num_images=8)
    assert [label for path, label in backwards if path.parent.name == SYNSETS[0]] == [3, 3]
    assert all(path.is_file() for path, _ in backwards)


def test_the_whole_of_a_set(tmp_path: Path) -> None:
    root = tmp_path / "fog" / "1"
    folders(root, {synset: [f"{synset}.JPEG"] for synset in imagenet_synsets()})
    samples = imagenet_c(str(tmp_path), "fog", 1, num_images=1000)
    assert [label for _, label in samples] == list(range(1000))
    with pytest.raises(ValueError, match=f"root must hold 50000 images, got 1000 in {root}. "):
        imagenet_c(tmp_path, "fog", 1)


def test_files_that_are_not_images_do_not_count(tmp_path: Path) -> None:
    names = ["a.png", "._a.png", ".DS_Store", "note.txt", "b.jpg"]
    root = folders(tmp_path / "fog" / "1", {SYNSETS[0]: names, ".cache": []})
    (root / "README.txt").touch()
    samples = imagenet_c(tmp_path, "fog", 1, SYNSETS[:1], num_images=2)
    assert [path.name for path, _ in samples] == ["a.png", "b.jpg"]


@pytest.fixture
def four_synsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ImageNet consist of `SYNSETS`."""
    monkeypatch.setattr("surrogap.evaluation.imagenet.imagenet_synsets", lambda: tuple(SYNSETS))


@pytest.mark.usefixtures("four_synsets")
def test_real_follows_the_names_of_the_images(tmp_path: Path) -> None:
    val(tmp_path / "val")
    lists = [[1], [2, 0], [], [0], [1, 2, 3], [], [3], [1]]
    real = tmp_path / "real.json"
    real.write_text(json.dumps(lists))
    samples = imagenet_real(tmp_path / "val", real)
    assert [path.name for path, _ in samples] == [val_name(n) for n in range(1, 9)]
    assert [labels for _, labels in samples] == lists
    # Then scores: a model that predicts ImageNet's labels (image n has class n % 4).
    answers = nn.functional.one_hot(torch.arange(1, 9) % 4, 4).double()
    scores = evaluate(nn.Identity(), [(answers, label_sets(lists, 4))], truth="set")
    assert (scores.num_samples, scores.accuracy) == (6, 5 / 6)


def v2(root: Path) -> Path:
    return folders(root, {str(k): [f"{k}_b.jpeg", f"{k}_a.jpeg"] for k in range(1000)})


def test_v2_counts_in_numbers(tmp_path: Path) -> None:
    samples = imagenet_v2(v2(tmp_path), num_images=2000)
    assert [label for _, label in samples] == [k for k in range(1000) for _ in "ab"]
    assert all(path.parent.name == str(label) for path, label in samples)
    assert [path.name for path, _ in samples[:2]] == ["0_a.jpeg", "0_b.jpeg"]


def test_v2_of_some_synsets_is_in_the_folders_of_their_positions_in_imagenet(
    tmp_path: Path,
) -> None:
    # Shark, tench and toilet tissue: see the known positions above.
    synsets = ["n01484850", "n01440764", "n15075141"]
    samples = imagenet_v2(v2(tmp_path), synsets, num_images=6)
    assert [(path.name, label) for path, label in samples] == [
        ("2_a.jpeg", 0),
        ("2_b.jpeg", 0),
        ("0_a.jpeg", 1),
        ("0_b.jpeg", 1),
        ("999_a.jpeg", 2),
        ("999_b.jpeg", 2),
    ]


def test_r_of_some_synsets_has_labels_of_the_model_and_its_own_classes(tmp_path: Path) -> None:
    renditions = {synset: ["toy_0.jpg", "art_9.jpg"] for synset in imagenet_r_synsets()}
    folders(tmp_path, renditions)
    # Tench is not one of ImageNet-R's synsets.
    model = ["n02099601", "n01440764", "n01443537"]
    samples, classes = imagenet_r(tmp_path, model, num_images=4)
    assert [(p.parent.name, p.name, k) for p, k in samples] == [
        ("n02099601", "art_9.jpg", 0),
        ("n02099601", "toy_0.jpg", 0),
        ("n01443537", "art_9.jpg", 2),
        ("n01443537", "toy_0.jpg", 2),
    ]
    assert classes == [0, 2]
    logits = torch.tensor([[1.0, 9.0, 0.0]] * 2 + [[0.0, 9.0, 1.0]] * 2)
    labels = torch.tensor([label for _, label in samples])
    assert evaluate(nn.Identity(), [(logits, labels)], classes=classes).accuracy == 1.0
    assert evaluate(nn.Identity(), [(logits, labels)]).accuracy == 0.0


def test_r_requires_one_of_its_synsets(tmp_path: Path) -> None:
    message = (
        r"synsets must include some of imagenet_r_synsets\(\), got n01440764. Leave ImageNet-R"
    )
    with pytest.raises(ValueError, match=message):
        imagenet_r(tmp_path, ["n01440764"])


def test_the_whole_of_r(tmp_path: Path) -> None:
    folders(tmp_path, {synset: ["0.jpg"] for synset in imagenet_r_synsets()})
    samples, classes = imagenet_r(tmp_path, num_images=200)
    assert [imagenet_synsets()[k] for k in classes] == sorted(imagenet_r_synsets())
    assert [label for _, label in samples] == classes


def test_c(tmp_path: Path) -> None:
    val(tmp_path / "fog" / "5")
    samples = imagenet_c(tmp_path, "fog", 5, SYNSETS, num_images=8)
    assert {path.parent.parent for path, _ in samples} == {tmp_path / "fog" / "5"}
    for severity, corruption in ((2, "fog"), (1, "snow")):
        with pytest.raises(
            ValueError, match=r"root must be the folder of the test set, got .*, which"
        ):
            imagenet_c(tmp_path, corruption, severity, SYNSETS)
    assert len(set(IMAGENET_C)) == 15


def test_c_lists_the_known_and_the_closest() -> None:
    message = (
        r"corruption must be one of gaussian_noise, .*, jpeg_compression, got 'elastic'\. "
        r"The closest is 'elastic_transform'\."
    )
    with pytest.raises(ValueError, match=message):
        imagenet_c("anywhere", "elastic", 1)


@pytest.mark.parametrize("severity", [0, 6, True, "1"])
def test_c_has_five_severities(severity: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"severity must be .*, got {severity!r}. "):
        imagenet_c("anywhere", "fog", severity)


def test_no_folder(tmp_path: Path) -> None:
    missing = tmp_path / "imagenet"
    message = (
        f"root must be the folder of the test set, got {missing}, which is not a folder. Pass the"
    )
    for list_images in (imagenet_v2, imagenet_r):
        with pytest.raises(ValueError, match=message):
            list_images(missing)


def test_folders_of_other_synsets_are_left_out(tmp_path: Path) -> None:
    """The published test sets have folders for all classes."""
    val(tmp_path / "fog" / "1")
    some = [SYNSETS[2], SYNSETS[0]]
    samples = imagenet_c(tmp_path, "fog", 1, some, num_images=4)
    assert [(path.parent.name, label) for path, label in samples] == [
        *[(SYNSETS[2], 0)] * 2,
        *[(SYNSETS[0], 1)] * 2,
    ]


def test_missing_folders(tmp_path: Path) -> None:
    root = folders(tmp_path / "fog" / "1", {SYNSETS[0]: ["1.JPEG"], SYNSETS[1]: ["2.JPEG"]})
    with pytest.raises(
        ValueError,
        match=r"root must hold the 4 folders n01440764, n01443537, n01484850, ... \(4\), got "
        f"{root} without n01484850, n01491361. Pass the folder that holds",
    ):
        imagenet_c(tmp_path, "fog", 1, SYNSETS)
    with pytest.raises(ValueError, match=r"folders 0, 2, got .* without 0, 2\. Pass"):
        imagenet_v2(tmp_path, [SYNSETS[0], SYNSETS[2]])
    with pytest.raises(ValueError, match=r"without .*, \.\.\. \(198\)\. Pass"):
        imagenet_r(folders(tmp_path / "r", {s: [] for s in imagenet_r_synsets()[:2]}))


def test_synsets_that_are_not_imagenets(tmp_path: Path) -> None:
    message = (
        r"synsets must be among imagenet_synsets\(\), got n00005787. ImageNet's test sets have"
    )
    for list_images in (imagenet_v2, imagenet_r):
        with pytest.raises(ValueError, match=message):
            list_images(tmp_path, ["n01440764", "n00005787"])


def test_a_wrong_number_of_images(tmp_path: Path) -> None:
    root = val(tmp_path / "fog" / "1")
    message = (
        f"root must hold 9 images, got 8 in {root}. Unpack the test set again, or pass "
        "num_images=None for a subset of it."
    )
    with pytest.raises(ValueError, match=message):
        imagenet_c(tmp_path, "fog", 1, SYNSETS, num_images=9)
    assert len(imagenet_c(tmp_path, "fog", 1, SYNSETS, num_images=None)) == 8


def test_a_class_without_images(tmp_path: Path) -> None:
    folders(tmp_path, {"0": ["a.jpeg"], "1": []})
    with pytest.raises(ValueError, match="root must hold images of each class, got none in 1 of"):
        imagenet_v2(tmp_path, SYNSETS[:2], num_images=None)


@pytest.mark.usefixtures("four_synsets")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0]", r"labels must be a JSON file, got .*real.json \(.*\). Pass the path of real.json"),
        ("[[0], [4]]", r"labels must be a list of lists of classes below 4, got \[4\] in .*real."),
        ("[0, 1]", "labels must be a list of lists of classes below 4, got 0 in .*real.json. Pass"),
        ('{"0": [0]}', r"labels must be a list of lists of classes below 4, got \{'0': \[0\]\} in"),
        ("3", "labels must be a list of lists of classes below 4, got 3 in .*real.json. Pass the"),
        ("[[0], []]", "labels must have a list for each of the 8 images, got 2 in .*real.json. "),
        (None, r"labels must be a JSON file, got .*real.json \(.*No such file.*\). Pass the path"),
    ],
)
def test_wrong_labels_of_real(text: str | None, message: str, tmp_path: Path) -> None:
    val(tmp_path / "val")
    if text is not None:
        (tmp_path / "real.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        imagenet_real(tmp_path / "val", tmp_path / "real.json")


@pytest.mark.usefixtures("four_synsets")
def test_real_needs_names_that_differ(tmp_path: Path) -> None:
    folders(tmp_path, {synset: ["1.JPEG"] for synset in SYNSETS})
    (tmp_path / "real.json").write_text("[[0], [1], [2], [3]]")
    with pytest.raises(ValueError, match=r"root must hold images of different names, got 1\.JPEG "):
        imagenet_real(tmp_path, tmp_path / "real.json")


def test_import_is_light() -> None:
    code = "import sys, surrogap; print('surrogap.evaluation' in sys.modules); "
    code += "import surrogap.evaluation; print({'torchvision', 'PIL'} & set(sys.modules))"
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert out.split("\n")[:2] == ["False", "set()"]
