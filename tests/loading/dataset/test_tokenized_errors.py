"""TokenizedDataset: nulls, wrong sources, wrong settings and wrong indices."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from tests.loading.dataset.dataset_oracle import ROWS, write_stream
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.vision import VisionLayout

# ---------------------------------------------------------------- nulls


def test_a_null_is_an_error_where_it_is_read_and_nowhere_else():
    rows = [[1, 2], None, [3], [4, None, 5], [6]]
    for kind in (pa.list_(pa.int32()), pa.large_list(pa.bool_()), pa.list_(pa.int32(), 2)):
        if pa.types.is_fixed_size_list(kind):
            values = [[1, 2], None, [3, 3], [4, None], [6, 6]]
        elif pa.types.is_boolean(kind.value_type):
            values = [row and [v and v % 2 == 0 for v in row] for row in rows]
        else:
            values = rows
        whole = pa.table({"input_ids": pa.array(values, kind)})
        chunks = pa.concat_tables([whole.slice(4), whole.slice(0, 4)])
        for table, null_row, null_token, fine in (
            (whole, 1, 3, {0: 0, 2: 2, 4: 4}),
            (whole.slice(1), 0, 2, {1: 2, 3: 4}),
            (chunks, 2, 4, {0: 4, 1: 0, 3: 2}),
        ):
            ds = TokenizedDataset(table)
            columns = ds.__getitems__(list(fine))
            assert columns["input_ids"].tolist() == [values[i] for i in fine.values()]
            for i, j in fine.items():
                assert ds[i]["input_ids"].tolist() == values[j]
            for i in (null_row, null_token):
                with pytest.raises(DataError, match=f"row {i}: input_ids is null or holds a null"):
                    ds.__getitems__([next(iter(fine)), i - len(ds)])
                with pytest.raises(DataError, match=f"row {i}: input_ids"):
                    ds[i]
            with pytest.raises(DataError, match=f"row {null_row}: input_ids is null"):
                _ = ds.lengths


# ---------------------------------------------------------------- errors


def _rows(**changes: Any) -> list[dict[str, Any]]:
    return [dict(ROWS[0]), {**ROWS[1], **changes}]


BAD_SOURCES = [
    ([], DataError, r"the source is empty \(0 examples\); give at least one"),
    ([{"text": "a"}], DataError, r"no input_ids, got columns \['text'\]"),
    (pa.table({"input_ids": [1, 2]}), DataError, "input_ids holds one number per row"),
    (pa.table({"input_ids": ["a b"]}), DataError, "input_ids has the Arrow type string"),
    (pa.table({"input_ids": [["a"]]}), DataError, r"input_ids has the Arrow type list<"),
    (pa.table({"input_ids": [[[[1]]]]}), DataError, r"a column holds one list of numbers per row"),
    (_rows(input_ids=None), DataError, "example 1: input_ids is None; give a list"),
    (_rows(input_ids=[1.5]), DataError, r"example 1: input_ids\[0\] is 1.5 \(float\)"),
    (
        _rows(input_ids=[[1], [2, 3]]),
        DataError,
        r"example 1: input_ids\[0\] is \[1\], so input_ids is nested",
    ),
    (_rows(input_ids=np.ones((1, 2), int)), DataError, r"example 1: input_ids is 2-D with shape"),
    (_rows(loss_mask="abc"), DataError, "example 1: loss_mask is str; give a list"),
    (
        [{**ROWS[0], "weight": w} for w in (1, None)],
        DataError,
        "example 1: weight is None .*number",
    ),
    (_rows(labels=[1]), DataError, "example 0 has no labels, other examples have; give"),
    ([*ROWS, {"input_ids": [1]}], DataError, "example 5 has no loss_mask, other examples have"),
    (
        7,
        TypeError,
        "source is an int; pass a list of examples, a mapping of columns, a pandas DataFrame",
    ),
    ([1, 2], DataError, "example 0 is an int; an example is a mapping with input_ids"),
    (Ragged.from_rows([[1]]), TypeError, "source is a Ragged; pass"),
    (datasets.DatasetDict(), TypeError, "source is a DatasetDict; .*of a DatasetDict one"),
]


@pytest.mark.parametrize(("source", "error", "message"), BAD_SOURCES)
def test_bad_sources(source, error, message):
    with pytest.raises(error, match=message):
        TokenizedDataset(source)


def test_bad_settings_and_files(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    with pytest.raises(
        ValueError, match=r"columns names 'rewards', the source has \['input_ids', "
    ):
        TokenizedDataset(table, columns=["input_ids", "rewards"])
    with pytest.raises(DataError, match=r"no input_ids, got columns \['loss_mask'\]"):
        TokenizedDataset(ROWS, columns=["loss_mask"])
    with pytest.raises(TypeError, match=r"got 'input_ids'; pass \['input_ids'\]"):
        TokenizedDataset(ROWS, columns="input_ids")
    with pytest.raises(TypeError, match=r"on the fly \(set_transform\).*apply it with .map first"):
        TokenizedDataset(datasets.Dataset(table).with_transform(lambda rows: rows))
    for texts in (["What is it?", "A cat."], "What is it?"):
        message = "there is no file 'What is it.': strings are .* paths .*; texts must be tokenized"
        with pytest.raises(FileNotFoundError, match=message):
            TokenizedDataset(texts)
    with pytest.raises(DataError, match=r"no saved dataset here"):
        TokenizedDataset(tmp_path)
    with pytest.raises(ValueError, match=r"is a folder; pass datasets.load_from_disk"):
        TokenizedDataset([tmp_path])
    (tmp_path / "a.txt").write_text("not an Arrow file, and long enough to be taken for one")
    with pytest.raises(ValueError, match=r"a.txt' is neither an Arrow nor a Parquet file"):
        TokenizedDataset(tmp_path / "a.txt")
    for number, content in enumerate((b"PAR1PAR1", b"PAR1" + bytes(40) + b"\x20\0\0\0PAR1")):
        (tmp_path / f"{number}.parquet").write_bytes(content)
        with pytest.raises(DataError, match=rf"{number}.parquet' is not a whole Parquet file"):
            TokenizedDataset(tmp_path / f"{number}.parquet")
    arrow = write_stream(tmp_path / "a.arrow", table)
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="mixes Parquet and Arrow files"):
        TokenizedDataset([arrow, tmp_path / "a.parquet"])
    narrow = write_stream(tmp_path / "b.arrow", table.select(["input_ids"]))
    with pytest.raises(
        ValueError, match=r"b.arrow' has the columns \['input_ids'\], .*pass columns="
    ):
        TokenizedDataset([arrow, narrow])
    assert len(TokenizedDataset([arrow, narrow], columns=["input_ids"])) == 10
    small = pa.table({"input_ids": pa.array([[1]], pa.list_(pa.int8()))})
    with pytest.raises(ValueError, match="the files of the source have columns of different types"):
        TokenizedDataset([narrow, write_stream(tmp_path / "c.arrow", small)])


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([0, 5], IndexError, "index 5 is outside the dataset, which has 5 rows; give -5 to 4"),
        ([-6], IndexError, "index -6 is outside the dataset"),
        ([0.5], TypeError, "row indices must be integers, got float64"),
        ([True, False], TypeError, r"got bool; for a mask pass mask.nonzero\(\)"),
        ([[0, 1]], TypeError, r"indices must be a flat list of integers, got shape \(1, 2\)"),
    ],
)
def test_bad_indices(indices, error, message):
    for source in (ROWS, datasets.Dataset.from_list(ROWS).shuffle(seed=0)):
        ds = TokenizedDataset(source)
        with pytest.raises(error, match=message):
            ds.__getitems__(indices)
        with pytest.raises(error):
            ds[indices[-1]]
        with pytest.raises(TypeError, match="an index is an int or a slice, got a list; a DataLoa"):
            ds[indices]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_without_a_collate_fn_is_told_to_have_one(num_workers):
    loader = DataLoader(TokenizedDataset(ROWS), batch_size=2, num_workers=num_workers)
    message = "a TokenizedDataset returns columns, not a list of examples"
    with pytest.raises(TypeError, match=message):
        next(iter(loader))
    columns = TokenizedDataset(ROWS).__getitems__([0])
    with pytest.raises(KeyError, match="reward"):
        columns["reward"]


def test_images_of_another_family_than_vision_have_no_patches():
    row = {"input_ids": [1], "pixel_values": np.zeros((1, 3, 2, 2)), "image_sizes": [[2, 2]]}
    qwen = VisionLayout("qwen3_vl", image_token_id=9, merge_size=2)
    ds = TokenizedDataset([row], train_all=True, vision=qwen)
    with pytest.raises(
        ValueError, match="the source has image_sizes, which qwen3_vl models do not"
    ):
        _ = ds.patches


def test_a_null_behind_an_indices_mapping_is_named_by_its_place_in_the_dataset():
    source = datasets.Dataset.from_dict(
        {"input_ids": [[1], None, [2]], "num_actions": [1, 1, None]}
    )
    ds = TokenizedDataset(source.select([2, 0, 1]))
    with pytest.raises(DataError, match="row 0: num_actions is null"):
        ds[0]
    assert ds[1]["input_ids"].tolist() == [1]
    with pytest.raises(DataError, match="row 2: input_ids is null"):
        ds.__getitems__([1, 2])
    with pytest.raises(DataError, match="row 2: input_ids is null"):
        _ = ds.lengths
    assert TokenizedDataset(source.select([2, 0])).lengths.tolist() == [1, 1]
