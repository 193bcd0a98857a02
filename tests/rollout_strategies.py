"""Hypothesis strategies: rollouts in every container that RolloutCollator and PackedCollator take.

As in `tests.strategies` a drawn batch holds the same rollouts twice: `plain` lists and numbers for
the oracle (rounded where a narrow dtype rounds), and `given`, what the collator gets. Numbers come
from the place of the token: drawing is fast, and a wrong cell says where it came from.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tests.building import packed_collator
from tests.strategies import (
    ANY,
    EXAMPLE_WEIGHTS,
    INTS,
    NUMBERS,
    Container,
    PackedOptions,
    array,
    batches,
    packed_options,
    padded_options,
    strided,
    tensor,
)
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PaddedCollator, RolloutCollator
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.ragged import Ragged

__all__ = ["DrawnRollouts", "draw_batch", "packed_rollout_options", "rollout_options", "rollouts"]

_ROUNDED = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_NUMBERS = (0.0, 1.0, -1.0, 0.5, 0.1, -1 / 3, 1e-6, 100.0, 3.0)
_WEIGHTS = (0.0, 1.0, 1.0, 0.5, 1 / 3)

_FLOATS = ANY | {
    **{f"float{n}": array(f"float{n}") for n in (16, 32, 64)},
    "tensor_float16": tensor(torch.float16),
    "tensor_bfloat16": tensor(torch.bfloat16),
    "tensor_float32": tensor(torch.float32),
    "tensor_float64": tensor(torch.float64),
    "tensor_bfloat16_grad": tensor(torch.bfloat16, requires_grad=True),
    "tensor_float64_grad": tensor(torch.float64, requires_grad=True),
}
_SCALARS: dict[str, Container] = {
    "float": float,
    "np_float32": np.float32,
    "np_float64": np.float64,
    "array_float64": array(np.float64),
    **{name: _FLOATS[name] for name in _FLOATS if name.startswith("tensor")},
}
_WHOLE = {"int": int, "np_int64": np.int64, "tensor_int64": tensor(torch.int64)}
_BITS = {"bool": bool, "np_bool": np.bool_, "tensor_bool": tensor(torch.bool)}
_ROUTES: dict[str, Container] = {
    "list": lambda array: array.tolist(),
    "uint8": lambda array: array.astype(np.uint8),
    "int64": lambda array: array.copy(),
    "strided": strided,
    "tensor_int16": tensor(torch.int16),
    "tensor_uint8": tensor(torch.uint8),
}
_IMAGES: dict[str, Container] = {
    "list": lambda array: array.tolist(),
    "float32": lambda array: array.astype(np.float32),
    "float64": lambda array: array.copy(),
    "tensor_bfloat16": tensor(torch.bfloat16),
    "tensor_float32_grad": tensor(torch.float32, requires_grad=True),
}
_UIDS: dict[str, Callable[[int], tuple[Any, Any]]] = {  # what is given, and what comes back
    "str": lambda i: (f"prompt-{i // 2}", f"prompt-{i // 2}"),
    "np_str": lambda i: (np.str_(f"p{i}"), f"p{i}"),
    "int": lambda i: (i // 2, i // 2),
    "np_int64": lambda i: (np.int64(i), i),
    "tensor": lambda i: (torch.tensor(i), i),
    "tensor_bfloat16": lambda i: (torch.tensor(i, dtype=torch.bfloat16), float(i)),
    "tuple": lambda i: (("prompt", i), ("prompt", i)),
    "uuid": lambda i: (uuid.UUID(int=i), uuid.UUID(int=i)),
}
_FLAGS: dict[str, Container] = {
    "bool": bool,
    "int": int,
    "np_bool": np.bool_,
    "tensor": torch.tensor,
}


@dataclass(frozen=True)
class DrawnRollouts:
    plain: list[dict[str, Any]]
    given: list[dict[str, Any]] | tuple[dict[str, Any], ...] | Mapping[str, Any]

    @property
    def lengths(self) -> list[int]:
        return [len(rollout["prompt_ids"]) + len(rollout["response_ids"]) for rollout in self.plain]


@st.composite
def rollouts(
    draw: st.DrawFn,
    *,
    images: bool = True,
    max_examples: int = 8,
    max_length: int = 12,
    **forced: bool,
) -> DrawnRollouts:
    """Rollouts with prompts and responses of 1 to `max_length` tokens.

    `forced` says whether an optional key is there: ``logprobs=True``.
    """
    lengths = draw(
        st.lists(
            st.tuples(st.integers(1, max_length), st.integers(1, max_length)),
            min_size=1,
            max_size=max_examples,
        )
    )
    optional = ["logprobs", "advantages", "uid", "trajectory_id", "is_last_step", "weight"]
    optional += ["rollout_expert_indices"]
    optional += ["pixel_values"] * images
    keys = {key: forced.get(key, draw(st.booleans())) for key in optional}
    in_columns = draw(st.booleans())
    plain: list[dict[str, Any]] = [{} for _ in lengths]
    given: list[dict[str, Any]] = [{} for _ in lengths]

    def put(key: str, entries: list[tuple[Any, Any]]) -> None:
        for i, (value, known) in enumerate(entries):
            given[i][key], plain[i][key] = value, known

    first = draw(st.sampled_from((0, 1, 150_000)))
    for key, which in (("prompt_ids", 0), ("response_ids", 1)):
        rows = [
            [first + 100 * i + 50 * which + t for t in range(n[which])] for i, n in _each(lengths)
        ]
        put(key, draw(_rows(rows, INTS)))
    num_tokens = [response for _, response in lengths]
    palette = draw(st.lists(st.sampled_from(_WEIGHTS), min_size=1, max_size=4))
    put("loss_mask", draw(_rows(_filled(num_tokens, palette), _FLOATS)))
    put("rewards", draw(_numbers(num_tokens)))
    if keys["logprobs"]:
        put("logprobs", draw(_rows(_filled(num_tokens, (-0.1, -1 / 3, 0.0, -20.0)), _FLOATS)))
    if keys["advantages"]:
        put("advantages", draw(_numbers(num_tokens)))
    if keys["weight"]:
        kinds = draw(_kinds(NUMBERS, len(lengths)))
        values = [draw(st.sampled_from(EXAMPLE_WEIGHTS)) for _ in lengths]
        put("weight", [(NUMBERS[k](n), n) for k, n in zip(kinds, values, strict=True)])
    for key in ("uid", "trajectory_id"):
        if keys[key]:
            kinds = draw(_kinds(_UIDS, len(lengths)))
            put(key, [_UIDS[kind](i) for i, kind in enumerate(kinds)])
    if keys["is_last_step"]:
        kinds = draw(_kinds(_FLAGS, len(lengths)))
        put("is_last_step", [(_FLAGS[k](i % 3 == 0), i % 3 == 0) for i, k in enumerate(kinds)])
    if keys["rollout_expert_indices"]:
        put("rollout_expert_indices", draw(_routes([sum(pair) for pair in lengths])))
    if keys.get("pixel_values"):
        pixels, grids = draw(_images(len(lengths)))
        put("pixel_values", pixels)
        put("image_grid_thw", grids)
    absent = draw(st.sets(st.sampled_from(optional)))  # None everywhere, as if it were not there
    for example in given:
        example |= {key: None for key in optional if key in absent and not keys[key]}
    if in_columns:
        return DrawnRollouts(plain, draw(_as_columns(plain, given)))
    return DrawnRollouts(plain, tuple(given) if draw(st.booleans()) else given)


@st.composite
def rollout_options(draw: st.DrawFn, lengths: list[int]) -> dict[str, Any]:
    """Keyword arguments of `RolloutCollator`; with overflow="raise" every rollout fits."""
    overflow, longest = draw(st.sampled_from(("raise", "raise", "drop"))), max(lengths)
    limits = (longest, min(lengths)) if overflow == "drop" else (None, longest, longest + 1)
    return {
        "max_length": draw(st.sampled_from(limits)),
        "overflow": overflow,
        "pad_to_multiple_of": draw(st.sampled_from((None, 1, 3, 8))),
        "normalize_loss": draw(st.booleans()),
    }


@st.composite
def packed_rollout_options(draw: st.DrawFn, lengths: list[int]) -> PackedOptions:
    """Keyword arguments of `PackedCollator`; rollouts are never cut."""
    overflow = draw(st.sampled_from(("raise", "drop")))
    return draw(packed_options(lengths, overflow=overflow))


def _each(lengths: list[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    return list(enumerate(lengths))


def _filled(lengths: list[int], palette: Any) -> list[list[float]]:
    return [[palette[(i + t) % len(palette)] for t in range(n)] for i, n in enumerate(lengths)]


def _rounded(kind: str, values: Any) -> Any:
    for name, dtype in _ROUNDED.items():
        if name in kind.split("_"):
            return torch.tensor(values, dtype=torch.float64).to(dtype).double().tolist()
    return values


@st.composite
def _kinds(draw: st.DrawFn, known: Mapping[str, Any], count: int) -> list[str]:
    """A container for every example: often the same, so that fast paths are taken."""
    kind = st.sampled_from(sorted(known))
    return [draw(kind)] * count if draw(st.booleans()) else [draw(kind) for _ in range(count)]


@st.composite
def _rows(draw: st.DrawFn, rows: list[Any], known: dict[str, Container]) -> list[tuple[Any, Any]]:
    kinds = draw(_kinds(known, len(rows)))
    return [(known[k](row), _rounded(k, row)) for k, row in zip(kinds, rows, strict=True)]


@st.composite
def _numbers(draw: st.DrawFn, lengths: list[int]) -> list[tuple[Any, Any]]:
    """Rewards or advantages: one number a rollout, one a token, or some of both."""
    form = draw(st.sampled_from(("number", "token", "both")))
    palette = draw(st.lists(st.sampled_from(_NUMBERS), min_size=1, max_size=4))
    rows = draw(_rows(_filled(lengths, palette), _FLOATS))
    entries = []
    for i, row in enumerate(rows):
        if form == "token" or (form == "both" and draw(st.booleans())):
            entries.append(row)
            continue
        value = palette[i % len(palette)]
        known = (
            _SCALARS | (_WHOLE if value == int(value) else {}) | (_BITS if value in (0, 1) else {})
        )
        kind = draw(st.sampled_from(sorted(known)))
        entries.append((known[kind](value), _rounded(kind, value)))
    return entries


@st.composite
def _routes(draw: st.DrawFn, lengths: list[int]) -> list[tuple[Any, Any]]:
    layers, top_k, first = draw(st.tuples(*[st.integers(1, 3)] * 2, st.sampled_from((0, 40))))
    kinds = draw(_kinds(_ROUTES, len(lengths)))
    entries: list[tuple[Any, Any]] = []
    for i, (kind, length) in enumerate(zip(kinds, lengths, strict=True)):
        count = draw(st.sampled_from((0, 1, length - 1, length, length)))
        routes = (np.arange(count * layers * top_k) + i) % 100 + first
        routes = routes.reshape(count, layers, top_k)
        if "uint8" not in kind:  # which holds no -1
            routes[list(draw(st.sets(st.integers(0, 9), max_size=3)) & set(range(count)))] = -1
        if count:
            entries.append((_ROUTES[kind](routes), routes.tolist()))
        else:  # a list of no tokens has no layers
            entries.append((routes, routes))
    return entries


@st.composite
def _images(draw: st.DrawFn, count: int) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """Patches and grids; a rollout has none, one or two images."""
    sizes = [(1, 2, 2), (1, 1, 3), (2, 2, 1)]
    pixels: list[tuple[Any, Any]] = []
    grids: list[tuple[Any, Any]] = []
    for i, kind in enumerate(draw(_kinds(_IMAGES, count))):
        grid = [sizes[(i + image) % 3] for image in range(draw(st.integers(0, 2)))]
        if not grid:
            pixels.append((None, None))
            grids.append((None, None))
            continue
        num_patches = sum(t * h * w for t, h, w in grid)
        patches = 10.0 * i + np.arange(num_patches * 3).reshape(num_patches, 3) / 2
        pixels.append((_IMAGES[kind](patches), patches.tolist()))
        as_lists = [list(size) for size in grid]
        container = draw(st.sampled_from((list, array(np.int32), tensor(torch.int64))))
        grids.append((container(as_lists), as_lists))
    return pixels, grids


@st.composite
def _as_columns(
    draw: st.DrawFn, plain: list[dict[str, Any]], given: list[dict[str, Any]]
) -> dict[str, Any]:
    """A column a key: a Ragged (NumPy or torch, perhaps a slice), a flat column, or a list."""
    columns: dict[str, Any] = {key: [None] * len(given) for key in given[0] if key not in plain[0]}
    for key in plain[0]:
        known = [rollout[key] for rollout in plain]
        if key in ("pixel_values", "image_grid_thw") or draw(st.booleans()):
            columns[key] = [rollout[key] for rollout in given]
        elif key in ("uid", "trajectory_id"):
            column = np.empty(len(known), dtype=object)
            column[:] = known
            columns[key] = column
        elif all(isinstance(value, int | float) for value in known):  # also is_last_step
            as_column = draw(st.sampled_from((list, np.array, torch.tensor)))
            columns[key] = as_column(known)
        elif any(isinstance(value, int | float) for value in known):
            columns[key] = known
        else:
            columns[key] = draw(_ragged(known))
    return columns


@st.composite
def _ragged(draw: st.DrawFn, rows: list[Any]) -> Ragged:
    arrays = [np.asarray(row) for row in rows]
    sliced = draw(st.booleans())
    if sliced:  # the rows around the slice must not be read
        shape = next((a.shape[1:] for a in arrays if len(a)), arrays[0].shape[1:])
        around = np.full((2, *shape), -7, dtype=arrays[0].dtype)
        arrays = [around, *arrays, around]
    flat = np.concatenate(arrays)
    values = torch.from_numpy(flat) if draw(st.booleans()) else flat
    column = Ragged.from_lengths(values, [len(array) for array in arrays])
    return column[1:-1] if sliced else column


def draw_batch(data: st.DataObject, *kinds: str) -> Batch:
    """A batch of one of the kinds "padded", "packed", "rollouts" and "packed rollouts"."""
    kind = data.draw(st.sampled_from(kinds))
    drawn: Any = data.draw(rollouts(images=False) if "rollouts" in kind else batches())
    if kind == "padded":
        return PaddedCollator(0, **data.draw(padded_options(drawn.lengths)))(drawn.given)
    if kind == "rollouts":
        return RolloutCollator(0, **data.draw(rollout_options(drawn.lengths)))(drawn.given)
    strategy = packed_options if kind == "packed" else packed_rollout_options
    options = data.draw(strategy(drawn.lengths))
    parallel = ParallelLayout(**options.layout)
    return packed_collator(0, parallel=parallel, **options.collator)(drawn.given)
