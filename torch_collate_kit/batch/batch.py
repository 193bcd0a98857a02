"""Batch: the tokens of its rows and where they lie; dense fields are made when they are read."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit._checks import checked_int
from torch_collate_kit.batch import rows
from torch_collate_kit.batch.buffer import tensor_of
from torch_collate_kit.batch.dense import make_field
from torch_collate_kit.batch.fields import Field
from torch_collate_kit.batch.model_inputs import model_inputs
from torch_collate_kit.batch.placement import Placement
from torch_collate_kit.batch.row_changes import joined, padded
from torch_collate_kit.batch.showing.drawing import described, html_of
from torch_collate_kit.batch.showing.explanation import Explanation, explained, row_of
from torch_collate_kit.batch.showing.plot import draw_rows
from torch_collate_kit.batch.storage import Storage
from torch_collate_kit.ragged import Ragged, row_indices

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Batch"]


class Batch(Mapping[str, Field]):
    """A training batch: fields with one entry per row, ``row_metadata`` and ``metadata``.

    ``batch["input_ids"]`` is a field, a tensor ``[R, ...]`` or a :class:`Ragged` with R rows;
    ``batch[2:5]`` is a Batch of these rows, ``len(batch)`` is R. docs/contract.md lists the fields
    that a collator gives.

    A collator's batch stores columns, one entry per token, and where they lie. A field is made of
    them when it is first read, on their device, and kept. A field that is changed in place stays
    changed (not through ``.numpy()``, which nobody sees); :meth:`with_fields` replaces one.

    ``row_metadata`` has one entry per row (list, ndarray, tensor or Ragged) and is sliced with the
    rows. ``metadata`` belongs to the batch as it was collated, so slices keep it.

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
            if not isinstance(field, Ragged) and (not isinstance(field, Tensor) or not field.ndim):
                raise TypeError(
                    f"field {name} must be a tensor with rows first or a Ragged, got "
                    f"{type(field).__name__}; what belongs to the whole batch goes into metadata"
                )
        self._set(Storage(None, dict(fields), dict(row_metadata or {}), dict(metadata or {})))

    @classmethod
    def of_storage(cls, storage: Storage) -> Batch:
        """What a collator makes."""
        batch = cls.__new__(cls)
        batch._set(storage)
        return batch

    def _set(self, storage: Storage) -> None:
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
        start, stop, step = key.indices(len(self))
        if step < 1:
            raise ValueError(f"rows cannot be sliced with step {step}; use batch.select(indices)")
        picked = slice(start, stop, step)
        return Batch.of_storage(self.stored().change(lambda value: value[picked]))

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            is_field = "_storage" in vars(self) and name in self
            found = f'; a field is an item, batch["{name}"]' if is_field else ""
            raise AttributeError(f"'Batch' object has no attribute {name!r}{found}")

    def _field(self, name: str) -> Field:
        storage = self._storage
        if name in storage.given:
            return storage.given[name]
        if name not in self._made:
            if storage.columns is None or name not in storage.columns.names:
                raise KeyError(f"{name}; the batch has {', '.join(self)}")
            field = make_field(name, storage.columns, self._shared, self.metadata)
            self._made[name] = field, _version(field)
        return self._made[name][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._storage.names)

    def __len__(self) -> int:
        return self._storage.num_rows

    def __contains__(self, key: object) -> bool:
        return key in self._storage.names

    def keys(self) -> KeysView[str]:  # the views of Mapping count rows: len(batch)
        return self._storage.names.keys()

    def items(self) -> ItemsView[str, Field]:
        """The fields by name; makes all of them."""
        return {name: self._field(name) for name in self}.items()

    def values(self) -> ValuesView[Field]:
        """The fields; makes all of them."""
        return dict(self.items()).values()

    def __eq__(self, other: object) -> bool:
        """The same fields with equal dtypes, shapes and values, and equal metadata."""
        if not isinstance(other, Batch):
            return NotImplemented
        same = self.stored().equals(other.stored())
        return all(rows.equal(self[n], other[n]) for n in self) if same is None else same

    __hash__ = None  # type: ignore[assignment]

    def with_fields(self, **fields: Field) -> Batch:
        """The same rows with fields added or replaced; nothing is copied.

        >>> batch = Batch({"input_ids": torch.tensor([[5], [6]])})
        >>> list(batch.with_fields(advantages=torch.zeros(2, 1)))
        ['input_ids', 'advantages']
        """
        storage = self.stored().with_given(Batch(fields)._storage.given if fields else {})
        batch = Batch.of_storage(storage)
        batch._made = {k: made for k, made in self._made.items() if k not in storage.given}
        batch._shared = self._shared
        return batch

    def chunk(self, num_chunks: int) -> list[Batch]:
        """The rows in ``num_chunks`` equal runs: chunk ``r`` is rank ``r``'s part.

        Raises:
            ValueError: rows that do not divide.

        >>> [c["x"].tolist() for c in Batch({"x": torch.arange(4)}).chunk(2)]
        [[0, 1], [2, 3]]
        """
        num_chunks = index(num_chunks)
        if num_chunks < 1 or len(self) % num_chunks:
            raise ValueError(
                f"{len(self)} rows do not divide into {num_chunks} equal chunks; "
                "add zero-loss rows with batch.pad_rows(multiple_of=...)"
            )
        size = len(self) // num_chunks
        return [self[i * size : (i + 1) * size] for i in range(num_chunks)]

    def select(self, indices: Sequence[int] | np.ndarray | Tensor) -> Batch:
        """The named rows, in that order and as often as named: a copy.

        >>> Batch({"x": torch.arange(4)}).select([3, 0])["x"].tolist()
        [3, 0]
        """
        picked = row_indices(indices)
        if picked.ndim != 1 or ((picked < 0) | (picked >= len(self))).any():
            raise IndexError(f"rows {picked.tolist()} of a batch with {len(self)} rows")
        return Batch.of_storage(self.stored().change(lambda value: rows.take(value, picked)))

    @classmethod
    def cat(cls, batches: Sequence[Batch], metadata: Mapping[str, Any] | None = None) -> Batch:
        """The rows of all batches, one after the other: a copy.

        Row metadata is concatenated; ``metadata`` must agree, but for keys that the argument has.

        Raises:
            ValueError: no batches, other fields, other widths, or metadata that disagrees.

        >>> Batch.cat(Batch({"x": torch.arange(4)}).chunk(2))["x"].tolist()
        [0, 1, 2, 3]
        """
        stored = [batch.stored() for batch in batches]
        return cls.of_storage(joined(stored, batches, dict(metadata or {})))

    def pad_rows(self, *, multiple_of: int) -> Batch:
        """Rows added at the end until ``multiple_of`` divides them: a copy, or self if it does.

        An added row repeats row 0, so that every model can run it, with zero loss and without
        sub-sequences: docs/contract.md has the value of each field and row metadata.
        ``metadata["num_dummy_rows"]`` counts added rows.

        >>> batch = Batch({"input_ids": torch.tensor([[5]]), "loss_mask": torch.tensor([[1.0]])})
        >>> padded = batch.pad_rows(multiple_of=2)
        >>> padded["input_ids"].tolist(), padded["loss_mask"].tolist(), padded.metadata
        ([[5], [5]], [[1.0], [0.0]], {'num_dummy_rows': 1})
        """
        added = -len(self) % checked_int("multiple_of", multiple_of)
        if not added:
            return self
        return Batch.of_storage(padded(self.stored(), added))

    def stored(self) -> Storage:
        """All that is stored, with the fields that were changed in place since they were made.

        >>> list(Batch({"x": torch.zeros(4)}).stored().names)
        ['x']
        """
        changed = {k: field for k, (field, at) in self._made.items() if _version(field) != at}
        storage = replace(self._storage, row_metadata=self.row_metadata, metadata=self.metadata)
        return storage.with_given(changed)

    def contents(self) -> dict[str, Any]:
        """The ``"columns"``, in the dtypes of the dense fields, and what was ``"given"``.

        No field is made. Batches with equal contents have equal fields.

        >>> Batch({"x": torch.zeros(2)}).contents()
        {'given': {'x': tensor([0., 0.])}}
        """
        return self.stored().contents()

    @property
    def placement(self) -> Placement | None:
        """Where the tokens lie, in host memory; None of a Batch built from dense tensors.

        >>> Batch({"x": torch.zeros(4)}).placement
        """
        return self._storage.placement

    def column(self, name: str) -> Tensor | None:
        """A column as it is stored, such as ``input_ids``, one entry per token; None without it.

        >>> Batch({"x": torch.zeros(4)}).column("input_ids")
        """
        columns = self._storage.columns
        return tensor_of(columns.values[name]) if columns and name in columns.values else None

    def num_tokens_per_row(self, count: str = "lengths") -> np.ndarray | None:
        """int64 [R], tokens (or ``"responses"``) of each row; None where they are not known.

        >>> Batch({"x": torch.zeros(4)}).num_tokens_per_row()
        """
        placement = self.placement
        if placement is None or count not in placement.segments:
            return None
        return np.diff(placement.offsets(count))

    def num_loss_tokens_per_row(self) -> np.ndarray | None:
        """int64 [R], cells of ``loss_mask`` that are not 0; None without one. Reads the device.

        >>> Batch({"loss_mask": torch.tensor([[0.0, 0.5], [1.0, 1.0]])}).num_loss_tokens_per_row()
        array([1, 2])
        """
        return self.stored().num_loss_tokens()

    def divide_loss_mask(self, divisor: int) -> Batch:
        """The same rows with a ``loss_mask`` divided by ``divisor``, whatever it was before.

        >>> batch = Batch({"loss_mask": torch.ones(1, 2)}, metadata={"loss_mask_divisor": 1})
        >>> batch.divide_loss_mask(4)["loss_mask"]
        tensor([[0.2500, 0.2500]])
        """
        return Batch.of_storage(self.stored().with_divisor(divisor))

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored, dense fields that were made from it not counted.

        >>> Batch({"x": torch.arange(4)}).nbytes
        32
        """
        return self.stored().nbytes

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Batch:
        """The batch on ``device``, by one copy of what is stored; self if it is there.

        Metadata stays in host memory. ``non_blocking=True`` overlaps with compute only from pinned
        memory.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"Batch.to takes a device, got {device}; fields keep their dtypes")
        target = torch.empty(0, device=device).device  # with its index
        moved = self.stored().moved(target, non_blocking=non_blocking)
        return self if moved is None else Batch.of_storage(moved)

    def pin_memory(self) -> Batch:
        """The batch in page-locked host memory, self on a device; DataLoader calls it to pin."""
        pinned = self.stored().pinned()
        return self if pinned is None else Batch.of_storage(pinned)

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that ``stream`` uses the batch, as ``Tensor.record_stream`` does."""
        made = [field for field, _ in self._made.values()]
        for value in (*self.stored().items().values(), *made, *self._shared.values()):
            tensor_of(value).record_stream(stream)

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch.of_storage, (self.stored(),)

    def __copy__(self) -> Batch:
        return self.with_fields()

    def model_inputs(
        self,
        attention: str | Mapping[str, str] = "torch_varlen",
        *,
        labels: bool = True,
        mask: Literal["block"] | None = None,
        sliding_window: int | None = None,
    ) -> dict[str, Any]:
        """What ``model(**inputs)`` of a transformers model needs, in a plain dict.

        ``input_ids``, ``position_ids``, ``use_cache=False``, and ``labels`` if there are any and
        ``labels`` is True. A padded batch adds ``attention_mask``; a packed one never does, since
        with that 2-D mask transformers ignores the segments. For varlen ``attention`` it adds
        ``cu_seq_lens_q/k`` (int32, flat over the rows) and ``max_length_q/k`` (Python ints). Rows
        with images add their fields. ``attention`` may be the dict that ``attn_implementation`` is.

        ``mask="block"`` is for packed rows of models whose mask does not see the position ids
        (docs/contract.md names them): a causal ``attention_mask`` ``[R, 1, W, W]`` of a block per
        segment, for "sdpa" or "eager". It replaces the masks of the model, so for one with
        sliding-window layers pass ``sliding_window=model.config.sliding_window``; it is then a dict
        of a mask for each kind of layer.

        Raises:
            ValueError: an unknown ``attention`` or ``mask``, or one without the other it needs;
                more cells than int32 boundaries count.
        """
        return model_inputs(
            self,
            self.stored(),
            attention,
            labels=labels,
            mask=mask,
            sliding_window=sliding_window,
        )

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
        """A row token by token: ids, text, positions, labels, weights and the other fields.

        ``tokenizer`` (or processor) gives the text. ``example`` shows that example alone, of the
        first row that has a piece of it if no row is named; ``start`` and ``stop`` limit the cells.
        Of more than ``max_tokens`` a table shows the first and the last; None shows all.

        Raises:
            IndexError, ValueError: no such row; an example that is not there; no ``input_ids``.
        """
        row = row_of(self.stored(), row, example)
        one = self[row : row + 1].to("cpu").divide_loss_mask(1)
        return explained(
            one,
            one.stored(),
            f"row {row} of {len(self)}",
            tokenizer,
            example=example,
            cells=slice(start, stop),
            max_tokens=max_tokens,
        )

    def plot(self, *, max_rows: int = 40, ax: Axes | None = None) -> Axes:
        """Draw the first ``max_rows`` rows with matplotlib, on ``ax`` or a new figure.

        Each example is a block, dark where it is trained; padding is hatched. Nothing is shown:
        call ``plt.show()``, or ``batch.plot().figure.savefig("rows.png")``.

        Raises:
            ValueError: no rows, or no ``input_ids`` ``[R, W]`` in host memory.
            ImportError: matplotlib is not installed.

        >>> from torch_collate_kit import PackedCollator
        >>> PackedCollator(0, max_tokens=8)([{"input_ids": [5, 6, 7]}]).plot().get_title()
        '1 row of 3 cells: 3 tokens, 0.0% padding, 2 trained'
        """
        shown = self[: checked_int("max_rows", max_rows)]
        return draw_rows(shown.stored(), len(self), ax)

    def __repr__(self) -> str:
        return described(self.stored())

    def _repr_html_(self) -> str:
        return html_of(self.stored())


def _version(field: Field) -> int:
    """Goes up with every change in place; of a NumPy array or an inference tensor nobody counts."""
    tensor = tensor_of(field)
    return 0 if tensor.is_inference() else tensor._version
