"""Batches from a stream of their own: the waits that keep their memory valid, in order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from surrogap.data.streams import on_side_stream


class Recorder:
    """Stands for the two streams and the tensors of a batch, and lists what is asked of them."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.events = events

    def wait_stream(self, other: "Recorder") -> None:
        self.events.append(f"{self.name} waits for {other.name}")

    def record_stream(self, stream: "Recorder") -> None:
        self.events.append(f"{self.name} is used by {stream.name}")


def test_a_batch_is_made_on_the_side_and_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    side, steps = Recorder("side", events), Recorder("steps", events)
    images: Any = Recorder("images", events)
    labels: Any = Recorder("labels", events)

    @contextmanager
    def stream(chosen: Recorder) -> Iterator[None]:
        events.append(f"enter {chosen.name}")
        yield
        events.append("leave")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    monkeypatch.setattr(torch.cuda, "stream", stream)

    def batches() -> Iterator[Any]:
        events.append("make")
        yield images, labels

    for batch in on_side_stream(batches(), torch.device("cuda")):
        assert batch == (images, labels)
        events.append("step")
    assert events == [
        "side waits for steps",  # the images of the set may be copied in the stream of the steps
        "enter side",
        "make",
        "leave",
        "steps waits for side",
        "images is used by steps",  # else the next batch may overwrite it during the step
        "labels is used by steps",
        "step",
        "enter side",
        "leave",
    ]
