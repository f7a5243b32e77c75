"""A check for damaged image files before training starts.

The check reads the header of each file, and its last bytes if the format has an end marker, which
a truncated download lacks. It decodes pixels only if the marker is missing. Files that pass are
cached by path, size and modification time in the user's cache folder, so the next run checks only
new and changed files.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from surrogap.atomic import atomic_write
from surrogap.data.files import check_mode, reason_of
from surrogap.data.splits import FileSet, Splits
from surrogap.errors import InvalidValueError

# Called with the number of files checked so far and the total.
OnChecked = Callable[[int, int], object]

_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
_NUM_THREADS = 16  # they wait for the disk or the network
_FILES_PER_TASK = 256
_MAX_LISTED = 10
_REMEDY = "Replace or delete them, or pass --skip-damaged (skip_damaged=True) to leave them out."


def intact(
    splits: Splits,
    names: Sequence[str] = ("train", "test", "val"),
    *,
    skip_damaged: bool = False,
    warn: bool = True,
    on_checked: OnChecked | None = None,
) -> Splits:
    """Return the splits without damaged image files. Datasets in memory are returned unchanged.

    Args:
        splits: The dataset.
        names: The splits to check.
        skip_damaged: Leave damaged files out instead of raising an error.
        warn: Warn about the files that are left out.
        on_checked: Called with the number of files checked so far and the total.

    Raises:
        ValueError: Files are damaged, and `skip_damaged` is False or no image of a split is left.
    """
    chosen = {name: split for name, split in splits.by_name.items() if name in names}
    files = {name: split for name, split in chosen.items() if isinstance(split, FileSet)}
    paths = [path for split in files.values() for path in split.paths]
    reasons = damaged_files(paths, on_checked) if paths else {}
    if not reasons:
        return splits
    kept = {
        name: [i for i, path in enumerate(split.paths) if path not in reasons]
        for name, split in files.items()
    }
    if not skip_damaged or not all(kept.values()):
        raise InvalidValueError(
            f"image files must be intact, got {_listed(splits.name, reasons)}. {_REMEDY}"
        )
    if warn:
        warnings.warn(f"Left out {_listed(splits.name, reasons)}.", stacklevel=2)
    changed: dict[str, Any] = {name: files[name][torch.tensor(kept[name])] for name in files}
    return replace(splits, **changed)


def damaged_files(paths: Sequence[str], on_checked: OnChecked | None = None) -> dict[str, str]:
    """Return the files that cannot be read as images, with the reason for each.

    >>> damaged_files(["missing.jpg"])
    {'missing.jpg': 'No such file or directory'}
    """
    cwd = os.getcwd()
    keys = np.array([_key(cwd, path) for path in paths], np.uint64)
    known = _read_cache()
    new = np.flatnonzero(~np.isin(keys, known)).tolist()
    reasons: dict[str, str] = {}
    tasks = [new[i : i + _FILES_PER_TASK] for i in range(0, len(new), _FILES_PER_TASK)]
    num_checked = len(paths) - len(new)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for found in threads.map(lambda task: [(paths[i], _damage(paths[i])) for i in task], tasks):
            reasons |= {path: reason for path, reason in found if reason is not None}
            num_checked += len(found)
            if on_checked is not None:
                on_checked(num_checked, len(paths))
    good = [keys[i] for i in new if paths[i] not in reasons]
    if good:
        _write_cache(np.union1d(known, np.array(good, np.uint64)))
    return reasons


def _damage(path: str) -> str | None:
    """Return why a file cannot be read as an image; None if it can."""
    try:
        with Image.open(path) as image:
            check_mode(image)
            if not _has_end(image):
                image.load()  # some writers add bytes after the end: decoding decides
    except Exception as error:  # Pillow's formats raise errors of many kinds
        return reason_of(error)
    return None


def _has_end(image: Image.Image) -> bool:
    end = _ENDS.get(image.format or "")
    file = getattr(image, "fp", None)
    if end is None or file is None:
        return True
    position = file.tell()
    file.seek(-len(end), os.SEEK_END)
    is_end: bool = file.read() == end
    file.seek(position)
    return is_end


def _listed(name: str, reasons: dict[str, str]) -> str:
    shown = [f"{path} ({reason})" for path, reason in list(reasons.items())[:_MAX_LISTED]]
    more = len(reasons) - len(shown)
    count = f"{len(reasons)} damaged file{'s' * (len(reasons) > 1)}"
    return f"{count} in {name}: {', '.join(shown)}{f' and {more} more' if more else ''}"


def _key(cwd: str, path: str) -> int:
    """Return a hash of a file's path, size and modification time."""
    try:
        found = os.stat(path)
    except OSError:
        return 0  # never in the cache, since the file is damaged
    text = f"{os.path.join(cwd, path)}\0{found.st_size}\0{found.st_mtime_ns}"
    return int.from_bytes(blake2b(os.fsencode(text), digest_size=8).digest(), "big")


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "surrogap" / "intact-images.npy"


def _read_cache() -> np.ndarray[Any, np.dtype[np.uint64]]:
    try:
        return np.asarray(np.load(_cache(), allow_pickle=False), np.uint64)
    except (OSError, ValueError, EOFError):  # missing or damaged: check all files
        return np.array([], np.uint64)


def _write_cache(keys: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
    # Without a writable home folder, the files are checked again next time.
    with contextlib.suppress(OSError):
        _cache().parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(_cache()) as temporary:
            np.save(temporary, keys)
