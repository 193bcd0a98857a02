"""Examples in, columns out, checked. A rollout is an example in other words.

Its prompt and response are one sequence, whose response tokens are the last ``num_actions``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.batch.fields import PerExample, PerResponseToken, PerRoutedToken, PerToken
from torch_collate_kit.batch.placement import MAX_WIDTH, too_wide
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.arrays import read_images, route_column
from torch_collate_kit.reading.columns import (
    Kind,
    Numbers,
    flag_column,
    id_column,
    number_column,
    scalar_column,
    spread_numbers,
)
from torch_collate_kit.reading.entries import (
    DeclaredFields,
    FieldColumn,
    are_int32_ids,
    joined,
)
from torch_collate_kit.reading.examples import ExampleColumns
from torch_collate_kit.reading.raw import (
    IMAGES,
    TARGETS,
    Examples,
    are_rollouts,
    raw_examples,
    raw_rollouts,
)
from torch_collate_kit.reading.token_types import token_types
from torch_collate_kit.vision import VisionLayout

__all__ = ["read_columns"]

_BATCH_NAMES = {"logprobs": "rollout_logprobs"}  # of our own fields that have another name there
_MOST = {"logprobs": 1e-3}  # of our own fields whose numbers have a limit; 0, and rounding
# What the columns of SFT examples and of rollouts have one entry of, besides ids.
_SFT_FIELDS: Mapping[str, PerToken] = {
    "loss_mask": PerToken(torch.float32),
    "labels": PerToken(torch.int64, IGNORE_INDEX),
    "assistant_masks": PerToken(torch.float32),
    "completion_mask": PerToken(torch.float32),
    "attention_mask": PerToken(torch.float32),
}
_ROLLOUT_FIELDS: Mapping[str, PerResponseToken | PerRoutedToken] = {
    "rewards": PerResponseToken(torch.float32),
    "loss_mask": PerResponseToken(torch.float32),
    "logprobs": PerResponseToken(torch.float32),
    "advantages": PerResponseToken(torch.float32),
    "rollout_expert_indices": PerRoutedToken(torch.int16),
}
# Of rollouts with images whose model is not known: they are carried along.
_UNKNOWN_MODEL = VisionLayout("qwen2_vl", image_token_id=None, patch_shape=(1, 1, 1))


def read_columns(
    examples: Examples,
    *,
    rollouts: bool | None = False,
    train_all: bool = False,
    fields: DeclaredFields | None = None,
    vision: VisionLayout | None = None,
) -> ExampleColumns:
    """Check the examples (DataError names the bad one) and look at them as columns.

    ``rollouts``: that is what they are; None: their keys tell. ``train_all``: SFT examples have no
    target, whatever other keys they have. ``fields`` are read too, and of a model with ``vision``
    the images.
    """
    fields = fields or {}
    if rollouts is None:
        rollouts = are_rollouts(examples)
    if not rollouts:
        raw = raw_examples(examples, fields, vision, train_all=train_all)
        input_ids = _ids("input_ids", raw["input_ids"])
        num_actions = _num_actions(raw, input_ids.lengths)
        types = token_types(examples, raw, input_ids.lengths, fields, vision)
        return _read(raw, input_ids, num_actions, {**fields, **types}, vision, rollouts=False)
    raw = raw_rollouts(examples, fields, vision)
    if vision is None and any(name in raw for name in IMAGES):
        vision = _UNKNOWN_MODEL
    prompts, responses = (_ids(name, raw[name]) for name in ("prompt_ids", "response_ids"))
    num_actions = responses.lengths
    lengths = prompts.lengths + num_actions
    if (longest := int(lengths.max())) > MAX_WIDTH:
        raise too_wide(longest, f"filter out example {lengths.argmax()}")
    for name in ("rewards", "advantages"):
        if name in raw:
            raw[name] = spread_numbers(name, raw[name], num_actions)
    ids = _in_pairs(prompts, responses, lengths)
    types = token_types(examples, raw, ids.lengths, fields, vision)
    return _read(raw, ids, num_actions, {**fields, **types}, vision, rollouts=True)


def _in_pairs(first: Numbers, second: Numbers, lengths: np.ndarray) -> Ragged:
    """Row i of the one column and row i of the other as one row: int32 where both fit, or int64.

    ``lengths``: of the rows that are returned.
    """
    is_narrow = all(isinstance(of, Ragged) and are_int32_ids(of.values) for of in (first, second))
    parts: list[Any] = [None] * (2 * len(first))
    parts[::2], parts[1::2] = first, second
    dtype = np.int32 if is_narrow else np.int64
    values = np.concatenate(parts, dtype=dtype, casting="unsafe")
    return Ragged.from_lengths(values, lengths)


def _read(
    raw: Mapping[str, Any],
    input_ids: Numbers,
    num_actions: np.ndarray | None,
    declared: DeclaredFields,
    vision: VisionLayout | None,
    *,
    rollouts: bool,
) -> ExampleColumns:
    """All other columns. What they have one entry of must be there; numbers are looked at later."""
    table, lengths = _ROLLOUT_FIELDS if rollouts else _SFT_FIELDS, input_ids.lengths
    own = {key: spec for key, spec in table.items() if key in raw}
    if num_actions is not None:
        own["loss_mask"] = _ROLLOUT_FIELDS["loss_mask"]
    fields = {}
    for key, spec in {**own, **declared}.items():
        values = _field(key, spec, raw, lengths, num_actions, rollouts=rollouts)
        name = _BATCH_NAMES.get(key, key) if key in own else key
        own_key = key if key in own else None
        fields[key] = FieldColumn(name, spec, values, own_key, _MOST.get(key, math.inf))
    images = None if vision is None else read_images(raw, vision, input_ids)
    made = ["response_mask", *(fields[key].name for key in own)] if rollouts else []
    if "rollout_expert_indices" in own:
        made.append("router_padding_mask")
    if "attention_mask" in own:
        _check_attention_mask(joined(fields.pop("attention_mask").values))
    target = _target_name(own)
    return ExampleColumns(
        input_ids,
        None if target is None else fields.pop(target),
        num_actions,
        list(fields.values()),
        (*made, *declared, *(() if images is None else images.arrays)),
        images,
        _per_example(raw) if rollouts else {},
        rollouts,
    )


def _field(
    key: str,
    spec: PerToken | PerResponseToken | PerRoutedToken | PerExample,
    raw: Mapping[str, Any],
    lengths: np.ndarray,
    num_actions: np.ndarray | None,
    *,
    rollouts: bool,
) -> Numbers:
    """One field, of our own or declared. ``lengths`` and ``num_actions``: int64 [N].

    Raises:
        DataError: it is missing, or has another number of entries than tokens that need one.
    """
    if key not in raw:
        raise DataError(
            f"example 0 has no {key}, which fields declares; give every example one, or "
            "leave it out of fields"
        )
    if isinstance(spec, PerExample):
        wanted = "it is declared PerExample, so give one number"
        numbers = scalar_column(key, raw[key], "iufb", wanted)
        if numbers.dtype.hasobject:
            raise DataError(f"{key} has a number beyond 64 bits; give numbers that fit")
        return Ragged(numbers, np.arange(len(numbers) + 1))
    if isinstance(spec, PerRoutedToken):
        return route_column(raw[key], lengths)
    expected = num_actions if isinstance(spec, PerResponseToken) else lengths
    if expected is None:
        raise DataError(
            f"fields declares {key} per response token, and the examples have no num_actions, "
            "which says how many these are; give it, or declare PerToken"
        )
    kind: Kind = "labels" if key == "labels" else "whole numbers"
    if spec.dtype.is_floating_point or spec.dtype == torch.bool:
        kind = "numbers"
    rows = number_column(key, raw[key], kind)
    _check_lengths(key, spec, rows.lengths, expected, rollouts=rollouts)
    return rows


def _check_lengths(
    key: str,
    spec: PerToken | PerResponseToken,
    lengths: np.ndarray,
    expected: np.ndarray,
    *,
    rollouts: bool,
) -> None:
    """That every example has as many entries of a field as tokens that need one each."""
    wrong = np.flatnonzero(lengths != expected)
    if not len(wrong):
        return
    i = int(wrong[0])
    if isinstance(spec, PerToken):
        found = f"{'the rollout' if rollouts else 'input_ids'} has {expected[i]} tokens"
        wanted = "one entry per token"
        if key == "loss_mask":
            wanted += " (or pass num_actions too, if it is the mask of the last tokens)"
    elif rollouts:
        found = f"response_ids has {expected[i]} tokens"
        numbers = {"rewards": "one number for the last token, or ", "advantages": "one number, or "}
        wanted = f"{numbers.get(key, '')}one entry per response token"
    else:
        found = f"num_actions={expected[i]}"
        wanted = "one entry for each of the last num_actions tokens"
    raise DataError(f"example {i}: {key} has {lengths[i]} entries, {found}; give {wanted}")


def _ids(name: str, column: Any) -> Numbers:
    ids = number_column(name, column, "ids")
    lengths = ids.lengths
    if not lengths.all():
        i = int(np.flatnonzero(lengths == 0)[0])
        if name == "input_ids":
            raise DataError(f"example {i} is empty (input_ids has 0 tokens); filter it out")
        hint = "filter it out"
        if name == "prompt_ids":
            hint = "nothing would predict its first response token; put the BOS token there"
        raise DataError(f"example {i}: {name} is empty (0 tokens); {hint}")
    return ids


def _target_name(own: Collection[str]) -> str | None:
    given = [key for key in TARGETS if key in own]
    if len(given) > 1:
        raise DataError(
            f"example 0 says twice where its loss is: {' and '.join(given)}; keep one of them"
        )
    return given[0] if given else None


def _num_actions(raw: Mapping[str, Any], lengths: np.ndarray) -> np.ndarray | None:
    if "num_actions" not in raw:
        return None
    if "loss_mask" not in raw:
        raise DataError(
            "example 0 has num_actions but no loss_mask; give the mask of its last num_actions "
            "tokens, or remove num_actions"
        )
    wanted = "it must be an integer, the number of tokens at the end that loss_mask covers"
    counts = scalar_column("num_actions", raw["num_actions"], "iu", wanted)
    bad = np.flatnonzero((counts < 0) | (counts > lengths))
    if len(bad):
        i = int(bad[0])
        raise DataError(
            f"example {i} has num_actions={counts[i]}, but {lengths[i]} tokens; it counts the "
            "tokens at the end, 0 to all of them"
        )
    return counts.astype(np.int64, copy=False)


def _check_attention_mask(mask: Ragged) -> None:
    if not mask.values.all():
        first = np.flatnonzero(mask.values == 0)[0]
        i = int(np.searchsorted(mask.offsets, first, side="right")) - 1
        raise DataError(
            f"example {i}: attention_mask contains a 0, so the example is padded already; "
            "tokenize without padding, collators pad"
        )


def _per_example(raw: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Row metadata of rollouts."""
    found: dict[str, list[Any]] = {
        f"{key}s": id_column(key, raw[key]) for key in ("uid", "trajectory_id") if key in raw
    }
    if "is_last_step" in raw:
        found["is_last_step"] = flag_column("is_last_step", raw["is_last_step"])
    return found
