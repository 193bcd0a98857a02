"""packing_report of examples whose segments begin alike: the row of shared prefixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from tests.oracle import trie
from torch_collate_kit import PackedCollator, ParallelLayout, TokenizedDataset, packing_report

RNG = np.random.default_rng(0)


def example(num_shared: int) -> list[list[int]]:
    prompt = RNG.integers(1, 9, num_shared).tolist()
    return [prompt + RNG.integers(10, 999, 4).tolist() for _ in range(3)]


EXAMPLES: list[dict[str, Any]] = [{"input_ids": example(n)} for n in (9, 3, 12, 7, 0, 5)]


def shared(data: Any, **options: Any) -> dict[str, Any]:
    report = packing_report(data, 64, strategies="sequential", show=False, **options)
    layouts = [candidate["strategy"] for candidate in report["candidates"]]
    assert layouts == ["padded", "shared_prefixes", "sequential"]
    assert report["recommended"]["strategy"] == "sequential"
    return report["candidates"][1]


@pytest.mark.parametrize(
    "data",
    [EXAMPLES, {"input_ids": [e["input_ids"] for e in EXAMPLES]}, Dataset.from_list(EXAMPLES),
     TokenizedDataset(EXAMPLES)],
    ids=["examples", "columns", "datasets.Dataset", "TokenizedDataset"],
)  # fmt: skip
def test_the_row_is_what_the_collator_packs(data: Any) -> None:
    row = shared(data)
    batch = PackedCollator(0, max_tokens=64, strategy="best_fit_decreasing", share_prefixes=True)(
        EXAMPLES
    )
    assert row["num_rows"] == len(batch)
    assert row["num_cells"] == batch["input_ids"].numel()
    assert row["num_tokens"] == sum(len(ids) for e in EXAMPLES for ids in e["input_ids"])
    used = sum(trie(e["input_ids"])[3] for e in EXAMPLES)
    assert row["padding"] == pytest.approx(1 - used / row["num_cells"])


def test_the_table_says_the_factor() -> None:
    report = packing_report(EXAMPLES, 64, show=False)
    header, line = (
        next(line for line in repr(report).splitlines() if word in line)
        for word in ("tokens/cell", "shared_prefixes")
    )
    row = report["candidates"][1]
    assert "tokens/cell" in header
    assert f" {row['num_tokens'] / row['num_cells']:.2f} " in line
    assert "shared_prefixes" in report._repr_html_()
    assert report.plot()


def test_lengths_alone_do_not_tell_what_is_shared() -> None:
    said = "note: lengths do not show what segments share; pass the dataset to see share_prefixes"
    report = packing_report(TokenizedDataset(EXAMPLES).lengths, 64, show=False)
    assert report["recommended"]["notes"][-1] == said
    assert said in repr(report)
    assert said not in repr(packing_report(EXAMPLES, 64, show=False))


def test_no_row_where_nothing_is_shared_or_known() -> None:
    ids = [e["input_ids"] for e in EXAMPLES]
    alone = [{"input_ids": [[*map(int, RNG.integers(9, 99, 4))]]} for _ in range(3)]
    for data, options in (
        ([sum(map(len, segments)) for segments in ids], {}),
        ([{"input_ids": of} for segments in ids for of in segments], {}),
        (alone, {}),
        (EXAMPLES, {"parallel": ParallelLayout(cp=2)}),
    ):
        report = packing_report(data, 64, show=False, **options)
        assert "shared_prefixes" not in [c["strategy"] for c in report["candidates"]]
        assert "tokens/cell" not in repr(report)
