"""The part of a large batch that check_isolation runs: small, and enough for every kind of leak."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hybrid_models import ATTENTION, hybrid_model
from tests.test_isolation import Toy
from tests.test_isolation_gradients import Unseen
from tests.test_isolation_trees import LEAKS, Planted
from tests.tiny_models import tiny_model, token_ids
from torch_collate_kit import (
    Batch,
    IsolationError,
    PackedCollator,
    PaddedCollator,
    attention,
    check_isolation,
)

MOST = 2 * 3 * 72  # cells


def examples(*lengths: int) -> list[dict[str, Any]]:
    return [{"input_ids": ids} for n in lengths for ids in token_ids(1, n).tolist()]


def large(*, rows: int = 4, width: int = 300, **options: Any) -> Batch:
    """Rows of segments of 120, 90, 60 and 30 tokens."""
    collate = PackedCollator(0, max_tokens=width, strategy="sequential", **options)
    return collate(examples(*rows * [120, 90, 60, width - 270]))


def shapes(model: Any) -> list[tuple[int, ...]]:
    """The shapes of the inputs that a model gets from now on."""
    seen: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda _, args, given: seen.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize(
    ("kind", "attention", "as_inputs"),
    [
        ("qwen3", "sdpa", False),
        ("qwen3", "torch_varlen", True),
        ("llama", "sdpa", True),
        ("gemma3", "eager", False),
        ("gpt_oss", "eager", False),  # with masks
    ],
)
def test_large_batches_pass_in_a_small_part(kind: str, attention: str, as_inputs: bool) -> None:
    model, batch = tiny_model(kind, attention, max_position_embeddings=512), large()
    seen = shapes(model)
    check_isolation(model, batch.model_inputs(model) if as_inputs else batch)
    assert max(rows * width for rows, width in seen) <= MOST
    assert max(rows for rows, _ in seen) == 2


@pytest.mark.parametrize(
    ("config", "longest"), [({}, 84), ({"sliding_window": 80}, 112), ({"sliding_window": 500}, 84)]
)
def test_windows_keep_their_length(config: dict[str, Any], longest: int) -> None:
    model = Toy(**config).eval()
    check_isolation(model, large())
    assert max(len(seen[0]) for seen in model.seen if len(seen) == 1) == longest


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": ["chunked_attention"]},
        {"attention_chunk_size": 64},
        {"rope_parameters": {"rope_type": "longrope"}},
        {"rope_scaling": {"rope_type": "dynamic"}},
    ],
)
def test_where_every_length_counts_two_rows_are_whole(config: dict[str, Any]) -> None:
    model = Toy(**config).eval()
    check_isolation(model, large())
    assert max(seen.shape for seen in model.seen) == (2, 300)
    assert max(len(seen[0]) for seen in model.seen if len(seen) == 1) == 120


def test_a_segment_is_named_as_in_the_batch() -> None:
    def leak(model: Any, hidden: Tensor) -> Tensor:
        return hidden if len(hidden) < 2 else hidden + 1e-6 * hidden[1, 0]

    collate = PackedCollator(0, max_tokens=300, strategy="sequential")
    batch = collate(examples(300, 300, 100, 30, 20, 150, 90, 210))
    with pytest.raises(IsolationError, match=r"row 3 segment 0 leaks into row 2 segment [03] "):
        check_isolation(Toy(leak), batch)


def with_cache(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs | {"use_cache": True}


def with_a_mask(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}


def counting_on(inputs: dict[str, Any]) -> dict[str, Any]:
    """The last segment of the last row goes on counting."""
    positions = inputs["position_ids"].clone()
    positions[-1, -30:] = torch.arange(270, 300)
    return inputs | {"position_ids": positions}


@pytest.mark.parametrize(
    ("change", "attention", "message"),
    [
        (with_cache, "sdpa", "use_cache=False"),
        (with_a_mask, "sdpa", "2-D attention_mask"),
        (counting_on, "torch_varlen", "row 3 segment 3 differs from a run alone"),
    ],
)
def test_wrong_inputs_of_large_batches_are_found(change: Any, attention: str, message: str) -> None:
    kind = "opt" if change is counting_on else "llama"
    model = tiny_model(kind, attention, max_position_embeddings=512, num_hidden_layers=1)
    inputs = large().model_inputs(model, labels=False)
    with pytest.raises(IsolationError, match=message):
        check_isolation(model, change(inputs))


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "falcon_h1"])
def test_state_that_runs_over_a_boundary_is_found(family: str) -> None:
    model = hybrid_model(family, ATTENTION.get(family, "sdpa"))
    with pytest.raises(IsolationError, match="leaks into row 0 segment 1"):
        check_isolation(Unseen(model).eval(), large(rows=2))


def test_trees_are_checked_by_two_rows() -> None:
    prefix, branches = [list(range(3, 60)) * 2, [[n] * 60 for n in (20, 30, 40)]]
    tree = {"input_ids": [prefix + branch for branch in branches]}
    batch = PackedCollator(0, max_tokens=300, share_prefixes=True)([tree] * 4)
    model = tiny_model("qwen3", "torch_varlen", max_position_embeddings=512, num_hidden_layers=1)
    seen = shapes(model)
    check_isolation(model, batch)
    assert len(batch) == 4
    assert max(rows for rows, _ in seen) == 2
    with pytest.raises(IsolationError, match=r"row 0 branch \d \(from cell \d+\) leaks into row"):
        check_isolation(Planted(model, LEAKS[0][0]), batch)


def test_padded_rows_of_both_ends_are_checked() -> None:
    model = Toy(lambda _, hidden: hidden.cumsum(1))
    batch = PaddedCollator(0)(examples(100, 60, 90, 100, 20, 100))
    with pytest.raises(IsolationError, match=r"^row 4 segment 0 differs from a run alone"):
        check_isolation(model, batch)
    assert max(seen.shape for seen in model.seen) == (2, 100)


def test_a_line_is_logged_when_it_takes_long(monkeypatch: Any, caplog: Any) -> None:
    module = __import__("sys").modules[attention.check_isolation.__module__]
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.02)
    caplog.set_level(logging.WARNING)
    check_isolation(Toy(lambda _, hidden: time.sleep(0.05) or hidden), large())
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("check_isolation still runs after 5 s, on 2 rows of 216 cells of the")
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 60)
    check_isolation(Toy(), large())
    assert len(caplog.records) == 1
