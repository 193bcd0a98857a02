"""Files are read by their names, whatever characters these have."""

from __future__ import annotations

import json
from pathlib import Path

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
