"""What MixedSampler refuses, and in which words (states: test_errors.py)."""

from __future__ import annotations

import re

import pytest

from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import MixedSampler

BAD_ARGUMENTS = [
    ({"sources": []}, ValueError, "sources must be a sequence of at least one dataset or number"),
    ({"sources": [10, 0]}, ValueError, "sources[1] must be at least 1, got 0; an empty dataset"),
    ({"sources": [[], [1]]}, ValueError, "len(sources[0]) must be at least 1, got 0; an empty"),
    ({"weights": 3}, TypeError, "weights must be a sequence with a number for each source, got 3"),
    ({"weights": [1]}, ValueError, "weights must have one number for each of the 2 sources, got "),
    ({"weights": [1, 0]}, ValueError, "weights[1] must be a finite number above 0, got 0; leave"),
    ({"weights": [1, float("nan")]}, ValueError, "weights[1] must be a finite number above 0, got"),
    ({"weights": ["1", 1]}, ValueError, "weights[0] must be a finite number above 0, got '1'"),
    ({"by": "rows"}, ValueError, "by must be one of 'examples', 'tokens'; got 'rows'"),
    ({"by": "examples", "lengths": [[1], [2]]}, ValueError, "lengths are used by='tokens' only, "),
    ({"by": "tokens"}, ValueError, "by='tokens' needs the length of every example, and"),
    ({"by": "tokens", "lengths": [[1] * 10]}, ValueError, "lengths must have one entry for each "),
    (
        {"by": "tokens", "lengths": [[1] * 10, [2] * 4]},
        ValueError,
        "lengths[1] must have one int for each of the 5 examples of sources[1], got 4",
    ),
    (
        {"by": "tokens", "lengths": [[1] * 10, [2, 0, 2, 2, 2]]},
        DataError,
        "lengths[1]: example 1 has length 0, but a length must be at least 1",
    ),
    (
        {"by": "tokens", "lengths": [[1] * 10, [0.5] * 5]},
        TypeError,
        "lengths[1]: lengths must be integers, got dtype float64",
    ),
    ({"num_steps": 3, "stop": "all"}, ValueError, "num_steps=3 and stop='all' both say when an e"),
    ({"stop": "last"}, ValueError, "stop must be one of None, 'first', 'all'; got 'last'"),
    ({"batch_size": 64}, ValueError, "a source ends after 15 examples, fewer than"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        MixedSampler(**{"sources": [10, 5], "batch_size": 4, **options})
