"""Batch: rows, one buffer, metadata beside the rows, and what a model is given."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.ragged import Ragged

VARLEN = ("torch_varlen", "flash_attention_2", "flash_attention_3")
MASKED = ("sdpa", "eager", "flex_attention")
LENGTHS = (5, 3, 4, 2, 7)


def examples(lengths: Any = LENGTHS) -> list[dict[str, list[int]]]:
    """Token t of example i is 100 * i + t + 1."""
    return [{"input_ids": [100 * i + t + 1 for t in range(n)]} for i, n in enumerate(lengths)]


@pytest.fixture
def packed() -> Batch:
    """Rows [7 | 1 pad], [5 + 3], [4 + 2 | 2 pads]."""
    return PackedCollator(0, max_tokens=8)(examples())


@pytest.fixture
def padded() -> Batch:
    return PaddedCollator(0)(examples())


@pytest.fixture(params=["packed", "padded"])
def collated(request: pytest.FixtureRequest) -> Batch:
    return request.getfixturevalue(request.param)


def loose() -> Batch:
    """Not from a collator: fields of many kinds, and metadata of all kinds."""
    return Batch(
        {
            "ids": torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]),
            "rewards": torch.tensor([0.5, 1.5, 2.5, 3.5]),
            "half": torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.bfloat16),
            "kept": torch.tensor([True, False, True, True]),
            "words": Ragged.from_rows([[1], [2, 3], [], [4, 5, 6]]),
        },
        {
            "uids": ["a", "b", "c", "d"],
            "turns": np.array([1, 2, 3, 4]),
            "scores": torch.tensor([0.1, 0.2, 0.3, 0.4]),
            "parts": Ragged.from_rows([[0], [], [1, 2], [3]]),
            "step": 7,
            "name": "run",
            "limits": (1, 2, 3),
            "options": {"x": [1]},
            "nothing": None,
        },
    )


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def contents(batch: Batch) -> dict[str, Any]:
    """All of a batch as Python values, so that two can be compared."""
    dtypes = {k: (v.values if isinstance(v, Ragged) else v).dtype for k, v in batch.items()}
    return {
        "rows": len(batch),
        "fields": {name: plain(field) for name, field in batch.items()},
        "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()},
        "metadata": {key: plain(value) for key, value in batch.metadata.items()},
    }


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    return [field.values if isinstance(field, Ragged) else field for field in batch.values()]


def storages_of(batch: Batch) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(batch)}


# --- a mapping -----------------------------------------------------------------------------------


def test_it_is_a_mapping_of_fields(packed: Batch) -> None:
    assert isinstance(packed, Mapping)
    names = ["input_ids", "position_ids", "attention_mask", "labels", "loss_mask"]
    assert list(packed) == [*names, "sub_seq_lengths", "cu_seq_lens"]
    assert len(packed) == 3
    assert "input_ids" in packed
    assert "pixel_values" not in packed
    assert packed.get("pixel_values") is None
    plain_dict = {**packed}
    assert list(plain_dict) == list(packed)
    assert plain_dict["labels"] is packed["labels"]
    assert dict(packed.items()).keys() == plain_dict.keys()
    with pytest.raises(KeyError, match="pixel_values"):
        packed["pixel_values"]
    with pytest.raises(TypeError, match="unhashable"):
        hash(packed)


def test_repr_shows_shapes(packed: Batch) -> None:
    assert repr(packed).startswith("Batch(3 rows; input_ids: [3, 8], position_ids: [3, 8], ")
    assert repr(packed).endswith("cu_seq_lens: Ragged(3 rows, 10 values, torch.int32))")


def test_the_arguments_are_not_kept_as_containers() -> None:
    fields, metadata = {"x": torch.arange(2)}, {"uids": ["a", "b"]}
    batch = Batch(fields, metadata)
    fields["y"], metadata["n"] = torch.arange(9), 1
    assert list(batch) == ["x"]
    assert list(batch.metadata) == ["uids"]


@pytest.mark.parametrize("index", [0, -1, np.int64(1), True, (0, 1), [0], None, slice])
def test_a_row_number_is_refused(index: Any) -> None:
    with pytest.raises(TypeError, match=r"got .*one row is batch\[i:i \+ 1\], rows in any order"):
        loose()[index]


def test_fields_and_row_metadata_must_agree_in_rows() -> None:
    x = torch.arange(3)
    with pytest.raises(ValueError, match="at least one field, got none"):
        Batch({})
    with pytest.raises(ValueError, match="y has 2 rows, but x has 3"):
        Batch({"x": x, "y": torch.arange(2)})
    for short in (["a"], np.array([1]), torch.tensor([1]), Ragged.from_rows([[1]])):
        with pytest.raises(ValueError, match=r"metadata\['u'\] has 1 rows, .*tuple or a dict"):
            Batch({"x": x}, {"u": short})
    Batch({"x": x}, {"u": ("a",), "v": {"w": [1]}, "s": "ab"})  # of the whole batch


@pytest.mark.parametrize("value", [torch.tensor(3), np.array(3)])
def test_metadata_without_rows_belongs_to_the_whole_batch(value: Any) -> None:
    batch = Batch({"x": torch.arange(3)}, {"num_loss_tokens": value})
    assert batch[:1].metadata["num_loss_tokens"] is value


@pytest.mark.parametrize("value", [[1, 2], np.arange(2), torch.tensor(1), None])
def test_a_field_is_a_tensor_with_rows_or_a_ragged(value: Any) -> None:
    with pytest.raises(TypeError, match="field x"):
        Batch({"x": value})


# --- rows ----------------------------------------------------------------------------------------


def test_a_slice_by_hand() -> None:
    batch = loose()[1:3]
    assert len(batch) == 2
    assert contents(batch) == {
        "rows": 2,
        "fields": {
            "ids": [[3, 4], [5, 6]],
            "rewards": [1.5, 2.5],
            "half": [[2.0], [3.0]],
            "kept": [False, True],
            "words": [[2, 3], []],
        },
        "dtypes": {
            "ids": "int64",
            "rewards": "float32",
            "half": "bfloat16",
            "kept": "bool",
            "words": "int64",
        },
        "metadata": {
            "uids": ["b", "c"],
            "turns": [2, 3],
            "scores": pytest.approx([0.2, 0.3]),
            "parts": [[], [1, 2]],
            "step": 7,
            "name": "run",
            "limits": (1, 2, 3),
            "options": {"x": [1]},
            "nothing": None,
        },
    }


@pytest.mark.parametrize(
    "index",
    [slice(None), slice(2), slice(-1, None), slice(0, 4, 2), slice(2, 1), slice(9, 12)],
)
def test_a_slice_is_the_selection_of_its_rows(index: slice) -> None:
    rows = list(range(4))[index]
    assert contents(loose()[index]) == contents(loose().select(rows))
    assert len(loose()[index]) == len(rows)


def test_slices_and_chunks_are_views(collated: Batch) -> None:
    collated[1:2]["input_ids"][:] = 9
    collated.chunk(len(collated))[2]["loss_mask"][:] = 4
    assert (collated["input_ids"][1] == 9).all()
    assert (collated["loss_mask"][2] == 4).all()
    assert storages_of(collated[1:2]) == storages_of(collated)


def test_a_slice_keeps_the_divisor_of_the_whole_batch(packed: Batch) -> None:
    part = packed[1:]
    assert part.metadata["num_loss_tokens"] == packed.metadata["num_loss_tokens"] == 16
    assert part.metadata["example_indices"].tolist() == [[0, 1], [2, 3]]
    assert part.metadata["max_segment_length"] == [5, 4]
    assert part["sub_seq_lengths"].tolist() == [[5, 3], [4, 2]]


def test_metadata_of_a_slice_is_its_own(packed: Batch) -> None:
    packed[1:].metadata["num_loss_tokens"] = 0
    assert packed.metadata["num_loss_tokens"] == 16


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"step -1; use batch\.select"):
        loose()[::-1]


def test_chunks_are_the_rows_in_order(collated: Batch) -> None:
    chunks = collated.chunk(len(collated))
    assert [len(chunk) for chunk in chunks] == [1] * len(collated)
    rebuilt = Batch.cat(chunks)
    assert contents(rebuilt) == contents(collated)
    assert contents(collated.chunk(1)[0]) == contents(collated)


@pytest.mark.parametrize("num_chunks", [0, -1, 3, 8])
def test_chunks_must_divide(num_chunks: int) -> None:
    with pytest.raises(ValueError, match=rf"4 rows do not divide into {num_chunks} .*pad_rows"):
        loose().chunk(num_chunks)


@pytest.mark.parametrize("indices", [[2, 0, 2], np.array([2, 0, 2]), torch.tensor([2, 0, 2])])
def test_a_selection_is_a_copy_in_the_named_order(indices: Any) -> None:
    batch = loose()
    picked = batch.select(indices)
    assert picked["ids"].tolist() == [[5, 6], [1, 2], [5, 6]]
    assert picked["words"].tolist() == [[], [1], []]
    assert picked.metadata["uids"] == ["c", "a", "c"]
    assert picked.metadata["turns"].tolist() == [3, 1, 3]
    assert picked.metadata["scores"].tolist() == pytest.approx([0.3, 0.1, 0.3])
    assert picked.metadata["parts"].tolist() == [[1, 2], [0], [1, 2]]
    assert picked.metadata["limits"] == (1, 2, 3)
    for tensor in tensors_of(picked):
        tensor[:] = 0
    picked.metadata["turns"][:] = 0
    assert contents(batch) == contents(loose())


def test_a_selection_of_no_rows() -> None:
    assert len(loose().select([])) == 0
    assert loose().select([]).metadata["uids"] == []


@pytest.mark.parametrize("indices", [[4], [-1], [0, 9], [[0]]])
def test_a_selection_of_rows_that_are_not_there(indices: Any) -> None:
    with pytest.raises(IndexError, match=r"rows \[.*\] of a batch with 4 rows"):
        loose().select(indices)


@pytest.mark.parametrize("indices", [[False, True, True, False], [0.9, 1.9]])
def test_a_selection_takes_integers_only(indices: Any) -> None:
    for given_indices in (indices, np.array(indices), torch.tensor(indices)):
        with pytest.raises(TypeError, match="integers"):
            loose().select(given_indices)


# --- cat -----------------------------------------------------------------------------------------


def test_cat_is_a_copy_of_all_rows() -> None:
    batch = loose()
    whole = Batch.cat([batch[2:], batch[:0], batch[:1], batch.select([1])])
    assert contents(whole) == contents(batch.select([2, 3, 0, 1]))
    for tensor in tensors_of(whole):
        tensor[:] = 0
    assert contents(batch) == contents(loose())
    assert contents(Batch.cat([batch])) == contents(batch)


def test_metadata_of_the_batches_must_agree_or_be_given(packed: Batch) -> None:
    other = copy.deepcopy(packed)
    other.metadata["num_loss_tokens"] = 3
    with pytest.raises(
        ValueError, match=r"metadata\['num_loss_tokens'\] is 16.* 3.*pass metadata="
    ):
        Batch.cat([packed, other])
    whole = Batch.cat([packed, other], {"num_loss_tokens": 19, "new": "x"})
    assert whole.metadata["num_loss_tokens"] == 19
    assert whole.metadata["new"] == "x"
    assert whole.metadata["max_segment_length"] == [7, 5, 4, 7, 5, 4]
    assert packed.metadata["num_loss_tokens"] == 16


def test_cat_needs_the_same_fields_widths_and_metadata(packed: Batch, padded: Batch) -> None:
    with pytest.raises(ValueError, match="at least one batch, got none"):
        Batch.cat([])
    with pytest.raises(ValueError, match=r"batch 1 has fields \['x'\], batch 0 has \['input_ids'"):
        Batch.cat([packed, Batch({"x": torch.arange(2)})])
    narrow = PackedCollator(0, max_tokens=6)(examples((6,)))
    with pytest.raises(
        ValueError, match=r"input_ids of batch 1 has row shape \[6\], of batch 0 \[8\].*fixed_width"
    ):
        Batch.cat([packed, narrow])
    x = {"x": torch.arange(2)}
    with pytest.raises(ValueError, match=r"only one of .*batch 2 has the metadata \['a', 'b'\]"):
        Batch.cat([Batch(x, {"a": 1}), Batch(x, {"a": 1}), Batch(x, {"b": 1})])


def test_masks_that_were_divided_by_different_numbers_are_not_joined(packed: Batch) -> None:
    other = PackedCollator(0, max_tokens=8)(examples((8,)))
    keys = ("num_loss_tokens", "loss_mask_divisor", "num_examples", "num_tokens")
    with pytest.raises(ValueError, match="loss_mask_divisor"):
        Batch.cat([packed, other], {key: packed.metadata[key] + 7 for key in keys})


# --- pad_rows ------------------------------------------------------------------------------------


def test_rows_that_divide_already_are_returned_as_they_are(collated: Batch) -> None:
    assert collated.pad_rows(multiple_of=1) is collated
    assert collated.pad_rows(multiple_of=len(collated)) is collated


def test_an_added_row_runs_like_row_0_and_trains_nothing(packed: Batch) -> None:
    before = contents(packed)
    batch = packed.pad_rows(multiple_of=5)
    assert len(batch) == 5
    assert contents(batch[:3])["fields"] == before["fields"]
    for name in ("input_ids", "position_ids", "attention_mask"):
        assert batch[name][3:].tolist() == [packed[name][0].tolist()] * 2
    assert batch["cu_seq_lens"].tolist()[3:] == [[0, 7, 8]] * 2
    assert (batch["labels"][3:] == -100).all()
    assert (batch["loss_mask"][3:] == 0).all()
    assert batch["sub_seq_lengths"].tolist() == [[7], [5, 3], [4, 2], [], []]
    assert batch.metadata["example_indices"].tolist() == [[4], [0, 1], [2, 3], [], []]
    assert batch.metadata["num_actions"].tolist()[3:] == [[], []]
    assert batch.metadata["max_segment_length"] == [7, 5, 4, 7, 7]
    assert batch.metadata["num_dummy_rows"] == 2
    assert batch.metadata["num_loss_tokens"] == 16
    assert batch.pad_rows(multiple_of=2).metadata["num_dummy_rows"] == 3
    assert contents(packed) == before


def test_rows_are_added_to_a_slice_that_starts_anywhere(packed: Batch) -> None:
    batch = packed[1:].pad_rows(multiple_of=3)
    assert batch["input_ids"][2].tolist() == packed["input_ids"][1].tolist()
    assert batch["sub_seq_lengths"].tolist() == [[5, 3], [4, 2], []]
    assert batch.metadata["example_starts"].tolist() == [[0, 0], [0, 0], []]
    assert batch.model_inputs()["cu_seq_lens_q"].tolist() == [0, 5, 8, 12, 14, 16, 21, 24]


def test_row_metadata_and_rewards_of_added_rows() -> None:
    batch = Batch(
        {"rewards": torch.tensor([5.0]), "response_mask": torch.tensor([[1, 1]])},
        {"uids": ["a"], "turns": np.array([3]), "step": 1},
    ).pad_rows(multiple_of=2)
    assert batch["rewards"].tolist() == [5.0, 0.0]
    assert batch["response_mask"].tolist() == [[1, 1], [0, 0]]
    assert batch.metadata["uids"] == ["a", "a"]
    assert batch.metadata["turns"].tolist() == [3, 3]
    assert batch.metadata["step"] == 1


def test_pad_rows_errors(packed: Batch) -> None:
    for multiple_of in (0, -2):
        with pytest.raises(ValueError, match=f"at least 1, got {multiple_of}"):
            packed.pad_rows(multiple_of=multiple_of)
    no_rows = packed[:0]  # 0 is a multiple of everything
    assert no_rows.pad_rows(multiple_of=2) is no_rows


# --- one buffer ----------------------------------------------------------------------------------


def test_a_collated_batch_is_one_buffer(collated: Batch) -> None:
    assert len(storages_of(collated)) == 1
    addresses = [tensor.data_ptr() for tensor in tensors_of(collated)]
    assert [address % 64 for address in addresses] == [0] * len(addresses)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors_of(collated))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_allocate_carves_every_dtype() -> None:
    dtypes = [torch.bool, torch.int64, torch.bfloat16, torch.uint8, torch.float64, torch.int32]
    specs: dict[str, Any] = {str(dtype): ((3, 5), dtype) for dtype in dtypes}
    specs["ragged"] = (np.array([0, 2, 2, 7]), torch.int16)
    specs["flat"] = ((3,), torch.float32)
    specs["no columns"] = ((3, 0), torch.float32)
    batch = Batch.allocate(specs, {"uids": ["a", "b", "c"]})
    for value, tensor in enumerate(tensors_of(batch)):
        tensor.fill_(value)
    for value, (name, tensor) in enumerate(zip(batch, tensors_of(batch), strict=True)):
        assert (tensor == torch.tensor(value).to(tensor.dtype)).all(), name
        assert tensor.is_contiguous()
    assert {str(dtype): batch[str(dtype)].dtype for dtype in dtypes} == {str(d): d for d in dtypes}
    assert batch["ragged"].lengths.tolist() == [2, 0, 5]
    assert batch["ragged"].values.dtype == torch.int16
    assert batch["flat"].shape == (3,)
    assert batch["no columns"].shape == (3, 0)
    assert batch.metadata == {"uids": ["a", "b", "c"]}


class _Copies(TorchFunctionMode):
    """Names the functions called that copy data (a dispatch mode would import all of dynamo)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("to", "copy_", "clone", "cat", "cpu", "contiguous", "pin_memory"):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_collated_batch_moves_with_one_copy(collated: Batch) -> None:
    with _Copies() as copies:
        moved = collated.to("meta", non_blocking=True)
    assert copies.seen == ["to"]
    assert {tensor.device.type for tensor in tensors_of(moved)} == {"meta"}
    assert moved.metadata == collated.metadata
    assert moved["sub_seq_lengths"].lengths.tolist() == collated["sub_seq_lengths"].lengths.tolist()
    assert moved["labels"].shape == collated["labels"].shape


