"""Steps of a trajectory that continue each other, as one example."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.rl._checks import checked_uids
from torch_collate_kit.rl._steps import array_of, flag_of, ids_of, per_token, rewards_of, routes_of
from torch_collate_kit.rl._trajectories import checked_trajectory_ids

__all__ = ["merge_steps"]

_IMAGES = ("pixel_values", "image_grid_thw")
_ROUTES = "rollout_expert_indices"


class _Step(NamedTuple):
    number: int
    example: Mapping[str, Any]
    uid: Hashable
    is_last: bool
    num_prompt: int
    tokens: np.ndarray
    """int64, the prompt and then the response."""


def merge_steps(examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rollout examples with the steps of a trajectory merged where one continues the other.

    Consecutive examples of one ``uid``, the earlier without ``is_last_step``, become one if the
    prompt of the later begins with all tokens of the earlier, prompt and response: a forward pass
    over the result computes every token once. A step whose prompt was rewritten starts a new one.
    Where the examples have a ``trajectory_id``, ``is_last_step`` is checked against it: a True
    forgotten between two trajectories of one uid would merge them.

    Of a merged example:

    - ``prompt_ids`` is that of the first step. ``response_ids`` int64 is all that follows: the
      responses, and between them what the later prompts added (tool output, the next user turn).
      There ``loss_mask``, ``logprobs`` and ``rewards`` are 0.
    - ``rewards`` has one value a token; a scalar reward is at the last token of its step.
    - ``rollout_expert_indices``: the route of a token is from the first step that has it, which is
      the one that sampled it; later steps fill what is missing. A prefix of the tokens, as before.
    - ``is_last_step`` and all other keys are those of the last step merged. ``pixel_values`` and
      ``image_grid_thw`` too: steps are merged only if the earlier's are the beginning of them.
      (A key of your own with one entry a response token does not fit the merged response.)

    Returns new dicts; examples are not changed. Merged columns are new ndarrays in the dtypes given
    (floats where ints and floats meet); all else is the objects of the examples, not copies.

    Raises:
        DataError: a key is missing or has a wrong length; ``trajectory_id`` contradicts
            ``is_last_step``, comes back later, or is there in some examples only; or only one of
            two steps to be merged has ``logprobs`` or ``rollout_expert_indices``.
        TypeError: not a list of mappings.

    >>> steps = [
    ...     {"uid": "a", "is_last_step": False, "prompt_ids": [1, 2], "response_ids": [3],
    ...      "loss_mask": [1], "rewards": 0.0},
    ...     {"uid": "a", "is_last_step": True, "prompt_ids": [1, 2, 3, 4], "response_ids": [5, 6],
    ...      "loss_mask": [1, 1], "rewards": 1.0},
    ... ]
    >>> [merged] = merge_steps(steps)
    >>> merged["prompt_ids"], merged["response_ids"].tolist(), merged["loss_mask"].tolist()
    ([1, 2], [3, 4, 5, 6], [1, 0, 1, 1])
    >>> merged["rewards"].tolist()
    [0.0, 0.0, 0.0, 1.0]
    """
    chains: list[list[_Step]] = []
    for step in _read(examples):
        if chains and _continues(chains[-1][-1], step):
            chains[-1].append(step)
        else:
            chains.append([step])
    return [_merged(chain) for chain in chains]


