"""The collators once more, one token at a time: slow, obvious, and written from the contract alone.

Nothing here imports the package. A batch comes back as a plain dict: tensors for the rectangular
fields, lists of lists for the ragged ones, and `metadata` with lists of lists where the batch has
a `Ragged`. Legend: R rows, W or L width in cells, A columns of `loss_mask`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

IGNORE = -100
_MASKS = ("loss_mask", "assistant_masks", "completion_mask")


class Plan(Protocol):
    """Which piece of which example is in which row; what `PackingPlan` offers."""

    example_indices: Any
    starts: Any
    lengths: Any
    row_offsets: Any
    dropped: Any
    cut: Any


class Segment:
    """One piece of one example with its targets; nothing predicts its first token as a next one."""

    def __init__(
        self, example: Mapping[str, Any], start: int, length: int, targets: Any = "next_token"
    ) -> None:
        weights, labels = example_weights(example)
        self.ids = [int(token) for token in example["input_ids"]][start : start + length]
        self.weights = weights[start : start + length]
        self.labels = labels[start : start + length]
        self.num_actions = len(self.ids)
        if targets == "next_token":
            self.weights[0] = 0.0
            self.labels[0] = IGNORE
            self.num_actions = _num_actions(example, start, len(self.ids))
        elif targets is None:
            self.weights = [0.0] * len(self.ids)
            self.num_actions = 0
        self.num_trained = sum(1 for weight in self.weights if np.float32(weight) != 0)


def example_weights(example: Mapping[str, Any]) -> tuple[list[float], list[int]]:
    """The weight and the label of every token of the whole example, its first token included.

    >>> example_weights({"input_ids": [7, 8, 9], "loss_mask": [0, 2], "num_actions": 2})
    ([0.0, 0.0, 2.0], [-100, -100, 9])
    >>> example_weights({"input_ids": [7, 8], "labels": [5, 6], "weight": 0.5})
    ([0.5, 0.5], [5, 6])
    """
    weights, labels = _weights_of_tokens(example)
    factor = np.float32(example.get("weight", 1))
    weights = [float(np.float32(weight) * factor) for weight in weights]
    return weights, [
        label if weight != 0 else IGNORE for weight, label in zip(weights, labels, strict=True)
    ]


def _weights_of_tokens(example: Mapping[str, Any]) -> tuple[list[float], list[int]]:
    ids = [int(token) for token in example["input_ids"]]
    if "labels" in example:
        labels = [int(label) for label in example["labels"]]
        return [0.0 if label == IGNORE else 1.0 for label in labels], labels
    weights = [1.0] * len(ids)
    for name in _MASKS:
        if name in example:
            weights = [float(weight) for weight in example[name]]
    while len(weights) < len(ids):  # a mask of the last num_actions tokens only
        weights.insert(0, 0.0)
    labels = []
    for token, weight in zip(ids, weights, strict=True):
        labels.append(token if weight != 0 else IGNORE)
    return weights, labels


def alignment(*, tp: int = 1, cp: int = 1, fp8: str | None = None) -> tuple[int, int]:
    """What every sub-sequence, and the width of every row, is padded to a multiple of."""
    align = tp * 2 * cp if cp > 1 else tp
    if fp8 is None:
        return align, align
    each = {"tensorwise": 16, "mxfp8": 32, "nvfp4": 64, "blockwise": 128}[fp8]  # of every rank
    return align, math.lcm(align, each * cp * tp)


def padded_batch(
    examples: Sequence[Mapping[str, Any]],
    *,
    pad_token_id: int,
    padding_side: str = "left",
    pad_to_multiple_of: int | None = None,
    max_length: int | None = None,
    overflow: str = "raise",
    normalize_loss: bool = True,
    targets: Any = "next_token",
) -> dict[str, Any]:
    """One example a row, positions 0 at pads; none longer than `max_length`."""
    kept, lost, segments = [], [], []
    for index, example in enumerate(examples):
        length = len(example["input_ids"])
        if max_length is not None and length > max_length:
            assert overflow != "raise"
            lost.append(index)
            length = max_length
        if index not in lost or overflow == "truncate":
            kept.append(index)
            segments.append(Segment(example, 0, length, targets))
    width = max(len(segment.ids) for segment in segments)
    while pad_to_multiple_of is not None and width % pad_to_multiple_of != 0:
        width += 1
    rows = []
    for segment in segments:
        row = _empty_row(width, pad_token_id)
        first = width - len(segment.ids) if padding_side == "left" else 0
        _write(row, first, segment)
        rows.append(row)
    num_columns = 0
    for segment in segments:
        pads_behind = 0 if padding_side == "left" else width - len(segment.ids)
        if segment.num_actions > 0:
            num_columns = max(num_columns, segment.num_actions + pads_behind)
    if targets == "same_token":
        num_columns = width
    batch = _without_targets(_stack(rows, width, num_columns, normalize_loss), targets)
    batch["sub_seq_lengths"] = [[len(segment.ids)] for segment in segments]
    batch["metadata"] |= {
        "num_examples": len(examples),
        "num_dummy_rows": 0,
        "step_num_tokens": sum(len(segment.ids) for segment in segments),
        "example_indices": [[index] for index in kept],
        "example_starts": [[0] for _ in kept],
        "num_actions": [[segment.num_actions] for segment in segments],
        "num_trained": [[segment.num_trained] for segment in segments],
        "num_dropped": len(lost) if overflow == "drop" else 0,
        "num_cut": len(lost) if overflow == "truncate" else 0,
        "dropped": tuple(lost) if overflow == "drop" else (),
        "cut": tuple(lost) if overflow == "truncate" else (),
    }
    return batch


def packed_batch(
    examples: Sequence[Mapping[str, Any]],
    plan: Plan,
    *,
    pad_token_id: int,
    max_tokens: int,
    align: int = 1,
    row_align: int | None = None,
    fixed_width: bool = False,
    normalize_loss: bool = True,
    targets: Any = "next_token",
) -> dict[str, Any]:
    """The rows of `plan`, cell by cell; a row is aligned segments and then one segment of pads."""
    pieces = rows_of(plan)
    row_align = row_align or align
    width = row_align  # an empty batch still has cells
    for row_pieces in pieces:
        cells = sum(_aligned(length, align) for _, _, length in row_pieces)
        width = max(width, _aligned(cells, row_align))
    if fixed_width:
        width = max_tokens - max_tokens % row_align
    assert width <= max_tokens
    rows = []
    fields: dict[str, list[list[int]]] = {
        "sub_seq_lengths": [],
        "cu_seq_lens": [],
        "example_indices": [],
        "num_actions": [],
        "num_trained": [],
    }
    for row_pieces in pieces:
        row = _empty_row(width, pad_token_id)
        boundaries = [0]
        num_actions = []
        num_trained = []
        for index, start, length in row_pieces:
            segment = Segment(examples[index], start, length, targets)
            _write(row, boundaries[-1], segment)
            for gap in range(length, _aligned(length, align)):  # a gap continues its segment
                row["position_ids"][boundaries[-1] + gap] = gap
            boundaries.append(boundaries[-1] + _aligned(length, align))
            num_actions.append(segment.num_actions)
            num_trained.append(segment.num_trained)
        for cell in range(boundaries[-1], width):  # the tail is a segment of its own
            row["position_ids"][cell] = cell - boundaries[-1]
        if boundaries[-1] < width:
            boundaries.append(width)
        rows.append(row)
        fields["sub_seq_lengths"].append([length for _, _, length in row_pieces])
        fields["cu_seq_lens"].append(boundaries)
        fields["example_indices"].append([index for index, _, _ in row_pieces])
        fields["num_actions"].append(num_actions)
        fields["num_trained"].append(num_trained)
    num_columns = {"next_token": width - 1, "same_token": width, None: 0}[targets]
    batch = _without_targets(_stack(rows, width, num_columns, normalize_loss), targets)
    batch["sub_seq_lengths"] = fields["sub_seq_lengths"]
    batch["cu_seq_lens"] = fields["cu_seq_lens"]
    batch["metadata"] |= {
        "num_examples": len(examples),  # those given: num_dropped counts some of them
        "num_dummy_rows": sum(1 for row_pieces in pieces if not row_pieces),
        "step_num_tokens": sum(sum(row) for row in fields["sub_seq_lengths"]),
        "example_indices": fields["example_indices"],
        "example_starts": [[start for _, start, _ in row_pieces] for row_pieces in pieces],
        "num_actions": fields["num_actions"],
        "num_trained": fields["num_trained"],
        "max_segment_length": [_largest_step(row) for row in fields["cu_seq_lens"]],
        "num_dropped": len(plan.dropped),
        "num_cut": len(plan.cut),
        "dropped": tuple(int(index) for index in plan.dropped),
        "cut": tuple(int(index) for index in plan.cut),
    }
    return batch


class OpenedPlan:
    """A plan of examples that are lists of segments, as a plan of the segments.

    `segments` has, for each example, the lengths of its segments, which are numbered through.
    """

    def __init__(self, plan: Plan, segments: Sequence[Sequence[int]]) -> None:
        self.example_indices: list[int] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.row_offsets = [0]
        self.numbers: list[list[int]] = []  # which of its example's segments, for every row
        self.examples: list[list[int]] = []
        for pieces in rows_of(plan):
            self.numbers.append([])
            self.examples.append([])
            for example, start, length in pieces:
                assert (start, length) == (0, sum(segments[example])), "an example was cut"
                before = sum(len(of) for of in segments[:example])
                for number, tokens in enumerate(segments[example]):
                    self.example_indices.append(before + number)
                    self.starts.append(0)
                    self.lengths.append(tokens)
                    self.numbers[-1].append(number)
                    self.examples[-1].append(example)
            self.row_offsets.append(len(self.lengths))
        self.dropped, self.cut = plan.dropped, plan.cut


def packed_segments(
    examples: Sequence[Sequence[Mapping[str, Any]]], plan: Plan, **options: Any
) -> dict[str, Any]:
    """What `packed_batch` gives of the segments of all examples, which stay in one row."""
    opened = OpenedPlan(plan, [[len(of["input_ids"]) for of in example] for example in examples])
    flat = [segment for example in examples for segment in example]
    batch = packed_batch(flat, opened, **options)
    batch["metadata"] |= {
        "num_examples": len(examples),
        "num_segments": tuple(len(example) for example in examples),
        "example_indices": opened.examples,
        "segment_numbers": opened.numbers,
    }
    return batch


def padded_segments(
    examples: Sequence[Sequence[Mapping[str, Any]]],
    *,
    max_length: int | None = None,
    overflow: str = "raise",
    **options: Any,
) -> dict[str, Any]:
    """A row for each segment; `max_length` limits the tokens of all segments of an example."""
    sizes = [sum(len(segment["input_ids"]) for segment in example) for example in examples]
    lost = [i for i, size in enumerate(sizes) if max_length is not None and size > max_length]
    assert overflow == "drop" or not lost
    kept = [i for i in range(len(examples)) if i not in lost]
    batch = padded_batch([segment for i in kept for segment in examples[i]], **options)
    places = [(i, number) for i in kept for number in range(len(examples[i]))]
    batch["metadata"] |= {
        "num_examples": len(examples),
        "num_segments": tuple(len(example) for example in examples),
        "example_indices": [[i] for i, _ in places],
        "segment_numbers": [[number] for _, number in places],
        "num_dropped": len(lost),
        "dropped": tuple(lost),
    }
    return batch


def rollout_batch(
    rollouts: Sequence[Mapping[str, Any]],
    *,
    pad_token_id: int,
    max_length: int | None = None,
    overflow: str = "raise",
    pad_to_multiple_of: int | None = None,
    normalize_loss: bool = False,
) -> dict[str, Any]:
    """One rollout a row, left-padded; what belongs to response tokens is right-aligned."""
    given, kept, dropped = rollouts, [], []
    for index, rollout in enumerate(rollouts):
        length = len(rollout["prompt_ids"]) + len(rollout["response_ids"])
        is_long = max_length is not None and length > max_length
        (dropped if is_long else kept).append(index)
    assert overflow == "drop" or not dropped
    rollouts = [rollouts[index] for index in kept]
    lengths = [len(rollout["prompt_ids"]) + len(rollout["response_ids"]) for rollout in rollouts]
    width, num_columns = max(lengths), max(len(rollout["response_ids"]) for rollout in rollouts)
    while pad_to_multiple_of is not None and width % pad_to_multiple_of:
        width += 1
    rows = []
    segments = []
    for rollout, length in zip(rollouts, lengths, strict=True):
        row = _empty_row(width, pad_token_id) | _empty_responses(width, rollouts)
        segments.append(Segment(_as_example(rollout), 0, length))
        _write(row, width - length, segments[-1])
        _write_response(row, width - length, rollout)
        rows.append(row)
    batch = _stack(rows, width, num_columns, normalize_loss)
    del batch["labels"]
    batch |= _stack_responses(rows, width, num_columns)
    batch["sub_seq_lengths"] = [[length] for length in lengths]
    batch["metadata"] |= {
        "num_examples": len(given),
        "num_dummy_rows": 0,
        "step_num_tokens": sum(lengths),
        "example_indices": [[index] for index in kept],
        "example_starts": [[0] for _ in rollouts],
        "num_actions": [[len(rollout["response_ids"])] for rollout in rollouts],
        "num_trained": [[segment.num_trained] for segment in segments],
        "num_dropped": len(dropped),
        "num_cut": 0,
        "dropped": tuple(dropped),
        "cut": (),
    }
    per_rollout = {"uid": "uids", "trajectory_id": "trajectory_ids", "is_last_step": "is_last_step"}
    for key, name in per_rollout.items():
        if rollouts[0].get(key) is not None:
            batch["metadata"][name] = [rollout[key] for rollout in rollouts]
    if any(rollout.get("pixel_values") is not None for rollout in given):
        for name in ("pixel_values", "image_grid_thw"):  # ragged: those of a row, or none
            batch[name] = [rollout[name] or [] for rollout in rollouts]
    return batch


def packed_rollouts(
    rollouts: Sequence[Mapping[str, Any]], plan: Plan, *, pad_token_id: int, **options: Any
) -> dict[str, Any]:
    """The rows of `plan`: what `packed_batch` gives, and a cell a token of what rollouts add."""
    examples = [_as_example(rollout) for rollout in rollouts]
    batch = packed_batch(examples, plan, pad_token_id=pad_token_id, **options)
    width = batch["input_ids"].shape[1]
    rows = []
    for row_pieces, boundaries in zip(rows_of(plan), batch["cu_seq_lens"], strict=True):
        row = _empty_responses(width, rollouts)
        for (index, _, _), first in zip(row_pieces, boundaries, strict=False):
            _write_response(row, first, rollouts[index])
        rows.append(row)
    return batch | _stack_responses(rows, width, width - 1)


_RESPONSE_FIELDS = {
    "rewards": "rewards",
    "logprobs": "rollout_logprobs",
    "advantages": "advantages",
}


def _as_example(rollout: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_ids": [*rollout["prompt_ids"], *rollout["response_ids"]],
        "loss_mask": list(rollout["loss_mask"]),
        "num_actions": len(rollout["response_ids"]),
        "weight": rollout.get("weight", 1),
    }


def _empty_responses(width: int, rollouts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    row: dict[str, list[Any]] = {"response_mask": [0] * width}
    for key, name in _RESPONSE_FIELDS.items():
        if key in rollouts[0]:
            row[name] = [0.0] * width
    if "rollout_expert_indices" in rollouts[0]:
        layers, top_k = np.shape(rollouts[0]["rollout_expert_indices"])[1:]
        row["routes"] = [[list(range(top_k))] * layers] * width
        row["is_pad"] = [True] * width
    return row


def _write_response(row: dict[str, list[Any]], first: int, rollout: Mapping[str, Any]) -> None:
    """The rollout starts at cell `first`."""
    num_tokens = len(rollout["response_ids"])
    response = first + len(rollout["prompt_ids"])
    for key, name in _RESPONSE_FIELDS.items():
        if key not in rollout:
            continue
        for token in range(num_tokens):
            value = rollout[key]
            if isinstance(value, list):
                value = value[token]
            elif key == "rewards" and token < num_tokens - 1:
                value = 0.0  # one reward is that of the last token
            row[name][response + token] = float(value)
    for token in range(num_tokens):
        row["response_mask"][response + token] = 1
    for token, route in enumerate(rollout.get("rollout_expert_indices", [])):
        if any(expert != -1 for layer in route for expert in layer):  # else a hole
            row["routes"][first + token] = route
            row["is_pad"][first + token] = False


def _stack_responses(
    rows: list[dict[str, list[Any]]], width: int, num_columns: int
) -> dict[str, torch.Tensor]:
    """Right-aligned: the last `num_columns` cells of every row; routes have all cells."""
    fields = {}
    for name in ("response_mask", *_RESPONSE_FIELDS.values()):
        if name in rows[0]:
            dtype = torch.int64 if name == "response_mask" else torch.float32
            values = [row[name][width - num_columns :] for row in rows]
            fields[name] = torch.tensor(values, dtype=dtype).reshape(len(rows), num_columns)
    if "routes" in rows[0]:
        routes = torch.tensor([row["routes"] for row in rows], dtype=torch.int16)
        fields["rollout_expert_indices"] = routes
        fields["router_padding_mask"] = torch.tensor([row["is_pad"] for row in rows])
    return fields


def rows_of(plan: Plan) -> list[list[tuple[int, int, int]]]:
    """The pieces of every row: (example index, first token inside the example, length)."""
    rows = []
    for row in range(len(plan.row_offsets) - 1):
        pieces = []
        for piece in range(int(plan.row_offsets[row]), int(plan.row_offsets[row + 1])):
            index, start = int(plan.example_indices[piece]), int(plan.starts[piece])
            pieces.append((index, start, int(plan.lengths[piece])))
        rows.append(pieces)
    return rows


def _num_actions(example: Mapping[str, Any], start: int, length: int) -> int:
    """Response tokens of a piece, its first token excluded, which nothing predicts.

    The response of the whole example is as given, else from its first trained token to its end.
    """
    weights, _ = example_weights(example)
    first = next((token for token, w in enumerate(weights) if token and w != 0), len(weights))
    if "num_actions" in example:
        first = len(weights) - int(example["num_actions"])
    return sum(1 for token in range(start + 1, start + length) if token >= first)


def trie(segments: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int], list[int], int]:
    """The cells of every segment's tokens, its depth and parent, and the cells of all.

    A token gets a cell of its own where no earlier segment has begun with all up to it.

    >>> trie([[5, 6, 7], [5, 6, 8, 9], [5, 6]])
    ([[0, 1, 2], [0, 1, 3, 4], [0, 1]], [0, 2, 2], [-1, 1, 1], 5)
    """
    cells: dict[tuple[int, ...], int] = {}
    paths, depths, parents = [], [], []
    for segment in segments:
        depth, path = 0, []
        for end in range(1, len(segment) + 1):
            beginning = tuple(int(token) for token in segment[:end])
            if beginning in cells:
                depth = end
            else:
                cells[beginning] = len(cells)
            path.append(cells[beginning])
        paths.append(path)
        depths.append(depth)
        parents.append(path[depth - 1] if depth else -1)
    return paths, depths, parents, len(cells)


def mixed_order(
    units: Sequence[Sequence[int]],
    weights: Sequence[Any],
    counts: Sequence[int] = (),
    most: int | None = None,
) -> list[tuple[int, int]]:
    """The next entries of a mixture, each as (source, number), after ``counts`` of each source.

    ``units`` of each entry are its tokens, or 1.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    at, taken, found = list(counts) or [0] * len(units), [0] * len(units), []
    while most is None or len(found) < most:
        due = {}
        for i, weight in enumerate(exact):
            rest = units[i][at[i] :]
            if weight:
                due[i] = Fraction(2 * taken[i] + (rest[0] if rest else 0)) / weight, not rest, i
        turn = min(due.values(), default=(0, True, 0))[-1]
        if at[turn] == len(units[turn]):
            break
        found.append((turn, at[turn]))
        taken[turn] += units[turn][at[turn]]
        at[turn] += 1
    return found


