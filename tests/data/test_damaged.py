"""Damaged image files are found before training, once, and listed or left out."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from surrogap.data import damaged, intact, load
from surrogap.data.damaged import damaged_files
from tests.data.synthetic import files, folder, pixels, tensors


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "surrogap" / "intact-images.npy"


def truncate(path: Path, length: int = -200) -> Path:
    path.write_bytes(path.read_bytes()[:length])
    return path


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp"])
def test_an_image_without_its_header(suffix: str, tmp_path: Path) -> None:
    good, bad, empty = (tmp_path / f"{name}.{suffix}" for name in ("good", "bad", "empty"))
    for path in (good, bad):
        Image.fromarray(pixels(40, 50, 3)).save(path)
    truncate(bad, 5)
    empty.touch()
    found = damaged_files([str(good), str(bad), str(empty)])
    assert found == {str(bad): "not an image", str(empty): "not an image"}


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_an_image_without_its_end(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"1.{suffix}"
    Image.fromarray(pixels(40, 50, 3)).save(path)
    path.write_bytes(path.read_bytes() + b"\0\0")  # some writers pad
    assert damaged_files([str(path)]) == {}
    truncate(path)
    assert "truncated" in damaged_files([str(path)])[str(path)]


def test_pixels_of_unknown_range(tmp_path: Path) -> None:
    path = tmp_path / "1.tiff"
    Image.fromarray(np.zeros((4, 4), np.float32)).save(path)
    assert damaged_files([str(path)]) == {
        str(path): "its pixels must have 8 or 16 bits, got Pillow's mode F"
    }


def test_the_error_lists_ten_files_and_counts_the_others(tmp_path: Path) -> None:
    root = folder(tmp_path / "set", per_class=6)
    bad = sorted((root / "train").rglob("*.png"))
    for path in bad[:11]:
        path.write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"^image files must be intact, got 11 damaged files in "
    ) as e:
        intact(load(root))
    message = str(e.value)
    assert [path for path in map(str, bad) if f"{path} (not an image)" in message] == [
        *map(str, bad[:10])
    ]
    assert message.endswith(
        " and 1 more. Replace or delete them, or pass --skip-damaged (skip_damaged=True) to leave "
        "them out."
    )


def test_damaged_files_can_be_left_out(tmp_path: Path) -> None:
    splits = files(tmp_path / "set")
    bad = truncate(Path(splits.train.paths[3]))
    with pytest.warns(
        UserWarning, match=rf"^Left out 1 damaged file in .*: {bad} \(.*truncated.*\)"
    ):
        kept = intact(splits, skip_damaged=True)
    assert [*kept.train.paths] == [p for p in splits.train.paths if p != str(bad)]
    assert [*kept.train.labels] == [0] * 4 + [1] * 5
    assert [*kept.test.paths] == [*splits.test.paths]


def test_only_the_given_splits_are_checked(tmp_path: Path) -> None:
    splits = files(tmp_path / "set")
    truncate(Path(splits.train.paths[0]))
    assert intact(splits, ["test"]) is splits


def test_a_split_without_intact_images_is_an_error(tmp_path: Path) -> None:
    splits = files(tmp_path / "set", per_class=1)
    for path in splits.test.paths:
        truncate(Path(path))
    with pytest.raises(ValueError, match="image files must be intact, got 2 damaged files in "):
        intact(splits, skip_damaged=True)


def test_sets_in_memory_are_returned_unchanged() -> None:
    splits = tensors(6)
    assert intact(splits) is splits


def test_files_are_checked_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = files(tmp_path / "set")
    changed, bad = (Path(splits.train.paths[i]) for i in (2, 7))
    truncate(bad)
    read: list[str] = []
    progress: list[tuple[int, int]] = []
    check = damaged._damage
    monkeypatch.setattr(damaged, "_damage", lambda path: read.append(path) or check(path))
    for expected in (
        [*splits.train.paths, *splits.test.paths],
        [str(bad)],  # always, since it may have been replaced
        [str(changed), str(bad)],
    ):
        read.clear()
        with pytest.raises(ValueError, match=re.escape(f"1 damaged file in {tmp_path}/set: {bad}")):
            intact(splits, on_checked=lambda *counts: progress.append(counts))
        assert sorted(read) == sorted(expected)
        if len(expected) == 1:
            os.utime(changed, (0, 0))
    assert progress == [(20, 20)] * 3
    assert len(np.load(cache)) == 20  # 18 in the first call, and the changed file once more


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x93NUMPY"])
def test_a_damaged_cache_is_ignored(content: bytes, tmp_path: Path, cache: Path) -> None:
    splits = files(tmp_path / "set")
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    assert intact(splits) is splits
    assert len(np.load(cache)) == 20


def test_no_cache_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    splits = files(tmp_path / "set")
    assert intact(splits) is splits
