"""Prompts and trajectories of rows: where they begin, and steps merged that continue each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from torch import Tensor

from torch_collate_kit._checks import checked_choice, checked_int
from torch_collate_kit.batch.fields import PackedValues, PerExample, PerResponseToken
from torch_collate_kit.errors import DataError
from torch_collate_kit.reading.columns import flag_column, id_column
from torch_collate_kit.reading.entries import DeclaredFields, checked_fields
from torch_collate_kit.reading.examples import ExampleColumns
from torch_collate_kit.reading.keys import CHECKED, ROLLOUT_KEYS
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.reading.source import is_sequence

Uids = Sequence[Hashable] | np.ndarray | Tensor
_Columns = Mapping[str, list[np.ndarray]]  # a row per step
_BASE = 0x9E3779B97F4A7C15  # of prefix hashes; odd
_logger = logging.getLogger("torch_collate_kit.rl")


def prompt_boundaries(uids: Uids) -> np.ndarray:
    """Return the first row of each prompt, and the number of rows: int64 [P + 1], 0, ..., N.

    ``uids`` names the prompt of each row: a list of hashables, an ndarray or a tensor [N]. The rows
    of a prompt lie next to each other. Call it before ``Batch.pad_rows``.

    Raises:
        DataError: no rows, a uid that comes back after another one, or one that is None or NaN.
        TypeError, ValueError: uids that are not one hashable per row.

    >>> prompt_boundaries(["a", "a", "b", "c", "c", "c"]).tolist()
    [0, 2, 3, 6]
    """
    keys = checked_uids(uids)
    if not keys:
        raise DataError("uids is empty (0 rows); give at least one row")
    starts = _starts_of_runs(
        keys,
        lambda first, again: (
            f"uid {keys[again]!r} begins at row {first} and comes back at row {again} after uid "
            f"{keys[again - 1]!r}; sort the rows by uid (stable), give prompts different uids, or "
            "compute boundaries before Batch.pad_rows, whose rows repeat the first uid"
        ),
    )
    return np.array([*starts, len(keys)], dtype=np.int64)


def _starts_of_runs(names: Sequence[Hashable], comes_back: Callable[[int, int], str]) -> list[int]:
    """Return where runs of equal names start; a name that comes back later is refused."""
    starts: dict[Hashable, int] = {}
    for i, name in enumerate(names):
        if i and name == names[i - 1]:
            continue
        if starts.setdefault(name, i) != i:
            raise DataError(comes_back(starts[name], i))
    return list(starts.values())


def mini_batch_boundaries(uids: Uids, prompts_per_mini_batch: int) -> np.ndarray:
    """Return the first row of each mini-batch, and the number of rows: int64 [M + 1], 0, ..., N.

    Every mini-batch has ``prompts_per_mini_batch`` prompts, with any number of rows: the number of
    optimizer steps does not depend on how many turns the model took.

    Raises:
        ValueError: the number of prompts is not a multiple of ``prompts_per_mini_batch``.
        DataError, TypeError: as :func:`prompt_boundaries`; ``prompts_per_mini_batch`` not an int.

    >>> mini_batch_boundaries(["a", "a", "b", "c", "c", "c", "d"], 2).tolist()
    [0, 3, 7]
    """
    size = checked_int("prompts_per_mini_batch", prompts_per_mini_batch)
    starts = prompt_boundaries(uids)
    num_prompts = len(starts) - 1
    num_left = num_prompts % size
    if num_left:
        raise ValueError(
            f"{num_prompts} prompts do not divide into mini-batches of prompts_per_mini_batch="
            f"{size}; drop {num_left} prompts, add {size - num_left}, or choose a divisor of "
            f"{num_prompts}"
        )
    return starts[::size].copy()


def checked_boundaries(boundaries: Any, num_rows: int) -> list[int]:
    """Return ``boundaries`` as Python ints 0, ..., ``num_rows`` that rise."""
    edges = np.asarray(boundaries.cpu() if isinstance(boundaries, Tensor) else boundaries)
    numbers: list[int] = edges.tolist()
    if edges.ndim == 1 and edges.dtype.kind in "iu" and len(numbers) > 1:
        rises = all(start < stop for start, stop in pairwise(numbers))
        if rises and numbers[0] == 0 and numbers[-1] == num_rows:
            return numbers
    raise ValueError(
        f"boundaries must be integers that rise from 0 to the {num_rows} rows, got {edges}; pass "
        "what mini_batch_boundaries(uids, ...) of these rows returned"
    )


def checked_uids(uids: Any, num_rows: int | None = None, *, name: str = "uid") -> list[Hashable]:
    """Return ``uids`` as hashables that compare by value; None, NaN and packed rows are refused."""
    if isinstance(uids, Sequence) and any(isinstance(uid, PackedValues) for uid in uids):
        row = next(i for i, uid in enumerate(uids) if isinstance(uid, PackedValues))
        raise ValueError(
            f"{name}s[{row}] is {uids[row]!r}, of a packed row, and here a row is one rollout; "
            "compute this on the batch of a RolloutCollator, and move advantages to packed rows "
            "with rl.from_response_values(rl.response_values(advantages, padded), packed)"
        )
    return id_column(name, _one_per_row(f"{name}s", name, uids, num_rows), "row")


def _one_per_row(name: str, what: str, values: Any, num_rows: int | None) -> list[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(
            f"{name} must be one {what} per row, got {values!r:.40} of type "
            f"{type(values).__name__}; pass a list"
        )
    if isinstance(values, np.ndarray | Tensor):
        if values.ndim != 1:
            raise ValueError(f"{name} must be one {what} per row, got shape {list(values.shape)}")
        values = values.tolist()
    listed = list(values)
    if num_rows is not None and len(listed) != num_rows:
        raise ValueError(
            f"{name} has {len(listed)} entries for {num_rows} rows; give one {what} per row"
        )
    return listed


def group_numbers(uids: Sequence[Hashable]) -> tuple[np.ndarray, list[Hashable]]:
    """Return the group of each uid, int64 [N], and the uid of each group, in order."""
    numbers: dict[Hashable, int] = {}
    groups = np.array([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=np.int64)
    return groups, list(numbers)


def last_steps(
    is_last_step: Any, trajectory_ids: Any, uids: Sequence[Hashable], rows: np.ndarray
) -> np.ndarray:
    """Return whether each of ``rows`` ends its trajectory: bool [N], all True by default."""
    last = None
    if is_last_step is not None:
        flags = _one_per_row("is_last_step", "bool", is_last_step, len(uids))
        last = np.array(flag_column("is_last_step", flags, "row"), dtype=bool)[rows]
    if trajectory_ids is not None:
        ids = checked_uids(trajectory_ids, len(uids), name="trajectory_id")
        last = checked_trajectory_ids([(uids[i], ids[i]) for i in rows.tolist()], last, rows)
    return np.ones(len(rows), dtype=bool) if last is None else last


def checked_trajectory_ids(
    names: Sequence[tuple[Hashable, Hashable]],
    last: np.ndarray | None,
    rows: np.ndarray,
    *,
    row: str = "row",
) -> np.ndarray:
    """Check ``last`` (but its last entry) against (uid, trajectory id) pairs, or derive it."""
    starts = _starts_of_runs(
        names,
        lambda first, again: (
            f"trajectory_id {names[again][1]!r} of uid {names[again][0]!r} begins at {row} "
            f"{rows[first]} and comes back at {row} {rows[again]}; the {row}s of a trajectory lie "
            "next to each other, in the order of their steps"
        ),
    )
    ends = np.isin(np.arange(len(names)) + 1, [*starts, len(names)])
    if last is None:
        return ends
    for i in np.flatnonzero(last[:-1] != ends[:-1]).tolist():
        (uid, own), (next_uid, other) = names[i], names[i + 1]
        raise DataError(
            f"{row} {rows[i]} has is_last_step={bool(last[i])} and trajectory_id {own!r} of uid "
            f"{uid!r}, but {row} {rows[i + 1]} has trajectory_id {other!r} of uid {next_uid!r}; "
            f"is_last_step is True at the last {row} of every trajectory, and only there"
        )
    return last


def trajectories(last: np.ndarray, uids: Sequence[Hashable], rows: np.ndarray) -> np.ndarray:
    """Return the number of the trajectory of each step, int64 [N]; ``rows`` are for messages."""
    for i in np.flatnonzero(~last).tolist():
        ends = i + 1 == len(last)
        if ends or uids[i + 1] != uids[i]:
            after = "no step follows" if ends else f"row {rows[i + 1]} is of uid {uids[i + 1]!r}"
            raise DataError(
                f"row {rows[i]} of uid {uids[i]!r} is not a last step, but {after}; the rows of a "
                "trajectory lie next to each other and end with is_last_step=True (rows whose "
                "response_mask is 0 do not count)"
            )
    return np.cumsum(last) - last


def merge_steps(
    examples: Sequence[Mapping[str, Any]],
    *,
    rewritten: Literal["split", "branch"] = "split",
    fields: DeclaredFields | None = None,
) -> list[dict[str, Any]]:
    """Merge the steps of a trajectory where one continues the other, so no token is computed twice.

    Consecutive examples of one ``uid``, the earlier without ``is_last_step``, become one if the
    prompt of the later begins with all tokens (and images) of the earlier, prompt and response. A
    step whose prompt was rewritten starts a new example. A merged example has:

    - ``prompt_ids`` of the first step. ``response_ids`` is all that follows: the responses, and
      between them what the later prompts added (tool output, the next user turn), where
      ``loss_mask``, ``rewards``, ``logprobs`` and ``advantages`` are 0.
    - ``rewards`` with one value per response token; a scalar is at the last token of its step.
    - ``rollout_expert_indices``, where the route of a token is from the first step that has it. A
      step's last token was sampled and not read, so its route is that of a later step, or a hole.
    - ``is_last_step`` and all other keys from the last step merged.

    With ``rewritten="branch"`` a trajectory becomes one rollout of several segments, its branches:
    a step continues the longest that its prompt begins with, of all its tokens, or else begins
    another. Each response is trained once. ``prompt_ids``, ``response_ids`` and the values per
    token are lists with an entry per branch, ``num_steps`` is added, and ``PackedCollator(...,
    share_prefixes=True)`` computes what branches share once. Images are refused.

    Declare your own keys per token in ``fields``, as for a collator: ``PerResponseToken`` has its
    pad at tokens of later prompts, a ``PerToken`` value is from the first step with the token. A
    call logs the break rate, ``sum(segments - 1) / sum(num_steps - 1)``; time is linear in tokens.

    Examples are read as by ``RolloutCollator``; ``uid`` and ``is_last_step`` are required, a
    ``trajectory_id`` is checked. Returns new dicts. Merged columns are new ndarrays: ids int64,
    routes uint8 or int16, the others float32. Everything else is not copied.

    Raises:
        DataError: an example that the collator would refuse, or without ``uid`` or
            ``is_last_step``; a ``trajectory_id`` that contradicts the flags or comes back later; a
            list of segments; images with "branch".
        TypeError, ValueError: not a list of mappings, or an option is wrong.

    >>> step = {"uid": "a", "is_last_step": False, "prompt_ids": [1, 2], "response_ids": [3],
    ...         "loss_mask": [1], "rewards": 1.0}
    >>> last = {**step, "is_last_step": True, "prompt_ids": [1, 2, 3, 4], "response_ids": [5]}
    >>> [merged] = merge_steps([step, last])
    >>> merged["prompt_ids"], merged["response_ids"].tolist(), merged["rewards"].tolist()
    ([1, 2], [3, 4, 5], [1.0, 0.0, 1.0])
    >>> last["prompt_ids"] = [1, 9, 3, 4]  # rewritten
    >>> [rollout] = merge_steps([step, last], rewritten="branch")
    >>> rollout["prompt_ids"], [ids.tolist() for ids in rollout["response_ids"]]
    ([[1, 2], [1, 9, 3, 4]], [[3], [5]])
    """
    checked_choice("rewritten", rewritten, ("split", "branch"))
    declared = checked_fields(fields, (*ROLLOUT_KEYS, "num_steps"))
    if isinstance(examples, Mapping) or not is_sequence(examples):
        raise TypeError(
            f"examples must be a list of mappings, one per step, got {type(examples).__name__}"
        )
    if not examples:
        return []
    rollouts = read_columns(examples, rollouts=True, fields=declared)
    uids, last = _checked_steps(rollouts, rewritten)
    is_split = rewritten == "split"
    columns = {name: list(column) for name, column in rollouts.checked().items()}
    starts = [i for i in range(len(last)) if not i or last[i - 1] or uids[i] != uids[i - 1]]
    steps = (range(*bounds) for bounds in pairwise([*starts, len(last)]))
    trajectories = [_branches(rollouts, columns, of, is_split) for of in steps]
    broken, later = sum(map(len, trajectories)) - len(starts), len(last) - len(starts)
    rate = 100 * broken / max(1, later)
    _logger.info("break rate %.1f%%: %d of %d later steps continue no other", rate, broken, later)
    weight = {} if rollouts.weights is None else {"weight": 1.0}  # loss masks are products now
    found: list[dict[str, Any]] = []
    for branches in trajectories:
        parts = [_merged(examples, rollouts, columns, of) for of in branches]
        if is_split:
            for of, part in zip(branches, parts, strict=True):
                found.append({**examples[of[-1]], **(part | weight if len(of) > 1 else {})})
            continue
        latest = examples[max(of[-1] for of in branches)]
        whole = {key: value for key, value in latest.items() if key not in CHECKED}
        lists = {key: [part[key] for part in parts] for key in parts[0]}
        found.append({**whole, **lists, **weight, "num_steps": sum(map(len, branches))})
    return found


def _checked_steps(rollouts: ExampleColumns, rewritten: str) -> tuple[list[Any], list[bool]]:
    """Return the uid of each step, and whether it is the last of its trajectory."""
    found = rollouts.per_segment
    if rollouts.segment_offsets is not None:
        raise DataError("example 0 is a list of segments, as merge_steps returns; give its steps")
    if rewritten == "branch" and rollouts.images is not None:
        raise DataError(
            f"example {min(rollouts.images.units)} has images, and rewritten='branch' finds what "
            "branches share by their tokens alone; merge such steps with rewritten='split'"
        )
    for key, name in (("uid", "uids"), ("is_last_step", "is_last_step")):
        if name not in found:
            raise DataError(
                f"no {key} in example 0; steps are merged by uid and is_last_step, give both"
            )
    uids, last = found["uids"], found["is_last_step"]
    if "trajectory_ids" in found:
        names = list(zip(uids, found["trajectory_ids"], strict=True))
        checked_trajectory_ids(names, np.array(last), np.arange(len(last)), row="example")
    return uids, last


def _branches(
    rollouts: ExampleColumns, columns: _Columns, steps: range, is_split: bool
) -> list[list[int]]:
    """Return the steps of each branch of a trajectory; split, only the latest branch goes on.

    The branches that end where a prompt may begin with them are found by hashes of the prefixes of
    their lengths: sums of ids times powers of an odd number, modulo 2**64.
    """
    longest = max(len(columns["input_ids"][step]) for step in steps)
    powers = np.cumprod(np.full(longest, _BASE, dtype=np.uint64)).view(np.int64)
    branches: list[list[int]] = []
    ends: dict[int, dict[int, list[list[int]]]] = {}  # of each length, by hash
    for step in steps:
        tokens, branch, num_prompt = columns["input_ids"][step], None, _num_prompt(columns, step)
        hashes = np.cumsum(tokens * powers[: len(tokens)])
        for length in sorted((n for n in ends if n <= num_prompt), reverse=True):
            same = ends[length].get(int(hashes[length - 1]), [])
            if same and _continues(rollouts, columns, same[-1][-1], step):
                branch = same.pop()
                if not same and len(ends[length]) == 1:
                    del ends[length]
                break
        if branch is None:
            branches.append(branch := [])
        branch.append(step)
        if is_split:
            ends.clear()
        ends.setdefault(len(tokens), {}).setdefault(int(hashes[-1]), []).append(branch)
    return branches


def _num_prompt(columns: _Columns, step: int) -> int:
    return len(columns["input_ids"][step]) - len(columns["loss_weights"][step])


def _continues(rollouts: ExampleColumns, columns: _Columns, earlier: int, later: int) -> bool:
    """Check whether its prompt begins with all tokens and images of an earlier step."""
    tokens, prompt = (columns["input_ids"][step] for step in (earlier, later))
    prompt = prompt[: _num_prompt(columns, later)]
    arrays = {} if rollouts.images is None else rollouts.images.arrays
    pairs = [(array.get(earlier), array.get(later)) for array in arrays.values()]
    return np.array_equal(prompt[: len(tokens)], tokens) and all(
        first is None or (then is not None and np.array_equal(then[: len(first)], first))
        for first, then in pairs
    )


def _merged(
    examples: Sequence[Mapping[str, Any]],
    rollouts: ExampleColumns,
    columns: _Columns,
    steps: Sequence[int],
) -> dict[str, Any]:
    """Return what has an entry per token, of steps that continue each other."""
    tokens = columns["input_ids"][steps[-1]][_num_prompt(columns, steps[0]) :]
    merged = {
        "prompt_ids": examples[steps[0]]["prompt_ids"],
        "response_ids": tokens.astype(np.int64),
        "loss_mask": _joined_responses(columns, "loss_weights", steps).astype(np.float32),
    }
    for field in rollouts.fields:
        key = field.key or field.name
        if isinstance(field.spec, PerResponseToken):
            merged[key] = _joined_responses(columns, field.name, steps, field.spec.pad)
        elif key == "rollout_expert_indices":
            merged[key] = _joined_routes(columns, steps)
        elif not isinstance(field.spec, PerExample):
            covered = zip(
                steps, [0, *(len(columns["input_ids"][i]) for i in steps[:-1])], strict=True
            )
            merged[key] = np.concatenate([columns[key][i][begin:] for i, begin in covered])
    return merged


def _joined_responses(
    columns: _Columns, name: str, steps: Sequence[int], pad: float = 0
) -> np.ndarray:
    """Join the values of the responses, with ``pad`` for tokens that the next prompt added."""
    parts = [columns[name][steps[0]]]
    for earlier, later in pairwise(steps):
        added = _num_prompt(columns, later) - len(columns["input_ids"][earlier])
        parts += [np.full((added, *parts[0].shape[1:]), pad, parts[0].dtype), columns[name][later]]
    return np.concatenate(parts)


def _joined_routes(columns: _Columns, steps: Sequence[int]) -> np.ndarray:
    """Join the routes of steps; -1 where no step has one, in int16."""
    # an engine that fills the row of the last sampled token, which it never read, fills a dummy
    stops = [len(columns["input_ids"][step]) - (step != steps[-1]) for step in steps]
    parts = [columns["rollout_expert_indices"][i][:n] for i, n in zip(steps, stops, strict=True)]
    joined = np.full((max(map(len, parts)), *parts[0].shape[1:]), -1, dtype=np.int16)
    for part in parts:
        is_new = joined[: len(part), 0, 0] < 0
        joined[: len(part)][is_new] = part[is_new]
    return joined.astype(parts[0].dtype)  # without holes in uint8: the longest part has none
