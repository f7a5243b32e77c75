"""The folder of a run.

`config.json` is the configuration, `versions.json` has the versions of packages and the machine,
`records.jsonl` the records, `checkpoints/` the checkpoints, and `tensorboard/` the records for
TensorBoard.
"""

import json
from pathlib import Path

from surrogap.atomic import atomic_write
from surrogap.errors import InvalidValueError
from surrogap.training.config import CONFIG, FREE, Config
from surrogap.training.processes import World
from surrogap.training.versions import device_name, versions

VERSIONS = "versions.json"
RECORDS = "records.jsonl"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"


def read_config(folder: Path) -> Config:
    """Read the configuration of the run in a folder.

    Raises:
        ValueError: The folder is not that of a run.
    """
    try:
        values = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        remedy = f"Restore {CONFIG} from a copy" if _is_used(folder) else "Pass a run's folder"
        raise InvalidValueError(
            f"run must be a folder with a readable {CONFIG}, got {folder}. {remedy}."
        ) from error
    try:
        return Config.from_dict(values)
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"{folder / CONFIG} is not a configuration of this version of surrogap: {error}"
        ) from error


def _is_used(folder: Path) -> bool:
    return any((folder / name).exists() for name in (CONFIG, RECORDS, CHECKPOINTS))


def check_folder(config: Config, *, resume: bool) -> None:
    """Check that a run may use its folder, without changing anything.

    Raises:
        ValueError: The folder has another run, or this run and `resume` is False, or other files.
    """
    folder = config.folder
    if _is_used(folder):
        _check_run(config, resume)
    elif folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise InvalidValueError(
            f"out must be a new or empty folder, or that of a run, got {folder}, which has other "
            "files. Pass another one."
        )


def _check_run(config: Config, resume: bool) -> None:
    folder, own = config.folder, read_config(config.folder).flat()
    different = {k: v for k, v in config.flat().items() if own.get(k) != v and k not in FREE}
    if different:
        name, value = next(iter(different.items()))
        raise InvalidValueError(
            f"out must be a folder of this configuration, got {folder}, whose run has "
            f"{name}={own[name]!r} and not {value!r}. Pass another --out, or the same {name}."
        )
    if not resume:
        raise InvalidValueError(
            f"out must be a new folder, got {folder}, which already has this run. "
            "Pass --resume to continue it, or another --out."
        )


def prepare_folder(config: Config, world: World) -> None:
    """Create the folder of a run, with its configuration and the versions of packages.

    Raises:
        ValueError: The folder cannot be written.
    """
    folder = config.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in ((CONFIG, config.to_json()), (VERSIONS, _versions(world))):
            if not (folder / name).exists():
                with atomic_write(folder / name) as temporary:
                    temporary.write_text(text)
    except OSError as error:
        raise InvalidValueError(
            f"out must be a writable folder, got {folder} ({error.strerror}). Pass another one."
        ) from error


def _versions(world: World) -> str:
    found = {**versions(), "device": device_name(world.device), "processes": world.size}
    return json.dumps(found, indent=2) + "\n"
