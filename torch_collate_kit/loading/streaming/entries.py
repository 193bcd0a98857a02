"""What the buffer of a stream has for each of its entries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from torch_collate_kit.errors import DataError
from torch_collate_kit.loading.streaming.states import Place
from torch_collate_kit.packing import PackingOptions
from torch_collate_kit.packing.atoms import Atoms

ENTRY = np.dtype(
    [
        ("position", np.int64),  # of the example in the source
        ("start", np.int64),  # its first token in the example
        ("num_tokens", np.int64),
        ("is_piece", np.bool_),
        ("patches", np.int64),  # of its images,
        ("vision_cost", np.int64),  # and what these cost
        ("cells", np.int64),  # of its segments, if it is a list of them; else 0
        ("num_segments", np.int64),
        ("cost", np.int64),  # of the segments in the language model
        ("num_read", np.int64),  # the Place after this entry:
        ("next_start", np.int64),  # ...
        ("source", np.object_),
        ("taken", np.int64),
        ("example", np.object_),  # the whole of it; None where rows are read by position
        ("skipped", np.object_),  # a tuple of the wrong examples that were left out before it
        ("of", np.int64),  # the source of a mixture
    ]
)


def place_after(entry: Any) -> Place:
    """Return the place of a pass after this entry."""
    num_read, start = int(entry["num_read"]), int(entry["next_start"])
    return Place(num_read, start, entry["source"], int(entry["taken"]))


_OF_TEXT = {"starts": "start", "patches": "patches", "vision_costs": "vision_cost"}
_OF_SEGMENTS = {"cells": "cells", "segments": "num_segments", "costs": "cost"}


def atoms_of(entries: np.ndarray, packing: PackingOptions) -> Atoms:
    """Return what is planned of entries.

    Raises:
        DataError: some examples are lists of segments, and others are not.
    """
    given: dict[str, Any] = {
        name: np.ascontiguousarray(entries[column])
        for name, column in {"tokens": "num_tokens", **_OF_TEXT, **_OF_SEGMENTS}.items()
    }
    atoms, is_list = Atoms.of(given["tokens"], None, packing), given["segments"] > 0
    if is_list.all() and len(is_list):
        given |= {"are_lists": True, "share": bool(packing.share_prefixes)}
        return replace(atoms, reserved=packing.reserved, **given)
    if is_list.any():
        flat, nested = (int(entries["position"][(is_list == of).argmax()]) for of in (False, True))
        raise DataError(
            f"example {nested} of the stream is a list of segments, and example {flat} is not; "
            "give every example a list, of one where it has one segment"
        )
    of_text = {name: given[name] for name in _OF_TEXT}
    return replace(atoms, reserved=packing.reserved, **of_text)