def test_a_slice_and_loose_tensors_are_gathered_and_then_move_with_one_copy(packed: Batch) -> None:
    for batch in (packed[1:], loose()):
        with _Copies() as copies:
            batch.to("meta")
        assert copies.seen.count("to") == 1
    gathered = packed[1:].to("cpu")
    assert contents(gathered) == contents(packed[1:])


def test_a_batch_that_is_there_already_is_returned(collated: Batch) -> None:
    assert collated.to("cpu") is collated
    assert collated.to(torch.device("cpu"), non_blocking=True) is collated


def test_a_slice_on_a_device_does_not_come_back_to_the_host(packed: Batch) -> None:
    moved = packed.to("meta")[1:]
    assert moved.to("meta")["input_ids"].shape == (2, 8)  # meta has nothing to copy to the host


def test_pinning_pins_the_one_buffer(packed: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        pinned.append(self.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    for batch in (packed, packed[1:], loose()):
        pinned.clear()
        result = batch.pin_memory()
        assert len(pinned) == 1
        assert storages_of(result) == {pinned[0].untyped_storage().data_ptr()}
        assert contents(result) == contents(batch)


# --- pickling and processes ----------------------------------------------------------------------


class _CountTensors(pickle.Pickler):
    """A tensor is what crosses to another process with a handle of its own."""

    tensors = 0

    def reducer_override(self, obj: Any) -> Any:
        self.tensors += isinstance(obj, torch.Tensor)
        return NotImplemented


@pytest.mark.parametrize("index", [slice(None), slice(1, 3), slice(0, 0)])
def test_a_pickle_is_one_tensor_and_the_same_batch(collated: Batch, index: slice) -> None:
    batch = collated[index]
    file = io.BytesIO()
    pickler = _CountTensors(file)
    pickler.dump(batch)
    assert pickler.tensors == 1
    loaded = pickle.loads(file.getvalue())
    assert isinstance(loaded, Batch)
    assert contents(loaded) == contents(batch)
    assert len(storages_of(loaded)) == 1


def test_loose_tensors_pickle_too() -> None:
    for batch in (loose(), loose()[1:], loose().select([3, 1])):
        assert contents(pickle.loads(pickle.dumps(batch))) == contents(batch)


@pytest.mark.parametrize("kind", [PackedCollator(0, max_tokens=64), PaddedCollator(0)])
def test_the_pickle_of_a_slice_holds_its_rows_alone(kind: Any) -> None:
    batch = kind(examples([64] * 200))
    row = 64 * 8 * 4 + 63 * 4
    whole, part = (len(pickle.dumps(b)) for b in (batch, batch[100:102]))
    assert whole > 200 * row
    # The three ragged columns of the metadata are 24 bytes a sub-sequence of all rows (reported).
    assert part < 2 * row + 3 * 200 * 8 + 6000


@pytest.mark.parametrize(
    "column", [Ragged.from_lengths(np.arange(100_000), [1000] * 100), torch.zeros(100, 1000)]
)
def test_the_metadata_of_a_slice_is_pickled_for_its_rows_alone(column: Any) -> None:
    batch = Batch({"x": torch.arange(100)}, {"column": column})
    assert len(pickle.dumps(batch[:1])) < 20_000


def test_copies(collated: Batch) -> None:
    deep, shallow = copy.deepcopy(collated), copy.copy(collated)
    assert contents(deep) == contents(shallow) == contents(collated)
    assert storages_of(shallow) == storages_of(collated)
    before = contents(collated)
    deep["input_ids"][:] = 1
    deep.metadata["num_loss_tokens"] = 0
    deep.metadata["example_indices"].values[:] = 0
    assert contents(collated) == before
    assert contents(copy.deepcopy(collated[1:])) == contents(collated[1:])


@pytest.mark.parametrize("kind", [PackedCollator(0, max_tokens=8), PaddedCollator(0)])
def test_a_dataloader_worker_sends_one_storage(kind: Any) -> None:
    loader = DataLoader(examples() * 2, batch_size=5, collate_fn=kind, num_workers=1)
    batches = list(loader)
    assert len(batches) == 2
    for batch in batches:
        assert isinstance(batch, Batch)
        assert len(storages_of(batch)) == 1
        assert batch["input_ids"].is_shared()
        assert contents(batch) == contents(kind(examples()))


def _put_rows(queue: Any, batch: Batch) -> None:
    queue.put(batch[1:])
    queue.get()  # its memory is shared: stay until the other side has looked at it


def test_a_slice_crosses_a_process_queue(packed: Batch) -> None:
    context = torch.multiprocessing.get_context("fork")
    queue, done = context.Queue(), context.Queue()

    class Ends:
        put, get = queue.put, done.get

    process = context.Process(target=_put_rows, args=(Ends, packed))
    process.start()
    part = queue.get(timeout=30)
    assert contents(part) == contents(packed[1:])
    assert len(storages_of(part)) == 1
    done.put(None)
    process.join(30)
    assert process.exitcode == 0


def test_accelerate_moves_it_as_a_batch(packed: Batch) -> None:
    operations = pytest.importorskip("accelerate.utils")
    moved = operations.send_to_device(packed, torch.device("meta"), non_blocking=True)
    assert isinstance(moved, Batch)
    assert moved["input_ids"].device.type == "meta"
    assert moved.metadata == packed.metadata
    assert operations.send_to_device(packed, "cpu") is packed
    assert operations.find_batch_size(packed) == 3


# --- model_inputs --------------------------------------------------------------------------------

ALWAYS = ["input_ids", "position_ids", "labels", "use_cache"]
CU = ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]


@pytest.mark.parametrize("attention", VARLEN)
def test_packed_rows_for_varlen_attention(packed: Batch, attention: str) -> None:
    inputs = packed.model_inputs(attention)
    assert list(inputs) == [*ALWAYS[:3], "use_cache", *CU]
    assert inputs["use_cache"] is False
    assert inputs["input_ids"].data_ptr() == packed["input_ids"].data_ptr()
    assert inputs["labels"].data_ptr() == packed["labels"].data_ptr()
    assert inputs["position_ids"].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 0],
        [0, 1, 2, 3, 4, 0, 1, 2],
        [0, 1, 2, 3, 0, 1, 0, 1],
    ]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert inputs[name].dtype == torch.int32
        assert inputs[name].tolist() == [0, 7, 8, 13, 16, 20, 22, 24]
    assert (inputs["max_length_q"], inputs["max_length_k"]) == (7, 7)
    assert type(inputs["max_length_q"]) is int


