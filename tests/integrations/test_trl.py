"""TRL's SFTTrainer, whose metrics and counts of tokens must not see the second pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surrogap import GSAM, SAM

pytest.importorskip("trl")
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from surrogap.integrations.huggingface import SharpnessAwareMixin

pytestmark = pytest.mark.integrations

WORDS = [f"w{i}" for i in range(28)]


class SharpnessAwareSFTTrainer(SharpnessAwareMixin, SFTTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", *WORDS])}
    base = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=base, pad_token="<pad>", eos_token="</s>", unk_token="<pad>"
    )


def texts() -> Dataset:
    generator = torch.Generator().manual_seed(1)
    lengths = [3 + i % 4 for i in range(10)]
    words = [[WORDS[j] for j in torch.randint(28, (n,), generator=generator)] for n in lengths]
    return Dataset.from_dict({"text": [" ".join(sentence) for sentence in words]})


def train(folder: Path, kind: type, **options: Any) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    args = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        gradient_checkpointing=False,
    )
    trainer = kind(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=texts(),
        processing_class=tokenizer(),
        **options,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("perturb_each", ["step", "micro_batch"])
def test_metrics_and_counts_are_those_of_the_unmodified_trainer(
    tmp_path: Path, perturb_each: str
) -> None:
    ours = train(
        tmp_path,
        SharpnessAwareSFTTrainer,
        objective=lambda model, optimizer: SAM(model, rho=0.0),
        perturb_each=perturb_each,
    )
    theirs = train(tmp_path, SFTTrainer)
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(one, other)
    pairs = zip(ours.state.log_history, theirs.state.log_history, strict=True)
    for found, wanted in pairs:
        for name in ("loss", "entropy", "num_tokens", "mean_token_accuracy", "grad_norm"):
            assert (name in found) == (name in wanted)
            assert found.get(name, 0.0) == pytest.approx(wanted.get(name, 0.0), rel=1e-6)
    assert "num_tokens" in ours.state.log_history[0]


def test_only_lora_weights_climb(tmp_path: Path) -> None:
    seen: list[dict[str, torch.Tensor]] = []

    def objective(model: nn.Module, optimizer: torch.optim.Optimizer) -> GSAM:
        def note(*_: object) -> None:
            seen.append({name: p.detach().clone() for name, p in model.named_parameters()})

        model.register_forward_pre_hook(note)
        return GSAM(model, rho=0.05)

    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    train(tmp_path, SharpnessAwareSFTTrainer, objective=objective, peft_config=lora)
    # The last step of an epoch has one micro-batch; B, which is 0 at first, has moved by then.
    before, after = seen[-2], seen[-1]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "lora_" in name}
