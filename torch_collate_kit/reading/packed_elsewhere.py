"""Rows that another tool has packed: read as one text, their documents would see each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Nested, Ragged

# seq_lengths (TRL), cu_seq_lens_q (transformers), packing_params (LLaMA-Factory), seq_lens_padded
# (Automodel), input_pos (torchtune), seq_start_id (NeMo), sequence_id (llm-foundry), segment_ids
# (Levanter), inputs_segmentation (maxtext), cumulative_len (XTuner), doc_lens (OLMo-core), ...
_PACKED = "(packed|packing|inputs?|targets?|encoder|decoder|cu|cumulative|max|sub)"
_DOCUMENT = "(seq|sequence|segment|doc|document|sample|example)s?"
_WHERE = "(len|length|id|idx|index|indice|number|start|end|offset|boundarie|position|param)s?"
_KEYS = re.compile(
    f"{_PACKED}*{_DOCUMENT}({_WHERE})+(q|k|kv|padded|unpadded)*|{_PACKED}*(segmentation|position)s?"
    f"|{_PACKED}+(pos|len|length|param)s?|lengths?|boundaries|cuseqlens"
)
CHECKED = ("attention_mask", "position_ids")  # not read, but checked by ``check_one_text``
_AS_ONE_TEXT = (
    "another tool has packed documents into the row, which would be read as one text; give each "
    "document as an example of its own (loading.unpack_dataset)"
)


def refuse_boundaries(
    keys: Iterable[Any],
    column: Callable[[Any], Any],
    declared: Collection[str] = (),
    owner: Callable[[int], str] = "example {}".format,
) -> None:
    """Refuse keys with lists of numbers that are boundaries of documents; ``owner`` names a row.

    A single number or a string under such a name, as an id of the source, is left alone.
    """
    for key in keys:
        name = "".join(filter(str.isalnum, str(key).lower()))
        if not _KEYS.fullmatch(name) or name == "positionids" or key in declared:
            continue
        entries = column(key)
        for i, entry in enumerate(entries if hasattr(entries, "__iter__") else ()):
            if _are_numbers(entry):
                raise DataError(
                    f"{owner(i)} has {key!r}: {_AS_ONE_TEXT}, or remove the key if it means "
                    "something else (fields= of a collator carries it along)"
                )


def _are_numbers(entry: Any) -> bool:
    """Return whether an entry is a list of numbers, at any depth, or a mapping of them."""
    if isinstance(entry, Mapping):
        return any(map(_are_numbers, entry.values()))
    if isinstance(entry, np.ndarray | Tensor | Ragged | Nested):
        return isinstance(entry, Ragged | Nested) or entry.ndim > 0
    if not isinstance(entry, list | tuple) or not entry:
        return False
    return isinstance(entry[0], int | float | np.number) or _are_numbers(entry[0])


def check_one_text(key: str, column: Ragged) -> None:
    """Check that a mask is 1 at all tokens, or that positions are 0, 1, 2, ... in each example."""
    values: Any = column.values
    expected, wanted = np.ones(1, dtype=np.int64), "a token of one text has 1"
    if key == "position_ids":
        expected = np.arange(len(values)) - column.offsets[:-1].repeat(column.lengths)
        wanted = "those of one text are 0, 1, 2, ..."
    wrong = np.flatnonzero(values != expected)
    if not len(wrong):
        return
    others = wrong if key == "position_ids" else wrong[values[wrong] != 0]
    entry = int((others if len(others) else wrong)[0])
    i = int(np.searchsorted(column.offsets, entry, side="right")) - 1
    if not len(others):
        raise DataError(
            f"example {i}: attention_mask contains a 0, so the example is padded already; "
            "tokenize without padding, collators pad"
        )
    raise DataError(
        f"example {i}: {key} is {values[entry]:g} at token {entry - column.offsets[i]}, and "
        f"{wanted}: {_AS_ONE_TEXT}, or remove {key} if it means something else"
    )
