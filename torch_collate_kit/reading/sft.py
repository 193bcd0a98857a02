"""SFT examples in, columns out, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.examples import ExampleColumns
from torch_collate_kit.reading.fields import DeclaredFields, read_declared
from torch_collate_kit.reading.media import MEDIA, TOKEN_TYPES, read_images, token_type_fields
from torch_collate_kit.reading.numbers import Numbers, number_column, row_array
from torch_collate_kit.reading.raw import (
    KNOWN,
    TARGETS,
    Examples,
    check_keys,
    first_with,
    one_value,
    raw_columns,
)
from torch_collate_kit.vision import VisionLayout

__all__ = ["read_columns"]


def read_columns(
    examples: Examples,
    *,
    train_all: bool = False,
    fields: DeclaredFields | None = None,
    vision: VisionLayout | None = None,
) -> ExampleColumns:
    """Check the examples (DataError names the bad one) and look at them as columns.

    ``train_all``: they have no target, whatever other keys they have. ``fields`` are read too, and
    of a model with ``vision`` the images.
    """
    fields = fields or {}
    of_images = () if vision is None else (*vision.fields, *TOKEN_TYPES)
    media = () if vision is None else tuple(dict.fromkeys((*MEDIA, *of_images)))
    hint = "tokenize the text first"
    raw = raw_columns(examples, (*KNOWN, *fields), "input_ids", hint, sometimes=media)
    owners = {key: f"example {i}" for key, i in first_with(examples).items()}
    if vision is None and "pixel_values" in owners and "pixel_values" not in fields:
        raise DataError(
            f"{owners['pixel_values']} has pixel_values, and the collator does not know the images "
            "of the model; give it the processor in place of the tokenizer"
        )
    check_keys(owners, train_all=train_all, declared=(*fields, *of_images))
    input_ids = number_column("input_ids", raw["input_ids"], "ids")
    lengths = input_ids.lengths
    if not lengths.all():
        index = int(np.flatnonzero(lengths == 0)[0])
        raise DataError(f"example {index} is empty (input_ids has 0 tokens); filter it out")
    if "attention_mask" in raw:
        _check_attention_mask(raw["attention_mask"], lengths)
    name = _target_name(raw)
    num_actions = _num_actions(raw, lengths) if "num_actions" in raw else None
    target = None
    if name is not None:
        target = number_column(name, raw[name], "labels" if name == "labels" else "weights")
        _check_target_lengths(name, target, lengths, num_actions)
    images = None
    if vision is not None:
        fields = {**fields, **token_type_fields(raw, vision)}
        images = read_images(raw, vision, input_ids)
    declared = read_declared(raw, fields, lengths, num_actions)
    names = (*fields, *(() if images is None else images.arrays))
    return ExampleColumns(input_ids, name, target, num_actions, declared, names, images)


def _target_name(raw: Mapping[str, Any]) -> str | None:
    given = [key for key in TARGETS if key in raw]
    if len(given) > 1:
        raise DataError(
            f"example 0 says twice where its loss is: {' and '.join(given)}; keep one of them"
        )
    return given[0] if given else None


def _num_actions(raw: Mapping[str, Any], lengths: np.ndarray) -> np.ndarray:
    if "loss_mask" not in raw:
        raise DataError(
            "example 0 has num_actions but no loss_mask; give the mask of its last num_actions "
            "tokens, or remove num_actions"
        )
    given = raw["num_actions"]
    if not isinstance(given, np.ndarray) or given.ndim != 1 or given.dtype.kind not in "iu":
        given = [one_value(value) for value in given]
        for i, count in enumerate(given):
            if not isinstance(count, int) or isinstance(count, bool):
                raise DataError(
                    f"example {i}: num_actions is {count!r:.40}; it must be an integer, the number "
                    "of tokens at the end that loss_mask covers"
                )
    counts = np.asarray(given)  # no integers if one is beyond 64 bits
    bad = np.flatnonzero((counts < 0) | (counts > lengths))
    if len(bad):
        i = int(bad[0])
        raise DataError(
            f"example {i} has num_actions={given[i]}, but {lengths[i]} tokens; it counts the "
            "tokens at the end, 0 to all of them"
        )
    return counts.astype(np.int64, copy=False)


def _check_target_lengths(
    name: str, target: Numbers, lengths: np.ndarray, num_actions: np.ndarray | None
) -> None:
    expected = lengths if num_actions is None else num_actions
    got = target.lengths
    if np.array_equal(got, expected):
        return
    i = int(np.flatnonzero(got != expected)[0])
    if num_actions is not None:
        raise DataError(
            f"example {i}: loss_mask has {got[i]} entries, num_actions={num_actions[i]}; give one "
            "entry for each of the last num_actions tokens"
        )
    hint = " (or pass num_actions too, if it is the mask of the last tokens)"
    raise DataError(
        f"example {i}: {name} has {got[i]} entries, input_ids has {lengths[i]} tokens; give one "
        f"entry per token{hint if name == 'loss_mask' else ''}"
    )


def _check_attention_mask(column: Any, lengths: np.ndarray) -> None:
    whole = isinstance(column, Ragged) and np.array_equal(column.lengths, lengths)
    if whole and column.flat_values.all():
        return
    for i, (row, length) in enumerate(zip(column, lengths.tolist(), strict=True)):
        if isinstance(row, Tensor | np.ma.MaskedArray):
            row = row_array("attention_mask", i, row)
        if not hasattr(row, "__len__") or isinstance(row, str) or len(row) != length:
            sized = hasattr(row, "__len__") and not isinstance(row, str)
            got = f"{len(row)} entries" if sized else repr(row)
            raise DataError(f"example {i}: attention_mask has {got}, input_ids has {length} tokens")
        if (0 in row) if isinstance(row, list | tuple) else not bool(row.all()):
            raise DataError(
                f"example {i}: attention_mask contains a 0, so the example is padded already; "
                "tokenize without padding, collators pad"
            )
