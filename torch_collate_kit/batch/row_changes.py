"""Changes of the stored rows: several batches joined, rows added, padding trimmed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.batch.context_shards import refuse_shard
from torch_collate_kit.batch.counts import OF_A_STEP, num_cells
from torch_collate_kit.batch.dense import make_field
from torch_collate_kit.batch.fields import (
    IGNORE_INDEX,
    Field,
    PackedValues,
    PerImage,
    PerResponseToken,
    PerToken,
    cat_rows,
    equal_values,
    take_rows,
)
from torch_collate_kit.batch.placement import Placement
from torch_collate_kit.batch.storage import Columns, Storage
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.vision.families import IMAGE_FIELDS

# Added rows. docs/contract.md has the table; a field that is not named here holds 0 if its numbers
# are floating point, nothing if it is ragged, and else what row 0 holds.
_FILL = dict.fromkeys(("loss_mask", "response_mask", "rewards", "advantages", "returns"), 0)
_FILL |= {"labels": IGNORE_INDEX, "router_padding_mask": 1}  # 1: a router counts no token there
_CUT_LAST = "slice or change the batch, then cut it with context_shard()"
_OF_A_PART = "is_last_part"  # metadata of ``Batch.split``
# What a model reads: of any dtype, ragged or not.
_REPEATED = ("attention_mask", "cu_seq_lens", "inputs_embeds", *IMAGE_FIELDS)


def joined(
    parts: Sequence[Storage], fields: Sequence[Mapping[str, Field]], overrides: dict[str, Any]
) -> Storage:
    """Return all rows of all parts; ``fields`` are for what only another part stores."""
    if not parts:
        raise ValueError("Batch.cat needs at least one batch, got none")
    for part in parts:
        refuse_shard(part, "joined with others", _CUT_LAST)
    collated_apart = _collated_apart(parts)
    parts = _with_one_step(parts, collated_apart)
    first = parts[0]
    for i, part in enumerate(parts):
        _check_fields(i, part, first)
        _check_metadata(i, part, first, overrides)
    if collated_apart and "num_loss_tokens" not in overrides:
        raise ValueError(collated_apart)
    columns = Columns.cat([part.columns for part in parts])
    stored = {name for part in parts for name in part.given}
    names = [name for name in first.names if not columns or name in stored]
    return Storage(
        columns,
        {name: cat_rows([given[name] for given in fields]) for name in names},
        {key: cat_rows([part.row_metadata[key] for part in parts]) for key in first.row_metadata},
        {k: v for k, v in first.metadata.items() if k != _OF_A_PART} | overrides,
    )


def _with_one_step(parts: Sequence[Storage], collated_apart: str | None) -> list[Storage]:
    """Return the parts without counts of the step that are not those of all of them."""
    of_parts = [part.metadata for part in parts]
    unknown = {
        key
        for key in OF_A_STEP
        if collated_apart or len({given.get(key) for given in of_parts}) > 1
    }
    kept = [{k: v for k, v in given.items() if k not in unknown} for given in of_parts]
    return [replace(part, metadata=given) for part, given in zip(parts, kept, strict=True)]


def _check_fields(index: int, part: Storage, first: Storage) -> None:
    shares = [
        bool(storage.columns and storage.columns.placement.tree_width) for storage in (first, part)
    ]
    if shares[0] != shares[1]:
        does, does_not = (0, index) if shares[0] else (index, 0)
        raise ValueError(
            f"rows of batch {does} share prefixes (share_prefixes), those of batch {does_not} do "
            "not; collate them together, or both in one way"
        )
    if part.names.keys() != first.names.keys():
        raise ValueError(
            f"batch {index} has fields {list(part.names)}, batch 0 has {list(first.names)}"
        )
    if part.columns and first.columns:
        of_both = [storage.columns.placement.targets for storage in (first, part)]
        if of_both[0] != of_both[1]:
            raise ValueError(
                f"batch {index} was collated with targets={of_both[1]!r}, batch 0 with "
                f"{of_both[0]!r}; collate both with the same"
            )
        mine, theirs = first.columns.placement.vision, part.columns.placement.vision
        if mine != theirs:  # images become tokens, and pixels a dtype, in one way
            raise ValueError(
                f"batch {index} was collated with {theirs}, batch 0 with {mine}; collate both with "
                "the processor of one model, and one pixel_dtype"
            )
    shapes = part.row_shapes()
    for name, shape in first.row_shapes().items():
        if shapes.get(name, shape) != shape:
            way_out = "collate them together, or with fixed_width=True"
            if shares[0]:
                way_out = (
                    "rows with share_prefixes are as long in tokens as the longest one, whatever "
                    "their width: collate them together"
                )
            raise ValueError(
                f"{name} of batch {index} has row shape {shapes[name]}, of batch 0 {shape}; "
                f"{way_out}"
            )


def _check_metadata(
    index: int, part: Storage, first: Storage, overrides: Mapping[str, Any]
) -> None:
    for kind in ("row_metadata", "metadata"):
        odd = getattr(first, kind).keys() ^ getattr(part, kind).keys()
        if odd:
            raise ValueError(f"only one of batch 0 and batch {index} has the {kind} {sorted(odd)}")
    pairs = {key: (value, part.metadata[key]) for key, value in first.metadata.items()}
    pairs.pop(_OF_A_PART, None)
    differ = {key: pair for key, pair in pairs.items() if not equal_values(*pair)}
    if "loss_mask_divisor" in differ:
        mine, theirs = differ["loss_mask_divisor"]
        raise ValueError(
            f"loss_mask_divisor is {mine} in batch 0 and {theirs} in batch {index}, so their masks "
            "are divided by different numbers; collate them together, or with normalize_loss=False"
        )
    pairs = {k: pair for k, pair in differ.items() if k not in overrides}
    if found := ", ".join(f"metadata[{k!r}] is {a!r}, {b!r}" for k, (a, b) in pairs.items()):
        raise ValueError(
            f"batches 0 and {index} disagree: {found}; pass metadata={{...}} with these keys to "
            "say what the whole shall have"
        )


def _collated_apart(parts: Sequence[Storage]) -> str | None:
    """Return why batches are not of one collation, or None: each begins at 0, parts do not."""
    found: list[list[Any]] = []
    for key in ("example_indices", "example_starts"):
        found.append([part.row_metadata.get(key) for part in parts])
        if not all(isinstance(column, Ragged) for column in found[-1]):
            return None
    examples, starts = (
        np.concatenate([column.to("cpu").values for column in key]) for key in found
    )
    owners = np.repeat(np.arange(len(parts)), [len(column.values) for column in found[0]])
    order = np.lexsort((owners, starts, examples))
    examples, starts, owners = examples[order], starts[order], owners[order]
    is_same = (np.diff(examples) == 0) & (np.diff(starts) == 0) & (np.diff(owners) != 0)
    if not is_same.any():
        return None
    i = int(is_same.argmax())
    return (
        f"batches {owners[i]} and {owners[i + 1]} both have an example {examples[i]}: they "
        "were collated apart, so their num_loss_tokens is not that of the whole; collate them "
        "together, or pass metadata={'num_loss_tokens': ...}"
    )


def padded(storage: Storage, added: int) -> Storage:
    """Add rows at the end that have nothing to train and nothing to count."""
    refuse_shard(storage, "given other rows", _CUT_LAST)
    if storage.columns and "sub_seq_lengths" not in storage.given:
        # from the columns, it would count the segments that are repeated
        lengths = make_field("sub_seq_lengths", storage.columns, {}, storage.metadata)
        storage = storage.with_given({"sub_seq_lengths": lengths})
    return Storage(
        _padded_columns(storage.columns, added),
        _padded_given(storage, added),
        {k: _padded_row_metadata(k, value, added) for k, value in storage.row_metadata.items()},
        _padded_metadata(storage, added),
    )


def _padded_metadata(storage: Storage, added: int) -> dict[str, Any]:
    """Count the added rows; those of a rank's share of a step, on every rank."""
    metadata = dict(storage.metadata)
    metadata["num_dummy_rows"] = metadata.get("num_dummy_rows", 0) + added
    if (in_step := metadata.pop("step_num_cells", None)) is not None:
        num_ranks = len(metadata.get("cost_per_rank", ()))
        if in_step in (num_cells(storage), num_cells(storage) * num_ranks):
            per_row = in_step // storage.num_rows  # on all ranks
            metadata["step_num_cells"] = per_row * (storage.num_rows + added)
    return metadata


