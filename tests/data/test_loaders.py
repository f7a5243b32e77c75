"""Loaders: order, distribution over processes, augmentation and resuming."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.v2 import functional as transforms

from surrogap.data import (
    AUGMENTATIONS,
    Augmentation,
    FileLoader,
    Loader,
    Splits,
    TensorLoader,
    load,
    loader,
    loaders,
)
from surrogap.data.augmentation import transform_of_files
from surrogap.data.files import Reader, Request, Unreadable, collated
from surrogap.data.seeds import derived
from tests.data.synthetic import files, folder, tensors

Batch = tuple[Tensor, Tensor]
# Files are read without workers, except where workers are tested.
SMALL: dict[str, Any] = {"size": 16, "num_workers": 0}


@pytest.fixture(params=["tensors", "files"])
def splits(request: pytest.FixtureRequest, tmp_path: Path) -> Splits:
    return tensors(10) if request.param == "tensors" else files(tmp_path)


def make(splits: Splits, **changes: Any) -> Loader:
    settings = {"batch_size": 3, "augmentation": "strong", "seed": 1, **SMALL, **changes}
    return loader(splits, **settings)


def same(one: Iterable[Batch], other: Iterable[Batch]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def numbers(batch: Batch, splits: Splits) -> list[int]:
    """Return the numbers of the images of `tensors` in a batch without augmentation."""
    corner = batch[0][:, 0, 0, 0] * splits.std[0] + splits.mean[0]
    return (corner * 255).round().int().tolist()


def test_the_kind_follows_the_set(splits: Splits) -> None:
    kinds = {"synthetic": TensorLoader}
    assert type(make(splits)) is kinds.get(splits.name, FileLoader)
    assert repr(make(splits)).endswith("Loader(3 batches of 3, epoch 0, position 0)")


def test_resuming_anywhere_gives_the_remaining_batches(splits: Splits) -> None:
    run = make(splits)
    batches, states = [], [run.state_dict()]
    for _ in range(2):
        for batch in run:
            batches.append(batch)
            states.append(run.state_dict())
    assert len(batches) == 6
    for done, state in enumerate(states):
        resumed = make(splits)
        resumed.load_state_dict(state)
        assert (resumed.epoch, resumed.position) == divmod(done, 3)
        rest = [batch for _ in range(resumed.epoch, 2) for batch in resumed]
        assert same(rest, batches[done:])


def test_epochs_and_seeds_differ_and_repeat(splits: Splits) -> None:
    run = make(splits)
    first, second = list(run), list(run)
    assert not same(first, second)
    assert not same(first, make(splits, seed=2))
    assert same(first, make(splits))
    assert (run.epoch, run.position) == (2, 0)


def test_the_global_generator_is_neither_read_nor_moved(splits: Splits) -> None:
    first = list(make(splits))
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert same(first, make(splits))
    assert torch.equal(before, torch.get_rng_state())


def test_an_abandoned_epoch_is_over(splits: Splits) -> None:
    whole = make(splits)
    epochs = [list(whole), list(whole)]
    run = make(splits)
    assert same([next(iter(run))], epochs[0][:1])
    assert same(run, epochs[1])


def test_an_epoch_has_each_image_once() -> None:
    splits = tensors(10)
    train = make(splits, augmentation="none")
    assert len(train) == 3
    assert len({number for batch in train for number in numbers(batch, splits)}) == 9
    test = make(splits, split="test", augmentation="none")
    assert [numbers(batch, splits) for batch in test] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    kept = make(splits, augmentation="none", drop_last=False)
    assert sorted(n for batch in kept for n in numbers(batch, splits)) == list(range(10))
    in_order = make(splits, augmentation="none", shuffle=False)
    assert numbers(next(iter(in_order)), splits) == [0, 1, 2]


def test_processes_share_a_step(splits: Splits) -> None:
    one = make(splits, batch_size=4, augmentation="none")
    shares = [make(splits, batch_size=2, augmentation="none", rank=r, world_size=2) for r in (0, 1)]
    together = [
        tuple(torch.cat(tensors) for tensors in zip(*batches, strict=True))
        for batches in zip(*shares, strict=True)
    ]
    assert same(one, together)


def test_processes_augment_differently() -> None:
    # All images are equal, so that batches differ by augmentation only.
    splits = tensors(8)
    splits.train.images[:] = splits.train.images[:1].clone()
    shares = [make(splits, batch_size=4, rank=r, world_size=2) for r in (0, 1)]
    (one, _), (other, _) = (next(iter(share)) for share in shares)
    assert not torch.equal(one, other)


def test_another_number_of_processes_sees_the_same_images() -> None:
    splits = tensors(12)
    run = make(splits, batch_size=4, augmentation="none")
    batches = iter(run)
    next(batches)
    state = run.state_dict()
    for rank in (0, 1):
        half = make(splits, batch_size=2, augmentation="none", rank=rank, world_size=2)
        half.load_state_dict(state)
        expected = [
            numbers(b, splits)[2 * rank : 2 * rank + 2] for b in list(make_rest(run, state))
        ]
        assert [numbers(b, splits) for b in half] == expected


def make_rest(run: Loader, state: dict[str, int]) -> Loader:
    run.load_state_dict(state)
    return run


def test_images_are_normalised() -> None:
    splits = tensors(10)
    everything = make(splits, split="test", augmentation="none", batch_size=10, size=None)
    images, labels = next(iter(everything))
    # Over all training images, each channel has mean 0 and standard deviation 1.
    assert torch.allclose(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(images.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)
    assert images.dtype == torch.float32
    assert torch.equal(labels, splits.train.labels)
    mean, std = (torch.tensor(values)[:, None, None] for values in (splits.mean, splits.std))
    assert torch.allclose(images, (splits.train.images / 255 - mean) / std, atol=1e-5)


@pytest.mark.parametrize("name", ["none", "light", "medium"])
def test_the_rule_for_targets(splits: Splits, name: str) -> None:
    run = make(splits, augmentation=name)
    for images, targets in run:
        if name == "medium":
            assert targets.shape == (3, len(splits.classes))
            assert targets.dtype == torch.float32
        else:
            assert targets.shape == (3,)
            assert targets.dtype == torch.int64
        # The loss takes both kinds of targets.
        assert functional.cross_entropy(images.new_zeros(3, len(splits.classes)), targets) > 0
    assert run.soft_targets == (name == "medium")


def test_size_resizes() -> None:
    splits = tensors(4)
    images, _ = next(iter(make(splits, split="test", augmentation="none", batch_size=4, size=20)))
    expected = transforms.resize(splits.train.images, [20, 20])
    mean, std = (torch.tensor(values)[:, None, None] for values in (splits.mean, splits.std))
    assert torch.allclose(images, (expected / 255 - mean) / std, atol=1e-5)


def test_batches_are_equal_on_all_devices(device: torch.device) -> None:
    # Without RandAugment, which rounds differently on other devices.
    augmentation = Augmentation(crop=True, flip=True, mixup=0.5)
    on_device = make(tensors(10), augmentation=augmentation, device=device)
    on_cpu, std = make(tensors(10), augmentation=augmentation), tensors(10).std
    for (images, targets), (expected, wanted) in zip(on_device, on_cpu, strict=True):
        assert images.device.type == targets.device.type == device.type
        # Resizing differs by one of 255 levels.
        torch.testing.assert_close(images.cpu(), expected, rtol=0, atol=1.01 / 255 / min(std))
        torch.testing.assert_close(targets.cpu(), wanted)


def test_files_are_on_the_device(device: torch.device, tmp_path: Path) -> None:
    images, targets = next(iter(make(files(tmp_path), device=device)))
    assert images.shape == (3, 3, 16, 16)
    assert images.device.type == targets.device.type == device.type


def test_each_file_is_transformed_with_a_seed_of_its_own(tmp_path: Path) -> None:
    splits = files(tmp_path)
    run = make(splits, augmentation=Augmentation(crop=True, flip=True, magnitude=15), seed=3)
    transform = transform_of_files(run.augmentation, 16)
    mean, std = (torch.tensor(values)[:, None, None] for values in (splits.mean, splits.std))
    order = run.order.images(0).tolist()
    for position, (images, targets) in enumerate(run):
        for i, (image, target) in enumerate(zip(images, targets, strict=True)):
            place = 3 * position + i
            torch.manual_seed(derived("image", 3, 0, place))
            with Image.open(splits.train.paths[order[place]]) as picture:
                expected = transforms.pil_to_tensor(transform(picture)) / 255
            assert torch.allclose(image, (expected - mean) / std, atol=1e-5)
            assert target == splits.train.labels[order[place]]


def test_another_default_dtype_changes_nothing(splits: Splits) -> None:
    # Except torchvision's: its transforms of files and RandAugment use the default dtype.
    is_ours = isinstance(make(splits), TensorLoader)
    augmentation = Augmentation(crop=is_ours, flip=is_ours, mixup=0.5)
    batches = list(make(splits, augmentation=augmentation))
    torch.set_default_dtype(torch.float64)
    assert same(batches, make(splits, augmentation=augmentation))


def test_what_goes_to_workers_can_be_pickled() -> None:
    # The start method "spawn" pickles it.
    reader = pickle.loads(pickle.dumps(Reader(transform_of_files(AUGMENTATIONS["strong"], 16))))
    assert len(reader.transform.transforms) == 3
    assert pickle.loads(pickle.dumps(collated)) is collated


def test_as_many_workers_as_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("surrogap.data.loaders.DataLoader", lambda *_, **to: asked.append(to))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)), raising=False)
    make(files(tmp_path), num_workers=None)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    make(files(tmp_path), num_workers=None)
    assert [to["num_workers"] for to in asked] == [5, 8]


# DataLoader warns of two workers on one CPU, and Python 3.12 of a fork with threads.
with_workers = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:.*multi-threaded, use of fork:DeprecationWarning"
)


@with_workers
def test_workers_change_nothing(tmp_path: Path) -> None:
    splits = files(tmp_path)
    alone, helped = make(splits), make(splits, num_workers=2)
    before = torch.get_rng_state()
    assert same(alone, helped)
    # Batches that workers have prefetched of an abandoned epoch are discarded.
    next(iter(alone))
    next(iter(helped))
    assert same(alone, helped)
    # A resumed loader starts at the position of its batches, not of its workers.
    batches = iter(helped)
    next(batches)
    state = helped.state_dict()
    assert state["position"] == 1
    alone.load_state_dict(state)
    assert same(alone, batches)
    assert torch.equal(before, torch.get_rng_state())


@with_workers
@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="macOS cannot wait for a signal")
def test_a_signal_does_not_end_a_worker_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = loaders.obey_parent_only

    def signalled(worker: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        start(worker)

    monkeypatch.setattr(loaders, "obey_parent_only", signalled)
    assert len(list(make(files(tmp_path), num_workers=1))) == len(make(files(tmp_path)))


# The resource tracker of multiprocessing would unblock signals if it started with the worker.
_FORK_SERVER = """
import multiprocessing, sys
from surrogap.data import load, loader

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    lock = multiprocessing.Lock()  # starts the resource tracker
    train = loader(load(sys.argv[1]), batch_size=4, size=16, num_workers=1)
    next(iter(train))
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(60)
    print("alive" if worker.is_alive() else "ended")
    worker.kill()
