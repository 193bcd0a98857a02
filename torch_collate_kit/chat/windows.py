"""Windows of an example that is too long: its prompt, and a run of what follows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Any

import numpy as np

from torch_collate_kit._checks import checked_bool, checked_int, type_name
from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.errors import DataError
from torch_collate_kit.reading.keys import MEDIA, TARGETS
from torch_collate_kit.reading.reader import read_columns
from torch_collate_kit.reading.source import num_rows


def windows(
    example: Mapping[str, Any],
    max_length: int,
    *,
    pinned: int | None = None,
    overlap: int = 0,
    as_segments: bool = False,
) -> Any:
    """Cut a long example into windows that train each of its trained tokens once.

    A window is the prompt and a run of what follows: the answer before the first own one, as
    context, and whole answers while they fit. A longer answer goes on in the next window. Every
    trained token keeps its weight, and the token before it.

    Args:
        example: a mapping with ``input_ids`` and a loss target in any form that collators read.
        max_length: the most tokens of a window; a shorter example is a window by itself.
        pinned: tokens that every window begins with; None: those before the first trained one.
        overlap: begin with earlier answers, up to this many tokens before the first own one.
        as_segments: return one example, whose segments ``share_prefixes`` packs with one prompt.

    Returns a list of dicts, with ``as_segments`` a dict of lists of lists, all copies. Keys with an
    entry per token are cut as ``input_ids`` is, others repeated; ``num_actions`` becomes a mask of
    all tokens. ``is_continued`` tells that a window, or one of them, ends inside an answer.

    Raises:
        DataError: the prompt fills a window, nothing is trained, or there are images or segments.
        TypeError, ValueError: a wrong option, or no mapping.

    >>> row = {"input_ids": [5, 6, 7, 1, 8, 2, 9, 3], "loss_mask": [0, 0, 0, 1, 0, 1, 0, 1]}
    >>> for window in windows(row, 6):
    ...     print(window["input_ids"], window["loss_mask"])
    [5, 6, 7, 1, 8, 2] [0, 0, 0, 1, 0, 1]
    [5, 6, 7, 2, 9, 3] [0, 0, 0, 0, 0, 1]
    """
    limit = checked_int("max_length", max_length, minimum=2)
    checked_int("overlap", overlap, minimum=0, hint="0 begins with one earlier answer")
    checked_bool("as_segments", as_segments)
    columns, others, target, is_trained_T = _read(example)
    least = int(is_trained_T.argmax()) if pinned is None else pinned
    first = checked_int("pinned", least, minimum=0, hint="None pins the whole prompt")
    if len(is_trained_T) > limit < first + 2:
        way_out = "raise max_length, pin less of it (pinned=), or leave the example out"
        what = f"the prompt has {first} tokens, and max_length={limit} must hold it and two more"
        raise DataError(f"{what}; {way_out}")
    found, untrained = [], type(columns[target][0])(IGNORE_INDEX if target == "labels" else 0)
    for start, new, stop, is_continued in _spans(is_trained_T, limit, first, overlap):
        window = {key: of[:first] + of[start:stop] for key, of in columns.items()}
        num_known = min(new, first) + max(new - start, 0)
        window[target][:num_known] = [untrained] * num_known
        if "position_ids" in window:
            window["position_ids"] = list(range(len(window["input_ids"])))
        found.append({**others, **window, "is_continued": is_continued})
    if not as_segments:
        return found
    segments = {key: [window[key] for window in found] for key in columns}
    return {**found[0], **segments, "is_continued": any(w["is_continued"] for w in found)}


def _read(example: Any) -> tuple[dict[str, list[Any]], dict[str, Any], str, np.ndarray]:
    """Return the columns per token, other keys, the target's name, and what it trains: bool [T]."""
    if not isinstance(example, Mapping):
        raise TypeError(f"an example is a mapping with input_ids, got {type_name(example)}")
    is_read = {k: (v is not None or k in TARGETS) and k != "weight" for k, v in example.items()}
    given = {k: value for k, value in example.items() if is_read[k]}
    if images := [name for name in MEDIA if name in given]:
        why = "and windows are of text: one could leave an image out; raise max_length, or leave"
        raise DataError(f"the example has {images[0]}, {why} the example out")
    read = read_columns([given])
    if read.segment_offsets is not None:
        way_out = "give one example of one segment, in Dataset.map without batched=True"
        raise DataError(f"input_ids holds {len(read.lengths)} lists; {way_out}")
    found = read.checked(limits=False)
    name = "loss_mask" if read.target is None else read.target.name
    target = found["labels" if name == "labels" else "loss_weights"].values
    is_trained_T = target != (IGNORE_INDEX if name == "labels" else 0)
    if not is_trained_T.any():
        raise DataError(f"none of the example's {len(target)} tokens is trained; leave it out")
    others = dict(example)
    if name not in given or others.pop("num_actions", None) is not None:
        others[name] = target
    keys = [k for k, v in others.items() if num_rows(v) == len(target) and not isinstance(v, dict)]
    columns = {k: v.tolist() if hasattr(v := others.pop(k), "tolist") else list(v) for k in keys}
    return columns, others, name, is_trained_T


def _spans(is_trained_T: np.ndarray, limit: int, pinned: int, overlap: int) -> list[Any]:
    """Return of each window's rest its start, first own token, stop, and whether it cuts a run."""
    if (num_tokens := len(is_trained_T)) <= limit:
        return [(pinned, 0, num_tokens, False)]
    edges = np.flatnonzero(np.diff(is_trained_T, prepend=False, append=False)).tolist()
    begins, ends = edges[::2], edges[1::2]
    found, run, new, room = list[Any](), 0, begins[0], limit - pinned
    while run < len(begins):
        # from there on the run ends in this window, or half of the window is new
        least = ends[run] - room if ends[run] - new < room else new - room // 2
        start = new - max(overlap, 1) if new > begins[run] else pinned
        if run and new == begins[run]:
            start = begins[min(bisect_left(begins, max(new - overlap, least)), run - 1)]
        start = max(start, least, pinned)
        fitting = bisect_right(ends, start + room)
        stop = start + room if fitting == run else max(ends[fitting - 1], pinned)
        following = begins[fitting] if fitting < len(begins) else num_tokens
        found.append((start, new, stop, following < stop))
        run, new = fitting, max(following, stop)
    return found
