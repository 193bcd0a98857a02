"""Merging of the steps of a trajectory that continue each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.examples import ExampleColumns
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.reading.source import is_sequence
from torch_collate_kit.rl.groups import checked_trajectory_ids


def merge_steps(examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the steps of a trajectory where one continues the other, so no token is computed twice.

    Consecutive examples of one ``uid``, the earlier without ``is_last_step``, become one if the
    prompt of the later begins with all tokens (and images) of the earlier, prompt and response. A
    step whose prompt was rewritten starts a new example. A merged example has:

    - ``prompt_ids`` of the first step. ``response_ids`` is all that follows: the responses, and
      between them what the later prompts added (tool output, the next user turn), where
      ``loss_mask``, ``rewards``, ``logprobs`` and ``advantages`` are 0.
    - ``rewards`` with one value per response token; a scalar is at the last token of its step.
    - ``rollout_expert_indices``, where the route of a token is from the first step that has it.
    - ``is_last_step`` and all other keys from the last step merged. (A key of your own with one
      entry per response token no longer fits.)

    Examples are read as by ``RolloutCollator`` (docs/contract.md); ``uid`` and ``is_last_step`` are
    required, a ``trajectory_id`` is checked. Returns new dicts. Merged columns are new ndarrays:
    ids int64, routes uint8 or int16, the others float32. Everything else is not copied.

    Raises:
        DataError: an example that the collator would refuse, or without ``uid`` or
            ``is_last_step``; a ``trajectory_id`` that contradicts the flags or comes back later.
        TypeError: not a list of mappings.

    >>> steps = [
    ...     {"uid": "a", "is_last_step": False, "prompt_ids": [1, 2], "response_ids": [3],
    ...      "loss_mask": [1], "rewards": 0.0},
    ...     {"uid": "a", "is_last_step": True, "prompt_ids": [1, 2, 3, 4], "response_ids": [5, 6],
    ...      "loss_mask": [1, 1], "rewards": 1.0},
    ... ]
    >>> [merged] = merge_steps(steps)
    >>> merged["prompt_ids"], merged["response_ids"].tolist(), merged["loss_mask"].tolist()
    ([1, 2], [3, 4, 5, 6], [1.0, 0.0, 1.0, 1.0])
    >>> merged["rewards"].tolist()
    [0.0, 0.0, 0.0, 1.0]
    """
    if isinstance(examples, Mapping) or not is_sequence(examples):
        raise TypeError(
            f"examples must be a list of mappings, one per step, got {type(examples).__name__}"
        )
    if not examples:
        return []
    rollouts = read_columns(examples, rollouts=True)
    found = rollouts.per_example
    for key, name in (("uid", "uids"), ("is_last_step", "is_last_step")):
        if name not in found:
            raise DataError(
                f"no {key} in example 0; steps are merged by uid and is_last_step, give both"
            )
    uids, last = found["uids"], found["is_last_step"]
    if "trajectory_ids" in found:
        names = list(zip(uids, found["trajectory_ids"], strict=True))
        checked_trajectory_ids(names, np.array(last), np.arange(len(last)), row="example")
    columns = rollouts.checked()
    chains = [[0]]
    for i in range(1, len(examples)):
        is_next = uids[i] == uids[i - 1] and not last[i - 1]
        if is_next and _continues(rollouts, columns["input_ids"], i):
            chains[-1].append(i)
        else:
            chains.append([i])
    return [_merged(examples, rollouts, columns, chain) for chain in chains]


def _num_prompt(rollouts: ExampleColumns, step: int) -> int:
    assert rollouts.num_actions is not None
    return int(rollouts.lengths[step] - rollouts.num_actions[step])


def _continues(rollouts: ExampleColumns, ids: Ragged, later: int) -> bool:
    """Check whether its prompt begins with all tokens and images of the step before."""
    tokens, prompt = ids[later - 1], ids[later][: _num_prompt(rollouts, later)]
    arrays = {} if rollouts.images is None else rollouts.images.arrays
    pairs = [(of.get(later - 1), of.get(later)) for of in arrays.values()]
    return np.array_equal(prompt[: len(tokens)], tokens) and all(
        first is None or (then is not None and np.array_equal(then[: len(first)], first))
        for first, then in pairs
    )


def _merged(
    examples: Sequence[Mapping[str, Any]],
    rollouts: ExampleColumns,
    columns: Mapping[str, Ragged],
    chain: Sequence[int],
) -> dict[str, Any]:
    merged = dict(examples[chain[-1]])
    if len(chain) == 1:
        return merged
    merged["prompt_ids"] = examples[chain[0]]["prompt_ids"]
    tokens = columns["input_ids"][chain[-1]][_num_prompt(rollouts, chain[0]) :]
    merged["response_ids"] = tokens.astype(np.int64)
    merged["loss_mask"] = _joined_responses(rollouts, columns["loss_weights"], chain)
    if rollouts.weights is not None:  # the loss weights of each step were multiplied by its own
        merged["weight"] = 1.0
    for field in rollouts.fields:
        column = columns[field.name]
        if field.name == "rollout_expert_indices":
            merged[field.name] = _joined_routes(column, chain)
        else:
            merged[str(field.key)] = _joined_responses(rollouts, column, chain)
    return merged


def _joined_responses(rollouts: ExampleColumns, field: Ragged, chain: Sequence[int]) -> np.ndarray:
    """Join the values of the responses, with 0 for tokens that the next prompt added."""
    parts = [field[chain[0]]]
    for earlier, later in pairwise(chain):
        added = _num_prompt(rollouts, later) - int(rollouts.lengths[earlier])
        parts += [np.zeros(added, np.float32), field[later]]
    return np.concatenate(parts, dtype=np.float32)


def _joined_routes(routes: Ragged, chain: Sequence[int]) -> np.ndarray:
    parts: list[np.ndarray] = []
    covered = 0
    for step in chain:
        parts.append(routes[step][covered:])
        covered = max(covered, len(routes[step]))
    return np.concatenate(parts)
