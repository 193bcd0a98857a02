"""Batch: the tokens of its rows and where they lie; dense fields are made when they are read."""

from __future__ import annotations

import dis
import sys
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn

from torch_collate_kit._checks import checked_int
from torch_collate_kit.batch.context_shards import instead_of, is_shard, shard_of
from torch_collate_kit.batch.counts import Counted
from torch_collate_kit.batch.dense import cells_of_shard, make_field, trained_labels
from torch_collate_kit.batch.fields import Field, equal_values, take_rows
from torch_collate_kit.batch.model_inputs import model_inputs
from torch_collate_kit.batch.placement import Placement
from torch_collate_kit.batch.row_changes import changed_rows, joined, padded
from torch_collate_kit.batch.showing.drawing import described, html_of
from torch_collate_kit.batch.showing.explanation import Explanation, explained
from torch_collate_kit.batch.showing.plot import draw_rows
from torch_collate_kit.batch.storage import Columns, Storage, tensor_of, version_of
from torch_collate_kit.batch.targets import Targets, pairs_of
from torch_collate_kit.ragged import Ragged, row_indices

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch.distributed import ProcessGroup


class Batch(Counted, Mapping[str, Field]):
    """A training batch: fields with one entry per row, ``row_metadata`` and ``metadata``.

    ``batch["input_ids"]`` is a field, a tensor ``[R, ...]`` or a :class:`Ragged` with R rows;
    ``batch[2:5]`` is a Batch of these rows, ``len(batch)`` is R. docs/contract.md lists the fields
    of a collated batch. A field is made of columns, one entry per token, when it is first read, and
    kept. A change in place stays (not one through ``.numpy()``); :meth:`with_fields` replaces one.
    ``row_metadata`` (lists, arrays, tensors, Ragged) is sliced with the rows, ``metadata`` is not.

    Raises:
        TypeError: a field that is neither a tensor nor a Ragged.
        ValueError: fields or row metadata that disagree in the number of rows.

    >>> batch = Batch({"x": torch.tensor([[1, 2], [3, 4]])}, row_metadata={"uids": ["a", "b"]})
    >>> len(batch), batch[1:]["x"].tolist(), batch[1:].row_metadata
    (2, [[3, 4]], {'uids': ['b']})
    """

    def __init__(
        self,
        fields: Mapping[str, Field],
        *,
        row_metadata: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        for name, field in fields.items():
            if not isinstance(field, Ragged | Tensor) or getattr(field, "ndim", 1) == 0:
                raise TypeError(
                    f"field {name} must be a tensor with rows first or a Ragged, got "
                    f"{type(field).__name__}; what belongs to the whole batch goes into metadata"
                )
        others = dict(row_metadata or {}), dict(metadata or {})
        self._set(Storage(Columns.none(), dict(fields), *others))

    @classmethod
    def of_storage(cls, storage: Storage, *, check: bool = True) -> Batch:
        """Return a Batch of ``storage``; ``check=False`` for what a collator has just made."""
        batch = object.__new__(cls)
        batch._set(storage, check=check)
        return batch

    def _set(self, storage: Storage, *, check: bool = True) -> None:
        if check:
            storage.check()
        self._storage = storage
        self._made: dict[str, tuple[Field, int]] = {}  # and the version they were made with
        self._shared: dict[str, Tensor] = {}  # what several of them are made of
        self.row_metadata = dict(storage.row_metadata)
        self.metadata = dict(storage.metadata)

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> Batch: ...
    def __getitem__(self, key: str | slice) -> Any:
        if isinstance(key, str):
            return self._field(key)
        if not isinstance(key, slice):
            raise TypeError(
                f"a Batch is indexed by a field name or a slice of rows, got {key!r}; "
                "one row is batch[i:i + 1], rows in any order are batch.select(indices)"
            )
        if (step := key.indices(len(self))[2]) < 1:
            raise ValueError(f"rows cannot be sliced with step {step}; use batch.select(indices)")
        return Batch.of_storage(changed_rows(self.stored(), lambda rows: rows[key]))

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            found = '; batch.to("cuda") moves it, dict(batch) reads, with_fields() replaces'
            found = found if hasattr(dict, name) or hasattr(Tensor, name) else ""
            if "_storage" in vars(self) and name in self:
                found = f'; a field is an item, batch["{name}"]'
            raise AttributeError(f"'Batch' object has no attribute {name!r}{found}")

        def __setitem__(self, name: str, value: Any = None) -> None:
            raise TypeError(f"fields of a Batch stay: batch = batch.with_fields({name}=tensor)")

        __delitem__ = __setitem__

    def _field(self, name: str) -> Field:
        storage = self._storage
        if name in storage.given:
            return storage.given[name]
        if name not in self._made:
            if name not in storage.columns.names:
                raise KeyError(
                    f"{name}; the batch has {', '.join(self)}{instead_of(name, storage)}"
                )
            field = make_field(name, storage.columns, self._shared, self.metadata)
            self._made[name] = field, version_of(field)
        return self._made[name][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._storage.names)

    def __len__(self) -> int:
        return self._storage.num_rows

    def __contains__(self, key: object) -> bool:
        return key in self._storage.names

    def keys(self) -> KeysView[str]:  # Mapping's views would count rows
        """Return the names of the fields; TypeError in ``model(**batch)`` of packed rows."""
        placement, frame = self.placement, sys._getframe(1)
        is_row = "cu_seq_lens" in self if placement is None else placement.is_packed
        operation = frame.f_code.co_code[frame.f_lasti] if is_row or is_shard(self) else 0
        if dis.opname[operation] == "DICT_MERGE":
            raise TypeError(
                "model(**batch) would pass a mask with which a packed row is one text; call "
                "model(**batch.model_inputs(model)), or your own function as f(**dict(batch))"
            )
        return self._storage.names.keys()

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def items(self) -> ItemsView[str, Field]:
        """Return the fields by name; makes all of them."""
        return {name: self._field(name) for name in self}.items()

    def values(self) -> ValuesView[Field]:
        """Return the fields; makes all of them."""
        return {name: self._field(name) for name in self}.values()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Batch):
            return NotImplemented
        same = self.stored().equals(other.stored())
        return all(equal_values(self[n], other[n]) for n in self) if same is None else same

    __hash__ = None  # type: ignore[assignment]

    def with_fields(self, **fields: Field) -> Batch:
        """Return the same rows with fields added, or replaced in their shape: a view.

        ``labels`` and ``loss_mask`` are kept in the dtype of the batch's own.

        >>> batch = Batch({"input_ids": torch.tensor([[5], [6]])})
        >>> list(batch.with_fields(advantages=torch.zeros(2, 1)))
        ['input_ids', 'advantages']
        """
        for name in fields.keys() & self._storage.columns.names:
            fields[name] = self._checked(name, fields[name])
        storage = self.stored().with_given(Batch(fields)._storage.given if fields else {})
        batch = Batch.of_storage(storage)
        batch._made = {k: made for k, made in self._made.items() if k not in storage.given}
        batch._shared = self._shared
        return batch

    def _checked(self, name: str, field: Field) -> Field:
        """Return a field in place of the batch's own, of its shape."""
        made, placement = self._field(name), self.placement
        if isinstance(field, Ragged) or isinstance(made, Ragged) or placement is None:
            return field  # else entries of another width would be read as other tokens
        shapes: list[tuple[int, ...]] = [made.shape]
        is_next = placement.targets == "next_token" and placement.shard is None
        if name == "loss_mask" and is_next:  # or of all predicted tokens
            shapes += [(len(made), placement.response_length), (len(made), placement.width - 1)]
        is_more = name in ("attention_mask", "position_ids") and field.ndim > made.ndim
        if field.shape not in shapes and not (is_more and field.shape[-1] == made.shape[-1]):
            raise ValueError(
                f"{name} has shape {[*field.shape]}, and of these rows it is {[*made.shape]}; give "
                "a value for each of its cells, or build another Batch of tensors"
            )
        if name == "labels" and (field.is_floating_point() or field.dtype == torch.bool):
            raise TypeError(f"labels are {field.dtype}; give ids, with -100 where none is trained")
        return field.to(made.dtype) if name in ("labels", "loss_mask") else field

    def chunk(self, num_chunks: int) -> list[Batch]:
        """Return the rows in ``num_chunks`` equal runs: chunk ``r`` is the part of rank ``r``.

        >>> [c["x"].tolist() for c in Batch({"x": torch.arange(4)}).chunk(2)]
        [[0, 1], [2, 3]]
        """
        num_chunks = checked_int("num_chunks", num_chunks)
        if len(self) % num_chunks:
            raise ValueError(
                f"{len(self)} rows do not divide into {num_chunks} equal chunks; "
                "add zero-loss rows with batch.pad_rows(multiple_of=...)"
            )
        size = len(self) // num_chunks
        return [self[i * size : (i + 1) * size] for i in range(num_chunks)]

    def split(self, rows: int | Sequence[Sequence[int] | np.ndarray]) -> list[Batch]:
        """Return micro-batches: of ``rows`` rows each (the last may have fewer), or of these rows.

        Their metadata is that of the batch, such as ``"num_loss_tokens"`` of the whole step, and
        ``"is_last_part"``. With an int they are slices, with row numbers per part copies.

        Raises:
            ValueError, IndexError: fewer rows than 1; row numbers that the batch does not have.

        >>> batch = Batch({"x": torch.arange(5)}, metadata={"num_loss_tokens": 9})
        >>> [(part["x"].tolist(), part.metadata["is_last_part"]) for part in batch.split(2)]
        [([0, 1], False), ([2, 3], False), ([4], True)]
        """
        if isinstance(rows, Sequence):
            parts = [self.select(numbers) for numbers in rows]
        else:
            size = checked_int("rows", rows)
            parts = [self[i : i + size] for i in range(0, len(self), size)]
        for i, part in enumerate(parts, 1):
            part.metadata["is_last_part"] = i == len(parts)
        return parts

    def select(self, indices: Sequence[int] | np.ndarray | Tensor) -> Batch:
        """Return the named rows, in that order and as often as named: a copy.

        >>> Batch({"x": torch.arange(4)}).select([3, 0])["x"].tolist()
        [3, 0]
        """
        picked = row_indices(indices)
        if picked.ndim != 1 or ((picked < 0) | (picked >= len(self))).any():
            raise IndexError(f"rows {picked.tolist()} of a batch with {len(self)} rows")
        return Batch.of_storage(changed_rows(self.stored(), lambda rows: take_rows(rows, picked)))

    @classmethod
    def cat(cls, batches: Sequence[Batch], metadata: Mapping[str, Any] | None = None) -> Batch:
        """Return the rows of all batches: a copy; ``metadata`` has the keys on which they disagree.

        Raises:
            ValueError: no batches, other fields or widths, or metadata that disagrees.
            TypeError: a Batch in place of a list of them.

        >>> Batch.cat(Batch({"x": torch.arange(4)}).chunk(2))["x"].tolist()
        [0, 1, 2, 3]
        """
        if isinstance(batches, Batch):
            raise TypeError("Batch.cat takes a list of batches, Batch.cat([a, b]); got a Batch")
        return cls.of_storage(
            joined([batch.stored() for batch in batches], batches, dict(metadata or {}))
        )

    def pad_rows(self, *, multiple_of: int) -> Batch:
        """Add rows without loss until ``multiple_of`` divides them: a copy, or self if it does.

        >>> batch = Batch({"input_ids": torch.tensor([[5]]), "loss_mask": torch.tensor([[1.0]])})
        >>> batch.pad_rows(multiple_of=2)["loss_mask"].tolist()
        [[1.0], [0.0]]
        """
        added = -len(self) % checked_int("multiple_of", multiple_of)
        return Batch.of_storage(padded(self.stored(), added)) if added else self

    def stored(self) -> Storage:
        """Return all that is stored, with the dense fields that were changed in place."""
        storage = replace(self._storage, row_metadata=self.row_metadata, metadata=self.metadata)
        changed = {
            k: field for k, (field, version) in self._made.items() if version_of(field) != version
        }
        return storage.with_given(changed)

    @property
    def placement(self) -> Placement | None:
        """Places of the tokens, in host memory; None of a Batch built from dense tensors."""
        return self._storage.columns.placement if self._storage.columns else None

    def column(self, name: str) -> Tensor | None:
        """Return a column as it is stored, with an entry per token, or None."""
        column = self._storage.columns.values.get(name)
        return None if column is None else tensor_of(column)

    @property
    def nbytes(self) -> int:
        """Number of bytes stored, without the dense fields made from them.

        >>> Batch({"x": torch.zeros(3, 2)}).nbytes
        24
        """
        return self.stored().nbytes

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Batch:
        """Return the batch on ``device``; self if it is there. Metadata stays in host memory."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"Batch.to takes a device, got {device}; fields keep their dtypes")
        device = torch.empty(0, device=device).device  # with its index
        moved = self.stored().moved(device, non_blocking=non_blocking)
        return self if moved is None else Batch.of_storage(moved)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked host memory, or self on a device."""
        return self if (pinned := self.stored().pinned()) is None else Batch.of_storage(pinned)

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that ``stream`` uses the batch, as ``Tensor.record_stream`` does."""
        made = (field for field, _ in self._made.values())
        for value in (*self.stored().items().values(), *made, *self._shared.values()):
            tensor_of(value).record_stream(stream)

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch.of_storage, (self.stored(),)

    def __copy__(self) -> Batch:
        return self.with_fields()

    def model_inputs(
        self,
        model: nn.Module | str | Mapping[str, str] | None = None,
        *,
        labels: bool = True,
        mask: Literal["block"] | None = None,
        sliding_window: int | None = None,
        context_group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return what ``model(**inputs)`` of a transformers model needs, in a plain dict.

        ``input_ids``, ``position_ids``, ``use_cache=False``, ``labels`` unless False, fields of
        images; of padded rows the ``attention_mask``, never of packed ones. The ``model``, or if it
        is a causal one the name of its attention ("torch_varlen" by default), decides the rest:

        - varlen attention gets ``cu_seq_lens_q/k`` (int32) and ``max_length_q/k`` (ints);
        - a hybrid model what its family reads (docs/isolation.md) of these and of ``seq_idx``,
          ``cu_seqlens``, ``cu_seqlens_cpu``; some kernels take one row: fields ``[1, R * W]``;
        - ``mask="block"`` ("sdpa", "eager"), chosen if the model is two-way or its mask ignores
          positions: ``[R, 1, W, W]``, a block per segment; with ``sliding_window`` a dict of two;
        - tables of positions and types: positions from the model's first, ``token_type_ids``;
        - segments that share prefixes, which need it: ``path_cells``, or a mask; no ``labels``;
        - a context shard, with ``context_group`` its ranks: ``path_cells``; no ``labels``.

        Raises:
            ValueError: an unknown name, or one without the other it needs; more cells than int32;
                a text longer than the table of positions; types that the model does not have.
            IsolationError: a model in which packed rows, or rows padded on the left, are wrong.
        """
        return model_inputs(
            self,
            self.stored(),
            model,
            labels=labels,
            mask=mask,
            sliding_window=sliding_window,
            context_group=context_group,
        )

    def context_shard(
        self,
        cp_rank: int,
        cp_size: int,
        *,
        layout: Literal["zigzag", "contiguous", "head_tail"] = "zigzag",
        depth: int = 1,
    ) -> Batch:
        """Return the cells of each row that one of ``cp_size`` context ranks computes: a copy.

        The shard is a Batch of the same rows, ``W / cp_size`` cells wide, in their order:

        - "zigzag" (TransformerEngine, Megatron-Core, ring-flash-attn): two parts of every segment,
          as far from its start as from its end, so attention costs all ranks the same;
        - "head_tail" (torch, Accelerate): two of every row; "contiguous" (Ulysses, DeepSpeed): one.

        ``input_ids``, ``position_ids`` (those in the segment), ``mrope_position_ids`` and masks are
        of its cells. ``targets``, int64 ``[R, W / cp_size]``, are the ids that they predict,
        shifted before the rows were cut: -100 where that is not trained, or the segment ends.
        ``loss_mask``, ``response_mask`` and all declared fields per token are with the cell that
        predicts, in that shape. Fields per example, images and row metadata stay whole, and so does
        ``metadata["num_loss_tokens"]``; ``"cu_seq_lens"``, int32 ``[S + 1]``, bounds the segments
        of the batch flat over its rows, ``"cu_seq_lens_local"`` their parts in the shard, and
        :attr:`cells` are its cells. Cut rows before, not after: a shard has no slices.

        At ``depth`` k (multi-token prediction, draft heads) the cell of a token has the target,
        ``loss_mask`` and fields of the k-th token after it in its segment, and reads the one before
        that, the pad id past the end; positions stay. Divide by ``global_num_loss_tokens(shard)``:
        ``"num_loss_tokens"`` is of depth 1. With ``cp_size=1``, of any rows, ``model_inputs`` are
        those of the whole batch.

        Raises:
            ValueError: segments or rows that the ranks do not divide; a batch that is a shard, was
                built from tensors, or whose segments share prefixes; images at a depth above 1.

        >>> from torch_collate_kit import PackedCollator, ParallelLayout
        >>> collate = PackedCollator(0, max_tokens=8, parallel=ParallelLayout(cp=2))
        >>> batch = collate([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [3, 4, 9]}])
        >>> shard = batch.context_shard(1, 2)
        >>> shard["input_ids"].tolist(), shard["position_ids"].tolist()
        ([[6, 7, 4, 9]], [[1, 2, 1, 2]])
        >>> shard["targets"].tolist(), shard.cells.tolist()
        ([[7, 8, 9, -100]], [1, 2, 5, 6])
        """
        whole, labels = self.stored(), trained_labels(self)
        whole = whole if labels is None else whole.with_given({"labels": labels})
        return self.of_storage(shard_of(whole, cp_rank, cp_size, layout, depth))

    def targets(self, depth: int = 1) -> Targets:
        """Return what cells predict ``depth`` tokens on in their segment, as flat pairs: copies.

        One pair for each trained token with that many before it in its segment, or in its piece
        after a split: the cell, ``row * W + column``, that predicts it, its label and its weight.
        Divide their loss by the number of pairs of that depth, over all ranks and micro-batches:
        weights are not divided, as ``loss_mask`` may be. It waits for the device, for their number.

        Raises:
            ValueError: a depth below 1; a shard; other ``targets``; a batch built from tensors.

        >>> from torch_collate_kit import PackedCollator
        >>> collate = PackedCollator(0, max_tokens=8)
        >>> batch = collate([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [3, 4, 9]}])
        >>> cells, ids, weights = batch.targets(depth=2)
        >>> cells.tolist(), ids.tolist(), weights.tolist()
        ([0, 1, 4], [7, 8, 9], [1.0, 1.0, 1.0])
        """
        return pairs_of(self, self.stored(), depth)

    @property
    def cells(self) -> Tensor:
        """Cells of the batch that a shard has, ``row * W + column``: int64, in its order.

        Raises:
            ValueError: the batch is not a shard.
        """
        columns = self.stored().columns
        if columns.placement is None or columns.placement.shard is None:
            raise ValueError(
                "the batch is not a shard, so its cells are all of them; cut it with "
                "batch.context_shard(cp_rank, cp_size)"
            )
        return cells_of_shard(columns, self._shared)

    def explain(
        self,
        row: int | None = None,
        tokenizer: Any = None,
        *,
        example: int | None = None,
        start: int | None = None,
        stop: int | None = None,
        max_tokens: int | None = 60,
    ) -> Explanation:
        """Show a row token by token: ids, text, positions, labels, weights and the other fields.

        ``tokenizer`` (or a processor) adds the text. ``example`` shows that example alone (without
        ``row``, in the first row with a piece of it), ``start`` and ``stop`` these cells. A table
        shows the first and last of more than ``max_tokens``.

        Raises:
            IndexError, ValueError: no such row; an example that is not there; no ``input_ids``.
        """
        return explained(self, row, tokenizer, example, slice(start, stop), max_tokens)

    def plot(self, *, max_rows: int = 40, ax: Axes | None = None) -> Axes:
        """Draw the first ``max_rows`` rows with matplotlib, on ``ax`` or a new figure.

        Examples are blocks, or their segments where these share cells; trained is dark. Call
        ``plt.show()``.

        Raises:
            ValueError: no rows, or no ``input_ids`` ``[R, W]`` in host memory.
            ImportError: matplotlib is not installed.

        >>> from torch_collate_kit import PackedCollator
        >>> PackedCollator(0, max_tokens=8)([{"input_ids": [5, 6, 7]}]).plot().get_title()
        '1 row of 3 cells: 3 tokens, 0.0% padding, 2 trained'
        """
        most = checked_int("max_rows", max_rows)
        stored = self.stored()
        return draw_rows(stored.change(lambda rows: rows[:most]), stored.num_rows, ax)

    def __repr__(self) -> str:
        return described(self.stored())

    def _repr_html_(self) -> str:
        return html_of(self.stored())
