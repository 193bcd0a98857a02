"""The strongest plain version: NumPy, arrays allocated once, a slice assignment per field and row.

What somebody writes who knows NumPy and has no library: the batch contract's fields, the same
values and dtypes as the collators of the kit, no checks of the input. Two ways to fill rows:
first fit, a Python loop over the rows, and best fit, with the free spaces kept sorted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torch_collate_kit import Batch

__all__ = ["best_fit", "check_equal", "first_fit", "packed", "padded", "rollouts"]

Example = Mapping[str, Any]  # input_ids and loss_mask, as lists or ndarrays
Fill = Callable[[Sequence[int], int], list[list[int]]]
IGNORE_INDEX = -100
ROLLOUT_CELLS = ("input_ids", "attention_mask", "position_ids")
ROLLOUT_VALUES = {"rewards": "rewards", "loss_mask": "loss_mask", "logprobs": "rollout_logprobs"}


def first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Longest first, each into the first row with room."""
    rows: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[i]
        for row, space in enumerate(free):
            if space >= length:
                free[row] = space - length
                rows[row].append(i)
                break
        else:
            free.append(max_tokens - length)
            rows.append([i])
    return rows


def best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Longest first, each into the fullest row with room: a bisection, no loop over the rows."""
    rows: list[list[int]] = []
    spaces: list[int] = []  # sorted free spaces, each with its rows, first come first served
    rows_with: dict[int, deque[list[int]]] = {}
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[i]
        at = bisect_left(spaces, length)
        if at == len(spaces):
            space, row = max_tokens, []
            rows.append(row)
        else:
            space = spaces[at]
            row = rows_with[space].popleft()
            if not rows_with[space]:
                del spaces[at], rows_with[space]
        row.append(i)
        left = space - length
        if left not in rows_with:
            insort(spaces, left)
            rows_with[left] = deque()
        rows_with[left].append(row)
    return rows


def packed(examples: Sequence[Example], *, max_tokens: int, fill: Fill) -> dict[str, Any]:
    """The fields of ``PackedCollator(0, max_tokens=max_tokens)``."""
    lengths = [len(example["input_ids"]) for example in examples]
    rows = fill(lengths, max_tokens)
    used = [sum(lengths[i] for i in row) for row in rows]
    shape = len(rows), max(used)
    input_ids = np.zeros(shape, dtype=np.int64)
    position_ids = np.empty(shape, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    loss_mask = np.zeros((shape[0], shape[1] - 1), dtype=np.float32)
    count_up = np.arange(shape[1])
    cu_seq_lens = []
    for r, row in enumerate(rows):
        start, boundaries = 0, [0]
        for i in row:
            example, end = examples[i], start + lengths[i]
            input_ids[r, start:end] = example["input_ids"]
            position_ids[r, start:end] = count_up[: lengths[i]]
            loss_mask[r, start : end - 1] = example["loss_mask"][1:]
            boundaries.append(end)
            start = end
        attention_mask[r, :start] = 1
        position_ids[r, start:] = count_up[: shape[1] - start]
        if start < shape[1]:
            boundaries.append(shape[1])
        cu_seq_lens.append(np.array(boundaries, dtype=np.int32))
    trained = loss_mask != 0
    np.copyto(labels[:, 1:], input_ids[:, 1:], where=trained)
    loss_mask /= np.float32(max(1, np.count_nonzero(trained)))
    return {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.from_numpy(position_ids),
        "attention_mask": torch.from_numpy(attention_mask),
        "labels": torch.from_numpy(labels),
        "loss_mask": torch.from_numpy(loss_mask),
        "sub_seq_lengths": [np.array([lengths[i] for i in row]) for row in rows],
        "cu_seq_lens": cu_seq_lens,
    }


def padded(examples: Sequence[Example]) -> dict[str, Any]:
    """The fields of ``PaddedCollator(0)``."""
    lengths = [len(example["input_ids"]) for example in examples]
    shape = len(examples), max(lengths)
    input_ids = np.zeros(shape, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    weights = np.zeros(shape, dtype=np.float32)
    count_up = np.arange(shape[1])
    for r, example in enumerate(examples):
        start = shape[1] - lengths[r]
        input_ids[r, start:] = example["input_ids"]
        position_ids[r, start:] = count_up[: lengths[r]]
        attention_mask[r, start:] = 1
        weights[r, start + 1 :] = example["loss_mask"][1:]
    trained = weights != 0
    np.copyto(labels, input_ids, where=trained)
    first = np.where(trained.any(axis=1), trained.argmax(axis=1), shape[1])
    loss_mask = weights[:, int(first.min()) :] / np.float32(max(1, np.count_nonzero(trained)))
    return {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.from_numpy(position_ids),
        "attention_mask": torch.from_numpy(attention_mask),
        "labels": torch.from_numpy(labels),
        "loss_mask": torch.from_numpy(loss_mask),
        "sub_seq_lengths": [np.array([length]) for length in lengths],
    }


def rollouts(examples: Sequence[Example]) -> dict[str, Any]:
    """The fields of ``RolloutCollator(0)`` for rollouts with log-probs and a reward per token."""
    prompts = [len(example["prompt_ids"]) for example in examples]
    responses = [len(example["response_ids"]) for example in examples]
    lengths = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    shape, of_responses = (len(examples), max(lengths)), (len(examples), max(responses))
    fields = {name: np.zeros(shape, dtype=np.int64) for name in ROLLOUT_CELLS}
    fields["response_mask"] = np.zeros(of_responses, dtype=np.int64)
    for name in ROLLOUT_VALUES.values():
        fields[name] = np.zeros(of_responses, dtype=np.float32)
    count_up = np.arange(shape[1])
    for r, example in enumerate(examples):
        start, response = shape[1] - lengths[r], shape[1] - responses[r]
        fields["input_ids"][r, start:response] = example["prompt_ids"]
        fields["input_ids"][r, response:] = example["response_ids"]
        fields["attention_mask"][r, start:] = 1
        fields["position_ids"][r, start:] = count_up[: lengths[r]]
        first = of_responses[1] - responses[r]
        fields["response_mask"][r, first:] = 1
        for key, name in ROLLOUT_VALUES.items():
            fields[name][r, first:] = example[key]
    return {name: torch.from_numpy(field) for name, field in fields.items()} | {
        "sub_seq_lengths": [np.array([length]) for length in lengths]
    }


def check_equal(batch: Batch, other: Mapping[str, Any]) -> None:
    """Raises unless both have the same fields, dtypes and values."""
    if set(batch) != set(other):
        raise AssertionError(f"the fields differ: {sorted(set(batch) ^ set(other))}")
    for name, field in batch.items():
        theirs = other[name]
        if isinstance(theirs, list):
            field, theirs = list(field), [torch.from_numpy(row) for row in theirs]
        else:
            field, theirs = [field], [theirs]
        for mine, their in zip(field, theirs, strict=True):
            if mine.dtype != their.dtype or not torch.equal(mine, their):
                raise AssertionError(f"{name} differs: {mine} ({mine.dtype}), {their}")
