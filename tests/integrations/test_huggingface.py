"""The Trainer of Hugging Face, run for real, against loops written by hand."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset, SequentialSampler

from surrogap import GSAM, SAM, Intermittent, MomentumSAM, Objective, Vanilla
from surrogap.rho import InverseSqrt, ProportionalToLR
from tests.integrations.by_hand import gsam_backward

pytest.importorskip("transformers")
pytest.importorskip("peft")
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PretrainedConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import ModelOutput

from surrogap.integrations.huggingface import (
    SharpnessAwareMixin,
    SharpnessAwareTrainer,
    _check,
)

LR, RHO, ALPHA, CLIP = 1e-2, 0.05, 0.4, 0.5
VOCABULARY, LENGTH, NUM_SAMPLES = 30, 8, 10

Batch = dict[str, Tensor]


def gsam(model: nn.Module, optimizer: torch.optim.Optimizer) -> Objective:
    return GSAM(model, rho=RHO, alpha=ALPHA)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Objective:
    """A radius of 0: two passes, and the plain gradient."""
    return SAM(model, rho=0.0)


class InOrder:
    """A trainer that does not shuffle, so that a loop by hand sees the same batches."""

    def _get_train_sampler(self, *args: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Ours(InOrder, SharpnessAwareTrainer):
    pass


class Theirs(InOrder, Trainer):
    pass


class Seeded(TrainerCallback):
    """The dropout masks of a step depend on its number only."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(state.global_step)


def language_model(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        **settings,
    )
    return GPT2LMHeadModel(config).double()


class Classifier(nn.Module):
    """A model whose `forward` takes no loss arguments, so that the trainer divides its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PretrainedConfig()  # where label smoothing looks for the kind of model
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.dropout(self.embedding(input_ids).tanh().mean(1)))
        loss = None if labels is None else cross_entropy(logits, labels)
        return ModelOutput(loss=loss, logits=logits)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return Classifier().double()


def texts() -> list[Batch]:
    """Sequences with 3 to 7 labels each, so that micro-batches differ in their number."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for index in range(NUM_SAMPLES):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[: 1 + index % 5] = -100
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def sentences() -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH), generator=generator)
    return [{"input_ids": t, "labels": torch.tensor(i % 3)} for i, t in enumerate(tokens)]


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": LR,
        "max_grad_norm": CLIP,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    } | changes


def train(
    folder: Path,
    model: nn.Module,
    data: list[Batch],
    kind: type[Trainer] = Ours,
    *,
    resume: str | None = None,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Train, and return the trainer."""
    options = dict(options or {})
    if issubclass(kind, SharpnessAwareMixin):
        options.setdefault("objective", gsam)
    trainer = kind(
        model=model,
        args=TrainingArguments(**arguments(folder, **changes)),
        train_dataset=data,
        callbacks=[Seeded()],
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def steps(data: list[Batch], num_epochs: int = 2) -> Iterator[list[Batch]]:
    """The micro-batches of every step: two of two samples, the last step of an epoch one."""
    micro_batches = [
        {name: torch.stack([sample[name] for sample in data[i : i + 2]]) for name in data[0]}
        for i in range(0, len(data), 2)
    ]
    for _ in range(num_epochs):
        for start in range(0, len(micro_batches), 2):
            yield micro_batches[start : start + 2]


Loss = Callable[[nn.Module, Batch, list[Batch]], Tensor]


def train_by_hand(
    model: nn.Module, data: list[Batch], loss_of: Loss, *, per_step: bool = True
) -> list[dict[str, float]]:
    """The loop of the trainer: AdamW, a linear schedule, clipping, ragged accumulation."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
    all_steps = list(steps(data))
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / len(all_steps))
    model.train()
    logged = []
    for index, batches in enumerate(all_steps):
        torch.manual_seed(index)
        closures = [lambda b=b, bs=batches: loss_of(model, b, bs) for b in batches]
        groups = [closures] if per_step else [[closure] for closure in closures]
        reports = [gsam_backward(model, *group, rho=RHO, alpha=ALPHA) for group in groups]
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        logged.append({name: sum(r[name] for r in reports) for name in reports[0]})
    return logged


