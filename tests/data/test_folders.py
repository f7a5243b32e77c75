"""Sets in folders."""

from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder

from surrogap.data import FileSet, load
from tests.data.synthetic import folder, save_image


@pytest.mark.parametrize("other", ["val", "test"])
def test_a_folder_with_train_and_another(tmp_path: Path, other: str) -> None:
    splits = load(str(folder(tmp_path, ("train", other))))
    assert splits.classes == ("ant", "bee")
    assert isinstance(splits.test, FileSet)
    assert splits.test.paths[0] == str(tmp_path / other / "ant" / "0.png")
    assert list(splits.train.labels) == [0] * 5 + [1] * 5
    assert splits.val is None
    assert splits.mean == (0.485, 0.456, 0.406)


def test_a_folder_with_all_three(tmp_path: Path) -> None:
    splits = load(folder(tmp_path, ("train", "val", "test")))
    assert isinstance(splits.val, FileSet)
    assert isinstance(splits.test, FileSet)
    assert "/val/" in splits.val.paths[0]
    assert "/test/" in splits.test.paths[0]


def test_folders_that_are_not_sets(tmp_path: Path) -> None:
    message = "path must be a folder with train and val or test in it, got .*, which has "
    with pytest.raises(ValueError, match=message + "none of them. A dataset is a folder with"):
        load(tmp_path)
    folder(tmp_path, ("train",))
    with pytest.raises(ValueError, match=message + "train. A dataset is"):
        load(tmp_path)


def test_a_class_without_images(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "val" / "cat").mkdir()
    message = "path must have images of each class, got .*val with no images in cat"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_links_to_elsewhere_are_followed(tmp_path: Path) -> None:
    expected = load(folder(tmp_path / "own"))
    (tmp_path / "linked").mkdir()
    for part in ("train", "val"):
        (tmp_path / "linked" / part).mkdir()
        for name in ("ant", "bee"):
            link = tmp_path / "linked" / part / name
            link.symlink_to(tmp_path / "own" / part / name)
    found = load(tmp_path / "linked")
    assert (len(found.train), found.classes) == (len(expected.train), expected.classes)


def test_images_are_in_the_order_of_torchvision(tmp_path: Path) -> None:
    folder(tmp_path)
    for name in ("a/1.png", "a-b/0.PNG", "Z/2.jpg", "notes.txt"):
        path = tmp_path / "train" / "bee" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    train = load(tmp_path).train
    assert isinstance(train, FileSet)
    assert (
        list(zip(train.paths, train.labels, strict=True))
        == ImageFolder(str(tmp_path / "train")).imgs
    )


def test_other_classes_to_test_on(tmp_path: Path) -> None:
    save_image(folder(tmp_path) / "val" / "cat" / "0.png")
    message = "path must have the same classes in train and val, got .*, where only one has cat"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
