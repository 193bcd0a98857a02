"""``f(**batch)`` of packed rows raises, in every form of the call; other readings do not."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from torch_collate_kit import PackedCollator, PaddedCollator
from torch_collate_kit.batch import Batch

EXAMPLES = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
PACKED = PackedCollator(0, max_tokens=8)(EXAMPLES)
PAIR = [{"input_ids": [[5, 6], [5, 7]], "loss_mask": [[0, 1], [0, 1]]}]
ROWS = {
    "packed": PACKED,
    "a slice": PACKED[0:1],
    "sent and changed": pickle.loads(pickle.dumps(PACKED)).with_fields(x=torch.zeros(1, 2)),
    "trees": PackedCollator(0, max_tokens=8, share_prefixes=True)(PAIR),
    "a shard": PackedCollator(0, max_tokens=8)(EXAMPLES).context_shard(0, 1),
    "built again": Batch(dict(PACKED), row_metadata=PACKED.row_metadata),
}


def given(*args: Any, **fields: Any) -> list[str]:
    return list(fields)


class Model(nn.Module):
    def forward(self, **fields: Any) -> list[str]:
        return list(fields)

    def method(self, *args: Any, **fields: Any) -> list[str]:
        return list(fields)


FORMS: dict[str, Callable[[Any], Any]] = {
    "a function": lambda batch: given(**batch),
    "with a keyword": lambda batch: given(a=1, **batch),
    "with a keyword after": lambda batch: given(**batch, a=1),
    "with arguments": lambda batch: given(*(1, 2), **batch),
    "with two mappings": lambda batch: given(**{"b": 1}, **batch),
    "a module": lambda batch: Model()(**batch),
    "a method": lambda batch: Model().method(1, **batch),
    "partial": lambda batch: partial(given, **batch)(),
    "a type": lambda batch: dict(**batch),
    "in a list": lambda batch: [given(**each) for each in [batch]],
    "in a generator": lambda batch: next(given(**each) for each in [batch]),
}
READINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "dict with a keyword": lambda batch: dict(batch, a=1),
    "braces": lambda batch: {**batch},
    "braces in a call": lambda batch: given(**{**batch}),
    "dict in a call": lambda batch: given(**dict(batch)),
    "keys": lambda batch: list(batch.keys()),
    "keys in a call": lambda batch: given(*batch.keys(), a=batch.keys(), **{"b": batch.keys()}),
    "items": lambda batch: dict(batch.items()),
    "update": lambda batch: {}.update(batch),
    "a comprehension": lambda batch: {name: batch[name] for name in batch.keys()},  # noqa: SIM118
    "inputs in a call": lambda batch: Model()(**{name: batch[name] for name in batch}),
}


def check(batch: Batch) -> None:
    for name, form in FORMS.items():
        with pytest.raises(TypeError, match=r"model\(\*\*batch.model_inputs\(model\)\), or.*dict"):
            raise AssertionError(f"{name}: {form(batch)}")
    for reading in READINGS.values():
        reading(batch)


@pytest.mark.parametrize("batch", ROWS.values(), ids=ROWS)
def test_packed_rows_and_shards_are_not_unpacked_into_a_call(batch):
    check(batch)


def test_in_hot_loops_and_under_a_tracer():
    form, reading = FORMS["a function"], READINGS["braces"]
    for _ in range(3000):  # the interpreter specializes the code of both
        with pytest.raises(TypeError, match="one text"):
            form(PACKED)
        reading(PACKED)
    tracer = sys.gettrace()
    for switch in (sys.settrace, sys.setprofile):
        try:
            switch(lambda *_: lambda *_: None)
            check(PACKED)
        finally:
            sys.setprofile(None)
            sys.settrace(tracer)


def test_padded_rows_are_as_they_were():
    padded = PaddedCollator(0)(EXAMPLES)
    for batch in (padded, padded[1:], Batch({"x": torch.zeros(1, 2)})):
        for form in FORMS.values():
            assert next(iter(batch)) in str(form(batch))