@pytest.mark.parametrize("attention", MASKED)
def test_packed_rows_never_come_with_a_mask(packed: Batch, attention: str) -> None:
    assert list(packed.model_inputs(attention)) == ALWAYS


@pytest.mark.parametrize("attention", VARLEN + MASKED)
def test_padded_rows_come_with_their_mask(padded: Batch, attention: str) -> None:
    inputs = padded.model_inputs(attention)
    assert list(inputs) == [*ALWAYS, "attention_mask"]
    assert inputs["attention_mask"] is padded["attention_mask"]


def test_the_default_is_torch_varlen(packed: Batch) -> None:
    assert list(packed.model_inputs()) == list(packed.model_inputs("torch_varlen"))


def test_boundaries_of_slices_and_selections_by_hand(packed: Batch) -> None:
    by_hand: list[tuple[Batch, list[int], int]] = [
        (packed[:1], [0, 7, 8], 7),
        (packed[1:], [0, 5, 8, 12, 14, 16], 5),
        (packed[2:], [0, 4, 6, 8], 4),
        (packed[::2], [0, 7, 8, 12, 14, 16], 7),
        (packed.chunk(3)[1], [0, 5, 8], 5),
        (packed.select([2, 0]), [0, 4, 6, 8, 15, 16], 7),
        (packed.select([1, 1, 2]), [0, 5, 8, 13, 16, 20, 22, 24], 5),
        (Batch.cat([packed[2:], packed[1:2]]), [0, 4, 6, 8, 13, 16], 5),
        (packed[1:][1:], [0, 4, 6, 8], 4),
        (packed[:2].pad_rows(multiple_of=3), [0, 7, 8, 13, 16, 23, 24], 7),
        (pickle.loads(pickle.dumps(packed[1:])), [0, 5, 8, 12, 14, 16], 5),
    ]
    for batch, boundaries, longest in by_hand:
        inputs = batch.model_inputs()
        assert inputs["cu_seq_lens_q"].tolist() == boundaries
        assert inputs["cu_seq_lens_q"].dtype == torch.int32
        assert inputs["max_length_k"] == longest
    assert packed["cu_seq_lens"].tolist() == [[0, 7, 8], [0, 5, 8], [0, 4, 6, 8]]  # unchanged


