"""Entries of a column in the order of the rows of a batch, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.batch.fields import (
    FieldSpec,
    PerExample,
    PerResponseToken,
    PerRoutedToken,
    PerToken,
)
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.rows import Pieces
from torch_collate_kit.ragged import Ragged, take_spans, unchecked
from torch_collate_kit.reading.columns import (
    Numbers,
    RowArrays,
    are_wrapped,
    scalar_column,
    tensor_to_numpy,
    wrapped_label,
)

DeclaredFields = Mapping[str, PerToken | PerResponseToken | PerExample]
# Type codes of arrays that torch takes; not of the other 64-bit integers, nor of a longer float.
_TORCH_CODES = "?bhilBHILefd"
_INT32_MAX = np.iinfo(np.int32).max
# Divided by the loss tokens of a batch, up to 10**8, it is still a normal float32.
_LEAST_WEIGHT = 1e-30
_ROW_METADATA = (
    *("example_indices", "example_starts", "segment_numbers", "num_trained", "max_segment_length"),
    *("uids", "trajectory_ids", "is_last_step", "row_indices", "shared_lengths"),
)
# Dtypes that torch computes with; of the others it has little more than the name.
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DTYPES = (*_INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def checked_fields(fields: DeclaredFields | None, taken_names: tuple[str, ...]) -> DeclaredFields:
    """Return the declared fields, checked."""
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"fields must map names to PerToken, PerResponseToken or PerExample, got {fields!r:.60}"
        )
    for name, spec in fields.items():
        where = f"fields[{name!r}]"
        if not isinstance(spec, PerToken | PerResponseToken | PerExample):
            raise TypeError(
                f"{where} must be a PerToken, PerResponseToken or PerExample, got {spec!r:.60}; "
                "for instance PerToken(torch.float32)"
            )
        if not isinstance(spec, PerExample) or spec.dtype is not str:
            _check_dtype(where, spec)
            _check_shape(where, spec.shape)
            if isinstance(spec, PerExample) and len(spec.shape) > 1:
                raise ValueError(f"{where} has shape={spec.shape}; an example has (k,) numbers")
        elif name in _ROW_METADATA:
            raise ValueError(f"fields names {name!r}, which is row metadata; rename yours")
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"fields names {name!r}, which is not a name; use letters and _")
        if name in taken_names:
            raise ValueError(
                f"fields names {name!r}, which the collator reads or makes itself; rename yours"
            )
    return dict(fields)


def _check_dtype(where: str, spec: Any) -> None:
    """Check that torch has numbers of this dtype, and that it holds the pad."""
    dtype, pad = spec.dtype, getattr(spec, "pad", 0)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex:
        text = ", or str" if isinstance(spec, PerExample) else ""
        raise TypeError(f"{where} must have a torch dtype of real numbers{text}, got {dtype!r}")
    if not isinstance(spec, PerExample) and dtype not in _DTYPES:
        raise TypeError(
            f"{where} has {dtype}, which torch does not place; give a signed integer, uint8, "
            "bool, or a float of 16 bits or more"
        )
    if not isinstance(pad, int | float | np.number):
        raise TypeError(f"{where} has pad={pad!r:.40}; give a number")
    if dtype.is_floating_point:
        is_held = not math.isfinite(pad) or bool(torch.tensor(pad, dtype=dtype).isfinite())
    else:
        is_bool = dtype == torch.bool
        least, most = (0, 1) if is_bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        is_held = bool(math.isfinite(pad) and pad == int(pad) and least <= pad <= most)
    if not is_held:
        raise ValueError(f"{where} has pad={pad}, which {dtype} does not hold")


def _check_shape(where: str, shape: Any) -> None:
    if not isinstance(shape, tuple) or any(type(size) is not int or size < 1 for size in shape):
        is_size = type(shape) is int and shape > 0
        way_out = f"shape=({shape},)" if is_size else "for k numbers in an entry shape=(k,)"
        raise ValueError(
            f"{where} has shape={shape!r:.40}; give a tuple of positive ints, {way_out}"
        )


def as_tensor(array: np.ndarray) -> Tensor:
    """Return a view of the array, or of a copy in a dtype and layout that torch has."""
    if array.dtype.char not in _TORCH_CODES or not array.dtype.isnative:
        array = array.astype({"u": np.uint64, "i": np.int64}.get(array.dtype.kind, np.float64))
    if min(array.strides, default=0) < 0:
        array = array.copy()
    if array.flags.writeable:
        return torch.from_numpy(array)
    own = array.__array_interface__  # torch would warn of what is not writable, as Arrow's are
    alias = SimpleNamespace(__array_interface__={**own, "data": (own["data"][0], False)}, of=array)
    return torch.from_numpy(np.asarray(alias))


def joined(column: Numbers) -> Ragged:
    """Return the column as one flat array, in the order of the examples."""
    if isinstance(column, Ragged):
        return column
    return unchecked(concatenated(column.arrays), column.offsets)


def concatenated(arrays: list[Any]) -> np.ndarray:
    """Join arrays, or tensors, of one dtype: in three quarters of the time of NumPy."""
    if isinstance(arrays[0], Tensor):
        return tensor_to_numpy("", None, torch.cat(arrays))
    try:
        joined = np.frombuffer(bytearray().join(arrays), dtype=arrays[0].dtype)
        return joined.reshape(-1, *arrays[0].shape[1:])
    except TypeError:  # one of them is not contiguous
        return np.concatenate(arrays)


def with_row(column: Numbers, row: np.ndarray) -> Ragged:
    """Return the column with one more row, in the dtype of its numbers."""
    flat = joined(column)
    return Ragged.cat([flat, Ragged(row.astype(flat.values.dtype), [0, len(row)])])


def taken(column: Numbers, pieces: Pieces, values: np.ndarray | None = None) -> np.ndarray:
    """Return the entries of the pieces, one after the other: perhaps a view of the column."""
    examples, starts, lengths, _ = pieces
    if not len(examples):
        return (joined(column).values if values is None else values)[:0].copy()
    if isinstance(column, RowArrays):
        chosen = [column.arrays[i] for i in examples.tolist()]
        if starts.any() or not np.array_equal(lengths, column.lengths[examples]):
            spans_of = zip(chosen, starts.tolist(), (starts + lengths).tolist(), strict=True)
            chosen = [array[start:stop] for array, start, stop in spans_of]
        return concatenated(chosen)
    values = column.values if values is None else values
    first = column.offsets[:-1][examples] + starts
    if (first[1:] == first[:-1] + lengths[:-1]).all():  # in order, and without a hole
        return values[first[0] : first[-1] + lengths[-1]]
    return take_spans(values, first, lengths)


def own_copy(values: np.ndarray, column: Numbers) -> np.ndarray:
    """Return ``values``, copied if they are a view of ``column``."""
    is_view = isinstance(column, Ragged) and np.may_share_memory(values, column.values)
    return values.copy() if is_view else values


def first_bad(is_bad: np.ndarray, pieces: Pieces) -> tuple[int, int]:
    """Return the example of the first bad entry, and its place there."""
    entry = int(np.flatnonzero(is_bad)[0])
    ends = np.cumsum(pieces.lengths)
    piece = int(np.searchsorted(ends, entry, side="right"))
    before = entry - int(ends[piece] - pieces.lengths[piece])
    return int(pieces.examples[piece]), before + int(pieces.starts[piece])


def are_int32_ids(values: np.ndarray) -> bool:
    """Return whether int32 holds all ids of a column."""
    if not values.size:
        return True
    if values.dtype.kind == "i" and values.dtype.itemsize >= 4:
        # one pass for both ends: as unsigned numbers, negative ones are the largest
        values = values.view(values.dtype.str.replace("i", "u"))
    is_negative = values.dtype.kind == "i" and int(values.min()) < 0
    return not is_negative and int(values.max()) <= _INT32_MAX


def placed_ids(column: Numbers, pieces: Pieces, num_actions: np.ndarray | None) -> np.ndarray:
    """Return the ids of the pieces, int32 where they fit, else int64: a copy."""
    if isinstance(column, Ragged) and are_int32_ids(column.values):
        narrow = column.values.astype(np.int32, copy=False)
        return own_copy(taken(column, pieces, narrow), column)
    values = taken(column, pieces)
    if are_int32_ids(values):
        return values.astype(np.int32)
    ids = values.astype(np.int64)  # beyond int64 they become negative numbers
    is_bad = ids < 0
    if not is_bad.any():
        return ids
    example, token = first_bad(is_bad, pieces)
    name, wanted = "input_ids", "token ids are 0 or more (-100 belongs into labels)"
    if num_actions is not None:
        name, wanted = "prompt_ids", "token ids are 0 or more"
        num_prompt = int(column.lengths[example] - num_actions[example])
        if token >= num_prompt:
            name, token = "response_ids", token - num_prompt
    raise DataError(f"example {example}: {name} is {values[is_bad][0]} at token {token}; {wanted}")


def placed_labels(column: Numbers, pieces: Pieces) -> np.ndarray:
    """Return the labels of the pieces, int32 where they fit, else int64: a copy."""
    labels = taken(column, pieces)
    if labels.dtype.kind == "u" and (is_bad := are_wrapped(labels)).any():
        raise wrapped_label(*first_bad(is_bad, pieces), labels.dtype)
    # beyond int64 they would become negative numbers
    signed = labels.view(np.int64) if labels.dtype == np.uint64 else labels
    is_bad = (signed < 0) & (signed != IGNORE_INDEX)
    if is_bad.any():
        i, token = first_bad(is_bad, pieces)
        raise DataError(
            f"example {i}: labels is {labels[is_bad][0]} at token {token}; a label is the id "
            f"of a token or class, or {IGNORE_INDEX} where nothing is trained"
        )
    fits = not labels.size or labels.max() <= np.iinfo(np.int32).max
    return labels.astype(np.int32 if fits else np.int64)


def placed_weights(name: str, column: Numbers, pieces: Pieces, unit: str) -> np.ndarray:
    """Return the weights of the pieces, bool where they are 0 and 1, else float32: a copy."""
    # bools are put in order in less memory
    flags = _as_flags(column.values) if isinstance(column, Ragged) else None
    weights = _as_flags(taken(column, pieces, flags))
    if weights.dtype == np.bool_:
        return own_copy(weights, column)
    kept, is_bad = _short_weights(weights)
    if is_bad.any():
        i, entry = first_bad(is_bad, pieces)
        weight = float(weights[is_bad][0])
        if 0 < weight < 1:
            raise DataError(
                f"example {i}: {name}[{entry}] is {weight}, which float32 loses; a weight must be "
                f"0 or at least {_LEAST_WEIGHT}: give 0 where nothing is trained"
            )
        raise DataError(
            f"example {i}: {name} is {weight} at {unit} {entry}; weights must be finite and 0 or "
            "more"
        )
    return kept


def weights_of_examples(column: Any) -> np.ndarray:
    """Return the weight of each example, checked: float32 [N]."""
    wanted = "give one number per example; a weight per token goes into loss_mask"
    weights = scalar_column("weight", column, "iufb", wanted)
    kept, is_bad = _short_weights(weights.astype(np.float64, copy=False))
    if is_bad.any():
        i = int(is_bad.argmax())
        raise DataError(
            f"example {i}: weight is {weights[i]}; a weight must be finite, and 0 or at least "
            f"{_LEAST_WEIGHT}"
        )
    return kept


def weighted(
    name: str, values: np.ndarray, weights_N: np.ndarray, pieces: Pieces, unit: str
) -> np.ndarray:
    """Return loss weights of pieces times those of their examples: bool where all are 0 and 1."""
    factors = np.repeat(_as_flags(weights_N[pieces.examples]), pieces.lengths)
    with np.errstate(over="ignore", under="ignore"):
        product: np.ndarray = values * factors
    if np.bool_ not in (values.dtype, factors.dtype):
        is_bad = _short_weights(product)[1] | ((product == 0) & (values != 0) & (factors != 0))
        if is_bad.any():
            i, entry = first_bad(is_bad, pieces)
            raise DataError(
                f"example {i}: {name} is {values[is_bad][0]:g} at {unit} {entry}, which times the "
                f"example's weight, {weights_N[i]:g}, is {product[is_bad][0]:g}; it must be "
                f"finite, and 0 or at least {_LEAST_WEIGHT}"
            )
    return product


def _short_weights(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weights as float32, and where float32 does not hold them: bool."""
    with np.errstate(over="ignore"):
        kept = weights.astype(np.float32)
    is_bad: np.ndarray = ~((weights == 0) | ((kept >= _LEAST_WEIGHT) & (kept < np.inf)))
    return kept, is_bad


