"""No test of a loader may hang, or leave a thread or a worker process."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from multiprocessing import active_children

import pytest

from tests.loading.hang_guard import fails_when_it_hangs, our_threads


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    if active_children():
        gc.collect()  # an iterator of an earlier test of other files, not collected yet
    earlier = active_children()
    with fails_when_it_hangs():
        yield
    assert our_threads() == []
    assert [child for child in active_children() if child not in earlier] == []


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What loaders log meanwhile."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("torch_collate_kit.loading")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
