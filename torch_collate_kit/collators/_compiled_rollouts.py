"""A block of rollouts by loops compiled by numba, to the same bytes. Imported on use."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64, void

from torch_collate_kit.batch import Batch
from torch_collate_kit.collators._compiled import TOKEN_IDS, compiled_loop, plain_ids, read_only
from torch_collate_kit.collators._rollouts import Rollouts

__all__ = ["fill_block"]


def fill_block(batch: Batch, rollouts: Rollouts, pad_token_id: int, divisor: int) -> None:
    """Fills what belongs to tokens and to response tokens; not routes, not images."""
    prompts, responses = rollouts.prompt_ids, rollouts.response_ids
    ids = [plain_ids(column.values) for column in (prompts, responses)]
    if ids[0].dtype != ids[1].dtype:
        ids = [flat.astype(np.int64) for flat in ids]
    cells = (batch[name].numpy() for name in ("input_ids", "attention_mask", "position_ids"))
    _fill_tokens(*ids, prompts.offsets, responses.offsets, pad_token_id, *cells)
    _fill_mask(responses.offsets, batch["response_mask"].numpy())
    for name, column in rollouts.fields.items():
        by = np.float32(divisor if name == "loss_mask" else 1)
        values = np.ascontiguousarray(column.values)
        _fill_values(values, responses.offsets, by, batch[name].numpy())


@compiled_loop(
    *(
        void(
            read_only(token_id),
            read_only(token_id),
            read_only(int64),
            read_only(int64),
            int64,
            int64[:, ::1],
            int64[:, ::1],
            int64[:, ::1],
        )
        for token_id in TOKEN_IDS
    )
)
def _fill_tokens(
    prompts: Any,
    responses: Any,
    prompt_offsets: Any,
    response_offsets: Any,
    pad_token_id: Any,
    input_ids: Any,
    mask: Any,
    positions: Any,
) -> None:
    width = input_ids.shape[1]
    for row in range(len(input_ids)):
        prompt = prompts[prompt_offsets[row] : prompt_offsets[row + 1]]
        response = responses[response_offsets[row] : response_offsets[row + 1]]
        middle = width - len(response)
        start = middle - len(prompt)
        input_ids[row, :start] = pad_token_id
        out = input_ids[row, start:middle]
        for i in range(len(out)):
            out[i] = np.int64(prompt[i])
        out = input_ids[row, middle:]
        for i in range(len(out)):
            out[i] = np.int64(response[i])
        mask[row, :start] = 0
        mask[row, start:] = 1
        positions[row, :start] = 0
        out = positions[row, start:]
        for i in range(len(out)):
            out[i] = i


@compiled_loop(void(read_only(int64), int64[:, ::1]))
def _fill_mask(offsets: Any, out: Any) -> None:
    for row in range(len(out)):
        first = out.shape[1] - (offsets[row + 1] - offsets[row])
        out[row, :first] = 0
        out[row, first:] = 1


@compiled_loop(void(read_only(float32), read_only(int64), float32, float32[:, ::1]))
def _fill_values(values: Any, offsets: Any, divisor: Any, out: Any) -> None:
    for row in range(len(out)):
        given = values[offsets[row] : offsets[row + 1]]
        first = out.shape[1] - len(given)
        out[row, :first] = 0
        rest = out[row, first:]
        for i in range(len(rest)):
            rest[i] = given[i] / divisor