def _repeated(value: Any, added: int) -> Any:
    """Return a copy with row 0 repeated ``added`` times at the end."""
    return take_rows(value, np.append(np.arange(len(value)), np.zeros(added, dtype=np.int64)))


def _with_empty_rows(ragged: Ragged, added: int) -> Ragged:
    """Return the rows with ``added`` empty ones after them; values are shared."""
    return Ragged(ragged.values, np.append(ragged.offsets, [ragged.offsets[-1]] * added))


def _filled(ragged: Ragged, added: int, value: int) -> Ragged:
    ragged.values[ragged.offsets[-1 - added] :] = value
    return ragged


def _padded_columns(columns: Columns, added: int) -> Columns:
    untrained = {"loss_weights": 0, "labels": IGNORE_INDEX}

    def column(name: str, values: Ragged) -> Ragged:
        if not isinstance(columns.specs[name], PerToken | PerImage):
            return _with_empty_rows(values, added)
        repeated = _repeated(values, added)
        return _filled(repeated, added, untrained[name]) if name in untrained else repeated

    def counts(name: str, segments: Any) -> Any:
        repeated = _repeated(segments, added)
        return _filled(repeated, added, 0) if name in ("responses", "routed") else repeated

    return columns.change(column, counts)


def _padded_given(storage: Storage, added: int) -> dict[str, Any]:
    """Return the dense fields with added rows; one that has a column is padded as that is."""
    specs = storage.columns.specs
    given: dict[str, Any] = {}
    for name, field in storage.given.items():
        spec = specs.get(name)
        repeats = name in _REPEATED if spec is None else isinstance(spec, PerToken | PerImage)
        if isinstance(field, Ragged):
            given[name] = (_repeated if repeats else _with_empty_rows)(field, added)
            continue
        given[name] = new = _repeated(field, added)
        if isinstance(spec, PerResponseToken):
            new[-added:] = spec.pad
        elif name == "rollout_expert_indices":  # what pads hold: no expert is there twice
            new[-added:] = torch.arange(field.shape[-1], device=field.device)
        elif name in _FILL or (not repeats and field.is_floating_point()):
            new[-added:] = _FILL.get(name, 0)
    return given