def context_cells(batch: Mapping[str, Any], rank: int, size: int, layout: str) -> list[list[int]]:
    """The columns of every row that a context rank computes, in its order."""
    width = batch["input_ids"].shape[1]
    rows = []
    for row in range(len(batch["input_ids"])):
        runs = [(0, width)]
        if layout == "zigzag" and "cu_seq_lens" in batch:  # one rank has rows of any layout
            runs = list(itertools.pairwise(batch["cu_seq_lens"][row]))
        columns = []
        for begin, end in runs:
            if layout == "contiguous" or size == 1:
                part = (end - begin) // size
                columns += range(begin + rank * part, begin + (rank + 1) * part)
            else:  # 2 * size parts, of which each rank has one from either end
                part = (end - begin) // (2 * size)
                columns += range(begin + rank * part, begin + (rank + 1) * part)
                columns += range(end - (rank + 1) * part, end - rank * part)
        rows.append(columns)
    return rows


def context_shard(
    batch: Mapping[str, Any],
    rank: int,
    size: int,
    layout: str,
    pads: Mapping[str, float],
    depth: int = 1,
    pad_token_id: int = 9,
) -> dict[str, Any]:
    """The cells of a context rank; what is not an input of the model is where it is predicted.

    `pads` names the declared fields, which have the shape of `input_ids` or of `loss_mask`. At a
    depth k a cell predicts the k-th token after its own, and reads the one before that.
    """
    width = batch["input_ids"].shape[1]
    first_column = width - batch["loss_mask"].shape[1]
    rows = context_cells(batch, rank, size, layout)
    labels = batch.get("labels")
    if labels is None:  # rollouts: the ids where a weight is not 0
        weights = torch.zeros(batch["input_ids"].shape)
        weights[:, first_column:] = batch["loss_mask"]
        labels = torch.where(weights != 0, batch["input_ids"], IGNORE)
    predicts, reads = _predicts(batch, depth), _predicts(batch, depth - 1)
    shard: dict[str, Any] = {"cells": []}
    for row, columns in enumerate(rows):
        shard["cells"] += [row * width + column for column in columns]
    for name in ("input_ids", "position_ids", "attention_mask", "router_padding_mask"):
        if name in batch:
            values = [[batch[name][r][c].item() for c in row] for r, row in enumerate(rows)]
            shard[name] = torch.tensor(values, dtype=batch[name].dtype)
    if depth > 1:
        for r, row in enumerate(rows):
            for i, c in enumerate(row):
                read = batch["input_ids"][r][c + depth - 1] if reads[r][c] else pad_token_id
                shard["input_ids"][r][i] = read
    pads = {"targets": IGNORE, "loss_mask": 0, "response_mask": 0, **pads}
    pads |= dict.fromkeys(_RESPONSE_FIELDS.values(), 0)
    for name, pad in pads.items():
        field = labels if name == "targets" else batch.get(name)
        if field is None:
            continue
        hidden = width - field.shape[1]
        values = []
        for r, row in enumerate(rows):
            values.append([])
            for c in row:
                token = c + depth
                is_there = predicts[r][c] and token >= hidden
                values[-1].append(field[r][token - hidden].tolist() if is_there else None)
        empty = torch.full(field.shape[2:], pad, dtype=field.dtype).tolist()
        dense = [[empty if value is None else value for value in row] for row in values]
        shard[name] = torch.tensor(dense, dtype=field.dtype)
    return shard


