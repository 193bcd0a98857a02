"""Fields that a user declares, against plain loops over the tokens of every row."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.building import packed_stream
from tests.strategies import FUZZ
from torch_collate_kit import (
    Batch,
    DataError,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    PerResponseToken,
    PerToken,
    RolloutCollator,
    StateError,
    TokenizedDataset,
)
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.vision import VisionLayout

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool)
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "array": np.array,
    "tensor": torch.tensor,
}
SHAPES = ((), (), (1,), (3,), (2, 2))  # of an entry per token
DOUBLE = {"array": np.float64, "tensor": torch.float64}


def number(draw: Any, dtype: Any) -> float | int | bool | str:
    if dtype is str:
        return draw(st.sampled_from(("web", "", "übung", "a b")))
    if dtype == torch.bool:
        return draw(st.booleans())
    whole = draw(st.integers(-100, 100))
    return whole / 4 if dtype.is_floating_point else whole


def entry(draw: Any, spec: Any) -> Any:
    """A number, or nested lists of the shape that is declared."""
    if not (shape := getattr(spec, "shape", ())):
        return number(draw, spec.dtype)
    return [entry(draw, replace(spec, shape=shape[1:])) for _ in range(shape[0])]


@st.composite
def declared(draw: st.DrawFn) -> dict[str, Any]:
    specs: dict[str, Any] = {}
    for i in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from((PerToken, PerResponseToken, PerExample)))
        dtype = draw(st.sampled_from((*DTYPES, str, str) if kind is PerExample else DTYPES))
        specs[f"mine_{i}"] = PerExample(dtype)
        if kind is not PerExample:
            pad, shape = draw(st.sampled_from((0, 1))), draw(st.sampled_from(SHAPES))
            specs[f"mine_{i}"] = kind(dtype, pad=pad, shape=shape)
    return specs


@st.composite
def examples(draw: st.DrawFn, specs: dict[str, Any], *, rollouts: bool) -> list[dict[str, Any]]:
    drawn = []
    for _ in range(draw(st.integers(1, 7))):
        response = draw(st.integers(1, 9))
        prompt = draw(st.integers(1 if rollouts else 0, 6))
        ids = list(range(1, prompt + response + 1))
        mask = [draw(st.integers(0, 1)) for _ in range(response)]
        if rollouts:
            example: dict[str, Any] = {
                "prompt_ids": ids[:prompt],
                "response_ids": ids[prompt:],
                "rewards": 1.0,
                "loss_mask": mask,
            }
        else:
            example = {"input_ids": ids, "num_actions": response, "loss_mask": mask}
        for name, spec in specs.items():
            counts = {PerToken: prompt + response, PerResponseToken: response}
            count = counts.get(type(spec))
            if count is None:
                example[name] = number(draw, spec.dtype)
            else:
                example[name] = [entry(draw, spec) for _ in range(count)]
        drawn.append(example)
    return drawn


def contained(rows: list[dict[str, Any]], specs: dict[str, Any], kind: str) -> Any:
    """The same examples with declared fields in another container."""
    if kind == "ragged":
        columns: dict[str, Any] = {}
        for key in rows[0]:
            values = [row[key] for row in rows]
            columns[key] = Ragged.from_rows(values) if isinstance(values[0], list) else values
        return columns
    if kind in ("arrow", "tokenized"):
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        table = pa.table(columns)
        if kind == "arrow":
            return table
        shapes = {name: getattr(spec, "shape", ()) for name, spec in specs.items()}
        if any(len(shape) > 1 for shape in shapes.values()):  # Arrow's have one dimension there
            return TokenizedDataset(columns, columns=list(columns))[:]
        return TokenizedDataset(table, columns=list(columns))[:]
    make = CONTAINERS[kind]
    return [
        {k: make(v) if k in specs and isinstance(v, list) else v for k, v in row.items()}
        for row in rows
    ]


def expected(batch: Batch, rows: list[dict[str, Any]], name: str, spec: Any) -> Any:
    """The dense field, cell by cell; a list of rows of one entry per example."""
    meta, width = batch.row_metadata, batch["input_ids"].shape[1]
    found = []
    for r, lengths in enumerate(batch["sub_seq_lengths"].tolist()):
        shape = getattr(spec, "shape", ())
        pad = None if isinstance(spec, PerExample) else np.full(shape, spec.pad).tolist()
        cells = [] if isinstance(spec, PerExample) else [pad] * width
        for k, length in enumerate(lengths):
            example = rows[meta["example_indices"][r][k]]
            if isinstance(spec, PerExample):
                cells.append(example[name])
                continue
            first = batch["cu_seq_lens"][r][k] if "cu_seq_lens" in batch else width - length
            ids = example.get("input_ids") or example["prompt_ids"] + example["response_ids"]
            before = len(ids) - len(example[name]) - meta["example_starts"][r][k]
            count = length if isinstance(spec, PerToken) else meta["num_actions"][r][k]
            for t in range(length - count, length):
                cells[first + t] = example[name][t - before]
        found.append(cells)
    if isinstance(spec, PerExample) and spec.dtype is str:
        return list(map(tuple, found)) if "cu_seq_lens" in batch else [row[0] for row in found]
    if isinstance(spec, PerExample):
        return [torch.tensor(row, dtype=spec.dtype) for row in found]
    num_columns = width if isinstance(spec, PerToken) else batch.metadata["response_length"]
    cells_of = torch.tensor(found, dtype=spec.dtype).reshape(len(batch), width, *spec.shape)
    return cells_of[:, width - num_columns :]


def assert_declared(batch: Batch, rows: list[dict[str, Any]], specs: dict[str, Any]) -> None:
    for name, spec in specs.items():
        wanted = expected(batch, rows, name, spec)
        if spec.dtype is str:
            assert name not in batch
            assert batch.row_metadata[name] == wanted
            continue
        field = batch[name]
        if isinstance(spec, PerExample):
            assert field.values.dtype == spec.dtype
            assert [row.tolist() for row in field] == [row.tolist() for row in wanted], name
        else:
            assert field.dtype == spec.dtype
            assert torch.equal(field, wanted), (name, field, wanted)


@FUZZ
@given(data=st.data())
def test_every_collator_places_them(data: st.DataObject) -> None:
    specs = data.draw(declared())
    kind = data.draw(st.sampled_from(("padded", "packed", "block", "packed rollouts")))
    rows = data.draw(examples(specs, rollouts="o" in kind))
    forms = (*CONTAINERS, "ragged", "arrow", *(() if "o" in kind else ("tokenized",)))
    container = data.draw(st.sampled_from(forms))
    collate: Any = PaddedCollator(0, fields=specs)
    if kind == "block":
        collate = RolloutCollator(0, fields=specs)
    elif kind != "padded":
        overflow = data.draw(st.sampled_from(("truncate", "split", "drop")))
        layout = ParallelLayout(dp=data.draw(st.sampled_from((1, 2))), tp=2)
        collate = PackedCollator(
            0,
            max_tokens=data.draw(st.sampled_from((8, 16))) if kind == "packed" else 16,
            overflow=overflow if kind == "packed" else "raise",
            parallel=layout,
            fields=specs,
        )
    batch = collate(contained(rows, specs, container))
    assert_declared(batch, rows, specs)
    for part in (batch[1:], batch.select([0]), pickle.loads(pickle.dumps(batch))):
        assert_declared(part, rows, specs)
    assert Batch.cat([batch[:1], batch[1:]]) == batch
    padded = batch.pad_rows(multiple_of=len(batch) + 1)
    for name, spec in specs.items():
        if isinstance(spec, PerToken):
            assert torch.equal(padded[name][-1], padded[name][0])
        elif isinstance(spec, PerResponseToken):
            assert (padded[name][-1] == spec.pad).all()
        elif spec.dtype is str:
            added = () if "cu_seq_lens" in batch else batch.row_metadata[name][0]
            assert padded.row_metadata[name][-1] == added
        else:
            assert len(padded[name][len(padded) - 1]) == 0


SFT = [
    {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "mine": [1, 2, 3]},
    {"input_ids": [8, 9], "loss_mask": [0, 1], "mine": [4, 5]},
]


def test_the_state_of_a_stream_says_which_fields_it_has() -> None:
    def stream(fields: dict[str, Any]) -> PackedIterableDataset:
        return packed_stream(SFT, tokenizer=0, max_tokens=8, fields=fields)

    state = stream({"mine": PerToken(torch.int16)}).state_dict()
    stream({"mine": PerToken(torch.int16)}).load_state_dict(state)
    for other in ({}, {"mine": PerToken(torch.int8)}, {"mine": PerToken(torch.int16, pad=1)}):
        with pytest.raises(StateError, match="the state is of fields='mine: PerToken"):
            stream(other).load_state_dict(state)


@pytest.mark.parametrize("overflow", ["split", "truncate"])
def test_a_stream_cuts_them_with_the_example(overflow: str) -> None:
    row: dict[str, Any] = {"input_ids": list(range(1, 12)), "loss_mask": [1] * 11}
    rows = [{**row, "mine": list(range(11)), "pairs": [[n, 10 * n] for n in range(11)]}]
    fields = {"mine": PerToken(torch.int16, pad=-1)}
    fields["pairs"] = PerToken(torch.int16, pad=-1, shape=(2,))
    options = {"max_tokens": 4, "overflow": overflow, "fields": fields}
    batches = [*packed_stream(rows, tokenizer=0, **options)]
    for batch in batches:
        ones, pairs = batch["mine"], batch["pairs"]
        assert torch.equal(pairs[..., 0], ones)
        assert torch.equal(pairs[..., 1], torch.where(ones < 0, -1, 10 * ones))
    found = sorted(row for batch in batches for row in batch["mine"].tolist())
    whole = sorted(PackedCollator(0, **options)(rows)["mine"].tolist())
    assert [[n for n in row if n >= 0] for row in found] == [
        [n for n in row if n >= 0] for row in whole
    ]
    assert len(found) == (3 if overflow == "split" else 1)


def test_a_rank_without_examples_has_them_too() -> None:
    fields = {"mine": PerToken(torch.int16), "one": PerExample(torch.float32)}
    fields["name"] = PerExample(str)
    collate = PackedCollator(0, max_tokens=8, fields=fields, parallel=ParallelLayout(dp=2))
    batch = collate([{**SFT[0], "one": 1.5, "name": "a"}])
    assert batch.row_metadata["name"] == [("a",), ()]
    collate.normalize_loss = False
    found = []
    for rank in (0, 1):  # the second one reads no example
        [part] = PackedBatchSampler(np.array([3]), collate, batch_size=1, dp_rank=rank)
        row = {**SFT[0], "one": 1.5, "name": "a"}
        found.append(collate(part.with_examples([row for _ in part.indices])))
    assert [part.row_metadata["name"] for part in found] == [[("a",)], [()]]
    assert "name" not in found[1]
    assert batch["mine"].tolist() == [[1, 2, 3], [0, 0, 0]]
    assert batch["one"].tolist() == [[1.5], []]


TOKEN, PAIR = PerToken(torch.int8), PerToken(torch.int8, shape=(2,))
NUMBER, NAME = PerExample(torch.int64), PerExample(str)
REF = PerExample(torch.float32, shape=(2,))
RIGHT: dict[Any, Any] = {TOKEN: [1, 2], PAIR: [[1, 2], [3, 4]], NUMBER: 1, NAME: "a", REF: [1, 2]}
WRONG_VALUES: list[tuple[Any, Any, str]] = [
    (TOKEN, [1, 2], "mine has 2 entries, input_ids has 3 tokens; gi"),
    (TOKEN, [1, 2, 300], r"mine\[2\] is 300, which torch.int8 does"),
    (TOKEN, [1, 2.5, 3], r"mine\[1\] is 2.5 \(float\); it must be a"),
    (TOKEN, None, "mine is None; give a list"),
    (TOKEN, ["a", "b", "c"], r"mine\[0\] is 'a' \(str\)"),
    (PerToken(torch.bool), [0, 1, 2], r"mine\[2\] is 2, which torch.bool does not hold"),
    (PerToken(torch.float32), [0, 1e60, 2], r"mine\[1\] is 1e\+60, which torch.float32 does"),
    (NUMBER, [1, 2, 3], r"mine is \[1, 2, 3\] \(list\); it is"),
    (PerExample(torch.int8), 1000, "mine is 1000, which torch.int8 does not hold"),
    (NAME, 3, r"mine is 3 \(int\); it is declared PerExample\(str\), so"),
    (REF, [-1.0], r"mine has 1 entries, and the field's shape is \(2,\); give 2"),
    (REF, [1, 2, 3], r"mine has 3 entries, and the field's shape is \(2,\); give 2"),
    (REF, [[1, 2]], r"mine\[0\] is \[1, 2\], so mine is nested"),
    (REF, 3.0, "mine is float; give a list"),
    (REF, [1, "x"], r"mine\[1\] is 'x' \(str\); it must be a number"),
    (PAIR, [[1, 2], [3], [4, 5]], r"mine\[1\] has 1 entries, and the field's shape is \(2,\)"),
    (PAIR, [1, 2, 3, 4, 5, 6], r"mine\[0\] is 1 \(int\), and .* \(2,\); give \[tokens, 2\]"),
    (PAIR, [[1, 2], None, [3, 4]], r"mine\[1\] is None \(NoneType\), and the field's shape is \(2"),
    (PAIR, [[1, 2], [3, 4]], "mine has 2 entries, input_ids has 3 tokens; give one entry per toke"),
    (PAIR, np.ones((2, 3)), r"mine has shape \(2, 3\), and the field's shape is \(2,\); give \[to"),
    (PAIR, torch.ones(3, 2, 1), r"mine has shape \(3, 2, 1\), and the field's shape is \(2,\); gi"),
    (PAIR, [[1, 2], [3, "a"], [5, 6]], r"mine\[1\]\[1\] is 'a' \(str\); it must be an integer tha"),
    (PAIR, [[1, 2], [3, 400], [5, 6]], r"mine\[1\]\[1\] is 400, which torch.int8 does not hold"),
    (PAIR, np.full((3, 2), np.nan), "mine has dtype float64, and other examples have integers; gi"),
    (PAIR, "abc", r"mine is str; give \[tokens, 2\] numbers"),
]


@pytest.mark.parametrize(("spec", "mine", "words"), WRONG_VALUES)
def test_wrong_values_are_refused(spec: Any, mine: Any, words: str) -> None:
    collate = PackedCollator(0, max_tokens=8, fields={"mine": spec}, train_all=True)
    right = [{"input_ids": [8, 9], "mine": RIGHT[spec]}] if spec in RIGHT else []
    with pytest.raises(DataError, match=rf"^example {len(right)}: {words}"):
        collate([*right, {"input_ids": [5, 6, 7], "mine": mine}])


def test_numbers_of_responses_or_beyond_64_bits_are_refused() -> None:
    response = PaddedCollator(0, fields={"mine": PerResponseToken(torch.float32)})
    with pytest.raises(DataError, match="fields declares mine per response token, an"):
        response([SFT[0]])
    with pytest.raises(DataError, match="mine has a number beyond 64 bits"):
        PaddedCollator(0, fields={"mine": NUMBER})([{**SFT[0], "mine": 2**70}])


def test_a_missing_one() -> None:
    collate = PaddedCollator(0, fields={"mine": PerToken(torch.int8)})
    with pytest.raises(DataError, match="example 0 has no mine, which fields declares"):
        collate([{"input_ids": [1, 2]}])
    with pytest.raises(DataError, match="example 1 and example 0 differ in mine"):
        collate([SFT[0], {"input_ids": [1, 2], "loss_mask": [1, 1]}])
    with pytest.raises(DataError, match="example 0 has no mine, but 'mines' looks like it"):
        collate([{"input_ids": [1, 2], "loss_mask": [1, 1], "mines": [1, 2]}])


@pytest.mark.parametrize("make", [PaddedCollator, RolloutCollator])
@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (["mine"], TypeError, "fields must map names to PerToken, PerResponseToken or PerExample"),
        ({"mine": torch.int8}, TypeError, r"fields\['mine'\] must be a PerToken, PerResponseToken"),
        ({"mine": PerToken("int8")}, TypeError, "must have a torch dtype of real numbers, got 'in"),
        ({"mine": PerToken(torch.uint16)}, TypeError, r"\['mine'\] has torch.uint16, which torch "),
        ({"mine": PerToken(str)}, TypeError, "a torch dtype of real numbers, got <class 'str'>"),
        ({"uids": PerExample(str)}, ValueError, "fields names 'uids', which is row metadata; re"),
        ({"weight": PerExample(torch.float32)}, ValueError, "names 'weight', which the collator"),
        ({"my field": PerToken(torch.int8)}, ValueError, "'my field', which is not a name"),
        ({"loss_mask": PerToken(torch.int8)}, ValueError, "names 'loss_mask', which the collator"),
        ({"loss_weights": PerToken(torch.float32)}, ValueError, "'loss_weights', which the coll"),
        ({"mine": PerToken(torch.int8, shape=3)}, ValueError, r"=3; give .*, shape=\(3,\)$"),
        ({"mine": PerToken(torch.int8, shape=(2, 0))}, ValueError, r"shape=\(2, 0\); give a tuple"),
        ({"mine": PerToken(torch.int8, pad=1000)}, ValueError, r"fields\['mine'\] has pad=1000, w"),
        ({"mine": PerToken(torch.int8, pad=0.5)}, ValueError, "pad=0.5, which torch.int8 does not"),
        (
            {"mine": PerToken(torch.float16, pad=1e9)},
            ValueError,
            "pad=1000000000.0, which torch.fl",
        ),
        ({"mine": PerToken(torch.int8, pad=None)}, TypeError, "has pad=None; give a number"),
    ],
)
def test_wrong_declarations(make: Any, fields: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make(0, fields=fields)


def test_pads_that_round_and_integers_beside_floats() -> None:
    fields = {
        "mine": PerToken(torch.float32, pad=math.nan),
        "tenth": PerToken(torch.float32, pad=0.1),
    }
    fields["large"] = PerExample(torch.int64)
    large, one = 2**53 + 1, {"mine": [1.0], "tenth": [1.0]}
    rows = [{"input_ids": [5], "large": n, **one} for n in (large, 1.0)]
    batch = PaddedCollator(0, fields=fields, pad_to_multiple_of=2)(rows)
    assert batch["large"].tolist() == [[large], [1]]
    assert batch["mine"].isnan().tolist() == [[True, False]] * 2
    assert batch["tenth"][0].tolist() == pytest.approx([0.1, 1.0])


@pytest.mark.parametrize("name", ["mrope_position_ids", "pixel_values", "image_grid_thw"])
def test_what_a_vision_model_reads_is_not_declared(name: str) -> None:
    vision = VisionLayout("qwen3_vl", image_token_id=9)
    fields = {name: PerToken(torch.int64)}
    for make in (PaddedCollator, RolloutCollator, partial(PackedCollator, max_tokens=8)):
        make(0, fields=fields)
        with pytest.raises(ValueError, match=f"fields names '{name}', which the collator"):
            make(0, fields=fields, vision=vision)


@pytest.mark.parametrize("container", CONTAINERS)
def test_float64_stays_what_it_is(container: str) -> None:
    exact = [0.1, 1 / 3, 1e300]
    given = exact if container == "list" else CONTAINERS[container](exact, dtype=DOUBLE[container])
    collate = PaddedCollator(0, fields={"mine": PerToken(torch.float64)})
    batch = collate([{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "mine": given}])
    assert batch["mine"].tolist() == [exact]


def test_a_number_beyond_int64() -> None:
    def collate(dtype: torch.dtype) -> Batch:
        fields = {"mine": PerExample(dtype)}
        example = {"input_ids": [5, 6], "mine": 2**63}
        return PaddedCollator(0, fields=fields, train_all=True)([example])

    assert collate(torch.float64)["mine"].tolist() == [[2.0**63]]
    with pytest.raises(DataError, match=f"example 0: mine is {2**63}, which torch.int64 does not"):
        collate(torch.int64)


def test_whole_numbers_in_arrays_of_several_dtypes() -> None:
    collate = PaddedCollator(0, fields={"mine": PerResponseToken(torch.int64)})

    def example(*numbers: float, dtype: Any) -> dict[str, Any]:
        mine = np.array(numbers, dtype=dtype)
        mask = [1] * len(numbers)
        return {"input_ids": [5, 6, 7], "loss_mask": mask, "num_actions": len(mask), "mine": mine}

    empty = example(dtype=np.float64)  # as np.array([]) is
    given = [example(2**60 + 1, 3, dtype=np.int64), empty, example(4, dtype=np.float32)]
    assert collate(given)["mine"].tolist() == [[2**60 + 1, 3], [0, 0], [0, 4]]
    for odd in (1.5, np.nan, 2.0**63):
        with pytest.raises(DataError, match="example 1: mine has dtype float64, and other example"):
            collate([given[0], example(odd, dtype=np.float64)])


def test_model_inputs_would_lose_them() -> None:
    with pytest.raises(ValueError, match="so mine would be lost; take the Batch"):
        PackedCollator(0, max_tokens=8, fields={"mine": PerToken(torch.int8)}).for_trainer()


@pytest.mark.parametrize(
    "column", [["a", "b"], np.array(["a", "b"]), np.array(["a", "b"], dtype=object)]
)
def test_names_in_columns(column: Any) -> None:
    columns = {"input_ids": [[5, 6], [7, 8]], "labels": [[5, 6], [7, 8]], "mine": column}
    for names in (columns, pandas.DataFrame({k: list(v) for k, v in columns.items()})):
        batch = PaddedCollator(0, fields={"mine": PerExample(str)})(names)
        assert batch.row_metadata["mine"] == ["a", "b"]
        assert {*map(type, batch.row_metadata["mine"])} == {str}


@pytest.mark.parametrize("make", [list, pa.Table.from_pylist, datasets.Dataset.from_list])
def test_names_in_a_dataset(make: Any) -> None:
    rows = [{**SFT[i % 2], "mine": f"n{i}", "weight": i / 2} for i in range(5)]
    names = ["input_ids", "loss_mask", "mine", "weight"]
    data = pickle.loads(pickle.dumps(TokenizedDataset(make(rows), columns=names)))
    collate = PackedCollator(0, max_tokens=8, fields={"mine": PerExample(str)})
    assert collate(data.__getitems__([3, 0, 1])) == collate([rows[i] for i in (3, 0, 1)])
    assert (data[4]["mine"], data[4]["weight"]) == ("n4", 2.0)
    assert data.num_loss_tokens.tolist() == [0, 1, 2, 1, 2]
    for source in (data, rows):
        stream = packed_stream(source, tokenizer=0, max_tokens=8, fields={"mine": PerExample(str)})
        found = [name for b in stream for row in b.row_metadata["mine"] for name in row]
        assert sorted(found) == [row["mine"] for row in rows]
