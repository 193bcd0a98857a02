"""All that takes a Batch, of rows that share prefixes: the same as of rows that do not, or refused.

The rows hold the same examples in the same order, so fields per token are equal, cell by cell.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.batch_samples import functions_of_a_batch, members_of_a_batch
from tests.tiny_models import tiny_model
from torch_collate_kit import (
    Batch,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    PerToken,
    TokenizedDataset,
    check_isolation,
    global_num_loss_tokens,
    losses,
    rl,
    unpack,
)
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.loading import map_segments
from torch_collate_kit.testing import batch_digest

EXAMPLES = [
    {
        "input_ids": [[3, 4, 5, 6], [3, 4, 5, 7, 8], [3, 4, 5, 7, 9, 10]],
        "loss_mask": [[0, 0, 1, 1], [0, 1, 1, 1, 0.5], [0, 0, 0, 1, 1, 1]],
        "old": [[0.1] * 4, [0.2] * 5, [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]],
        "source": "a",
    },
    {
        "input_ids": [[20, 21, 22], [20, 21, 22], [11, 12]],
        "loss_mask": [[0, 1, 1], [0, 1, 1], [1, 1]],
        "old": [[1.0] * 3, [2.0] * 3, [3.0] * 2],
        "source": "b",
    },
]
FIELDS = {"old": PerToken(torch.float64), "source": PerExample(str)}


def collated(share: bool, examples: Any = EXAMPLES) -> Batch:
    layout = ParallelLayout(dp=2)
    return PackedCollator(
        0,
        max_tokens=24,
        share_prefixes=share,
        strategy="sequential",
        parallel=layout,
        fields=FIELDS,
    )(examples)


def cells_of_ids(batch: Batch, size: int = 30) -> Tensor:
    """Logits that depend on the id and the position of a cell alone, so those of shared ones."""
    table = torch.randn(size, 16, size, generator=torch.Generator().manual_seed(0)).double()
    return table[batch["input_ids"], batch["position_ids"]]


def logps(batch: Batch) -> Tensor:
    return losses.token_logps(cells_of_ids(batch), batch)


def per_token(batch: Batch) -> Tensor:
    """Something for each predicted token, [R, U - 1], as log-probs of trainers are."""
    return torch.arange(batch["loss_mask"].numel()).view(batch["loss_mask"].shape).double()


def staged(batch: Batch) -> Any:
    return rl.stage_mini_batches(batch, [0, 2], dp_size=2)


def outputs(batch: Batch) -> Any:
    options = {"num_loss_tokens": 3, "return_per_token_outputs": True}
    loss, found = losses.token_loss(cells_of_ids(batch), batch, **options)
    return loss, found.example_indices, found.nll


def micro(batch: Batch) -> Any:
    parts = [m for ranks in staged(batch) for m in rl.micro_batches(ranks[0], max_tokens=99)]
    return [part["labels"] for part in parts], parts[0].metadata["num_loss_tokens"]


def ends(batch: Batch) -> Any:
    return cells_of_ids(batch).flatten(0, 1)[losses.segment_ends(batch)]


FUNCTIONS: dict[str, Callable[[Batch], Any]] = {
    "unpack": lambda b: unpack(cells_of_ids(b), b),
    "losses.token_loss": outputs,
    "losses.token_logps": logps,
    "losses.trained_values": lambda b: losses.trained_values(b["old"], b),
    "losses.segment_sums": lambda b: losses.segment_sums(logps(b), b, mean=True),
    "losses.segment_ends": ends,
    "losses.segment_pool": lambda b: losses.segment_pool(cells_of_ids(b), b, how="last"),
    "losses.segment_values": lambda b: losses.segment_values(losses.segment_sums(logps(b), b), b),
    "losses.example_losses": lambda b: losses.example_losses(
        [losses.segment_sums(logps(b), b)], [b]
    )["loss"],
    "rl.log_ratios": lambda b: rl.log_ratios(logps(b), 0.9 * logps(b), b, level="sequence"),
    "rl.importance_weights": lambda b: rl.importance_weights(
        logps(b), 0.9 * logps(b), b, level="geometric"
    ),
    "losses.sums_by": lambda b: losses.sums_by(logps(b), b, "source"),
    "losses.global_num_examples": lambda b: losses.global_num_examples(b.split(1)),
    "losses.global_num_loss_tokens": lambda b: global_num_loss_tokens(b.split(1)),
    "rl.response_values": lambda b: rl.response_values(per_token(b), b),
    "rl.from_response_values": lambda b: rl.from_response_values(
        rl.response_values(per_token(b), b), b
    ),
    "rl.stage_mini_batches": lambda b: [p["labels"] for ranks in staged(b) for p in ranks],
    "rl.unstage": lambda b: rl.unstage(staged(b), [[p["labels"] for p in r] for r in staged(b)]),
    "rl.micro_batches": micro,
}
MEMBERS: dict[str, Callable[[Batch], Any]] = {
    "cat": lambda b: logps(Batch.cat(b.chunk(2))),
    "chunk": lambda b: [logps(part) for part in b.chunk(2)],
    "split": lambda b: [logps(part) for part in b.split(1)],
    "select": lambda b: logps(b.select([1, 0])),
    "pad_rows": lambda b: logps(b.pad_rows(multiple_of=3)),
    "with_fields": lambda b: logps(b.with_fields(more=torch.zeros(2))),
    "to": lambda b: logps(b.to("cpu")),
    "of_storage": lambda b: logps(Batch.of_storage(b.stored())),
    "stored": lambda b: logps(pickle.loads(pickle.dumps(b))),
    "pin_memory": lambda b: b.pin_memory()["labels"] if torch.cuda.is_available() else None,
    "record_stream": lambda b: None,
    "column": lambda b: b.column("loss_weights"),
    "get": lambda b: b.get("labels"),
    "keys": lambda b: sorted({*b.keys()} - {"cu_seq_lens"}),
    "items": lambda b: [v for k, v in sorted(b.items()) if k in ("labels", "loss_mask", "old")],
    "values": lambda b: [v.shape[0] for v in b.values() if isinstance(v, Tensor)][:5],
    "num_tokens": lambda b: b.num_tokens,
    "step": lambda b: b.step.num_tokens,
    "targets": lambda b: tuple(b.targets(2)[1:]),
    "explain": lambda b: [{**one, "cell": 0, "segment": 0} for one in b.explain(1).records()],
    "plot": lambda b: b.plot().get_title().split(" tokens")[0][-2:],
}


def refusal(call: Callable[..., Any], *arguments: Any) -> str | None:
    """Which of these reasons the call is refused for; None if it is not."""
    try:
        call(*arguments)
    except ValueError as error:
        reasons = ("share_prefixes", "not a shard", "weights")
        return next(of for of in reasons if of in str(error))
    return None


# Values of their own: what they are is said here, for (shared, plain).
OWN: dict[str, tuple[Callable[[Batch], Any], Any, Any]] = {
    "num_cells": (lambda b: b.num_cells, 16, 30),
    "padding": (lambda b: round(b.padding, 3), 0.188, 0.233),
    "nbytes": (lambda b: b.nbytes > 0, True, True),
    "placement": (lambda b: b.placement.tree_width, 8, 0),
    "model_inputs": (lambda b: b.model_inputs("sdpa")["input_ids"].shape[1], 8, 15),
    "context_shard": (lambda b: refusal(b.context_shard, 0, 1), "share_prefixes", None),
    "cells": (lambda b: refusal(lambda: b.cells), "not a shard", "not a shard"),
}
NOT_OF_A_BATCH = {
    "pack",
    "packing.pack",
    "packing_report",
    "loading.map_segments",  # test_a_number_for_every_segment
    "testing.batch_digest",  # test_digests_differ_from_those_of_plain_rows
    "reporting.packing_report",
    "rl.mini_batch_boundaries",
    "check_isolation",  # tests/test_isolation_trees.py
    "attention.check_isolation",
    "attention.context_join",  # of shards
}


def equal(one: Any, other: Any) -> None:
    if isinstance(one, Tensor | np.ndarray | float):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            equal(*pair)
    else:
        assert one == other


@pytest.mark.parametrize("name", {**FUNCTIONS, **MEMBERS})
def test_rows_with_shared_prefixes_give_the_same(name: str) -> None:
    run = {**FUNCTIONS, **MEMBERS}[name]
    equal(*(run(collated(share)) for share in (True, False)))


@pytest.mark.parametrize("name", OWN)
def test_cells_are_fewer(name: str) -> None:
    run, shared, plain = OWN[name]
    assert (run(collated(True)), run(collated(False))) == (shared, plain)


def test_the_table_names_all_that_takes_a_batch() -> None:
    named = {*FUNCTIONS, *(name.rpartition(".")[2] for name in FUNCTIONS)}
    found = functions_of_a_batch()
    assert found - named == NOT_OF_A_BATCH & found
    assert members_of_a_batch() == {*MEMBERS, *OWN}


APART = {
    "other widths": (
        True,
        {},
        "input_ids of batch 1 has row shape [5], of batch 0 [8]; rows with ",
    ),
    "one width": (
        True,
        {"fixed_width": True},
        "loss_mask of batch 1 has row shape [7], of batch 0 [14]; rows with share_prefixes are as "
        "long in tokens as the longest one, whatever their width: collate them together",
    ),
    "plain rows": (
        False,
        {},
        "rows of batch 0 share prefixes (share_prefixes), those of batch 1 do not; collate them",
    ),
}


@pytest.mark.parametrize(("share", "options", "message"), APART.values(), ids=APART)
def test_batches_that_were_collated_apart(share: bool, options: Any, message: str) -> None:
    options = {"max_tokens": 24, "normalize_loss": False, **options}
    first = PackedCollator(0, share_prefixes=True, **options)(EXAMPLES[:1])
    second = PackedCollator(0, share_prefixes=share, **options)(EXAMPLES[1:])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Batch.cat([first, second])


def test_batches_of_one_shape_are_joined_though_collated_apart() -> None:
    collate = PackedCollator(0, max_tokens=24, share_prefixes=True, normalize_loss=False)
    other = [{**EXAMPLES[0], "input_ids": [[of + 9 for of in s] for s in EXAMPLES[0]["input_ids"]]}]
    parts = [collate(examples) for examples in (EXAMPLES[:1], other)]
    both = Batch.cat(parts, metadata={"num_loss_tokens": 18, "num_examples": 2})
    equal(logps(both), torch.cat([logps(part) for part in parts]))


def test_a_number_for_every_segment() -> None:
    dataset = TokenizedDataset(EXAMPLES, columns=["input_ids", "loss_mask"])
    found = [
        map_segments(
            lambda batch: losses.segment_sums(logps(batch), batch),
            dataset,
            PackedCollator(0, max_tokens=24, share_prefixes=share),
        )
        for share in (True, False)
    ]
    assert found[0].shape == (2, 3)
    equal(*found)


def test_digests_differ_from_those_of_plain_rows() -> None:
    digests = [batch_digest(collated(share)) for share in (True, True, False)]
    assert digests[0] == digests[1] != digests[2]


def test_staged_rows_are_balanced_by_cells() -> None:
    parts = rl.stage_mini_batches(collated(True), [0, 2], dp_size=2, balance="tokens")
    metadata = parts[0][0].metadata
    assert metadata["step_num_filled_cells"] == 13
    assert metadata["step_num_tokens"] == 23
    assert metadata["row_widths"].tolist() == [[8], [8]]
    assert parts[0][0].step.padding == pytest.approx(3 / 16)


def test_values_per_token_are_not_taken_for_those_of_cells() -> None:
    batch = collated(True)
    with pytest.raises(ValueError, match=r"share prefixes, has cells \[2, 8\]"):
        unpack(batch["labels"], batch)


def test_a_model_that_carries_state_is_refused_by_the_check() -> None:
    with pytest.raises(IsolationError, match="without share_prefixes"):
        check_isolation(tiny_model("lfm2", "sdpa"), collated(True))


# --- how they look -------------------------------------------------------------------------------


def test_the_repr_says_tokens_cells_and_the_factor() -> None:
    text = repr(collated(True))
    assert "2 packed rows, of 8 cells for 15 tokens: 2 examples in 6 segments, 23" in text
    assert "tokens in 13 cells (81% of them, 1.77 for each), 14" in text
    assert "Batch of" in collated(True)._repr_html_()
    assert "13 cells" in collated(True)._repr_html_()


def test_explain_shows_the_cell_of_each_token() -> None:
    explanation = collated(True).explain(0)
    columns = explanation.columns
    assert explanation.title == "row 0 of 2: 15 tokens in 8 cells, 9 trained"
    assert columns["cell"] == [0, 1, 2, 3, 0, 1, 2, 4, 5, 0, 1, 2, 4, 6, 7]
    assert columns["id"] == [token for row in EXAMPLES[0]["input_ids"] for token in row]
    assert columns["position"] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert "padding" not in str(explanation)
    other = collated(True).explain(example=1, stop=4)
    assert other.columns["cell"] == [0, 1, 2, 0]
    assert len(collated(True).explain(1)) == 8  # its pads hold no token


@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if name.startswith("losses.") or name == "unpack"]
)
def test_tensors_alone_are_refused(name: str) -> None:
    """Fields per cell and per token, and nothing that relates them."""
    batch = collated(True)
    alone = Batch(dict(batch), row_metadata=batch.row_metadata, metadata=batch.metadata)
    if name.startswith("losses.global"):
        equal(*(FUNCTIONS[name](of) for of in (alone, batch)))
        return
    with pytest.raises(ValueError, match=r"tensors alone do not say"):
        FUNCTIONS[name](alone)


def test_fields_of_another_shape_are_refused():
    """A mask of one column per cell would be read as one per token: the loss was 3.61."""
    trees = collated(True)
    packed = PackedCollator(0, max_tokens=16)([{"input_ids": [5, 6, 7]}] * 2)
    padded = PaddedCollator(0)([{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}])
    cells, tokens = trees["input_ids"].shape[1], trees["labels"].shape[1]
    for batch, name, *right in [
        (trees, "loss_mask", tokens - 1), (trees, "labels", tokens), (trees, "old", tokens),
        (trees, "input_ids", cells), (packed, "loss_mask", 5), (packed, "labels", 6),
        (packed, "position_ids", 6), (padded, "loss_mask", 1, 2), (padded, "attention_mask", 3),
    ]:  # fmt: skip
        for width in range(tokens + 3):
            field = torch.ones(len(batch), width, dtype=batch[name].dtype)
            if width in right:
                assert batch.with_fields(**{name: field})[name] is field
                continue
            with pytest.raises(ValueError, match=f"{name} has shape .*, and of these rows it is"):
                batch.with_fields(**{name: field})
    block = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    assert padded.with_fields(attention_mask=block)["attention_mask"] is block
