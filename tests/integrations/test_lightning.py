"""The Trainer of Lightning, run for real, against loops written by hand."""

import csv
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from surrogap import GSAM, SAM, Intermittent, Objective
from surrogap.rho import InverseSqrt
from tests.integrations.by_hand import gsam_backward

pytest.importorskip("lightning")
import lightning.pytorch as pl
import pytorch_lightning
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassPrecision,
)

from surrogap.integrations.lightning import SharpnessAware, _check_strategy

pytestmark = [
    # Lightning uses deprecated parts of torch.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*number of training batches"),
]

LR, RHO, ALPHA, CLIP = 0.1, 0.05, 0.4, 0.3
NUM_BATCHES, BATCH_SIZE = 5, 4

# Two packages with the same contents, but different classes.
both_packages = pytest.mark.parametrize("package", [pl, pytorch_lightning])


def gsam(model: nn.Module, optimizer: torch.optim.Optimizer) -> Objective:
    return GSAM(model, rho=RHO, alpha=ALPHA)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Objective:
    """A radius of 0: two passes, and the plain gradient."""
    return SAM(model, rho=0.0)


def counted(model: nn.Module, optimizer: torch.optim.Optimizer) -> Objective:
    return Intermittent(GSAM(model, rho=InverseSqrt(RHO), alpha=ALPHA), every=2)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


class Steps:
    """A module of either package, except for its base class."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network().double()
        self.accuracy = MulticlassAccuracy(3)
        self.loss_mean = MeanMetric()
        self.areas = MulticlassAUROC(3)  # whose states are lists
        self.collection = MetricCollection([MulticlassAccuracy(3), MulticlassPrecision(3)])
        self.num_logged = 0

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.num_logged += 1
        super().log(*args, **kwargs)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x.to(self.net[0].weight.dtype))
        loss = cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.loss_mean.update(loss.detach())
        self.areas.update(logits.detach().softmax(1), y)
        self.collection(logits, y)
        self.log("train_accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("train_loss", loss)
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(self.current_epoch * NUM_BATCHES + batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Classifier(Steps, pl.LightningModule):
    pass


class OldClassifier(Steps, pytorch_lightning.LightningModule):
    pass


CLASSIFIERS = {pl: Classifier, pytorch_lightning: OldClassifier}


def batches() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_BATCHES * BATCH_SIZE, 6, generator=generator, dtype=torch.float64)
    y = torch.arange(len(x)) % 3
    return [[x[i : i + BATCH_SIZE], y[i : i + BATCH_SIZE]] for i in range(0, len(x), BATCH_SIZE)]


def loader() -> DataLoader[Any]:
    xs, ys = zip(*batches(), strict=True)
    return DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), BATCH_SIZE)


def trainer(folder: Path, *callbacks: pl.Callback, package: Any = pl, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": CLIP,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "logger": False,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
    }
    return package.Trainer(callbacks=list(callbacks), **(settings | changes))


def train_by_hand(net: nn.Module) -> list[dict[str, float]]:
    """Lightning's loop: a perturbation per batch, two batches a step, the last of an epoch one."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    net.train()
    reports = []
    for epoch in range(2):
        for index, (x, y) in enumerate(batches()):
            torch.manual_seed(epoch * NUM_BATCHES + index)
            # Lightning divides by 2 also where one batch is left.
            closure = lambda x=x, y=y: cross_entropy(net(x), y) / 2  # noqa: E731
            reports.append(gsam_backward(net, closure, rho=RHO, alpha=ALPHA))
            if index % 2 == 1 or index == NUM_BATCHES - 1:
                nn.utils.clip_grad_norm_(net.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    return reports


def assert_same_state(some: nn.Module, others: nn.Module, *, exactly: bool = False) -> None:
    for name, value in some.state_dict().items():
        torch.testing.assert_close(
            value, others.state_dict()[name], rtol=0.0, atol=0.0 if exactly else 1e-9
        )


@both_packages
def test_gsam_with_accumulation_and_clipping_is_the_loop_by_hand(
    tmp_path: Path, package: Any
) -> None:
    module, by_hand = CLASSIFIERS[package](), network().double()
    logger = CSVLogger(tmp_path)
    trainer(tmp_path, SharpnessAware(gsam), package=package, logger=logger).fit(module, loader())
    expected = train_by_hand(by_hand)
    assert_same_state(module.net, by_hand)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["gap"]]
    # Lightning writes one row per optimizer step, that of its last batch.
    ends = [2 * expected[i]["perturbed_loss"] for i in (1, 3, 4, 6, 8, 9)]
    assert [float(row["perturbed_loss"]) for row in rows] == pytest.approx(ends, rel=1e-6)
    assert [float(row["rho"]) for row in rows] == pytest.approx([RHO] * 6)