def _padded_row_metadata(key: str, value: Any, added: int) -> Any:
    if isinstance(value, Ragged):
        return _with_empty_rows(value, added)
    if isinstance(value, list) and isinstance(value[0], PackedValues):
        return [*value, *[PackedValues()] * added]
    repeated = _repeated(value, added)
    if key == "is_last_step":
        repeated[-added:] = [True] * added if isinstance(repeated, list) else True
    return repeated


def changed_rows(storage: Storage, change: Callable[[Any], Any], divides: bool = False) -> Storage:
    """Return other rows of a batch; refuse those in which segments of an example are missing.

    Raises:
        ValueError: padded rows, one for each segment, that divide an example; a context shard.
    """
    refuse_shard(storage, "given other rows", _CUT_LAST)
    storage = storage.change(change)
    numbers, examples = (
        storage.row_metadata.get(key) for key in ("segment_numbers", "example_indices")
    )
    counts = None if divides else storage.metadata.get("num_segments")
    if not isinstance(numbers, Ragged) or not isinstance(examples, Ragged) or counts is None:
        return storage
    columns = storage.columns
    if columns.placement.is_packed if columns else (numbers.lengths > 1).any():
        return storage  # what stays together is in one row
    number, example = np.asarray(numbers.values), np.asarray(examples.values)
    is_next = np.append(number, 0)[1:] == number + 1
    is_next &= np.append(example, -1)[1:] == example
    is_last = number + 1 == np.asarray(counts)[example]
    is_first = np.append(False, is_next)[:-1] | (number == 0)
    wrong = np.flatnonzero(~is_first | ~(is_next | is_last))
    if len(wrong):
        row = int(np.searchsorted(numbers.offsets, wrong[0], side="right")) - 1
        i = int(example[wrong[0]])
        raise ValueError(
            f"the rows of example {i}, one for each of its {counts[i]} segments, would be divided "
            f"at row {row} of the part; cut batches only between examples: with two segments each "
            "into parts of an even number of rows"
        )
    return storage


