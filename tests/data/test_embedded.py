"""The embedded set, and the script that builds it."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from surrogap.data import TensorSet, load
from surrogap.data.embedded import PATH, embedded
from tests.data.synthetic import pixels

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "embedded_set.py")


def test_it_is_small_balanced_and_licensed() -> None:
    splits = load("embedded")
    assert PATH.stat().st_size < 3_000_000
    assert "Zalando" in PATH.with_name("fashion_mnist.LICENSE").read_text()
    for name, count in (("train", 500), ("test", 200)):
        split = splits.by_name[name]
        assert isinstance(split, TensorSet)
        assert split.labels.bincount().tolist() == [count] * 10
        assert split.images.shape == (10 * count, 1, 28, 28)
    # The published statistics of the whole training set are 0.2860 and 0.3530. The standard error
    # of a mean over 5,000 images is below 0.353 / sqrt(5000) = 0.005, its value for uniform images.
    assert abs(splits.mean[0] - 0.2860) < 0.01
    assert abs(splits.std[0] - 0.3530) < 0.01


def test_no_test_image_is_trained_on() -> None:
    splits = embedded()
    rows = [
        {row.tobytes() for row in split.images.numpy()}
        for split in (splits.train, splits.test)
        if isinstance(split, TensorSet)
    ]
    assert not rows[0] & rows[1]


def test_two_fifths_of_the_noisy_labels_are_wrong() -> None:
    train, again = embedded().train, embedded().train
    assert isinstance(train, TensorSet)
    assert isinstance(again, TensorSet)
    assert train.noisy_labels is not None
    assert train.noisy_labels.equal(again.noisy_labels)
    is_wrong = train.noisy_labels != train.labels
    # Four standard errors: sqrt(0.4 * 0.6 / 5000) = 0.007.
    assert abs(is_wrong.double().mean() - 0.4) < 0.028
    # Every wrong class is as likely as another: about 222 of 2,000.
    offsets = (train.noisy_labels - train.labels)[is_wrong] % 10
    counts = offsets.bincount(minlength=10)[1:]
    assert counts.sum() == is_wrong.sum()
    assert (counts - is_wrong.sum() / 9).abs().max() < 60


def whole_set(per_class: int) -> dict[str, np.ndarray]:
    labels = np.arange(10).repeat(per_class)
    np.random.default_rng(0).shuffle(labels)
    images = pixels(len(labels), 2, 2, 1)
    result = {f"{name}_images": images for name in ("train", "test")}
    result |= {f"{name}_labels": labels for name in ("train", "test")}
    return {**result, "classes": np.array(list("abcdefghij"))}


def test_the_script_takes_the_first_of_each_class_in_order() -> None:
    whole = whole_set(per_class=7)
    kept = runpy.run_path(SCRIPT)["first_of_each_class"](whole, {"train": 3, "test": 7})
    seen = dict.fromkeys(range(10), 0)
    expected = []
    for image, label in zip(whole["train_images"], whole["train_labels"], strict=True):
        seen[label] += 1
        if seen[label] <= 3:
            expected.append(image)
    assert np.array_equal(kept["train_images"], expected)
    assert np.array_equal(kept["test_images"], whole["test_images"])


def test_the_script_builds_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = str(tmp_path / "whole.npz"), str(tmp_path / "out.xz")
    np.savez(source, **whole_set(per_class=2))
    monkeypatch.setattr(sys, "argv", [SCRIPT, source, out])
    runpy.run_path(SCRIPT, run_name="__main__")
    assert repr(embedded(out)) == "Splits('embedded', 10 classes, train: 20, test: 20)"
    monkeypatch.setattr(sys, "argv", [SCRIPT])
    with pytest.raises(SystemExit, match=r"usage: python benchmarks/embedded_set.py FASHION"):
        runpy.run_path(SCRIPT, run_name="__main__")