@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-mixed", "bf16-true"])
def test_a_radius_of_zero_is_the_unmodified_trainer(tmp_path: Path, precision: str) -> None:
    module, unmodified = Classifier().float(), Classifier().float()
    trainer(tmp_path, SharpnessAware(plain), precision=precision).fit(module, loader())
    trainer(tmp_path, precision=precision).fit(unmodified, loader())
    assert_same_state(module, unmodified, exactly=True)


@both_packages
def test_the_second_pass_neither_logs_nor_updates_metrics(tmp_path: Path, package: Any) -> None:
    module, unmodified = CLASSIFIERS[package](), CLASSIFIERS[package]()
    changes = {"package": package, "max_epochs": 1}
    ours = trainer(tmp_path, SharpnessAware(plain, log=False), **changes)
    theirs = trainer(tmp_path, **changes)
    ours.fit(module, loader())
    theirs.fit(unmodified, loader())
    assert module.num_logged == unmodified.num_logged == 2 * NUM_BATCHES
    assert ours.logged_metrics.keys() == theirs.logged_metrics.keys()
    for name, value in ours.logged_metrics.items():
        torch.testing.assert_close(value, theirs.logged_metrics[name], rtol=0, atol=0)
    # Lightning resets what it logs, so the others still hold the whole epoch.
    for name in ("loss_mean", "areas"):
        metric, other = getattr(module, name), getattr(unmodified, name)
        assert isinstance(metric, Metric)
        assert metric.update_count == other.update_count == NUM_BATCHES
        torch.testing.assert_close(metric.compute(), other.compute(), rtol=0, atol=0)
    found, wanted = module.collection.compute(), unmodified.collection.compute()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


class ReadOnly(dict[str, Any]):
    """A configuration, as those of diffusers."""

    def __setitem__(self, *_: Any) -> None:
        raise TypeError("read-only")


