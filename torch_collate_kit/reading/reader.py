"""Examples in, columns out, checked. A rollout is an example in other words.

Its prompt and response are one sequence, whose response tokens are the last ``num_actions``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.batch.fields import PerResponseToken, PerRoutedToken, PerToken
from torch_collate_kit.batch.placement import whole_examples
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.examples import ExampleColumns
from torch_collate_kit.reading.fields import BATCH_NAMES, DeclaredFields, Specs, read_fields
from torch_collate_kit.reading.media import read_images, token_type_fields
from torch_collate_kit.reading.numbers import (
    Numbers,
    first_bad,
    in_pairs,
    joined,
    number_column,
    tensor_to_numpy,
)
from torch_collate_kit.reading.raw import (
    IMAGES,
    TARGETS,
    Examples,
    is_sequence,
    raw_examples,
    raw_rollouts,
)
from torch_collate_kit.reading.scalars import flag_column, id_column, one_value, scalar_column
from torch_collate_kit.vision import VisionLayout

__all__ = ["read_columns"]

# What the columns of SFT examples and of rollouts have one entry of, besides ids.
_SFT_FIELDS: Specs = {
    "loss_mask": PerToken(torch.float32),
    "labels": PerToken(torch.int64, IGNORE_INDEX),
    "assistant_masks": PerToken(torch.float32),
    "completion_mask": PerToken(torch.float32),
    "attention_mask": PerToken(torch.float32),
}
_ROLLOUT_FIELDS: Specs = {
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
    rollouts: bool = False,
    train_all: bool = False,
    fields: DeclaredFields | None = None,
    vision: VisionLayout | None = None,
) -> ExampleColumns:
    """Check the examples (DataError names the bad one) and look at them as columns.

    ``rollouts``: that is what they are. ``train_all``: SFT examples have no target, whatever other
    keys they have. ``fields`` are read too, and of a model with ``vision`` the images.
    """
    fields = fields or {}
    num_actions: np.ndarray | None
    if rollouts:
        raw = raw_rollouts(examples, fields, vision)
        input_ids, num_actions = _joined(raw)
        if vision is None and any(name in raw for name in IMAGES):
            vision = _UNKNOWN_MODEL
    else:
        raw = raw_examples(examples, fields, vision, train_all=train_all)
        input_ids = _ids("input_ids", raw["input_ids"])
        num_actions = _num_actions(raw, input_ids.lengths)
    table = _ROLLOUT_FIELDS if rollouts else _SFT_FIELDS
    own = {key: spec for key, spec in table.items() if key in raw}
    if num_actions is not None:
        own["loss_mask"] = _ROLLOUT_FIELDS["loss_mask"]
    types = {} if vision is None or rollouts else token_type_fields(raw, vision)
    declared = {**fields, **types}
    columns = read_fields(raw, own, declared, input_ids.lengths, num_actions, rollouts=rollouts)
    names = [*(_names(own) if rollouts else ()), *fields]
    if "attention_mask" in own:
        _check_attention_mask(joined(columns.pop("attention_mask").values))
    target = _target_name(own)
    weights = None if target is None else columns.pop(target).values
    images = None if vision is None else read_images(raw, vision, input_ids)
    names += [] if images is None else images.arrays
    per_example = _per_example(raw) if rollouts else {}
    fields_read = list(columns.values())
    return ExampleColumns(
        input_ids,
        target,
        weights,
        num_actions,
        fields_read,
        tuple(names),
        images,
        per_example,
        rollouts,
    )


def _joined(raw: dict[str, Any]) -> tuple[Numbers, np.ndarray]:
    """Prompts and responses as ids and ``num_actions``; the single numbers in ``raw`` as rows."""
    prompts, responses = (_ids(name, raw[name]) for name in ("prompt_ids", "response_ids"))
    for name in ("rewards", "advantages"):
        if name in raw:
            raw[name] = _spread(name, raw[name], responses.lengths)
    return in_pairs(prompts, responses), responses.lengths


def _names(own: Collection[str]) -> list[str]:
    """The fields of a batch that follow from these columns of rollouts."""
    routes = ("router_padding_mask",) if "rollout_expert_indices" in own else ()
    return ["response_mask", *(BATCH_NAMES.get(key, key) for key in own), *routes]


def _ids(name: str, column: Any) -> Numbers:
    ids = number_column(name, column, "ids")
    lengths = ids.lengths
    if not lengths.all():
        i = int(np.flatnonzero(lengths == 0)[0])
        why = "filter it out"
        if name == "prompt_ids":
            why = "nothing would predict its first response token; put the BOS token there"
        raise DataError(f"example {i}: {name} is empty (0 tokens); {why}")
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
        i, _ = first_bad(mask.values == 0, whole_examples(mask.lengths))
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


def _spread(name: str, column: Any, lengths: np.ndarray) -> Any:
    """Numbers to rows: a reward to the last token, an advantage to every token."""
    if isinstance(column, Ragged):
        return column
    if isinstance(column, np.ndarray | Tensor) and column.ndim == 1:
        column = tensor_to_numpy(name, None, column) if isinstance(column, Tensor) else column
        if column.dtype.kind in "iufb":
            return _rows_of(name, column, lengths)
        column = column.tolist()
    types = set(map(type, column))
    if types == {list} or (types == {np.ndarray} and all(value.ndim for value in column)):
        return column
    is_number = [_is_number(value) for value in column]
    numbers = np.zeros(len(lengths))
    for i, (value, is_one) in enumerate(zip(column, is_number, strict=True)):
        if is_one:
            numbers[i] = _number(name, i, value)
        elif not is_sequence(value) and not isinstance(value, np.ndarray | Tensor):
            kind = "None" if value is None else type(value).__name__
            raise DataError(
                f"example {i}: {name} is {kind}; give one number, or one per response token"
            )
    rows = _rows_of(name, numbers, lengths)
    if all(is_number):
        return rows
    parts = zip(column, rows, is_number, strict=True)
    return [row if is_one else value for value, row, is_one in parts]


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim == 0
    return isinstance(value, int | float | np.number | np.bool_)


def _number(name: str, index: int, value: Any) -> float:
    number = one_value(value)
    try:
        if isinstance(number, str | bytes):
            raise TypeError
        return float(number)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise DataError(
            f"example {index}: {name} is {number!r:.40} ({type(number).__name__}); give one number "
            "that float32 holds, or one per response token"
        ) from None


def _rows_of(name: str, numbers: np.ndarray, lengths: np.ndarray) -> Ragged:
    if name == "advantages":
        return Ragged.from_lengths(np.repeat(numbers, lengths), lengths)
    rows = Ragged.from_lengths(np.zeros(int(lengths.sum())), lengths)
    rows.values[rows.offsets[1:] - 1] = numbers
    return rows