def _as_flags(values: np.ndarray) -> np.ndarray:
    """Return values that are all 0 and 1 as bools; others as they are."""
    if values.dtype == np.bool_:
        return values
    trained: np.ndarray = values != 0
    return trained if np.count_nonzero(values == 1) == np.count_nonzero(trained) else values


def count_trained(trained: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count trained tokens of each piece, and all from its first trained one on: int64 [S] each."""
    edges = np.flatnonzero(trained[1:] != trained[:-1]) + 1
    if trained[:1].any():
        edges = np.append(0, edges)
    if trained[-1:].any():
        edges = np.append(edges, len(trained))
    begins, ends = edges[::2], edges[1::2]
    bounds = np.append(0, np.cumsum(lengths))
    if not len(begins):
        return np.zeros_like(lengths), np.zeros_like(lengths)
    num_before = np.searchsorted(begins, bounds)  # runs that begin before each bound
    # of the last run before a bound, the part after the bound belongs to the next piece
    last = num_before - 1
    num_trained = np.cumsum(ends - begins)[last] - np.maximum(ends[last] - bounds, 0)
    num_trained[last < 0] = 0
    first = np.append(begins, len(trained))[num_before[:-1]]
    return num_trained[1:] - num_trained[:-1], np.maximum(bounds[1:] - first, 0)


@dataclass(frozen=True)
class FieldColumn:
    """Column that was read: one row of entries per example, in their order."""

    name: str
    spec: FieldSpec
    values: Numbers
    key: str | None = None
    """Key in the examples, for a field of our own, whose numbers must be finite; else None."""
    most: float = math.inf  # largest number that a field of our own may have

    def with_row(self, num_tokens: int) -> FieldColumn:
        """Return the column and an example without a response: pads per token, else nothing."""
        number = num_tokens if self.spec.count == "lengths" else 0
        pad = self.spec.pad if isinstance(self.spec, PerToken) else 0
        empty = np.zeros((number, *joined(self.values).values.shape[1:]))
        return replace(self, values=with_row(self.values, empty + pad))

    def place(self, pieces: Pieces, responses: Pieces) -> tuple[Tensor, Pieces]:
        """Return the entries of the pieces, one after the other: a copy; and which they are."""
        entries = pieces
        if self.spec.count == "responses":
            entries = responses
        elif self.spec.count != "lengths":
            lengths = self.values.lengths[pieces.examples]
            entries = pieces._replace(starts=np.zeros_like(lengths), lengths=lengths)
        values = taken(self.values, entries)
        column = as_tensor(values)
        is_routes = isinstance(self.spec, PerRoutedToken)
        dtype: Any = column.dtype if is_routes else self.spec.dtype  # never str
        cast = column.to(dtype)
        if cast is column:
            cast = as_tensor(own_copy(values, self.values))
        if is_routes:
            return cast, entries
        is_bad = _is_lost(values, cast) if self.key is None else _is_outside(cast, self.most)
        if is_bad is not None and self.key == "logprobs":  # NaN: the engine did not score the token
            is_bad = is_bad & ~np.isnan(values)
        if is_bad is not None and is_bad.any():
            is_wrong = is_bad.reshape(len(is_bad), -1).max(axis=1)  # any entry of a vector
            example, entry = first_bad(is_wrong, entries)
            place = (entry, *np.argwhere(is_bad)[0, 1:].tolist())
            raise self._bad_number(values[is_bad][0], example, place)
        return cast, entries

    def _bad_number(self, number: Any, example: int, place: tuple[int, ...]) -> DataError:
        if self.key is None:
            entry = "".join(f"[{i}]" for i in place[isinstance(self.spec, PerExample) :])
            return DataError(
                f"example {example}: {self.name}{entry} is {number}, which {self.spec.dtype} does "
                "not hold; declare another dtype, or give other numbers"
            )
        found = f"example {example}: {self.key} is {number} at response token {place[0]}"
        if self.most < float(number) < math.inf:
            return DataError(
                f"{found}; a log-probability is 0 or less (rounding may add 0.001): give the "
                "logarithm of the probability, with its sign"
            )
        hint = ""
        if self.key == "logprobs":
            hint = "of a token that was not sampled give 0.0, of one without a score NaN, or "
        return DataError(f"{found}; it must be finite in float32: {hint}filter such rollouts out")


def _is_lost(values: np.ndarray, cast: Tensor) -> np.ndarray | None:
    """Return where the cast changed a whole number, or made one infinite: bool, or None."""
    if not cast.is_floating_point():
        is_lost = values != cast.numpy()
    elif cast.dtype == torch.float16 or (
        values.dtype.kind == "f" and values.dtype.itemsize > cast.dtype.itemsize
    ):
        is_lost = np.isfinite(values) & ~cast.isfinite().numpy()
    else:
        return None
    return is_lost if is_lost.any() else None


def _is_outside(cast: Tensor, most: float) -> np.ndarray | None:
    """Return where a number is not finite, or over ``most``: bool, or None."""
    # NumPy finds the largest of 285,000 numbers in 12 us, torch in 44
    is_within = most == math.inf or not len(cast) or bool(cast.numpy().max() <= most)
    if is_within and cast.sum().isfinite():
        return None
    is_bad = ~(cast.isfinite() & (cast <= most)).numpy()
    return is_bad if is_bad.any() else None


def segment_name(offsets: np.ndarray | None) -> Callable[[int], str] | None:
    """Return a function that names a segment in errors; None for examples of one each."""
    if offsets is None:
        return None

    def name(segment: int) -> str:
        example = int(np.searchsorted(offsets, segment, side="right")) - 1
        return f"example {example}, segment {segment - offsets[example]}"

    return name
