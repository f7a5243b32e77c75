"""`surrogap export`: write a run's weights for timm.

surrogap export runs/a
python -c "import timm; timm.create_model('local-dir:runs/a/export', pretrained=True)"
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from surrogap.atomic import atomic_write
from surrogap.cli.options import options
from surrogap.errors import InvalidValueError
from surrogap.training.flags import OptionalPath

if TYPE_CHECKING:
    from torch import Tensor

    from surrogap.experiments.exports import Architecture

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Export:
    """Write a run's weights for timm.

    The folder that it writes holds the weights, and what timm needs to know to build the network:
    timm.create_model("local-dir:FOLDER", pretrained=True) returns it.
    """

    run: Positional[Path]
    """The run's folder."""

    out: OptionalPath = None
    """The folder to write, which must not be there yet. By default export, in the run's."""


def main(arguments: Sequence[str]) -> int:
    """Exports a run, and returns the exit status.

    Raises:
        ValueError: There is no such run, it has no checkpoint, or the folder is there already.
    """
    chosen = options(Export, "export", arguments)
    folder = chosen.run / "export" if chosen.out is None else chosen.out
    if folder.exists():
        raise InvalidValueError(
            f"out must be a new folder, got {folder}, which is there already. "
            "Pass another --out, or delete it."
        )
    from surrogap.experiments.exports import architecture_of
    from surrogap.experiments.runs import Run
    from surrogap.training.model import image_sides, image_size

    run = Run.read(chosen.run)
    splits = run.splits()
    model = run.network(splits)
    size = image_size(run.config.model, splits)
    architecture = architecture_of(run.config.model.name, model, splits, size)
    config = {
        **architecture.config(splits, image_sides(run.config.model, splits)),
        "surrogap": {"run": run.config.to_dict(), "classes": splits.classes},
    }
    _write(folder, model.state_dict(), config)
    print(f"{folder / WEIGHTS}\n\n{_told(architecture, folder)}")
    return 0


def _write(folder: Path, weights: "dict[str, Tensor]", config: dict[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Weights that a network shares between layers are one tensor, which safetensors refuses.
    apart = {name: weight.contiguous().clone() for name, weight in weights.items()}
    try:
        with atomic_write(folder) as temporary:
            temporary.mkdir(parents=True, exist_ok=True)
            (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            save_file(apart, temporary / WEIGHTS, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidValueError(
            f"out must be a folder that can be written, got {folder} ({reason}). Pass another one."
        ) from error


def _told(architecture: "Architecture", folder: Path) -> str:
    if architecture.name is not None:
        return (
            "To load it with timm alone:\n\n  import timm\n"
            f'  model = timm.create_model("local-dir:{folder}", pretrained=True)'
        )
    lines = "\n".join(f"  {line}" for line in architecture.code.splitlines())
    return (
        "timm has no network like this by name. To build it, and load the weights:\n\n"
        f'{lines}\n  model.load_state_dict(safetensors.torch.load_file("{folder / WEIGHTS}"))'
    )
