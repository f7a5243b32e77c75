"""`surrogap export`: export the weights of a run for timm.

surrogap export runs/a
python -c "import timm; timm.create_model('local-dir:runs/a/export', pretrained=True)"
"""

from collections.abc import Sequence
from dataclasses import dataclass

from surrogap.cli.options import RunFolder, options
from surrogap.training.flags import OptionalPath


@dataclass(frozen=True)
class Export:
    """Export the weights of a run for timm.

    Writes the weights as model.safetensors, and config.json, from which timm builds the model:
    timm.create_model("local-dir:FOLDER", pretrained=True).
    """

    run: RunFolder
    """The folder of the run."""

    out: OptionalPath = None
    """The folder for the weights, which must not exist. By default export, in the folder of the
    run."""


def main(arguments: Sequence[str]) -> int:
    """Export a run, and return the exit status.

    Raises:
        ValueError: The run has no checkpoint, or the folder exists or is not writable.
    """
    chosen = options(Export, "export", arguments)
    folder = chosen.out or chosen.run / "export"
    from surrogap.experiments.exports import WEIGHTS, export_run
    from surrogap.experiments.trained import TrainedRun

    architecture = export_run(TrainedRun.read(chosen.run), folder)
    print(f"{folder / WEIGHTS}\n")
    if architecture.name is not None:
        print("To load it with timm, without surrogap:\n\n  import timm")
        print(f'  model = timm.create_model("local-dir:{folder}", pretrained=True)')
        return 0
    print("timm does not have this model. To build it and load the weights:\n")
    print(*(f"  {line}" for line in architecture.code.splitlines()), sep="\n")
    print(f'  model.load_state_dict(safetensors.torch.load_file("{folder / WEIGHTS}"))')
    return 0
