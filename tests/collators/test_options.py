"""Options of every public constructor: NumPy integers are integers, and only bools are bools."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.building import mixed_sampler, packed_collator, packed_sampler, packed_stream
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.loading import PrefetchingSampler
from torch_collate_kit.packing import PackingOptions, ParallelLayout, pack

INTEGERS = [np.int64, np.int32, np.uint8]
EXAMPLES = [{"input_ids": [1] * (1 + i % 60)} for i in range(600)]  # more than 256 KB of fields
ROLLOUTS = [{"prompt_ids": [1], "response_ids": [2], "rewards": 1.0, "loss_mask": [1]}]


def _layout(n: Callable[[int], Any]) -> ParallelLayout:
    return ParallelLayout(dp=n(2), tp=n(2), cp=n(2))


def _packed(n: Callable[[int], Any]) -> Any:
    options = {"max_tokens": n(200), "max_sequences_per_row": n(3)}
    collate = packed_collator(n(7), parallel=_layout(n), fixed_width=True, **options)
    return collate(EXAMPLES), collate.packing


def _stream(n: Callable[[int], Any]) -> Any:
    options = {"max_sequences_per_row": n(3), "dp_rank": n(0)}
    dataset = packed_stream(
        EXAMPLES,
        tokenizer=0,
        max_tokens=n(200),
        buffer_size=n(100),
        rows=n(2),
        dp_size=2,
        **options,
    )
    return next(iter(dataset)), json.dumps(dataset.state_dict())


def _packed_sampler(n: Callable[[int], Any]) -> str:
    options = {"max_tokens": n(200), "max_sequences_per_row": n(2), "dp_rank": n(1), "seed": n(3)}
    sampler = packed_sampler([3, 2, 4], batch_size=n(2), parallel=_layout(n), **options)
    return json.dumps(sampler.state_dict())


USES: dict[str, Callable[[Callable[[int], Any]], Any]] = {
    "ParallelLayout": _layout,
    "PackedCollator": _packed,
    "PaddedCollator": lambda n: PaddedCollator(n(7), pad_to_multiple_of=n(200),
     max_length=n(64))(EXAMPLES),
    "RolloutCollator": lambda n: RolloutCollator(n(7), max_length=n(200))(ROLLOUTS),
    "PackedIterableDataset": _stream,
    "PackedBatchSampler": _packed_sampler,
    "PrefetchingSampler": lambda n: json.dumps(PrefetchingSampler(n(8), batch_size=n(2), seed=n(3),
     dp_rank=n(0), dp_size=n(2)).state_dict()),
    "MixedSampler": lambda n: json.dumps(mixed_sampler([n(9), n(4)], batch_size=n(2),
     seed=n(3), dp_rank=n(0), dp_size=n(1)).state_dict()),
    "pack": lambda n: (pack([3, 4, 9], packing=PackingOptions(n(200),
     max_sequences_per_row=n(2))).bins),
    "Batch.pad_rows": lambda n: PaddedCollator(0)(EXAMPLES).pad_rows(multiple_of=n(7)),
    "Batch.chunk": lambda n: PaddedCollator(0)(EXAMPLES).chunk(n(3)),
}  # fmt: skip


def _plain(value: Any) -> Any:
    """Metadata of numbers by type too: 8 and np.int64(8) are equal."""
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if isinstance(value, Batch):
        return {k: type(v) for k, v in value.metadata.items()}
    return type(value)


@pytest.mark.parametrize("integer", INTEGERS)
@pytest.mark.parametrize("name", USES)
def test_numpy_integers_give_what_python_ints_give(name, integer):
    use = USES[name]
    found, expected = use(integer), use(int)
    assert found == expected
    assert _plain(found) == _plain(expected)


def test_a_collator_that_was_sent_to_a_worker_gives_the_same() -> None:
    for collate in (PaddedCollator(0), packed_collator(0, max_tokens=64, parallel=_layout(int))):
        assert pickle.loads(pickle.dumps(collate))(EXAMPLES) == collate(EXAMPLES)


COLLATORS = {
    "packed": lambda **options: PackedCollator(0, max_tokens=8, **options),
    "padded": lambda **options: PaddedCollator(0, **options),
    "rollout": lambda **options: RolloutCollator(0, **options),
    "stream": lambda **options: packed_stream([], tokenizer=0, max_tokens=8, **options),
    "inputs": lambda **options: PaddedCollator(0)([{"input_ids": [5]}]).model_inputs(**options),
}


@pytest.mark.parametrize("value", ["no", "False", 0, 1, None, np.False_])
@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("packed", "normalize_loss"),
        ("packed", "fixed_width"),
        ("packed", "train_all"),
        ("padded", "normalize_loss"),
        ("padded", "train_all"),
        ("rollout", "normalize_loss"),
        ("stream", "normalize_loss"),
        ("stream", "fixed_width"),
        ("stream", "train_all"),
        ("inputs", "labels"),
    ],
)
def test_only_bools_are_bools(kind, option, value):
    with pytest.raises(TypeError) as caught:
        COLLATORS[kind](**{option: value})
    assert str(caught.value) == f"{option} must be True or False, got {value!r}"