def _read(examples: Any) -> list[_Step]:
    if isinstance(examples, Mapping | str) or not isinstance(examples, Sequence):
        raise TypeError(
            f"examples must be a list of mappings, one a step, got {type(examples).__name__}"
        )
    for i, example in enumerate(examples):
        if not isinstance(example, Mapping):
            raise TypeError(f"example {i} is a {type(example).__name__}; a step is a mapping")
        needed = ("prompt_ids", "response_ids", "loss_mask", "rewards", "uid", "is_last_step")
        missing = [key for key in needed if example.get(key) is None]
        if missing:
            raise DataError(
                f"example {i} has no {missing[0]}, got keys {sorted(map(str, example))}; merging "
                f"needs {', '.join(needed)}"
            )
    uids = checked_uids([example["uid"] for example in examples])
    steps = []
    for i, (example, uid) in enumerate(zip(examples, uids, strict=True)):
        prompt, response = (ids_of(i, example, key) for key in ("prompt_ids", "response_ids"))
        tokens = np.concatenate([prompt, response])
        steps.append(_Step(i, example, uid, flag_of(i, example), len(prompt), tokens))
    ids = [example.get("trajectory_id") for example in examples]
    if any(own is not None for own in ids):
        ids = checked_uids(ids, name="trajectory_id", owner="trajectory", row="example")
        last = np.array([step.is_last for step in steps])
        names = list(zip(uids, ids, strict=True))
        checked_trajectory_ids(names, last, np.arange(len(steps)), row="example")
    return steps


def _continues(earlier: _Step, later: _Step) -> bool:
    length = len(earlier.tokens)
    return (
        earlier.uid == later.uid
        and not earlier.is_last
        and later.num_prompt >= length
        and np.array_equal(later.tokens[:length], earlier.tokens)
        and all(_begins_with(later.example.get(k), earlier.example.get(k)) for k in _IMAGES)
    )


def _begins_with(whole: Any, beginning: Any) -> bool:
    """Whether the first rows of ``whole`` are ``beginning``; None has no rows."""
    if beginning is None or whole is beginning:
        return True
    first = array_of(beginning)
    if not len(first) or whole is None:
        return not len(first)
    return np.array_equal(array_of(whole)[: len(first)], first)


def _merged(chain: list[_Step]) -> dict[str, Any]:
    first, last = chain[0], chain[-1]
    if first is last:
        return dict(first.example)
    for earlier, later in pairwise(chain):
        for key in ("logprobs", _ROUTES):
            owners = [s.number for s in (earlier, later) if s.example.get(key) is not None]
            if len(owners) == 1:
                raise DataError(
                    f"examples {earlier.number} and {later.number} are steps that continue each "
                    f"other, but only example {owners[0]} has {key}; give it for both or neither"
                )
    merged = dict(last.example)
    merged["prompt_ids"] = first.example["prompt_ids"]
    merged["response_ids"] = last.tokens[first.num_prompt :]
    merged["loss_mask"] = _joined(chain, [_column(step, "loss_mask") for step in chain])
    merged["rewards"] = _joined(
        chain, [rewards_of(s.number, s.example, len(s.tokens) - s.num_prompt) for s in chain]
    )
    if first.example.get("logprobs") is not None:
        merged["logprobs"] = _joined(chain, [_column(step, "logprobs") for step in chain])
    if first.example.get(_ROUTES) is not None:
        merged[_ROUTES] = _joined_routes(chain)
    return merged


def _column(step: _Step, key: str) -> np.ndarray:
    return per_token(step.number, step.example, key, len(step.tokens) - step.num_prompt)


def _joined(chain: list[_Step], columns: list[np.ndarray]) -> np.ndarray:
    """The columns of the responses, with 0 where the next prompt put tokens in between."""
    parts = [columns[0]]
    for (earlier, later), column in zip(pairwise(chain), columns[1:], strict=True):
        parts += [np.zeros(later.num_prompt - len(earlier.tokens), column.dtype), column]
    return np.concatenate(parts)


def _joined_routes(chain: list[_Step]) -> np.ndarray:
    parts: list[np.ndarray] = []
    covered = 0
    for step in chain:
        routes = routes_of(step.number, step.example, _ROUTES, len(step.tokens))
        if parts and routes.shape[1:] != parts[0].shape[1:]:
            raise DataError(
                f"example {step.number}: {_ROUTES} has [layers, top_k] {list(routes.shape[1:])}, "
                f"example {chain[0].number} has {list(parts[0].shape[1:])}; both are of one model"
            )
        parts.append(routes[covered:])
        covered = max(covered, len(routes))
    return np.concatenate(parts)
