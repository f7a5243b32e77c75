"""The command line: flags, help, errors in one sentence, exit statuses."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from surrogap import cli
from surrogap.cli.commands import COMMANDS
from surrogap.cli.compare import Compare
from surrogap.experiments.columns import with_lr_of_gradient
from surrogap.experiments.recipes import RECIPES
from surrogap.models import names
from surrogap.training.config import Config
from surrogap.training.objective_configs import CONFIGS
from surrogap.training.records import read_records
from surrogap.training.signals import stop_requests
from tests.data.synthetic import folder as image_folder
from tests.training import small_runs


def flags(config: Config) -> list[str]:
    """Return the arguments of a small run."""
    names = ("model", "data", "augmentation", "batch_size", "epochs", "device", "out")
    words = [(f"--{name.replace('_', '-')}", str(config.flat()[name])) for name in names]
    return ["train", "--no-tensorboard", *(word for pair in words for word in pair)]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> Config:
    assert cli.main(["train", "--print-config", *arguments]) == 0
    return Config.from_dict(json.loads(capsys.readouterr().out))


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith("surrogap: ")
    assert output.err.count("\n") == 1
    return output.err


def test_print_config_shows_defaults_and_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shown(capsys) == Config()
    words = "--objective sam --rho 0.1 --lr 0.05 --epochs 20 --seed 3 --out runs/a --betas 0.8 0.9"
    assert shown(capsys, *words.split(), "--compile") == Config().override(
        objective="sam", rho=0.1, lr=0.05, epochs=20, seed=3, out="runs/a",
        betas=(0.8, 0.9), compile=True,
    )  # fmt: skip


def test_a_recipe_gives_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    name, recipe = next(iter(RECIPES.items()))
    assert shown(capsys, "--recipe", name) == recipe.config
    assert shown(capsys, f"--recipe={name}", "--seed", "7") == recipe.config.override(seed=7)


def test_another_objective_keeps_shared_settings(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = RECIPES["fashion-mnist-gsam"].config
    words = ("--recipe", "fashion-mnist-gsam", "--objective")
    assert shown(capsys, *words, "sam", "--every", "5") == recipe.override(objective="sam", every=5)
    assert shown(capsys, *words, "momentum-sam").flat()["rho"] == CONFIGS["momentum-sam"]().rho  # type: ignore[attr-defined]
    assert shown(capsys, "--objective=sam", "--perturb", "norms").flat()["perturb"] == "norms"


def test_the_learning_rate_of_a_recipe_is_meant_for_gradients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = RECIPES["fashion-mnist-gsam"].config.override(objective="entropy-sgd")
    words = ("--recipe", "fashion-mnist-gsam", "--objective", "entropy-sgd", "--gamma", "0.5")
    found = shown(capsys, *words)
    assert found == with_lr_of_gradient(recipe.override(gamma=0.5))
    assert found.optimizer.lr == pytest.approx(0.2)
    assert shown(capsys, *words, "--lr", "0.3").optimizer.lr == 0.3
    decayed = shown(capsys, *words, "--weight-decay", "0.01").optimizer
    assert (decayed.lr, decayed.weight_decay) == pytest.approx((0.2, 0.01))
    assert shown(capsys, "--objective", "entropy-sgd").optimizer.lr == Config().optimizer.lr


@pytest.mark.parametrize("objective", [None, *CONFIGS])
def test_every_field_has_a_flag_with_a_help_line(
    objective: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the fields of the chosen objective."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--help", *([] if objective is None else ["--objective", objective])])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    config = Config() if objective is None else Config().override(objective=objective)
    flags = {f"--{name.replace('_', '-')}" for name in config.flat()}
    flags |= {"--recipe", "--resume", "--print-config"}
    assert set(re.findall(r"^.{2}(--[a-z][a-z-]*)", text, re.MULTILINE)) == flags


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert cli.main([]) == 2
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("usage: surrogap COMMAND")


def test_every_command_has_a_module() -> None:
    folder = Path(cli.__file__).parent
    assert all((folder / f"{name.replace('-', '_')}.py").exists() for name in COMMANDS)


def test_help_does_not_import_torch() -> None:
    """Nor other large packages, so that help takes a tenth of a second."""
    for arguments in ("['--help']", "['train', '--print-config']"):
        code = f"import sys; from surrogap.cli import main; main({arguments}); print(*sys.modules)"
        output = subprocess.check_output([sys.executable, "-c", code], text=True)
        loaded = {name.split(".")[0] for name in output.splitlines()[-1].split()}
        assert not loaded & {"torch", "numpy", "timm", "torchvision", "matplotlib", "tensorboard"}


def test_a_run_and_its_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_runs.config(tmp_path)
    assert cli.main(flags(config)) == 0
    output = capsys.readouterr().out
    assert "12/12  epoch 3" in output
    folder = config.folder
    assert f"{folder}: finished, step 12 of 12. For its curves: surrogap show {folder}" in output
    assert "got" in mistake(capsys, *flags(config))
    assert cli.main(["train", "--resume", "--out", str(config.folder)]) == 0
    assert "finished, step 12 of 12" in capsys.readouterr().out


def test_resuming_needs_no_other_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_runs.config(tmp_path, seed=3)
    cli.main([*flags(config), "--seed", "3"])
    capsys.readouterr()
    assert shown(capsys, "--resume", "--out", str(config.folder)).execution.seed == 3
    text = mistake(capsys, "train", "--resume", "--out", str(config.folder), "--seed", "4")
    assert "out must be a folder of this configuration" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "trian",
            "command must be one of train, .*got 'trian'. The closest is 'train'. See surrog",
        ),
        ("train --recipe nonsense", "recipe must be one of .*, got 'nonsense'"),
        ("train --objective samm", "objective must be one of .*got 'samm'. The closest is 'sam'."),
        ("train --objective", "options of surrogap train must be valid, got: Missing value"),
        (
            "train --objective sam --alpha 0.4",
            "surrogap: alpha has no effect on sam. Leave it out, or choose an objective that uses",
        ),
        ("train --gamma=0.1", "surrogap: gamma has no effect on gsam. Leave it out, or choose"),
        (
            "train --recipe fashion-mnist-gsam --objective vanilla --no-rho-inverse-sqrt",
            "surrogap: rho_inverse_sqrt has no effect on vanilla. Leave it out, or choose",
        ),
        (
            "train --rhoo 3",
            "got: Unrecognized options: --rhoo, 3. The closest is --rho. See surrog",
        ),
        ("train --lr abc", "--lr: could not convert string to float: 'abc'"),
        (
            "train --lr -1",
            "surrogap: lr must be above 0 and finite, got -1.0. Pass a positive numb",
        ),
        ("train --lr", "options of surrogap train must be valid, got: Missing value for argument"),
        ("train --recipe", "options of surrogap train must be valid, got: Missing value"),
        (
            "train --rho-min 0.5",
            "surrogap: rho_min must not exceed rho, got rho_min=0.5 and rho=0.1. Pass",
        ),
        ("train --model resnet5 --out {tmp}/a", "name must be a known model, got 'resnet5'"),
        (
            "train --data {tmp}/no.npz --out {tmp}/a",
            "name_or_path must be one of .*, or the path of a dataset, got",
        ),
        ("train --data cifar10 --data-root {tmp} --out {tmp}/a", "must"),
        ("train --model small_mlp --out {tmp}/file/a", "out must be a writable folder, got"),
        ("train --capture --device cpu --out {tmp}/a", "capture must be used with one process"),
        ("train --resume --out {tmp}/typo", "out must be the folder of a run, got .*typo"),
        ("train --resume --out {tmp}/broken", "run must be a folder with a readable .*broken"),
        ("train --resume --out {tmp}/binary", "run must be a folder with a readable .*binary"),
    ],
)
def test_errors_are_one_sentence(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for name, content in (("broken", b"{half a"), ("binary", b"\xff\xfe{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(content)
    text = mistake(capsys, *arguments.format(tmp=tmp_path).split())
    assert re.search(message, text), text
    assert not (tmp_path / "a").exists()


def test_warnings_show_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    assert cli.main(["recipes", "vit-b32-gsam"]) == 0
    text = warnings.formatwarning("Left out 1 damaged file.", UserWarning, "images.py", 42)
    assert text == "UserWarning: Left out 1 damaged file.\n"


def test_a_csv_file_is_refused_with_a_hint_at_the_python_api(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.csv").write_text("1,2\n")
    text = mistake(capsys, "train", "--data", str(tmp_path / "table.csv"))
    assert "such as tables, use an objective in your own loop: docs/tutorials/tabular.md" in text


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_fits_80_columns_and_shows_no_python_values(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "None" not in text
    assert "(default: )" not in text


def test_help_of_a_flag_is_one_paragraph(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line breaks of the source do not appear."""
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        cli.main(["compare", "--help"])
    text = " ".join((Compare.__doc__ or "").split("\n\n")[1].split())
    lines = capsys.readouterr().out.splitlines()
    assert text in lines
    (line,) = (line for line in lines if "The number of runs per column." in line)
    assert "The first has the seed --seed, the next --seed + 1, and so on." in line