class Counting(Classifier):
    """Collects results in its attributes, as many modules do until the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"rate": LR})
        self.losses: list[Tensor] = []
        self._recent: deque[Tensor] = deque(maxlen=3)
        self.num_seen = 0
        self.running = torch.zeros((), dtype=torch.float64)
        self.totals: dict[str, Any] = {"loss": torch.zeros((), dtype=torch.float64)}
        self.frequencies = Counter[int]()
        self.weights = dict(self.net.named_parameters())
        self.settings = ReadOnly(width=3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x, y = batch
        assert self.weights["0.weight"] is self.net[0].weight
        loss = cross_entropy(self.net(x), y)
        self.losses.append(loss.detach())
        self._recent.append(loss.detach())
        self.num_seen += len(x)
        self.running += loss.detach()
        self.totals["loss"] += loss.detach()
        self.frequencies.update(y.tolist())
        return loss


def test_attributes_of_the_module_see_the_first_pass_only(tmp_path: Path) -> None:
    module, unmodified = Counting(), Counting()
    losses, running = module.losses, module.running  # which others may hold too
    trainer(tmp_path, SharpnessAware(plain)).fit(module, loader())
    trainer(tmp_path).fit(unmodified, loader())
    assert_same_state(module, unmodified, exactly=True)
    for name in ("losses", "_recent", "num_seen", "running", "totals", "frequencies"):
        assert getattr(module, name) == getattr(unmodified, name)
    assert module.num_seen == 2 * NUM_BATCHES * BATCH_SIZE
    assert module.losses is losses
    assert module.running is running


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, half, resumed = Classifier(), Classifier(), Classifier()
    first, second = SharpnessAware(counted), SharpnessAware(counted)
    trainer(tmp_path, first).fit(whole, loader())
    saving = ModelCheckpoint(dirpath=tmp_path / "saved", save_last=True)
    trainer(tmp_path, SharpnessAware(counted), saving, max_epochs=1).fit(half, loader())
    path = saving.last_model_path
    trainer(tmp_path, second, ModelCheckpoint(tmp_path / "saved")).fit(
        resumed, loader(), ckpt_path=path
    )
    assert_same_state(whole, resumed, exactly=True)
    assert first.state_dict() == second.state_dict()
    assert second.objective is not None
    assert second.objective.num_steps == 6


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_callback_that_was_used_before_is_resumed_too(tmp_path: Path) -> None:
    whole, resumed = Classifier(), Classifier()
    trainer(tmp_path, SharpnessAware(counted)).fit(whole, loader())
    callback = SharpnessAware(counted)
    saving = ModelCheckpoint(dirpath=tmp_path / "saved", save_last=True)
    trainer(tmp_path, callback, saving, max_epochs=1).fit(Classifier(), loader())
    path, again = saving.last_model_path, ModelCheckpoint(tmp_path / "saved")
    trainer(tmp_path, callback, again).fit(resumed, loader(), ckpt_path=path)
    assert_same_state(whole, resumed, exactly=True)
    assert callback.objective is not None
    assert callback.objective.num_steps == 6


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_state_that_was_loaded_for_a_test_is_not_that_of_the_next_fit(tmp_path: Path) -> None:
    class Tested(Classifier):
        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            pass

    saving = ModelCheckpoint(dirpath=tmp_path / "saved", save_last=True)
    trainer(tmp_path, SharpnessAware(counted), saving, max_epochs=1).fit(Tested(), loader())
    callback = SharpnessAware(counted)
    used = trainer(tmp_path, callback, ModelCheckpoint(tmp_path / "saved"), max_epochs=1)
    used.test(Tested(), loader(), ckpt_path=saving.last_model_path)
    used.fit(Tested(), loader())
    assert callback.objective is not None
    assert callback.objective.num_steps == 3


def test_steps_are_counted_if_accumulation_changes(tmp_path: Path) -> None:
    callback = SharpnessAware(counted)
    scheduler = GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})
    changes = {"accumulate_grad_batches": 1, "max_epochs": 3}
    used = trainer(tmp_path, callback, scheduler, **changes)
    used.fit(Classifier(), loader())
    assert callback.objective is not None
    assert callback.objective.num_steps == used.global_step == 5 + 3 + 2


def test_the_strategy_gets_its_training_step_back(tmp_path: Path) -> None:
    class Failing(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            raise RuntimeError("of the module")

    callback = SharpnessAware(gsam)
    used = trainer(tmp_path, callback)
    used.fit(Classifier(), loader())
    assert "training_step" not in vars(used.strategy)
    used = trainer(tmp_path, callback)
    with pytest.raises(RuntimeError, match="of the module"):
        used.fit(Failing(), loader())
    assert "training_step" not in vars(used.strategy)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_skipped_batch_stays_skipped(tmp_path: Path, accumulated: int) -> None:
    class Skipping(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            return None if batch_idx % 2 else output["loss"]

    module, unmodified = Skipping(), Skipping()
    # Without BatchNorm, whose statistics an objective leaves alone if the batch is skipped.
    for skipping in (module, unmodified):
        skipping.net[1] = nn.Identity()
    changes = {"accumulate_grad_batches": accumulated}
    trainer(tmp_path, SharpnessAware(plain), **changes).fit(module, loader())
    trainer(tmp_path, **changes).fit(unmodified, loader())
    assert_same_state(module, unmodified, exactly=True)
    callback = SharpnessAware(counted)
    used = trainer(tmp_path, callback, **changes)
    used.fit(Skipping(), loader())
    assert callback.objective is not None
    assert callback.objective.num_steps == used.global_step


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"objective must be a function of the model .* got float"):
        SharpnessAware(0.05)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"objective must be a function of the model .* got SAM"):
        SharpnessAware(SAM(nn.Linear(1, 1)))  # type: ignore[arg-type]
    callback = SharpnessAware(lambda model, optimizer: model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="objective must return an objective, got Classifier"):
        trainer(tmp_path, callback).fit(Classifier(), loader())


def test_manual_optimization_and_several_optimizers_are_refused(tmp_path: Path) -> None:
    module = Classifier()
    module.automatic_optimization = False
    changes: dict[str, Any] = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    with pytest.raises(ValueError, match="automatic_optimization must be True, got False"):
        trainer(tmp_path, SharpnessAware(gsam), **changes).fit(module, loader())

    class Double(Classifier):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=LR) for layer in self.net[::4]]

    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual"):
        trainer(tmp_path, SharpnessAware(gsam)).fit(Double(), loader())


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_a_training_step_that_takes_its_own_batches_is_refused(tmp_path: Path) -> None:
    class Taking(Classifier):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="training_step must take a batch, got dataloader_iter"):
        trainer(tmp_path, SharpnessAware(gsam)).fit(Taking(), loader())


@both_packages
@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "FSDPStrategy"])
def test_strategies_that_hide_the_weights_are_refused(package: Any, name: str) -> None:
    class Derived(getattr(package.strategies, name)):
        pass

    with pytest.raises(ValueError, match=f"strategy must not be {name}"):
        _check_strategy(object.__new__(Derived))
