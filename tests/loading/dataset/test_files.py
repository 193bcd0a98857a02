"""Files are read by their names, whatever characters these have."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import read_records


def written(path: Path, ids: list[int]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"input_ids": ids}) + "\n")
    return path


@pytest.mark.parametrize("name", ["a[1].jsonl", "a*.jsonl", "a?.jsonl", "b[1]/a1.jsonl", "A.JSONL"])
def test_a_name_is_no_pattern(name: str, tmp_path: Path) -> None:
    written(tmp_path / "a1.jsonl", [3, 3])
    found = read_records(written(tmp_path / name, [1, 1]))
    assert found["input_ids"][:] == [[1, 1]]


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"input_ids": [1]}\n\xff\xfe\n')
    with pytest.raises(DataError, match="line 2 is not JSON: 'utf-8' codec can't decode"):
        read_records(path)


def nested(depth: int, kind: str = "[]") -> str:
    opening, closing = ("[", "]") if kind == "[]" else ('{"a": ', "}")
    return '{"messages": "[[{{", "x": ' + opening * depth + "1" + closing * depth + "}"


@pytest.mark.parametrize("kind", ["[]", "{}"])
@pytest.mark.parametrize(
    ("name", "depth"),
    [("a.jsonl", d) for d in (99, 999, 50_000)] + [("a.json", d) for d in (999, 50_000)],
)
def test_nesting_is_checked_before_a_line_is_parsed(
    name: str, depth: int, kind: str, tmp_path: Path
) -> None:
    """The reader of datasets raises RecursionError at 1,000 levels, and crashes at 10,000."""
    lines = [nested(1, kind), "", nested(depth, kind)]
    text = "\n".join(lines) if name == "a.jsonl" else f"[{lines[0]},\n\n{lines[2]}]"
    (tmp_path / name).write_text(text)
    shown = depth + 1 + (name == "a.json")
    with pytest.raises(DataError) as caught:
        read_records(tmp_path / name)
    assert str(caught.value) == (
        f"{tmp_path / name}: line 3 is nested {shown:,} deep, more than the 63 levels that an "
        "Arrow table holds; give what is inside as a JSON string"
    )


def test_brackets_in_strings_are_no_nesting(tmp_path: Path) -> None:
    texts = ["[" * 1000 + '"', '\\"[' * 1200, "[" * 62 + "1" + "]" * 62, "{\\"]
    path = tmp_path / "a.jsonl"
    row = {"texts": texts, "deep": json.loads(texts[2])}
    path.write_text((json.dumps(row) + "\n") * 2)
    assert read_records(path)["texts"][1] == texts


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="older datasets read it as it is")
def test_a_saved_dataset_without_rows_is_refused(tmp_path):
    datasets.Dataset.from_dict({"input_ids": []}).save_to_disk(tmp_path / "empty")
    with pytest.raises(DataError, match=r"empty: there are no rows in it \(0 examples\); give at"):
        read_records(tmp_path / "empty")