def _predicts(batch: Mapping[str, Any], depth: int) -> list[list[bool]]:
    """Whether each cell holds a token of a segment that has so many after it."""
    width = batch["input_ids"].shape[1]
    rows = []
    for row, lengths in enumerate(batch["sub_seq_lengths"]):
        cells = [False] * width
        for number, length in enumerate(lengths):
            if "cu_seq_lens" in batch:
                first = batch["cu_seq_lens"][row][number]
            else:
                first = batch["attention_mask"][row].tolist().index(1)
            for token in range(length - depth):
                cells[first + token] = True
        rows.append(cells)
    return rows


def _empty_row(width: int, pad_token_id: int) -> dict[str, list[Any]]:
    return {
        "input_ids": [pad_token_id] * width,
        "position_ids": [0] * width,
        "attention_mask": [0] * width,
        "labels": [IGNORE] * width,
        "weights": [0.0] * width,
    }


def _write(row: dict[str, list[Any]], first: int, segment: Segment) -> None:
    for offset in range(len(segment.ids)):
        row["input_ids"][first + offset] = segment.ids[offset]
        row["position_ids"][first + offset] = offset
        row["attention_mask"][first + offset] = 1
        row["labels"][first + offset] = segment.labels[offset]
        row["weights"][first + offset] = segment.weights[offset]


