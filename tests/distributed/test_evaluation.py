"""Every process gets the scores of the whole set."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from surrogap.evaluation import Scores, evaluate
from tests import toy_models
from tests.distributed.processes import Processes, is_failure


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 3, 4, 4, generator=generator)
    y = torch.randint(3, (16,), generator=generator)
    return list(zip(x.split((8, 3, 5)), y.split((8, 3, 5)), strict=True))


def batches_of_this_process(share: list[int]) -> list[tuple[Tensor, Tensor]]:
    """The batches of this process: those whose entry in `share` is its rank."""
    return [b for b, rank in zip(batches(), share, strict=True) if rank == dist.get_rank()]


def shared(share: list[int]) -> Scores:
    return evaluate(toy_models.convnet(), batches_of_this_process(share))


def alone() -> Scores | None:
    return (
        evaluate(toy_models.convnet(), batches(), across_processes=False)
        if dist.get_rank() == 1
        else None
    )


@pytest.mark.parametrize("share", [[0, 1, 0], [1, 0, 0], [1, 1, 1]])
def test_every_process_gets_the_scores_of_the_whole_set(share: list[int], two: Processes) -> None:
    torch.manual_seed(0)
    whole = evaluate(toy_models.convnet(), batches())
    results = two.run(shared, share)
    assert results[0] == results[1]
    assert vars(results[0]) == pytest.approx(vars(whole), rel=1e-6)
    assert results[0].num_samples == 16


def test_one_process_alone(two: Processes) -> None:
    torch.manual_seed(0)
    nobody, one = two.run(alone)
    assert nobody is None
    assert vars(one) == pytest.approx(vars(evaluate(toy_models.convnet(), batches())), rel=1e-6)


def wrapped(share: list[int]) -> tuple[Scores, float]:
    """A DDP model whose statistics differ between processes, as after a training step."""
    model = DistributedDataParallel(toy_models.convnet())
    statistics = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert statistics
    for norm in statistics:
        assert norm.running_mean is not None
        norm.running_mean.fill_(0.1 + dist.get_rank())
    scores = evaluate(model, batches_of_this_process(share))
    assert all(module.training for module in model.modules())
    return scores, float(statistics[0].running_mean.mean())  # type: ignore[union-attr]


@pytest.mark.parametrize("share", [[0, 1, 0], [1, 1, 1]])
def test_ddp_with_unequal_shares_uses_the_first_processes_statistics(
    share: list[int], two: Processes
) -> None:
    torch.manual_seed(0)
    model = toy_models.convnet()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None:
            norm.running_mean.fill_(0.1)
    expected = evaluate(model, batches())
    for scores, mean in two.run(wrapped, share):
        assert vars(scores) == pytest.approx(vars(expected), rel=1e-6)
        assert mean == pytest.approx(0.1)


def mistaken() -> Scores:
    x, y = batches()[0]
    return evaluate(toy_models.convnet(), [(x, y + 3 * dist.get_rank())])


def test_an_error_in_one_process_is_raised_in_all(two: Processes) -> None:
    for result in two.try_run(mistaken):
        assert is_failure(result)
        assert "labels must be classes of the model" in result
        assert "got 8 of 16 that are not" in result
