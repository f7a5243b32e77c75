"""fp16, FSDP2 and compiled models inside the trainers, which need a GPU."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("lightning")
from lightning.pytorch.plugins import MixedPrecision

from surrogap.integrations.lightning import SharpnessAware
from tests.distributed.torchrun import torchrun
from tests.integrations import test_huggingface, test_lightning
from tests.integrations.test_huggingface import Batch, Theirs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of trainers on one GPU
]

SCALE = 65536.0  # where GradScaler starts


def sentences() -> list[Batch]:
    return test_huggingface.sentences()


def classifier() -> nn.Module:
    """A model without dropout, in float32."""
    model = test_huggingface.classifier().float()
    model.dropout.p = 0.0
    return model


def scaled_loss(model: nn.Module, batch: Batch, batches: list[Batch]) -> Tensor:
    with torch.autocast("cuda", torch.float16):
        logits = model(batch["input_ids"].cuda()).logits
    return SCALE * cross_entropy(logits.float(), batch["labels"].cuda()) / len(batches)


def unscaled(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad /= SCALE


@pytest.mark.parametrize("perturb_each", ["step", "micro_batch"])
def test_huggingface_in_fp16_is_the_loop_by_hand(
    tmp_path: Path, perturb_each: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, by_hand = classifier(), classifier().cuda()
    options = {"perturb_each": perturb_each}
    test_huggingface.train(tmp_path, model, sentences(), options=options, use_cpu=False, fp16=True)
    clip = nn.utils.clip_grad_norm_

    def unscale_and_clip(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        unscaled(parameters)
        return clip(parameters, max_norm)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", unscale_and_clip)
    per_step = perturb_each == "step"
    test_huggingface.train_by_hand(by_hand, sentences(), scaled_loss, per_step=per_step)
    # A tenth of a step of AdamW, which magnifies rounding. GSAM moves weights by 0.02 and more.
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("perturb_each", ["step", "micro_batch"])
def test_a_radius_of_zero_in_fp16_is_the_unmodified_trainer(
    tmp_path: Path, perturb_each: str
) -> None:
    model, unmodified = classifier(), classifier()
    options = {"objective": test_huggingface.plain, "perturb_each": perturb_each}
    changes = {"use_cpu": False, "fp16": True}
    test_huggingface.train(tmp_path, model, sentences(), options=options, **changes)
    test_huggingface.train(tmp_path, unmodified, sentences(), Theirs, **changes)
    test_huggingface.assert_same_weights(model, unmodified, exactly=True)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_a_radius_of_zero_is_unmodified_lightning(tmp_path: Path, precision: str) -> None:
    module = test_lightning.Classifier().float()
    unmodified = test_lightning.Classifier().float()
    settings = {"accelerator": "gpu", "precision": precision}
    ours = SharpnessAware(test_lightning.plain)
    test_lightning.trainer(tmp_path, ours, **settings).fit(module, test_lightning.loader())
    test_lightning.trainer(tmp_path, **settings).fit(unmodified, test_lightning.loader())
    test_lightning.assert_same_state(module, unmodified, exactly=True)


def test_lightning_in_fp16_is_near_float32(tmp_path: Path) -> None:
    """The scaled passes compute the same direction, to the precision of float16."""
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0)  # at which no step overflows
    half = {"plugins": [MixedPrecision("16-mixed", "cuda", scaler)]}
    modules = []
    for precision in (half, {"precision": "32-true"}):
        module = test_lightning.Classifier().float()
        module.net[3].p = 0.0  # its masks depend on the precision
        ours = SharpnessAware(test_lightning.gsam)
        trainer = test_lightning.trainer(tmp_path, ours, accelerator="gpu", **precision)
        trainer.fit(module, test_lightning.loader())
        modules.append({name: p.detach().cpu() for name, p in module.net.named_parameters()})
    start = dict(test_lightning.network().named_parameters())
    for name, value in modules[1].items():
        moved = (value - start[name]).norm()
        assert (modules[0][name] - value).norm() < 0.01 * moved + 1e-4


@pytest.mark.parametrize("perturb_each", ["step", "micro_batch"])
def test_huggingface_with_inductor_is_near_eager(tmp_path: Path, perturb_each: str) -> None:
    model, eager = classifier(), classifier()
    options = {"perturb_each": perturb_each}
    for each, changes in ((model, {"torch_compile": True}), (eager, {})):
        test_huggingface.train(
            tmp_path, each, sentences(), options=options, use_cpu=False, **changes
        )
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-4)


_FSDP2 = """
import sys
from pathlib import Path
import torch
from tests.integrations import test_gpu, test_huggingface

folder, perturb_each, version = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
changes = {"fsdp": "full_shard", "fsdp_config": {"version": version}} if version else {}
model = test_gpu.classifier()
trainer = test_huggingface.train(
    folder, model, test_gpu.sentences(), options={"perturb_each": perturb_each},
    use_cpu=False, **changes,
)
assert trainer.accelerator.is_fsdp2 == (version == 2)
state = {
    name: value.full_tensor() if hasattr(value, "full_tensor") else value
    for name, value in trainer.model_wrapped.state_dict().items()
}
state = {name.removeprefix("module."): value.cpu() for name, value in state.items()}
torch.save(state, folder / "state.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("perturb_each", ["step", "micro_batch"])
def test_huggingface_with_fsdp2_is_huggingface_without(tmp_path: Path, perturb_each: str) -> None:
    """In one process: its weights are sharded tensors, and the collectives are real."""
    states = []
    for version in (2, 0):
        folder = tmp_path / str(version)
        folder.mkdir()
        script = folder / "script.py"
        script.write_text(_FSDP2)
        torchrun(1, script, folder, perturb_each, version)
        states.append(torch.load(folder / "state.pt"))
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=0.0, atol=1e-5)