def _stack(
    rows: list[dict[str, list[Any]]], width: int, num_columns: int, normalize_loss: bool
) -> dict[str, Any]:
    """The rectangular fields, and the metadata that the loss mask decides."""
    batch: dict[str, Any] = {}
    for name in ("input_ids", "position_ids", "attention_mask", "labels"):
        values = [row[name] for row in rows]
        batch[name] = torch.tensor(values, dtype=torch.int64).reshape(len(rows), width)
    num_loss_tokens = 0
    for row in rows:
        for weight in row["weights"]:
            if np.float32(weight) != 0:
                num_loss_tokens += 1
    divisor = max(1, num_loss_tokens) if normalize_loss else 1
    loss_mask = torch.zeros(len(rows), num_columns, dtype=torch.float32)
    for number, row in enumerate(rows):
        for column in range(num_columns):
            weight = row["weights"][width - num_columns + column]
            loss_mask[number, column] = float(np.float32(weight) / np.float32(divisor))
    batch["loss_mask"] = loss_mask
    batch["metadata"] = {
        "response_length": num_columns,
        "num_loss_tokens": num_loss_tokens,
        "loss_mask_divisor": divisor,
    }
    return batch


def _without_targets(batch: dict[str, Any], targets: Any) -> dict[str, Any]:
    """The batch, and with `targets=None` without what says which tokens are trained."""
    if targets is None:
        for name in ("labels", "loss_mask"):
            del batch[name]
        for name in ("num_loss_tokens", "loss_mask_divisor"):
            del batch["metadata"][name]
    return batch