def cells_per_row(storage: Storage) -> np.ndarray | None:
    """Return the width that each row alone would be trimmed to, int64 [R], or None."""
    if storage.columns and not storage.columns.placement.is_packed:
        return storage.columns.placement.segments["lengths"].values.astype(np.int64)
    shape = storage.row_shapes().get("input_ids")
    return None if shape is None else np.full(storage.num_rows, shape[0], dtype=np.int64)


def trimmed(storage: Storage, *, multiple_of: int = 1) -> Storage:
    """Return the rows without the padding, left or right, that none of them needs.

    The width is that of the longest row, rounded up to ``multiple_of``, which divides the width
    that they have; ``metadata["response_length"]`` that of the longest response. Columns are
    shared, integers say where they lie now. Fields that are stored as they are (given, or changed
    in place) are cut where their rows are as wide as the rows or as the responses: views.
    """
    columns = storage.columns
    if not columns or columns.placement.is_packed:
        return storage
    before = columns.placement
    starts, lengths, responses = (
        before.segments[name].values for name in ("starts", "lengths", "responses")
    )
    width = -(-int(lengths.max()) // multiple_of) * multiple_of
    is_left_padded = bool((starts + lengths == before.width).all())
    first = before.width - width if is_left_padded else 0
    stop = first + width
    kept = before.response_length - (before.width - stop)  # columns of [R, A], up to there
    begins = (starts + lengths - responses)[responses > 0]
    longest = stop - int(begins.min(initial=stop - 1))
    if "loss_mask" in storage.given:  # it may train more than the responses
        longest = width
    most = width - (before.targets == "next_token")  # then nothing predicts the first cell
    response_length = max(0, min(longest, kept, most))

    def moved(name: str, value: Any) -> Any:
        return Ragged(value.values - first, value.offsets) if name == "starts" else value

    cells, of_responses = slice(first, stop), slice(kept - response_length, kept)
    return Storage(
        columns.change(
            lambda _, column: column, moved, width=width, response_length=response_length
        ),
        {k: _cut(k, field, before, cells, of_responses) for k, field in storage.given.items()},
        storage.row_metadata,
        {**storage.metadata, "response_length": response_length},
    )


def _cut(name: str, field: Field, before: Placement, cells: slice, of_responses: slice) -> Field:
    if not isinstance(field, Tensor) or field.ndim < 2:
        return field
    if name == "mrope_position_ids":  # [R, 4, W]
        return field[..., cells]
    if field.shape[1] == before.width:
        return field[:, cells]
    if name == "loss_mask" and field.shape[1] == before.width - 1 > before.response_length:
        return field[:, cells.start : cells.stop - 1]  # of all predicted tokens
    return field[:, of_responses] if field.shape[1] == before.response_length else field
