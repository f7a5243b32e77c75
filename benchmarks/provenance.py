"""The provenance of a record, and its JSON file: the same for all benchmarks."""

import argparse
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import surrogap


def provenance(args: argparse.Namespace, device: str, peers: Sequence[str] = ()) -> dict[str, Any]:
    """The start of a record: date, arguments other than paths, hardware and versions.

    Args:
        args: The command line.
        device: "cuda" or "cpu".
        peers: Other packages whose versions to record.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "hardware": hardware(device),
        "versions": versions(peers),
    }


def hardware(device: str) -> dict[str, Any]:
    """The hardware; the CPU also for a GPU, since eager steps of small models wait for the CPU."""
    cpuinfo = Path("/proc/cpuinfo")  # platform.processor() is empty on many Linux systems
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = {"cpu": (models or [platform.processor()])[0]}
    if device == "cuda":
        return {"gpu": torch.cuda.get_device_name()} | processor
    return processor | {"num_threads": torch.get_num_threads()}


def versions(peers: Sequence[str] = ()) -> dict[str, str | None]:
    python, cuda = platform.python_version(), torch.version.cuda
    found = {name: _version(name) for name in ("torch", "torchvision", "timm", *peers)}
    return {"surrogap": surrogap.__version__, "python": python, "cuda": cuda, **found}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # on the path, but not installed
        return "unknown"


def write(record: Mapping[str, Any], path: Path | None) -> None:
    """Write a record as JSON, unless `path` is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, default=str) + "\n")
