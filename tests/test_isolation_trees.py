"""check_isolation of rows that share prefixes: ancestors are seen, siblings never."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.test_isolation import Toy
from tests.tiny_models import tiny_model, token_ids
from tests.tree_samples import both, random_examples
from torch_collate_kit import (
    Batch,
    IsolationError,
    PackedCollator,
    PaddedCollator,
    attention,
    check_isolation,
)

ATTENTIONS = ("torch_varlen", "sdpa", "eager")
# a prompt, two answers, one that divides again, and a stranger
SEGMENTS = [[3, 4, 5, 6], [3, 4, 5, 7, 8], [3, 4, 5, 7, 9, 10], [11, 12]]


def tree(*more: dict[str, Any]) -> Batch:
    collate = PackedCollator(0, max_tokens=64, share_prefixes=True)
    return collate([{"input_ids": SEGMENTS}, {"input_ids": [[20, 21, 22]]}, *more])


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3", "mistral"])
def test_trees_are_isolated(kind: str, attention: str) -> None:
    check_isolation(tiny_model(kind, attention), tree())


@pytest.mark.parametrize("kind", ["gpt_oss", "opt", "falcon"])
def test_models_whose_masks_ignore_positions_follow_the_mask_of_a_tree(kind: str) -> None:
    check_isolation(tiny_model(kind, "eager"), tree())


@pytest.mark.parametrize("seed", range(3))
def test_random_trees_are_isolated_in_training_too(seed: int) -> None:
    model = tiny_model("qwen3", ATTENTIONS[seed], dtype=torch.float64)
    shared, _ = both(random_examples(seed, most=2), max_tokens=90)
    check_isolation(model.train(), shared)


class Planted(nn.Module):
    """A model that gets other inputs than it is passed, or adds to its logits."""

    def __init__(self, model: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__()
        self.model, self.config, self.change = model, model.config, change

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, **inputs: Any) -> Any:
        is_alone = inputs["input_ids"].shape[1] < 10
        logits = self.model(**inputs if is_alone else inputs | self.change(inputs)).logits
        return logits if is_alone else self.added(logits)

    def added(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def _siblings(inputs: dict[str, Any]) -> dict[str, Any]:
    """Every cell sees all before it."""
    width = inputs["input_ids"].shape[1]
    if "path_cells" not in inputs:
        return _masked(inputs, torch.ones(width, width, dtype=torch.bool).tril())
    bounds = inputs["cu_seq_lens_q"].tolist()
    cells = [torch.arange(stop) for stop in bounds[1:]]
    cu_k = torch.tensor([0, *map(len, cells)]).cumsum(0).int()
    return {"path_cells": torch.cat(cells), "cu_seq_lens_k": cu_k, "max_length_k": width}


def _blocks(inputs: dict[str, Any]) -> dict[str, Any]:
    """Every cell sees only its segment's own cells."""
    if "path_cells" in inputs:
        cells = torch.arange(inputs["input_ids"].numel())
        return {"path_cells": cells, "cu_seq_lens_k": inputs["cu_seq_lens_q"]}
    bounds = tree().model_inputs("torch_varlen")["cu_seq_lens_q"]
    runs = torch.repeat_interleave(bounds.diff().long())
    return _masked(inputs, (runs[:, None] == runs[None]).tril())


def _masked(inputs: dict[str, Any], seen: torch.Tensor) -> dict[str, Any]:
    mask = inputs["attention_mask"]
    if mask.dtype != torch.bool:
        seen = torch.zeros(seen.shape, dtype=mask.dtype).masked_fill(~seen, -torch.inf)
    return {"attention_mask": seen.expand(mask.shape)}


def _one_too_many(inputs: dict[str, Any]) -> dict[str, Any]:
    """The last branch sees a cell of its sibling, in place of the one before that."""
    if "path_cells" in inputs:
        cells, bounds = inputs["path_cells"].clone(), inputs["cu_seq_lens_k"].tolist()
        cells[bounds[2] + 2] = 3  # [3, 4, 5, 7, 9, 10] sees 6
        return {"path_cells": cells}
    mask = inputs["attention_mask"].clone()
    mask[0, 0, 6, 3] = mask[0, 0, 6, 0]
    return {"attention_mask": mask}


def _by_cell(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}


LEAKS = [
    (_siblings, r"row 0 branch \d \(from cell \d+\) leaks into row 0 branch"),
    (_one_too_many, r"row 0 branch \d \(from cell 3\) leaks into row 0 branch \d \(from cell"),
    (_blocks, "differs from a run alone"),
    (_by_cell, "differs from a run alone"),
]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("leak", "message"), LEAKS, ids=[f.__name__ for f, _ in LEAKS])
def test_planted_leaks_are_caught(leak: Any, message: str, attention: str) -> None:
    model = tiny_model("qwen3", attention)
    assert tree().model_inputs("torch_varlen")["input_ids"].tolist() == [
        [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 20, 21, 22]
    ]
    with pytest.raises(IsolationError, match=message):
        check_isolation(Planted(model, leak), tree())


def small(cell: torch.Tensor) -> torch.Tensor:
    return 1e-6 * cell


def by_a_choice(cell: torch.Tensor) -> torch.Tensor:
    """Has no gradient."""
    return cell.detach().round()


@pytest.mark.parametrize("leak", [small, by_a_choice])
def test_a_leak_between_siblings_is_caught(leak: Any) -> None:
    """By the gradient or by the movement, which the other one does not show."""

    class Mixing(Planted):
        def added(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.index_add(1, torch.tensor([4]), leak(logits[:, 3:4]))

    model = Mixing(tiny_model("qwen3", "sdpa"), lambda inputs: {})
    with pytest.raises(IsolationError, match=r"\(from cell 3\) leaks into .* \(from cell 4\)"):
        check_isolation(model, tree())


def test_inputs_without_the_batch_do_not_say_which_segments_these_are() -> None:
    model = tiny_model("qwen3")
    with pytest.raises(ValueError, match=r"path_cells, .*share_prefixes.*pass the Batch"):
        check_isolation(model, tree().model_inputs("torch_varlen"))


def test_one_path_alone_has_nothing_to_leak() -> None:
    batch = PackedCollator(0, max_tokens=9, share_prefixes=True)([{"input_ids": [[3], [3, 4]]}])
    with pytest.raises(ValueError, match="nothing can leak"):
        check_isolation(tiny_model("qwen3"), batch)


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