def test_boundaries_of_aligned_segments_and_dummy_rows() -> None:
    collate = PackedCollator(0, max_tokens=16, parallel=ParallelLayout(dp=3, tp=4))
    batch = collate(examples((5, 3)))  # 5 takes 8 cells, 3 takes 4, and the third row is empty
    assert batch.metadata["num_dummy_rows"] == 1
    rows = sorted(batch["cu_seq_lens"].tolist())
    assert rows == [[0, 4, 8], [0, 8], [0, 8]]
    inputs = batch.model_inputs()
    assert inputs["max_length_q"] == 8
    expected = [0]
    for i, row in enumerate(batch["cu_seq_lens"].tolist()):
        expected += [8 * i + boundary for boundary in row[1:]]
    assert inputs["cu_seq_lens_q"].tolist() == expected


def test_one_row_boundaries_are_not_the_field_itself(packed: Batch) -> None:
    packed[:1].model_inputs()["cu_seq_lens_q"][:] = 0
    assert packed["cu_seq_lens"].tolist()[0] == [0, 7, 8]


@pytest.mark.parametrize("attention", ["flash", "", "SDPA", None])
def test_an_unknown_attention_is_refused(collated: Batch, attention: Any) -> None:
    with pytest.raises(ValueError, match=r"is unknown; use one of torch_varlen, .*flex_attention"):
        collated.model_inputs(attention)