def test_models_are_listed_and_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == names()
    assert cli.main(["models", "resnet50"]) == 0
    found = capsys.readouterr().out.splitlines()
    assert {"resnet50", "wide_resnet50_2"} <= {*found}
    assert all("resnet50" in name for name in found)
    assert "got 'smal_mlp'. The closest name is 'small_mlp'." in mistake(
        capsys, "models", "smal_mlp"
    )
    assert "got '?'. Pass another substring." in mistake(capsys, "models", "?")


@pytest.mark.parametrize("colour", [False, True])
def test_colours_do_not_change_messages(
    colour: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: colour)
    text = mistake(capsys, "train", "--rhoo", "3")
    expected = (
        "got: Unrecognized options: --rhoo, 3. The closest is --rho. See surrogap train --help."
    )
    assert text.endswith(f"{expected}\n")


def test_an_unreadable_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.data.synthetic import folder

    images = folder(tmp_path / "images", per_class=4)
    (images / "train" / "ant" / "0.png").write_bytes(b"no image")
    arguments = ["train", "--data", str(images), "--out", str(tmp_path / "run"), "--num-workers"]
    arguments += ["0", "--image-size", "8", "--model", "small_mlp", "--batch-size", "8"]
    text = mistake(capsys, *arguments, "--device", "cpu", "--no-tensorboard")
    assert "image files must be intact, got 1 damaged file in" in text


