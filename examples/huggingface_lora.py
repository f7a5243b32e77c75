"""GSAM in Hugging Face's Trainer, on LoRA weights of a small causal language model.

    python examples/huggingface_lora.py

It trains LoRA weights of a tiny random model on sums of two digits, without a download. With
internet access, `--model HuggingFaceTB/SmolLM2-135M` adapts a checkpoint from the Hub instead.
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
)

from surrogap import GSAM
from surrogap.integrations.huggingface import SharpnessAwareTrainer
from surrogap.rho import ProportionalToLR

CHARACTERS = "0123456789+=\n"
LR, RHO = 5e-3, 0.05


def sums() -> list[str]:
    """All sums of two digits, in random order."""
    texts = [f"{a}+{b}={a + b:02}\n" for a in range(10) for b in range(10)]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    return [texts[index] for index in order]


def samples(texts: list[str], tokenizer) -> list[dict[str, list[int]]]:
    """Tokens of each text, with labels for the result only."""
    found = []
    for text in texts:
        if tokenizer is None:
            tokens = [CHARACTERS.index(character) for character in text]
        else:
            tokens = tokenizer(list(text), add_special_tokens=False).input_ids
            tokens = [token for (token,) in tokens]
        found.append({"input_ids": tokens, "labels": [-100] * 4 + tokens[4:]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a causal model from the Hub, instead of the tiny one")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model, target = AutoModelForCausalLM.from_pretrained(args.model), "all-linear"
    else:
        tokenizer, target = None, ["c_attn", "c_proj", "c_fc"]
        sizes = {"n_positions": 16, "n_embd": 64, "n_layer": 2, "n_head": 4}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(CHARACTERS), **sizes))
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=target, fan_in_fan_out=not args.model)
    model = get_peft_model(model, lora)

    data = samples(sums(), tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SharpnessAwareTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=10,
                gradient_accumulation_steps=2,
                num_train_epochs=args.epochs,
                learning_rate=LR,
                logging_strategy="epoch",
                eval_strategy="epoch",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=torch.cuda.is_available(),
            ),
            train_dataset=data[:80],
            eval_dataset=data[80:],
            objective=lambda model, optimizer: GSAM(
                model,
                rho=ProportionalToLR(optimizer, rho_max=RHO, rho_min=0.0, lr_max=LR, lr_min=0.0),
                alpha=0.4,
            ),
        )
        trainer.train()


if __name__ == "__main__":
    main()