def token_losses(log_probs: torch.Tensor, batch: Mapping[str, Any], targets: str) -> torch.Tensor:
    """The sum of weighted losses, one cell after the other; `log_probs` [R, W, V].

    >>> batch = {"labels": torch.tensor([[-100, 2]]), "loss_mask": torch.tensor([[0.5]])}
    >>> token_losses(torch.tensor([[[0.0, 0.0, -3.0], [0.0, 0.0, -7.0]]]), batch, "next_token")
    tensor(1.5000)
    >>> batch["loss_mask"] = torch.tensor([[0.0, 0.5]])
    >>> token_losses(torch.tensor([[[0.0, 0.0, -3.0], [0.0, 0.0, -7.0]]]), batch, "same_token")
    tensor(3.5000)
    """
    total = log_probs.new_zeros(())
    num_rows, width = batch["labels"].shape
    hidden = width - batch["loss_mask"].shape[1]
    for row in range(num_rows):
        for cell in range(hidden, width):
            weight = batch["loss_mask"][row, cell - hidden]
            if weight != 0:
                predicts = cell if targets == "same_token" else cell - 1
                total = total - weight * log_probs[row, predicts, batch["labels"][row, cell]]
    return total


def pooled(
    hidden: torch.Tensor, batch: Mapping[str, Any], how: str, weights: Any = None
) -> torch.Tensor:
    """A vector per segment; `hidden` [R, W, H], `weights` [R, W]."""
    found = []
    for row, lengths in enumerate(batch["sub_seq_lengths"]):
        if "cu_seq_lens" in batch:
            starts = list(batch["cu_seq_lens"][row])
        else:
            starts = [int(batch["attention_mask"][row].tolist().index(1))]
        for start, length in zip(starts, lengths, strict=False):  # a tail has none
            cells = range(start, start + length)
            if how == "first":
                found.append(hidden[row, cells[0]])
            elif how == "last":
                found.append(hidden[row, cells[-1]])
            else:
                factors = [1.0 if weights is None else float(weights[row, cell]) for cell in cells]
                total = sum(f * hidden[row, cell] for f, cell in zip(factors, cells, strict=True))
                found.append(total / (sum(factors) or 1))
    return torch.stack(found) if found else hidden.new_zeros(0, hidden.shape[-1])


def _aligned(length: int, align: int) -> int:
    while length % align != 0:
        length += 1
    return length


def _largest_step(boundaries: list[int]) -> int:
    steps = [end - start for start, end in itertools.pairwise(boundaries)]
    return max(steps, default=0)


def two_way_inputs(
    boundaries: Sequence[Sequence[int]],
    lengths: Sequence[Sequence[int]],
    first: int,
    window: int,
) -> tuple[list[list[int]], list[list[list[bool]]]]:
    """Positions of rows, and which cells each sees; ``window`` counts itself, on both sides."""
    positions, masks = [], []
    for bounds, of_row in zip(boundaries, lengths, strict=True):
        cells = [first] * bounds[-1]
        for start, length in zip(bounds, of_row, strict=False):
            for place in range(length):
                cells[start + place] = first + place
        seen = [[False] * bounds[-1] for _ in cells]
        for start, stop in pairwise(bounds):
            for query in range(start, stop):
                for key in range(start, stop):
                    seen[query][key] = abs(query - key) < window
        positions.append(cells)
        masks.append(seen)
    return positions, masks
