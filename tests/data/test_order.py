"""The order of the images, and its distribution over processes."""

import itertools
from typing import Any

import pytest
import torch

from surrogap.data.order import Order

WORLDS = list(itertools.product((2, 3, 5), (1, 2, 4)))


@pytest.mark.parametrize(("batch", "world"), WORLDS)
def test_kept_images_come_once_and_in_equally_many_batches(batch: int, world: int) -> None:
    for number in range(world, 45):
        orders = [Order(number, batch, rank, world, drop_last=False) for rank in range(world)]
        assert {len(order) for order in orders} == {-(-number // (batch * world))}
        indices = [order.indices(i) for order in orders for i in range(len(order))]
        assert all(0 < len(mine) <= batch for mine in indices)
        assert sorted(torch.cat(indices).tolist()) == list(range(number))


@pytest.mark.parametrize(("batch", "world"), WORLDS)
def test_many_processes_take_the_steps_of_one(batch: int, world: int) -> None:
    for number in range(batch * world, 45):
        one = Order(number, batch * world)
        orders = [Order(number, batch, rank, world) for rank in range(world)]
        assert {len(order) for order in orders} == {len(one)} == {number // (batch * world)}
        for i in range(len(one)):
            assert torch.equal(torch.cat([order.indices(i) for order in orders]), one.indices(i))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def images(seed: int, epoch: int, **world: int) -> list[int]:
        torch.rand(1)  # the global generator has no effect
        return Order(50, 2, seed=seed, **world).images(epoch).tolist()

    assert images(3, 1) == images(3, 1) == images(3, 1, rank=1, world_size=4)
    assert sorted(images(3, 1)) == list(range(50))
    assert len({tuple(images(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert Order(5, 2, shuffle=False).images(7).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0. Pass a number such"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an integer, got 2.0"),
        ({"batch_size": True}, TypeError, "batch_size must be an integer, got True"),
        ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"rank": -1}, ValueError, "rank must be at least 0, got -1"),
        ({"rank": 2}, ValueError, "rank must be below world_size, got rank=2 and world_size=2"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        (
            {"batch_size": 5},
            ValueError,
            "batch_size must leave a full batch for each process, got 9 images for 2 processes "
            "with batch_size=5. Pass a smaller one.",
        ),
        (
            {"num_images": 1, "drop_last": False},
            ValueError,
            "batch_size must leave an image for each process, got 1 images .* Use fewer processes.",
        ),
        (
            {"batch_size": 1, "drop_last": False},
            ValueError,
            "batch_size must be at least 2 to share 9 images among 2 processes, got 1. Pass 2,",
        ),
    ],
)
def test_bad_orders(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    good: dict[str, Any] = {"num_images": 9, "batch_size": 2, "world_size": 2}
    with pytest.raises(error, match=message):
        Order(**{**good, **changes})