"""


def test_a_worker_of_a_fork_server_obeys_its_parent(tmp_path: Path) -> None:
    folder(tmp_path / "images")
    script = tmp_path / "script.py"
    script.write_text(_FORK_SERVER)
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "images")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.stdout == "ended\n", result.stderr


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_that_is_not_an_image(tmp_path: Path, num_workers: int) -> None:
    bad = folder(tmp_path) / "train" / "bee" / "3.png"
    bad.write_bytes(bad.read_bytes()[:200])
    message = rf"^image files must be intact, got {bad} \(.*\). Replace or delete it"
    with pytest.raises(ValueError, match=message):
        list(make(load(tmp_path), batch_size=10, num_workers=num_workers))


def test_files_of_all_modes_become_rgb(tmp_path: Path) -> None:
    root = folder(tmp_path)
    for i, mode in enumerate(("L", "RGBA", "CMYK", "1")):
        suffix = "jpg" if mode == "CMYK" else "png"
        Image.new(mode, (30, 30)).save(root / "train" / "ant" / f"{mode}{i}.{suffix}")
    images, _ = next(iter(make(load(root), batch_size=14)))
    assert images.shape == (14, 3, 16, 16)


def test_sixteen_bits_keep_their_shades(tmp_path: Path) -> None:
    """Pillow would clip all values above 255 to white."""
    ramp = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    read = Reader(lambda image: image)[Request(str(tmp_path / "a.png"), label=0, seed=0)]
    assert isinstance(read, tuple)
    assert read[0].flatten(1).tolist() == 3 * [list(range(256))]


def test_pixels_of_unknown_range(tmp_path: Path) -> None:
    Image.new("F", (4, 4), 0.5).save(tmp_path / "a.tif")
    read = Reader(lambda image: image)[Request(str(tmp_path / "a.tif"), label=0, seed=0)]
    reason = "its pixels must have 8 or 16 bits, got Pillow's mode F"
    assert read == Unreadable(str(tmp_path / "a.tif"), reason)


def state(**changes: Any) -> dict[str, Any]:
    return {**make(tensors(10)).state_dict(), **changes}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "state must have seed=1, as this loader does, got None. Resume with"),
        (state(seed=2), "state must have seed=1, as this loader does, got 2"),
        (state(num_images=11), "state must have num_images=10, as .*, got 11"),
        (state(images_per_step=4), "state must have images_per_step=3, as .*, got 4"),
    ],
)
def test_states_that_do_not_fit(state: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tensors(10)).load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"split": "val"}, ValueError, "split must be one of train, test, got 'val'"),
        ({"size": 0}, ValueError, "size must be at least 1, got 0. Pass a number of pixels"),
        ({"augmentation": "heavy"}, ValueError, "augmentation must be one of none, light"),
        ({"batch_size": 11}, ValueError, "batch_size must leave a full batch for each process"),
    ],
)
def test_bad_settings(
    splits: Splits, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(splits, **changes)


def test_bad_number_of_workers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_workers must be at least 0, got -1. Pass 0 to read"):
        make(files(tmp_path), num_workers=-1)