def test_a_run_that_fails_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from surrogap.training.step import EagerStep

    def lost(self: EagerStep, x: Any, y: Any) -> Any:
        return self.model(x).sum() * float("nan"), y.float().mean()

    monkeypatch.setattr(EagerStep, "_loss_and_accuracy", lost)
    assert cli.main([*flags(small_runs.config(tmp_path)), "--max-skipped", "0"]) == 1
    assert "surrogap: loss must be finite, got infinity or NaN" in capsys.readouterr().err


def test_an_error_of_torch_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(*_: object) -> int:
        torch.nn.Linear(2, 2)(torch.zeros(1, 2, dtype=torch.bfloat16))
        return 0

    monkeypatch.setattr("surrogap.cli.train.main", multiply)
    # Its message resembles our own: "must have the same dtype, but got".
    with pytest.raises(RuntimeError, match=r"must.*got"):
        cli.main(["train"])


def test_a_path_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied", "/data/cifar10")

    monkeypatch.setattr("surrogap.cli.train.main", denied)
    assert mistake(capsys, "train") == ("surrogap: Cannot use /data/cifar10: Permission denied.\n")


def test_settings_that_an_objective_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    text = mistake(capsys, "train", "--model", "small_mlp", "--perturb", "norms")
    assert 'perturb="norms" must find a trainable parameter of a normalisation layer' in text


def test_an_interrupt_at_startup_prints_no_traceback() -> None:
    """Before `main` catches interrupts, nothing is imported that Python itself does not need."""
    code = "import sys; from surrogap.cli import main; print(*sys.modules)"
    # Without site, whose path files import much in some environments.
    command = [sys.executable, "-S", "-c", code]
    path = {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    loaded = subprocess.check_output(command, env=os.environ | path, text=True).split()
    assert not {"collections", "enum", "importlib", "re", "typing"} & {*loaded}
    # An interrupt during the first import of `main`.
    code = (
        "import builtins, sys; from surrogap import cli\n"
        "def interrupt(*_, **__): raise KeyboardInterrupt\n"
        "builtins.__import__ = interrupt; sys.exit(cli.main(['train']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (
        128 + signal.SIGINT,
        "surrogap: stopped by SIGINT.\n",
    )


def long_run(config: Config, *more: str, **settings: Any) -> subprocess.Popen[str]:
    """Start a run of 400,000 steps, and wait for its first record."""
    arguments = [word if word != "3" else "100000" for word in (*flags(config), *more)]
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "surrogap.cli", *arguments, "--record-every", "1"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
        **settings,
    )
    deadline = time.monotonic() + 300  # a busy machine takes a minute to import torch
    try:
        while not read_records(config.folder):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def test_sigterm_saves_a_checkpoint(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path / "my runs")
    process = long_run(config, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    step = small_runs.state(config.folder)["step"]
    assert text == (
        f"surrogap: SIGTERM stopped the run after step {step} of 400000. Its checkpoint is "
        f"saved. Continue with surrogap train --resume --out '{config.folder}'\n"
    )


def test_a_signal_to_the_whole_process_group_saves_a_checkpoint(tmp_path: Path) -> None:
    """As timeout, torchrun and a closed terminal send it. Workers read the images."""
    images = image_folder(tmp_path / "images", per_class=8)
    config = small_runs.config(tmp_path, data=str(images))
    more = ["--num-workers", "2", "--image-size", "8"]
    process = long_run(config, *more, stderr=subprocess.PIPE, start_new_session=True)
    try:
        os.killpg(process.pid, signal.SIGTERM)
        _, text = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, "Its checkpoint is saved." in text) == (143, True), text
    assert small_runs.state(config.folder)["step"] > 0


def test_without_checkpoints_a_signal_saves_none(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path)
    process = long_run(config, "--checkpoint-every", "0", stderr=subprocess.PIPE)
    try:
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=60)
    finally:
        process.kill()
    assert text.endswith("No checkpoint was saved, because of --checkpoint-every 0.\n")


def test_closing_the_terminal_saves_a_checkpoint(tmp_path: Path) -> None:
    config = small_runs.config(tmp_path)
    ours, theirs = pty.openpty()
    process = long_run(
        config,
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        os.close(theirs)
        os.close(ours)
        process.wait(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGHUP
    assert small_runs.state(config.folder)["step"] == read_records(config.folder)[-1]["step"]


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as requests:
            os.kill(os.getpid(), signal.SIGHUP)
        assert requests.signal == 0
    finally:
        signal.signal(signal.SIGHUP, before)
