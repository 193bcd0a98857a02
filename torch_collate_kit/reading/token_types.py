"""What else a vision-language model reads of every token, where it makes its own positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from torch_collate_kit.batch.fields import PerToken
from torch_collate_kit.errors import DataError
from torch_collate_kit.reading.raw import (
    KNOWN,
    MEDIA,
    ROLLOUT_KEYS,
    TOKEN_TYPES,
    Examples,
    first_with,
)
from torch_collate_kit.vision import VisionLayout

__all__ = ["token_types"]


def token_types(
    examples: Examples,
    raw: Mapping[str, Any],
    lengths: np.ndarray,
    declared: Iterable[str],
    layout: VisionLayout | None,
) -> dict[str, PerToken]:
    """Return the fields per token that are passed on to the model, of those in ``raw``.

    ``lengths``: int64 [N], the tokens of each example. ``declared`` fields are read anyway.

    Raises:
        DataError: a field that the model needs is missing, or it is not known whether it reads one.
    """
    if layout is None or layout.family.positions != "model":
        return {}
    has_images = any(name in raw for name in layout.other_fields)
    needed = layout.token_fields if has_images else (layout.family.token_types,)
    missing = [name for name in needed if name and name not in raw]
    if missing:
        raise DataError(
            f"example 0 has no {' and no '.join(missing)}, which the model reads for every token; "
            "give all that the processor returned"
        )
    passed_on = dict.fromkeys((*TOKEN_TYPES, *layout.token_fields))
    if layout.family_name == "other":
        read = {*KNOWN, *ROLLOUT_KEYS, *MEDIA, *layout.fields, *passed_on, *declared}
        _refuse_unread(examples, lengths, read)
    return {name: PerToken(torch.int64) for name in passed_on if name in raw}


def _refuse_unread(examples: Examples, lengths: np.ndarray, read: set[str]) -> None:
    """Refuse other keys with one entry per token: dropped, they would change what is computed."""
    for key, owner in first_with(examples).items():
        if key in read:
            continue
        if isinstance(examples, Mapping):
            column = examples[key]
        else:
            column = [example.get(key) for example in examples]
        if len(column) == len(lengths) and all(map(_is_per_token, column, lengths.tolist())):
            raise DataError(
                f"example {owner} has {key!r} with one entry per token, and it is not known "
                "whether the model reads it, since it is in no row of the table of families "
                "(docs/vision.md); remove it, or declare it in fields and add it to the dict that "
                "model_inputs() returns"
            )


def _is_per_token(entry: Any, num_tokens: int) -> bool:
    if isinstance(entry, str | bytes | Mapping) or not hasattr(entry, "__len__"):
        return False
    if getattr(entry, "ndim", 1) == 0 or len(entry) != num_tokens:
        return False
    return not isinstance(entry[0], str | bytes | Mapping)
