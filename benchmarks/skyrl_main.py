"""The collation of SkyRL's main branch, written again from its description (August 2026).

It stands in where there is no checkout to load (peers.py): arrays of NumPy filled by one slice per
example and field, each converted to a tensor once, in a dict. Its collators log and check little
else, so the loops are what takes time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from row_by_row import first_fit

__all__ = ["packed", "padded", "rollouts"]

Examples = Sequence[Mapping[str, Any]]  # with num_actions and the loss_mask of these
_VALUES = ("loss_mask", "rewards", "logprobs")


def packed(examples: Examples, max_tokens: int) -> dict[str, Any]:
    """Rows by first fit decreasing; the mask of cell p is of the token that p predicts."""
    ids = [np.asarray(example["input_ids"], dtype=np.int64) for example in examples]
    masks = []
    for example, row in zip(examples, ids, strict=True):
        mask = np.zeros(len(row), dtype=np.float32)
        mask[len(row) - example["num_actions"] :] = np.asarray(example["loss_mask"], np.float32)
        masks.append(mask)
    rows = first_fit([len(row) for row in ids], max_tokens)
    width = max(sum(len(ids[i]) for i in row) for row in rows)
    sequences = np.zeros((len(rows), width), dtype=np.int64)
    attention_mask = np.zeros((len(rows), width), dtype=np.int64)
    loss_mask = np.zeros((len(rows), width - 1), dtype=np.float32)
    for r, row in enumerate(rows):
        start = 0
        for i in row:
            end = start + len(ids[i])
            sequences[r, start:end] = ids[i]
            attention_mask[r, start:end] = 1
            loss_mask[r, start : end - 1] = masks[i][1:]
            start = end
    loss_mask *= 1 / max(int(loss_mask.sum()), 1)
    lengths = [torch.tensor([len(ids[i]) for i in row]) for row in rows]
    return {**_tensors(sequences, attention_mask, loss_mask), "sub_seq_lengths": lengths}


def padded(examples: Examples, *, normalized: bool = True) -> dict[str, Any]:
    """Left-padded rows, and the loss mask of the last tokens, int64, divided if ``normalized``."""
    width = max(len(example["input_ids"]) for example in examples)
    actions = max(example["num_actions"] for example in examples)
    sequences = np.zeros((len(examples), width), dtype=np.int64)
    sequences.fill(0)  # the pad id
    attention_mask = np.zeros((len(examples), width), dtype=np.int64)
    loss_mask = np.zeros((len(examples), actions), dtype=np.int64)
    for i, example in enumerate(examples):
        pads = width - len(example["input_ids"])
        sequences[i, pads:] = example["input_ids"]
        attention_mask[i, pads:] = example["attention_mask"]
        loss_mask[i, actions - example["num_actions"] :] = example["loss_mask"]
    fields = _tensors(sequences, attention_mask, loss_mask)
    if normalized:
        count = max(fields["loss_mask"].sum().item(), 1)
        fields["loss_mask"] = fields["loss_mask"].float() / count
    return fields


def rollouts(examples: Examples) -> dict[str, Any]:
    """One block of prompts and responses, left-padded, and right-aligned values of responses."""
    prompts, responses = (
        np.array([len(example[name]) for example in examples])
        for name in ("prompt_ids", "response_ids")
    )
    width, actions = int((prompts + responses).max()), int(responses.max())
    sequences = np.full((len(examples), width), 0, dtype=np.int64)
    for i, example in enumerate(examples):
        response = width - len(example["response_ids"])
        sequences[i, response - len(example["prompt_ids"]) : response] = example["prompt_ids"]
        sequences[i, response:] = example["response_ids"]
    pads, pads_of_actions = width - prompts - responses, actions - responses
    attention_mask = (np.arange(width)[None] >= pads[:, None]).astype(np.int64)
    response_mask = (np.arange(actions)[None] >= pads_of_actions[:, None]).astype(np.int64)
    values = {name: np.zeros((len(examples), actions), dtype=np.float32) for name in _VALUES}
    for name, array in values.items():
        for i, example in enumerate(examples):
            array[i, actions - len(example[name]) :] = example[name]
    names = (sequences, attention_mask, values.pop("loss_mask"))
    others = {"response_mask": response_mask, **values}
    return _tensors(*names) | {name: torch.from_numpy(array) for name, array in others.items()}


def _tensors(*arrays: np.ndarray) -> dict[str, Any]:
    names = ("sequences", "attention_mask", "loss_mask")
    return {name: torch.from_numpy(of) for name, of in zip(names, arrays, strict=True)}