def test_inputs_are_made_without_reading_a_tensor(
    packed: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device each of these would wait; the GPU tests see the waits inside torch as well."""

    def refuse(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a tensor was read")

    part = packed[1:]
    for name in ("cpu", "numpy", "tolist", "item", "__array__", "__bool__", "__int__", "max"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    inputs = part.model_inputs()
    monkeypatch.undo()
    assert inputs["cu_seq_lens_q"].tolist() == [0, 5, 8, 12, 14, 16]


# --- any sequence of operations ------------------------------------------------------------------


def _as_rows(batch: Batch) -> list[tuple[Any, ...]]:
    columns = [plain(batch[name]) for name in ("x", "r")]
    columns += [plain(batch.metadata[name]) for name in ("list", "array", "ragged")]
    return list(zip(*columns, strict=True))


@given(st.data())
def test_fields_and_metadata_stay_together(data: Any) -> None:
    counts = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    rows = [(10 * i, [10 * i + j for j in range(n)]) for i, n in enumerate(counts)]
    ragged = Ragged.from_rows([r for _, r in rows], dtype=np.int64)
    batch = Batch(
        {"x": torch.tensor([x for x, _ in rows]), "r": ragged.to("cpu")},
        {"list": [x for x, _ in rows], "array": np.array([x for x, _ in rows]), "ragged": ragged},
    )
    expected = _as_rows(batch)
    assert [(row[0], row[1]) for row in expected] == rows
    for _ in range(data.draw(st.integers(1, 4))):
        operation = data.draw(st.sampled_from(["slice", "select", "cat", "pickle", "deepcopy"]))
        if operation == "slice":
            bounds = st.none() | st.integers(-6, 6)
            index = slice(data.draw(bounds), data.draw(bounds), data.draw(st.integers(1, 2)))
            batch, expected = batch[index], expected[index]
        elif operation == "select" and expected:
            indices = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=5))
            batch, expected = batch.select(indices), [expected[i] for i in indices]
        elif operation == "cat":
            batch, expected = Batch.cat([batch[1:], batch]), expected[1:] + expected
        elif operation == "pickle":
            batch = pickle.loads(pickle.dumps(batch))
        elif operation == "deepcopy":
            batch = copy.deepcopy(batch)
        assert len(batch) == len(expected)
        assert _as_rows(batch) == expected


def test_model_inputs_come_without_labels_on_request():
    batch = PackedCollator(0, max_tokens=8)([{"input_ids": [5, 6, 7]}])
    with_labels = batch.model_inputs()
    assert list(with_labels)[:3] == ["input_ids", "position_ids", "labels"]
    without = batch.model_inputs(labels=False)
    assert list(without) == [name for name in with_labels if name != "labels"]
