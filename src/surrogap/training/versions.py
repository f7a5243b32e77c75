"""Versions of packages, and the machine, for records of results."""

import platform
from importlib import metadata
from pathlib import Path

import torch

from surrogap import __version__


def versions() -> dict[str, str | None]:
    """Return the versions of Python and packages, and the machine; None for a missing package.

    >>> versions()["torch"] == torch.__version__
    True
    """
    packages = ("timm", "torchvision", "numpy")
    return {
        "surrogap": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in packages},
        "platform": platform.platform(),
        "processor": _processor(),
    }


def device_name(device: torch.device) -> str:
    """Return the name of a device, such as that of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    information = Path("/proc/cpuinfo")  # platform.processor() is mostly empty on Linux
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
