"""The table of bad inputs: what is given and what comes back, as in docs/contract.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.packing import ParallelLayout, pack
from torch_collate_kit.ragged import Ragged

GOOD = {"input_ids": [5, 6, 7]}


class _NoPad:
    pad_token_id = None


class BadInput(NamedTuple):
    given: str
    call: Callable[[], Any]


def _collated(*examples: Any, **settings: Any) -> Callable[[], Any]:
    """Both collators must say the same, so the packed one is tried where the padded one passes."""

    def call() -> Any:
        PackedCollator(0, max_tokens=8, **settings)(list(examples))

    return call


def _example(**keys: Any) -> Callable[[], Any]:
    return _collated({**GOOD, **keys})


def _padded(*examples: Any, **settings: Any) -> Callable[[], Any]:
    return lambda: PaddedCollator(0, **settings)(list(examples))


BAD_INPUTS = [
    BadInput("an empty list of examples", _collated()),
    BadInput("an example without tokens", _collated(GOOD, {"input_ids": []})),
    BadInput("no `input_ids`", _collated({"text": "hello"})),
    BadInput("an example that is not a mapping", _collated([5, 6, 7])),
    BadInput("one example without its list", lambda: PaddedCollator(0)(GOOD)),
    BadInput("a string", lambda: PaddedCollator(0)("hello")),
    BadInput("`input_ids` that is None", _collated(GOOD, {"input_ids": None})),
    BadInput("a string as ids", _collated({"input_ids": "hello"})),
    BadInput("a float in a list of ids", _collated(GOOD, {"input_ids": [5, 6.5]})),
    BadInput("a float array of ids", _collated({"input_ids": np.array([5.0, 6.0])})),
    BadInput("a bool tensor of ids", _collated({"input_ids": torch.tensor([True, False])})),
    BadInput("a string in a list of ids", _collated({"input_ids": [5, "6"]})),
    BadInput("an id over 64 bits", _collated({"input_ids": [2**64]})),
    BadInput("a negative id", _collated(GOOD, {"input_ids": [5, -100, 7]})),
    BadInput("nested ids", _collated({"input_ids": [[5, 6, 7]]})),
    BadInput("a 2-D array", _collated(GOOD, {"input_ids": np.ones((1, 3), dtype=int)})),
    BadInput("a 2-D tensor", _collated({"input_ids": torch.ones(2, 3, dtype=torch.long)})),
    BadInput("a short `loss_mask`", _example(loss_mask=[1, 1])),
    BadInput("a long `labels`", _example(labels=[5, 6, 7, 8])),
    BadInput("a short `assistant_masks`", _example(assistant_masks=[1])),
    BadInput("a long `completion_mask`", _example(completion_mask=[1, 1, 1, 1])),
    BadInput("a `loss_mask` unlike `num_actions`", _example(loss_mask=[1, 1, 1], num_actions=2)),
    BadInput("`num_actions` over the length", _example(loss_mask=[1] * 4, num_actions=4)),
    BadInput("`num_actions` that is a float", _example(loss_mask=[1], num_actions=1.0)),
    BadInput("`num_actions` without `loss_mask`", _example(num_actions=2)),
    BadInput("two targets", _example(labels=[-100, 6, 7], loss_mask=[0, 1, 1])),
    BadInput("a label of -1", _example(labels=[-100, -1, 7])),
    BadInput("a weight that is NaN", _example(loss_mask=[0, 1, float("nan")])),
    BadInput("a negative weight", _example(loss_mask=np.array([0, -1, 1]))),
    BadInput("a mask of strings", _example(loss_mask=["a", "b", "c"])),
    BadInput("a mask that is None", _example(loss_mask=None)),
    BadInput("mixed keys", _collated({**GOOD, "labels": [5, 6, 7]}, GOOD)),
    BadInput("padded examples", _example(attention_mask=[0, 1, 1])),
    BadInput("a short `attention_mask`", _example(attention_mask=[1, 1])),
    BadInput("an example over a row", _collated(GOOD, {"input_ids": list(range(9))})),
    BadInput("an example over `max_length`", _padded(GOOD, {"input_ids": [5] * 9}, max_length=8)),
    BadInput(
        "a column of another length",
        lambda: PaddedCollator(0)(
            {"input_ids": Ragged.from_rows([[5, 6], [7]]), "labels": Ragged.from_rows([[5, 6]])}
        ),
    ),
    BadInput(
        "a column of 2-D values",
        lambda: PaddedCollator(0)({"input_ids": Ragged(np.ones((2, 2), dtype=int), [0, 2])}),
    ),
    BadInput("a tokenizer without a pad token", lambda: PaddedCollator(_NoPad())),
    BadInput("a model instead of a tokenizer", lambda: PaddedCollator(torch.nn.Linear(1, 1))),
    BadInput("a negative pad id", lambda: PaddedCollator(-100)),
    BadInput(
        "`max_tokens` under the alignment",
        lambda: PackedCollator(0, max_tokens=8, parallel=ParallelLayout(tp=4, cp=2)),
    ),
    BadInput("`max_tokens` of 0", lambda: PackedCollator(0, max_tokens=0)),
    BadInput("an unknown strategy", lambda: PackedCollator(0, max_tokens=8, strategy="bfd")),
    BadInput("an unknown overflow", lambda: PackedCollator(0, max_tokens=8, overflow="cut")),
    BadInput("an unknown balance", lambda: PackedCollator(0, max_tokens=8, balance="flops")),
    BadInput("an unknown side", lambda: PaddedCollator(0, padding_side="middle")),
    BadInput("a multiple of 0", lambda: PaddedCollator(0, pad_to_multiple_of=0)),
    BadInput("a data-parallel size of 0", lambda: ParallelLayout(dp=0)),
    BadInput("float lengths", lambda: pack([3.0, 4.0], 8)),
    BadInput("a length of 0", lambda: pack([3, 0], 8)),
    BadInput("nested lengths", lambda: pack([[3], [4]], 8)),
    BadInput("an attention that is not known", lambda: _batch().model_inputs("flash")),
    BadInput("rows that do not divide", lambda: _batch().chunk(2)),
    BadInput("a row by its number", lambda: _batch()[0]),
]


def _batch() -> Batch:
    batch = PackedCollator(0, max_tokens=8)([GOOD])
    assert isinstance(batch, Batch)
    return batch


def table() -> str:
    """The Markdown table of docs/contract.md: ``python -m tests.collators.bad_inputs``."""
    rows = ["| you give | you get |", "| --- | --- |"]
    for case in BAD_INPUTS:
        try:
            case.call()
        except (TypeError, ValueError) as error:
            message = str(error).replace("|", "\\|")
            rows.append(f"| {case.given} | `{type(error).__name__}`: {message} |")
        else:
            raise AssertionError(f"{case.given}: nothing was raised")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
