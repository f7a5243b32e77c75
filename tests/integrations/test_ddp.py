"""Trainers in two processes, under DDP and FSDP2, against the loop by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.distributed.torchrun import torchrun
from tests.integrations.by_hand import gsam_backward

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("lightning")
from tests.integrations import ranks, test_huggingface
from tests.integrations.test_accelerate import data, sgd

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    """The weights that each process ends with, by trainer."""
    folder = tmp_path_factory.mktemp("ranks")
    torchrun(2, "-m", "tests.integrations.ranks", folder)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


ACCUMULATING = ["accelerate", "fabric", "lightning", "lightning fsdp2", "timm"]
TRAINERS = ["huggingface step", "huggingface micro_batch", *ACCUMULATING]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_replicas_are_the_same(trainer: str, states: list[dict[str, dict[str, Tensor]]]) -> None:
    first, second = (state[trainer] for state in states)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("perturb_each", ["step", "micro_batch"])
def test_huggingface_is_the_loop_by_hand(
    perturb_each: str, states: list[dict[str, dict[str, Tensor]]]
) -> None:
    model = ranks.still_model().train()
    samples = test_huggingface.texts()[:8]
    (first, *others) = test_huggingface.steps(samples, 1)
    batches = [*first, *(batch for step in others for batch in step)]
    assert len(batches) == 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=test_huggingface.LR, weight_decay=0.0)
    # Processes take batches in turn, so the first has 0 and 2, and the second 1 and 3.
    ranked = [batches[0], batches[2], batches[1], batches[3]]
    for step in range(2):  # one per epoch
        closures = [lambda b=b: test_huggingface.token_loss(model, b, batches) for b in ranked]
        groups = [closures[:2], closures[2:]] if perturb_each == "step" else [[c] for c in closures]
        for group in groups:
            gsam_backward(model, *group, rho=ranks.RHO, alpha=ranks.ALPHA)
        nn.utils.clip_grad_norm_(model.parameters(), test_huggingface.CLIP)
        optimizer.param_groups[0]["lr"] = test_huggingface.LR * (1 - step / 2)
        optimizer.step()
        optimizer.zero_grad()
    for key, value in states[0][f"huggingface {perturb_each}"].items():
        torch.testing.assert_close(value, model.state_dict()[key], rtol=0, atol=1e-7)


@pytest.mark.parametrize("trainer", ACCUMULATING)
def test_accumulation_is_the_loop_by_hand(
    trainer: str, states: list[dict[str, dict[str, Tensor]]]
) -> None:
    model = ranks.still_network()
    optimizer = sgd(model)
    x, y = data().tensors
    # DistributedSampler deals samples out to the processes in turn, the others batches.
    if not trainer.startswith("lightning"):
        pairs = [[slice(i, i + 2), slice(i + 2, i + 4)] for i in range(0, 20, 4)]
    else:
        pairs = [[slice(i, i + 4, 2), slice(i + 1, i + 4, 2)] for i in range(0, 20, 4)]
    for index, pair in enumerate(pairs):
        closures = [lambda s=part: cross_entropy(model(x[s]), y[s]) / 4 for part in pair]
        # FSDP2 has one perturbation for the batches of all processes, and DDP one for each.
        for group in [closures] if trainer.endswith("fsdp2") else [[c] for c in closures]:
            gsam_backward(model, *group, rho=ranks.RHO, alpha=ranks.ALPHA)
        if index % 2 == 1 or index == len(pairs) - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    for key, value in states[0][trainer].items():
        torch.testing.assert_close(value, model.state_dict()[key], rtol=0, atol=1e-9)
