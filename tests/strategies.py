"""Hypothesis strategies: batches in every form and container a collator takes, and its options.

A drawn batch holds the same examples twice: `plain` lists for the oracle, and `given`, what the
collator gets (lists, arrays, tensors, mixed or as ragged columns). The token of place t in example
i is `first + 100 * i + t`, so a wrong cell in a failure says where it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.oracle import IGNORE, alignment
from torch_collate_kit.ragged import Ragged

__all__ = [
    *("ANY", "COUNT_COLUMNS", "EXAMPLE_WEIGHTS", "FORMS", "FUZZ", "INTS", "MANY"),
    *("NUMBERS", "Container", "DrawnBatch", "PackedOptions", "array", "batches", "count_column"),
    *("packed_options", "padded_options", "strided", "tensor"),
]

# The profile is that of conftest.py. Explaining a failure takes minutes here; shrinking is enough.
FUZZ = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

MANY = settings(FUZZ, max_examples=3 * settings().max_examples)  # of all forms together

FORMS = ("loss_mask", "num_actions", "labels", "assistant_masks", "completion_mask", "none")
COUNT_COLUMNS = ("list", "array", "tensor", "ragged_array", "ragged_tensor")
EXAMPLE_WEIGHTS = (0, 1, 0.5, 3.0, 1 / 3, 1e-6, 100)
NUMBERS: dict[str, Callable[[float], Any]] = {
    "int": lambda n: n,
    "numpy": lambda n: np.array(n)[()],
    "array": np.array,
    "float32": np.float32,
    "tensor": torch.tensor,
    "tensor of one": lambda n: torch.tensor([n], dtype=torch.float64),
}
_WEIGHTS = (0.0, 1.0, 0.5, 2.0, 0.25, 0.1, 1 / 3, 1e-6, 100.0)

Container = Callable[[Any], Any]


def array(dtype: Any) -> Container:
    return lambda values: np.array(values, dtype=dtype)


def tensor(dtype: torch.dtype, **options: Any) -> Container:
    return lambda values: torch.tensor(np.array(values).tolist(), dtype=dtype, **options)


def strided(values: Any) -> np.ndarray:
    return np.repeat(np.array(values), 2, axis=0)[::2]


def readonly(values: Any) -> np.ndarray:
    made = np.array(values)
    made.flags.writeable = False
    return made


ANY: dict[str, Container] = {
    **{"list": list, "tuple": tuple, "strided": strided, "readonly": readonly},
}
INTS = ANY | {
    **{f"int{n}": array(f"int{n}") for n in (32, 64)},
    **{f"uint{n}": array(f"uint{n}") for n in (32, 64)},
    **{"tensor32": tensor(torch.int32), "tensor64": tensor(torch.int64)},
}
_SIGNED = [name for name in INTS if not name.startswith("uint")]
_FLOATS = ANY | {
    **{"float32": array(np.float32), "float64": array(np.float64)},
    **{"tensor32": tensor(torch.float32), "tensor64": tensor(torch.float64)},
}
_BITS: dict[str, Container] = {  # a 0/1 mask comes as any of these, and as floats
    **{"ints": list, "tuple": tuple, "bools": lambda values: [bool(value) for value in values]},
    **{name: array(name) for name in ("bool", "uint8", "int64")},
    **{f"tensor {of}": tensor(of) for of in (torch.bool, torch.int8, torch.int64)},
    **{f"tensor {of}": tensor(of) for of in (torch.float16, torch.bfloat16)},
}


@dataclass(frozen=True)
class DrawnBatch:
    plain: list[dict[str, Any]]
    given: list[dict[str, Any]] | Mapping[str, Any]
    form: str

    @property
    def lengths(self) -> list[int]:
        return [len(example["input_ids"]) for example in self.plain]


@dataclass(frozen=True)
class PackedOptions:
    """Keyword arguments of `PackedCollator`, with the layout as plain numbers."""

    layout: dict[str, Any]
    collator: dict[str, Any]

    @property
    def align(self) -> int:
        return alignment(**{k: v for k, v in self.layout.items() if k != "dp"})[0]

    @property
    def row_align(self) -> int:
        return alignment(**{k: v for k, v in self.layout.items() if k != "dp"})[1]

    @property
    def capacity(self) -> int:
        return int(self.collator["max_tokens"]) // self.row_align * self.row_align


@st.composite
def batches(
    draw: st.DrawFn,
    form: str | None = None,
    *,
    max_examples: int = 10,
    max_length: int = 40,
    columns: bool = True,
) -> DrawnBatch:
    """Examples of one target form (a batch has one); lengths 1 to `max_length`."""
    form = form or draw(st.sampled_from(FORMS))
    lengths = draw(st.lists(st.integers(1, max_length), min_size=1, max_size=max_examples))
    first = draw(st.sampled_from((0, 1, 150_000)))
    weighted = draw(st.booleans())
    palette = draw(st.sampled_from(((), (), (0, 1), (1,), EXAMPLE_WEIGHTS)))
    plain = []
    for index, length in enumerate(lengths):
        ids = [first + 100 * index + place for place in range(length)]
        plain.append({"input_ids": ids, **draw(_target(ids, form, weighted))})
        if palette:
            plain[-1]["weight"] = draw(st.sampled_from(palette))
    given: Any
    if columns and draw(st.booleans()):
        given = draw(_as_columns(plain))
    else:
        same = draw(st.booleans())  # every example in the same containers, or each in its own
        attention_mask = draw(st.booleans())
        containers = draw(_containers())
        given = []
        for example in plain:
            containers = containers if same else draw(_containers())
            given.append(_contained(example, containers))
            if attention_mask:  # of ones: says nothing
                given[-1]["attention_mask"] = [1] * len(example["input_ids"])
    return DrawnBatch(plain, given, form)


@st.composite
def padded_options(draw: st.DrawFn, lengths: list[int]) -> dict[str, Any]:
    """Keyword arguments of `PaddedCollator`; with overflow="raise" every example fits."""
    longest = max(lengths)
    overflow = draw(st.sampled_from(("raise", "raise", "truncate", "drop")))
    limits = (None, longest, longest + 1, 100)
    if overflow != "raise":
        limits = (longest, max(1, longest // 2) if overflow == "truncate" else min(lengths))
        limits = (*limits, draw(st.integers(limits[1], longest)))
    return {
        "overflow": overflow,
        "padding_side": draw(st.sampled_from(("left", "right"))),
        "pad_to_multiple_of": draw(st.sampled_from((None, 1, 2, 5, 8, 16))),
        "max_length": draw(st.sampled_from(limits)),
        "normalize_loss": draw(st.booleans()),
    }


@st.composite
def packed_options(
    draw: st.DrawFn, lengths: list[int], *, overflow: str | None = None
) -> PackedOptions:
    """Keyword arguments of `PackedCollator`; with overflow="raise" every example fits."""
    overflow = overflow or draw(st.sampled_from(("raise", "truncate", "drop", "split")))
    layout = {
        "dp": draw(st.sampled_from((1, 1, 2, 3, 4, 8))),
        "tp": draw(st.sampled_from((1, 1, 1, 2, 3, 4))),
        "cp": draw(st.sampled_from((1, 1, 1, 2, 3))),
        "fp8": draw(st.sampled_from((*[None] * 6, "tensorwise", "mxfp8"))),
    }
    align = alignment(tp=layout["tp"], cp=layout["cp"], fp8=layout["fp8"])[1]
    longest = -(-max(lengths) // align) * align
    smallest = longest if overflow == "raise" else align
    room = draw(st.sampled_from((0, 1, align, longest, 3 * longest)))
    max_tokens = draw(st.integers(smallest, longest + room))
    return PackedOptions(
        layout,
        {
            "max_tokens": max_tokens,
            "strategy": draw(
                st.sampled_from(
                    ("best_fit_decreasing", "first_fit_decreasing", "balanced", "sequential")
                )
            ),
            "overflow": overflow,
            "max_sequences_per_row": draw(st.sampled_from((None, None, 1, 2, 3))),
            "fixed_width": draw(st.booleans()),
            "balance": draw(st.sampled_from(("attention", "tokens", None))),
            "normalize_loss": draw(st.booleans()),
        },
    )


@st.composite
def _target(draw: st.DrawFn, ids: list[int], form: str, weighted: bool) -> dict[str, Any]:
    length = len(ids)
    if form == "none":
        return {}
    if form == "labels":
        trained = draw(_mask(length, weighted=False))
        other = draw(st.sampled_from((0, 0, 7)))  # labels need not be the input ids
        return {
            "labels": [
                token + other if kept else IGNORE for token, kept in zip(ids, trained, strict=True)
            ]
        }
    if form == "num_actions":
        num_actions = draw(st.integers(0, length))
        mask = draw(_mask(num_actions, weighted=weighted))
        return {"loss_mask": mask, "num_actions": num_actions}
    return {form: draw(_mask(length, weighted=weighted))}


@st.composite
def _mask(draw: st.DrawFn, length: int, *, weighted: bool) -> list[float]:
    """0/1 ints, or weights; one integer is drawn a mask, so that drawing and shrinking are fast."""
    kind = draw(st.sampled_from(("any", "any", "any", "suffix", "ones", "zeros")))
    if kind == "suffix":
        prompt = draw(st.integers(0, length))
        mask: list[float] = [0] * prompt + [1] * (length - prompt)
    elif kind == "any":
        bits = draw(st.integers(0, 2**length - 1))
        mask = [(bits >> place) & 1 for place in range(length)]
    else:
        mask = [int(kind == "ones")] * length
    if weighted:
        palette = draw(st.lists(st.sampled_from(_WEIGHTS), min_size=1, max_size=4))
        mask = [float(bit) * palette[place % len(palette)] for place, bit in enumerate(mask)]
    return mask


@st.composite
def _containers(draw: st.DrawFn) -> dict[str, str]:
    """A container for every kind of field."""
    return {
        "input_ids": draw(st.sampled_from(sorted(INTS))),
        "labels": draw(st.sampled_from(_SIGNED)),
        "floats": draw(st.sampled_from(sorted(_FLOATS))),
        "bits": draw(st.sampled_from(sorted(_BITS))),
        "num_actions": draw(st.sampled_from(("int", "numpy"))),
        "weight": draw(st.sampled_from(sorted(NUMBERS))),
        "extras": draw(st.sampled_from(("none", "none", "text"))),
    }


def _contained(example: dict[str, Any], containers: dict[str, str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in example.items():
        if name == "num_actions":
            given[name] = value if containers[name] == "int" else np.int32(value)
        elif name == "weight":
            given[name] = NUMBERS[containers[name]](value)
        elif name in ("input_ids", "labels"):
            given[name] = INTS[containers[name]](value)
        elif all(isinstance(entry, int) for entry in value):
            given[name] = _BITS[containers["bits"]](value)
        else:
            given[name] = _FLOATS[containers["floats"]](value)
    has_target = example.keys() > {"input_ids", "weight"} & example.keys()
    if containers["extras"] == "text" and has_target:  # beside a target it is left alone
        given["text"] = "ignored"
    return given


@st.composite
def _as_columns(draw: st.DrawFn, plain: list[dict[str, Any]]) -> dict[str, Any]:
    """One `Ragged` a field: NumPy or torch values, and sometimes a slice of a longer column."""
    kind = draw(st.sampled_from(("numpy", "numpy", "torch")))
    sliced = draw(st.booleans())
    dtypes = {
        "input_ids": draw(st.sampled_from((np.int32, np.int64))),
        "labels": draw(st.sampled_from((np.int32, np.int64))),
    }
    columns: dict[str, Any] = {}
    for name in plain[0]:
        if name in ("num_actions", "weight"):
            kind_of_count = draw(st.sampled_from(COUNT_COLUMNS))
            columns[name] = count_column(kind_of_count, [example[name] for example in plain])
            continue
        rows = [example[name] for example in plain]
        all_ints = all(isinstance(entry, int) for row in rows for entry in row)
        masks = (bool, np.uint8, np.int64, np.float32) if all_ints else (np.float32, np.float64)
        dtype = dtypes[name] if name in dtypes else draw(st.sampled_from(masks))
        if sliced:  # the rows around the slice must not be read
            rows = [[1, 0, 1], *rows, [1]]
        column = Ragged.from_rows(rows, dtype=dtype)
        if kind == "torch":
            column = Ragged(torch.from_numpy(column.values), column.offsets)
        columns[name] = column[1:-1] if sliced else column
    return columns


def count_column(kind: str, counts: list[Any]) -> Any:
    """One number an example: a flat column, or a ragged one with one entry a row."""
    array = np.array(counts)
    return {
        "list": counts,
        "array": array,
        "tensor": torch.from_numpy(array),
        "ragged_array": Ragged(array, np.arange(len(counts) + 1)),
        "ragged_tensor": Ragged(torch.from_numpy(array), np.arange(len(counts) + 1)),
    }[kind]