def token_loss(model: nn.Module, batch: Batch, batches: list[Batch]) -> Tensor:
    """The mean over all tokens of a step, in float32 as transformers computes it."""
    num_tokens = sum((b["labels"][:, 1:] != -100).sum() for b in batches)
    logits = model(batch["input_ids"]).logits[:, :-1].float()
    targets = batch["labels"][:, 1:]
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / num_tokens


def assert_same_weights(some: nn.Module, others: nn.Module, *, exactly: bool = False) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0 if exactly else 1e-9}
    pairs = zip(some.parameters(), others.parameters(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("perturb_each", ["step", "micro_batch"])
def test_token_weighted_training_is_the_loop_by_hand(tmp_path: Path, perturb_each: str) -> None:
    model, by_hand = language_model(), language_model()
    trainer = train(tmp_path, model, texts(), options={"perturb_each": perturb_each})
    expected = train_by_hand(by_hand, texts(), token_loss, per_step=perturb_each == "step")
    assert_same_weights(model, by_hand)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == len(expected) == 6
    for found, wanted in zip(logged, expected, strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["perturbed_loss"] == pytest.approx(wanted["perturbed_loss"], rel=1e-5)
        gap = wanted["perturbed_loss"] - wanted["loss"]
        assert found["gap"] == pytest.approx(gap, abs=1e-5)
        assert found["rho"] == pytest.approx(RHO)


def mean_loss(model: nn.Module, batch: Batch, batches: list[Batch]) -> Tensor:
    logits = model(batch["input_ids"]).logits
    return cross_entropy(logits, batch["labels"]) / len(batches)


def smoothed_loss(model: nn.Module, batch: Batch, batches: list[Batch]) -> Tensor:
    logits = model(batch["input_ids"]).logits
    return cross_entropy(logits, batch["labels"], label_smoothing=0.1) / len(batches)


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    loss: Tensor = cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch
    return loss


def weighted_loss(model: nn.Module, batch: Batch, batches: list[Batch]) -> Tensor:
    num_samples = sum(len(b["labels"]) for b in batches)
    logits = model(batch["input_ids"]).logits
    return cross_entropy(logits, batch["labels"], reduction="sum") / num_samples


@pytest.mark.parametrize(
    ("loss_of", "changes", "options"),
    [
        (mean_loss, {}, {}),
        (mean_loss, {}, {"perturb_each": "micro_batch"}),
        (smoothed_loss, {"label_smoothing_factor": 0.1}, {}),
        (weighted_loss, {}, {"compute_loss_func": own_loss}),
    ],
    ids=["mean", "mean, each micro-batch", "label smoothing", "compute_loss_func"],
)
def test_classification_is_the_loop_by_hand(
    tmp_path: Path, loss_of: Loss, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    model, by_hand = classifier(), classifier()
    trainer = train(tmp_path, model, sentences(), options=options, **changes)
    per_step = options.get("perturb_each") != "micro_batch"
    expected = train_by_hand(by_hand, sentences(), loss_of, per_step=per_step)
    assert_same_weights(model, by_hand)
    logged = [entry["perturbed_loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx([entry["perturbed_loss"] for entry in expected], rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{}, {"bf16": True}, {"gradient_checkpointing": True}],
    ids=["float64", "bf16", "gradient checkpointing"],
)
@pytest.mark.parametrize("perturb_each", ["step", "micro_batch"])
def test_a_radius_of_zero_is_the_unmodified_trainer(
    tmp_path: Path, changes: dict[str, Any], perturb_each: str
) -> None:
    model, unmodified = language_model(), language_model()
    if "bf16" in changes:
        model, unmodified = model.float(), unmodified.float()
    options = {"objective": plain, "perturb_each": perturb_each}
    trainer = train(tmp_path, model, texts(), options=options, num_train_epochs=1, **changes)
    reference = train(tmp_path, unmodified, texts(), Theirs, num_train_epochs=1, **changes)
    assert_same_weights(model, unmodified, exactly=True)
    pairs = zip(trainer.state.log_history, reference.state.log_history, strict=True)
    for ours, theirs in pairs:
        for name in ("loss", "grad_norm", "learning_rate", "epoch", "step", "train_loss"):
            assert (name in ours) == (name in theirs)
            assert ours.get(name, 0.0) == pytest.approx(theirs.get(name, 0.0), rel=1e-6)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    model, checkpointed = language_model(), language_model()
    train(tmp_path, model, texts(), num_train_epochs=1)
    train(tmp_path, checkpointed, texts(), num_train_epochs=1, gradient_checkpointing=True)
    assert_same_weights(model, checkpointed)


def with_lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zeros at first, whose gradient alone would climb
            nn.init.normal_(parameter, std=0.1)
    return adapted.double()


def test_only_lora_weights_climb(tmp_path: Path) -> None:
    model, by_hand = with_lora(language_model()), with_lora(language_model())
    seen: list[dict[str, Tensor]] = []

    def note(*_: object) -> None:
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})

    model.register_forward_pre_hook(note)
    train(tmp_path, model, texts())
    train_by_hand(by_hand, texts(), token_loss)
    assert_same_weights(model, by_hand)
    first, second = seen[0], seen[2]  # the passes over the first micro-batch
    moved = {name for name in first if not torch.equal(first[name], second[name])}
    assert moved == {name for name in first if "lora_" in name}


def counted(model: nn.Module, optimizer: torch.optim.Optimizer) -> Objective:
    return Intermittent(GSAM(model, rho=InverseSqrt(RHO), alpha=ALPHA), every=2)


@pytest.mark.parametrize("perturb_each", ["step", "micro_batch"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, perturb_each: str) -> None:
    options = {"objective": counted, "perturb_each": perturb_each}
    saving = {"save_strategy": "steps", "save_steps": 3, "options": options}
    whole, resumed = language_model(), language_model()
    first = train(tmp_path / "run", whole, texts(), **saving)
    checkpoint = str(tmp_path / "run" / "checkpoint-3")
    second = train(tmp_path / "again", resumed, texts(), resume=checkpoint, **saving)
    assert_same_weights(whole, resumed, exactly=True)
    assert first.objective.state_dict() == second.objective.state_dict()
    assert second.objective.num_steps == 6
    radii = [entry.get("rho") for entry in second.state.log_history if "loss" in entry]
    expected = [RHO / (t + 1) ** 0.5 if t % 2 == 0 else None for t in range(6)]
    assert radii == [pytest.approx(rho) for rho in expected]


def test_a_checkpoint_of_another_trainer_starts_the_objective_at_its_first_step(
    tmp_path: Path,
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    train(tmp_path / "run", language_model(), texts(), Theirs, **saving)
    checkpoint = str(tmp_path / "run" / "checkpoint-3")
    model = language_model()
    trainer = train(
        tmp_path / "again", model, texts(), resume=checkpoint, options={"objective": counted}
    )
    assert trainer.objective.num_steps == 3


def test_the_radius_follows_the_schedule_of_the_learning_rate(tmp_path: Path) -> None:
    def objective(model: nn.Module, optimizer: torch.optim.Optimizer) -> Objective:
        rho = ProportionalToLR(optimizer, rho_max=0.1, rho_min=0.0, lr_max=LR, lr_min=0.0)
        return GSAM(model, rho=rho)

    trainer = train(tmp_path, language_model(), texts(), options={"objective": objective})
    logged = [entry["rho"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx([0.1 * (1 - step / 6) for step in range(6)])


def test_an_objective_without_a_first_pass_logs_what_it_measures(tmp_path: Path) -> None:
    def objective(model: nn.Module, optimizer: torch.optim.Optimizer) -> Objective:
        return MomentumSAM(model, optimizer, rho=0.1)

    trainer = train(tmp_path, language_model(), texts(), options={"objective": objective})
    entry = trainer.state.log_history[1]
    assert entry["loss"] == pytest.approx(entry["perturbed_loss"])
    assert "gap" not in entry
    options = {"objective": lambda model, optimizer: Vanilla(model)}
    trainer = train(tmp_path, language_model(), texts(), options=options)
    assert not {"gap", "perturbed_loss", "rho"} & set(trainer.state.log_history[0])


def test_evaluation_between_steps_is_one_plain_pass(tmp_path: Path) -> None:
    class Evaluating(Ours):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(eval_dataset=texts(), **kwargs)

    model, undisturbed = language_model(), language_model()
    num_forwards = 0

    def count(*_: object) -> None:
        nonlocal num_forwards
        num_forwards += not model.training

    model.register_forward_hook(count)
    trainer = train(tmp_path, model, texts(), Evaluating, eval_strategy="steps", eval_steps=2)
    train(tmp_path, undisturbed, texts())
    assert_same_weights(model, undisturbed, exactly=True)
    assert num_forwards == 3 * 2  # 10 samples in batches of 8, three times
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluated) == 3
    assert not any("gap" in entry for entry in evaluated)


class Counting(InOrder, Trainer):
    """Counts in `compute_loss`, as TRL and sentence-transformers do, and takes the labels."""

    def __init__(self, **kwargs: Any) -> None:
        self._metrics: Any = {"train": defaultdict(list)}
        self.accum_loss_components: Any = {"train": {"steps": torch.tensor(0)}}
        self.losses: list[Tensor] = []
        self._num_tokens = 0
        super().__init__(**kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._num_tokens += inputs["input_ids"].numel()
        inputs["use_cache"] = False
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self._metrics["train"]["loss"].append(loss.item())
        self.accum_loss_components["train"]["steps"] += 1
        self.losses.append(loss.detach())
        del inputs["labels"]
        return loss


class CountingOurs(SharpnessAwareMixin, Counting):
    pass


@pytest.mark.parametrize("perturb_each", ["step", "micro_batch"])
def test_counters_and_metrics_see_the_first_pass_only(tmp_path: Path, perturb_each: str) -> None:
    options = {"objective": plain, "perturb_each": perturb_each}
    ours = train(tmp_path, language_model(), texts(), CountingOurs, options=options)
    theirs = train(tmp_path, language_model(), texts(), Counting)
    assert ours._num_tokens == theirs._num_tokens == 2 * NUM_SAMPLES * LENGTH
    assert ours._metrics == theirs._metrics
    assert len(ours._metrics["train"]["loss"]) == 10
    assert ours.accum_loss_components == theirs.accum_loss_components == {"train": {"steps": 10}}
    assert ours.losses == theirs.losses


def test_the_mixin_goes_before_any_trainer(tmp_path: Path) -> None:
    class Ours2(SharpnessAwareMixin, InOrder, Seq2SeqTrainer):
        pass

    model, by_hand = language_model(), language_model()
    trainer = Ours2(
        model=model,
        args=Seq2SeqTrainingArguments(**arguments(tmp_path)),
        train_dataset=texts(),
        callbacks=[Seeded()],
        objective=gsam,
    )
    trainer.train()
    train_by_hand(by_hand, texts(), token_loss)
    assert_same_weights(model, by_hand)


class Weighted(InOrder, Trainer):
    """A trainer whose micro-batches have different weights: 1 and `SECOND` in turn."""

    SECOND = 1.0

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        self.num_seen = getattr(self, "num_seen", 0) + 1
        model.train()
        weight = 1.0 if self.num_seen % 2 else self.SECOND
        loss = self.compute_loss(model, self._prepare_inputs(inputs)) * weight / 2
        self.accelerator.backward(loss)
        return loss.detach()


class Unequal(Weighted):
    SECOND = 3.0


class WeightedOurs(SharpnessAwareMixin, Weighted):
    pass


class UnequalOurs(SharpnessAwareMixin, Unequal):
    pass


def test_a_trainer_of_ones_own_keeps_its_weights(tmp_path: Path) -> None:
    for ours, theirs, perturb_each in (
        (WeightedOurs, Weighted, "step"),
        (UnequalOurs, Unequal, "micro_batch"),
    ):
        model, other = classifier(), classifier()
        options = {"objective": plain, "perturb_each": perturb_each}
        train(tmp_path, model, sentences(), ours, options=options, num_train_epochs=1, max_steps=2)
        train(tmp_path, other, sentences(), theirs, num_train_epochs=1, max_steps=2)
        assert_same_weights(model, other)


def test_unequal_weights_are_refused_with_one_perturbation_per_step(tmp_path: Path) -> None:
    message = 'perturb_each must be "micro_batch" if micro-batches have different weights, got'
    with pytest.raises(ValueError, match=f"{message} a factor of 1.5 .* and 0.5 for"):
        train(tmp_path, classifier(), sentences(), UnequalOurs, options={"perturb_each": "step"})


class Stream(IterableDataset):
    """Batches without a length: the last micro-batch of an epoch joins the next epoch's first."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(sentences())


def test_a_micro_batch_left_over_by_an_epoch_keeps_its_weight(tmp_path: Path) -> None:
    models = [classifier(), classifier()]
    for model, kind in zip(models, (SharpnessAwareTrainer, Trainer), strict=True):
        options = {"objective": plain} if kind is SharpnessAwareTrainer else {}
        model.dropout.p = 0.0
        train(tmp_path, model, Stream(), kind, options=options, max_steps=6)
    assert_same_weights(*models)


class OwnLoss(Ours):
    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = model(**inputs).loss
        return loss


class OwnStep(Ours):
    def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
        loss: Tensor = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize("kind", [OwnLoss, OwnStep])
def test_an_override_that_bypasses_the_objective_is_refused(kind: type, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"{kind.__name__} trained without the objective: its"):
        train(tmp_path, classifier(), sentences(), kind)


class Outputs(Ours):
    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().compute_loss(model, inputs, return_outputs=True)[0]
        return loss


def test_outputs_are_refused_in_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="return_outputs must be False in training, got True"):
        train(tmp_path, classifier(), sentences(), Outputs)


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
@pytest.mark.parametrize("perturb_each", ["step", "micro_batch"])
def test_a_compiled_model_is_the_loop_by_hand(tmp_path: Path, perturb_each: str) -> None:
    model, by_hand = language_model(), language_model()
    changes = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    train(tmp_path, model, texts(), options={"perturb_each": perturb_each}, **changes)
    train_by_hand(by_hand, texts(), token_loss, per_step=perturb_each == "step")
    assert_same_weights(model, by_hand)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"objective": 0.05},
            TypeError,
            "objective must be a function of the model and the optimizer, got float.",
        ),
        (
            {"objective": SAM(nn.Linear(1, 1))},
            TypeError,
            "objective must be a function of the model and the optimizer, got SAM.",
        ),
        (
            {"objective": gsam, "perturb_each": "batch"},
            ValueError,
            'perturb_each must be "step" or "micro_batch", got \'batch\'.',
        ),
    ],
)
def test_wrong_arguments_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        SharpnessAwareTrainer(**options)
    assert str(raised.value).startswith(message)


def test_a_function_that_does_not_return_an_objective_is_refused(tmp_path: Path) -> None:
    options = {"objective": lambda model, optimizer: optimizer}
    with pytest.raises(TypeError, match="objective must return an objective, got AdamW"):
        train(tmp_path, language_model(), texts(), options=options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "DistributedType.DEEPSPEED"}, "args must not use DEEPSPEED"),
        ({"kind": "DistributedType.MEGATRON_LM"}, "args must not use MEGATRON_LM"),
        ({"kind": "DistributedType.FSDP"}, "args must use FSDP2, got FSDP1"),
        ({"n_gpu": 2}, "args must use one GPU per process, got 2 under DataParallel"),
        ({"optim": "lomo"}, "optim must step after backward, got lomo"),
    ],
)
def test_engines_that_step_by_themselves_are_refused(changes: dict[str, Any], message: str) -> None:
    settings = {"kind": "DistributedType.NO", "n_gpu": 1, "optim": "adamw_torch"} | changes
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(distributed_type=settings["kind"], is_fsdp2=False),
        args=SimpleNamespace(n_gpu=settings["n_gpu"], optim=settings["optim"]),
    )
    with pytest.raises(ValueError, match=message):
        _check(trainer)


def test_the_log_history_is_json(tmp_path: Path) -> None:
    trainer = train(tmp_path, language_model(), texts(), options={"objective": counted})
    json.dumps(trainer.state.log_history, allow_nan=False)
