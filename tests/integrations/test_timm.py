"""timm's ClassificationTask under an objective, in a script with the parts of timm's train.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from surrogap import MomentumSAM
from surrogap.core.catalog import OBJECTIVES
from tests.integrations.by_hand import gsam_backward

pytest.importorskip("timm")
import timm.optim
from timm.loss import SoftTargetCrossEntropy
from timm.task import ClassificationTask, LogitDistillationTask
from timm.utils import ModelEmaV3, NativeScaler

from surrogap.integrations.timm import SharpnessAwareTasks, main

RHO, ALPHA = 0.05, 0.4


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 4, 6, generator=generator, dtype=torch.float64)
    return [(batch, torch.arange(4) % 3) for batch in x]


def train_by_hand(model: nn.Module) -> None:
    """Two batches a step, and in the last step one, as in timm's script."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for index, (x, y) in enumerate(batches()):
        torch.manual_seed(index)
        parts = 1 if index == 4 else 2
        closure = lambda x=x, y=y, n=parts: cross_entropy(model(x), y) / n  # noqa: E731
        gsam_backward(model, closure, rho=RHO, alpha=ALPHA)
        if index in (1, 3, 4):
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()


def train(model: nn.Module, *, scaler: NativeScaler | None = None) -> None:
    """The loop of timm's script, with its parts."""
    optimizer = timm.optim.create_optimizer_v2(model, opt="sgd", lr=0.1, momentum=0.9)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    for index, (x, y) in enumerate(batches()):
        torch.manual_seed(index)
        accum_steps = 1 if index == 4 else 2
        loss = task(x, y)["loss"]
        if accum_steps > 1:
            loss /= accum_steps
        needs_update = index in (1, 3, 4)
        if scaler is not None:
            parameters = list(model.parameters())
            scaler(loss, optimizer, 0.3, "norm", parameters, need_update=needs_update)
        else:
            loss.backward()
            if needs_update:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
        if needs_update:
            optimizer.zero_grad()


@pytest.mark.parametrize("is_scaled", [False, True])
def test_classification_task_is_the_loop_by_hand(is_scaled: bool) -> None:
    model, by_hand = network(), network()
    tasks = SharpnessAwareTasks("gsam", rho=RHO, alpha=ALPHA)
    with tasks.installed():
        train(model, scaler=NativeScaler(device="cpu") if is_scaled else None)
    train_by_hand(by_hand)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, by_hand.state_dict()[name], rtol=0, atol=1e-9)
    assert tasks.objective is not None
    assert tasks.objective.model is model
    assert float(tasks.objective.report.rho) == pytest.approx(RHO)


def test_averaged_weights_and_soft_targets_are_those_of_the_loop_by_hand() -> None:
    """As with timm's `--model-ema` and `--mixup`."""
    model, by_hand = network(), network()
    task = ClassificationTask(model, SoftTargetCrossEntropy(), verbose=False)
    averaged, expected = task.setup_ema(decay=0.5), ModelEmaV3(by_hand, decay=0.5)
    with SharpnessAwareTasks("gsam", rho=RHO, alpha=ALPHA).installed():
        for index, (x, _) in enumerate(batches()):
            y = x[:, :3].softmax(1)
            torch.manual_seed(index)
            task(x, y)["loss"].backward()
            torch.manual_seed(index)
            gsam_backward(
                by_hand, lambda x=x, y=y: cross_entropy(by_hand(x), y), rho=RHO, alpha=ALPHA
            )
            for one in (model, by_hand):
                timm.optim.create_optimizer_v2(one, opt="sgd", lr=0.1).step()
                one.zero_grad()
            task.update_ema(step=index)
            expected.update(by_hand, step=index)
    for name, value in averaged.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=0, atol=1e-9)
    assert not torch.equal(averaged.module[0].weight, model[0].weight)


def test_a_radius_of_zero_is_the_unmodified_task() -> None:
    model, unmodified = network(), network()
    with SharpnessAwareTasks("sam", rho=0.0).installed():
        train(model)
    train(unmodified)
    for name, value in model.state_dict().items():
        assert torch.equal(value, unmodified.state_dict()[name])


def test_the_optimizer_is_that_of_the_script() -> None:
    tasks = SharpnessAwareTasks("momentum-sam", rho=0.1)
    with tasks.installed():
        train(network())
    assert isinstance(tasks.objective, MomentumSAM)
    assert isinstance(tasks._optimizer, torch.optim.SGD)
    with (
        SharpnessAwareTasks("momentum-sam").installed(),
        pytest.raises(RuntimeError, match="momentum-sam needs the optimizer"),
    ):
        ClassificationTask(network(), nn.CrossEntropyLoss(), verbose=False)(*batches()[0])


def test_other_tasks_are_refused() -> None:
    task = object.__new__(LogitDistillationTask)
    with (
        SharpnessAwareTasks("sam").installed(),
        pytest.raises(TypeError, match="task must be a ClassificationTask, got LogitDistillation"),
    ):
        task(*batches()[0])


SCRIPT = """
import sys
import torch
from torch import nn
from timm.optim import create_optimizer_v2
from timm.loss import SoftTargetCrossEntropy
from timm.task import ClassificationTask

assert __name__ == "__main__" and sys.argv[1:] == ["data", "--model", "tiny", "--opt-eps", "1"]
torch.manual_seed(0)
model = nn.Linear(6, 3)
task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
result = task(torch.randn(4, 6), torch.arange(4) % 3)
result["loss"].backward()
torch.save([model.weight.grad, model.bias.grad, result["output"]], sys.path[0] + "/out.pt")
"""


def test_the_command_runs_an_unedited_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.syspath_prepend(tmp_path)
    rest = ["data", "--model", "tiny", "--opt-eps", "1"]
    main([str(script), "--sharpness", "gsam", "--rho", "0.1", "--alpha", "0.2", *rest])
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    x, y = torch.randn(4, 6), torch.arange(4) % 3
    gsam_backward(model, lambda: cross_entropy(model(x), y), rho=0.1, alpha=0.2)
    expected = [model.weight.grad, model.bias.grad, model(x)]
    for found, wanted in zip(torch.load(tmp_path / "out.pt"), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "script must be a file, got missing.py"),
        ([__file__, "--sharpness", "sam", "--alpha", "1"], "--alpha has no effect on sam"),
        ([__file__, "--sharpness", "sharp"], "invalid choice: 'sharp'"),
        ([__file__, "--memory", "none"], "--memory: invalid choice: 'none'"),
        (
            [],
            "[arguments of the script]\npython -m surrogap.integrations.timm: error: the following",
        ),
    ],
)
def test_wrong_arguments_exit_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_help_describes_each_argument_of_the_objectives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    assert f"objective: {', '.join(OBJECTIVES)} (default: gsam)" in words
    assert "weight of the gap; 0 to ignore it (gsam: default 0.1; asam: default 0.0)" in words
    options = {option for entry in OBJECTIVES.values() for option in entry.arguments}
    for option in options - {"scoping"}:
        assert f" --{option.replace('_', '-')} " in words


def test_timm_is_restored() -> None:
    before: list[Any] = [timm.optim.create_optimizer_v2, NativeScaler.__init__]
    with SharpnessAwareTasks("sam").installed():
        pass
    assert [timm.optim.create_optimizer_v2, NativeScaler.__init__] == before
    assert ClassificationTask.__call__ is nn.Module.__call__
