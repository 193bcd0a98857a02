"""Samplers that are copied or pickled, before, between and while they are read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.loading.sampler.test_elastic import MAKERS
from torch_collate_kit.testing import batch_digest


def read(parts: Any) -> list[Any]:
    return [batch_digest(part) if isinstance(part, list) else part.indices for part in parts]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("num_drawn", [None, 0, 1, 3, 9])
def test_a_copy_goes_on_by_itself(name: str, copied: Callable[[Any], Any], num_drawn: Any) -> None:
    sampler = MAKERS[name](1, 2)
    steps = None
    if num_drawn is not None:
        steps = iter(sampler)
        for _, _ in zip(range(num_drawn), steps, strict=False):
            pass
    other, rest = copied((sampler, steps))
    assert other.state_dict() == sampler.state_dict()
    assert repr(other) == repr(sampler)
    if steps is not None:
        assert rest.state_dict() == steps.state_dict()
        assert read(rest) == read(steps), "the iterator's own copy"
    expected = read(sampler)
    other_state = other.state_dict()
    assert read(other) == expected
    assert other.state_dict() != other_state
    assert other.examples(0, 1).tolist() == sampler.examples(0, 1).tolist()


@pytest.mark.parametrize("name", MAKERS)
def test_iterators_of_one_epoch_do_not_disturb_each_other(name: str) -> None:
    """A DataLoader with workers makes two."""
    sampler, alone = MAKERS[name](1, 2), MAKERS[name](1, 2)
    first, second = iter(sampler), iter(sampler)
    expected = read(alone)
    begun = read([next(first), next(first), next(second), next(first)])
    assert begun == [expected[i] for i in (0, 1, 0, 2)]
    assert read(second) == expected[1:]
    assert read(first) == expected[3:]
