"""Trees larger than a row, cut between their segments: as if each run of them were an example."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import runs
from tests.tree_samples import exact_model, inputs_of, random_examples
from torch_collate_kit import (
    Batch,
    PackedCollator,
    PackingOptions,
    ParallelLayout,
    PerExample,
    PerResponseToken,
    PerToken,
    global_num_loss_tokens,
    segment_sums,
    token_logps,
    token_loss,
    unpack,
)
from torch_collate_kit.losses import global_num_examples, segment_ends

FIELDS = {"old": PerToken(torch.float64)}
TURNS = {
    "input_ids": [[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6, 7]],
    "loss_mask": [[0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0, 1]],
}


def random_packing(rng: np.random.Generator, examples: list[Any]) -> PackingOptions:
    parallel = ParallelLayout(dp=int(rng.choice([1, 2, 3])), tp=int(rng.choice([1, 1, 4])))
    longest = max(len(of) for example in examples for of in example["input_ids"])
    least = -(-longest // parallel.align) * parallel.align
    return PackingOptions(
        max_tokens=int(rng.integers(least, least + 25)),
        strategy=str(rng.choice(["best_fit_decreasing", "balanced", "sequential"])),
        share_prefixes=True,
        parallel=parallel,
        max_sequences_per_row=rng.choice([None, None, 3]),
    )


def parts_of(examples: list[Any], packing: PackingOptions) -> tuple[list[Any], list[int]]:
    """Every run as an example, and the example that it is of."""
    parts, owners = [], []
    for i, example in enumerate(examples):
        for run in runs(example["input_ids"], packing.capacity, packing.max_sequences_per_row):
            per_segment = {k: v[slice(*run)] for k, v in example.items() if k != "weight"}
            weight = {"weight": example["weight"]} if "weight" in example else {}
            parts.append({**per_segment, **weight})
            owners.append(i)
    return parts, owners


def assert_as_parts(examples: list[Any], packing: PackingOptions) -> tuple[Batch, Batch]:
    """A batch of cut trees has the rows of a batch of their runs, and says whose these are."""
    split = PackedCollator(
        0, packing=PackingOptions(**{**vars_of(packing), "overflow": "split"}), fields=FIELDS
    )(examples)
    parts, owners = parts_of(examples, packing)
    whole = PackedCollator(0, packing=packing, fields=FIELDS)(parts)
    assert list(split) == list(whole)
    for name in whole:
        if isinstance(whole[name], torch.Tensor):
            assert torch.equal(split[name], whole[name]), name
        else:
            assert split[name] == whole[name], name
    assert split.metadata["cut"] == tuple(i for i in range(len(examples)) if owners.count(i) > 1)
    assert split.metadata["num_segments"] == tuple(len(of["input_ids"]) for of in examples)
    assert split.metadata["num_examples"] == len(examples)
    for name in ("step_num_tokens", "step_num_cells", "step_num_filled_cells", "cost_per_rank"):
        assert split.metadata[name] == whole.metadata[name], name
    for row in range(len(whole)):
        indices, numbers = (split.row_metadata[k][row].tolist() for k in WHERE)
        of_parts, places = (whole.row_metadata[k][row].tolist() for k in WHERE)
        assert indices == [owners[part] for part in of_parts]
        assert [examples[i]["input_ids"][k] for i, k in zip(indices, numbers, strict=True)] == [
            parts[part]["input_ids"][k] for part, k in zip(of_parts, places, strict=True)
        ]
    segments = [of for example in examples for of in example["input_ids"]]
    assert [of.tolist() for of in unpack(split["input_ids"], split)] == segments
    found: list[list[int]] = [[] for _ in segments]  # row by row, each has some of them
    for row in range(len(split)):
        for i, of in enumerate(unpack(split[row : row + 1]["input_ids"], split[row : row + 1])):
            found[i] += of.tolist()
    assert found == segments
    return split, whole


WHERE = ("example_indices", "segment_numbers")


def vars_of(packing: PackingOptions) -> dict[str, Any]:
    return {name: getattr(packing, name) for name in packing.__dataclass_fields__}


@given(st.integers(0, 2**32))
def test_rows_are_those_of_the_runs(seed: int) -> None:
    rng, examples = np.random.default_rng(seed), random_examples(seed, most=6)
    if rng.random() < 0.3:
        for example in examples:
            example["weight"] = float(rng.choice([0.5, 1, 2]))
    assert_as_parts(examples, random_packing(rng, examples))


def test_a_cut_tree_by_hand() -> None:
    collate = PackedCollator(0, max_tokens=5, share_prefixes=True, overflow="split")
    batch = collate([TURNS])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [1, 2, 4, 6, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 2, 3], [0, 1, 2, 3, 4]]
    assert batch["sub_seq_lengths"].tolist() == [[3, 4], [5]]
    assert [of.tolist() for of in batch.row_metadata["segment_numbers"]] == [[0, 1], [2]]
    assert [of.tolist() for of in batch.row_metadata["example_indices"]] == [[0, 0], [0]]
    assert [of.tolist() for of in batch.row_metadata["example_starts"]] == [[0, 0], [0]]
    assert (batch.metadata["cut"], batch.metadata["num_segments"]) == ((0,), (3,))
    assert global_num_examples(batch).item() == 1
    assert global_num_loss_tokens(batch).item() == batch.metadata["num_loss_tokens"] == 3
    assert segment_ends(batch).tolist() == [2, 4, 9]
    assert repr(batch).startswith(
        "Batch of 2 packed rows, of 5 cells for 7 tokens: 1 example in 3 segments, 12\n"
    )
    assert batch.explain(1).columns["example"] == [0] * 5
    x = -100
    assert batch["labels"].tolist() == [[x, x, 3, x, x, x, 5], [x, x, x, x, 7, x, x]]


@pytest.mark.parametrize("attention", ["torch_varlen", "sdpa"])
def test_a_cut_tree_trains_as_the_whole(attention: str) -> None:
    model = exact_model("qwen3", attention)
    examples = random_examples(7, most=3)
    options = {"max_tokens": 24, "overflow": "split", "share_prefixes": True}
    losses, sums, gradients = [], [], []
    for collate in (PackedCollator(0, **options), PackedCollator(0, max_tokens=320)):
        batch = collate(examples)
        logits = model(**inputs_of(batch, model)).logits
        loss = token_loss(logits, batch, num_loss_tokens=batch.metadata["num_loss_tokens"])
        model.zero_grad()
        loss.backward()
        gradients.append(torch.cat([of.grad.flatten() for of in model.parameters()]))
        of_segments = segment_sums(token_logps(logits, batch), batch).tolist()
        whose = (np.asarray(batch.row_metadata[k].values).tolist() for k in WHERE)
        losses.append(loss.item())
        sums.append(dict(zip(zip(*whose, strict=True), of_segments, strict=True)))
        assert len(batch.metadata["cut"]) == (1 if collate.packing.overflow == "split" else 0)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert sums[0] == pytest.approx(sums[1], rel=1e-10)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)


def test_auto_below_its_factor_cuts_plainly() -> None:
    strangers = {"input_ids": [[1, 2, 3], [4, 5], [6, 7, 8]]}
    batch = PackedCollator(0, max_tokens=6, share_prefixes="auto", overflow="split")([strangers])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert [of.tolist() for of in batch.row_metadata["segment_numbers"]] == [[0, 1], [2]]
    assert batch.metadata["cut"] == (0,)


@pytest.mark.parametrize(
    ("examples", "fields", "message"),
    [
        (
            lambda: [{**TURNS, "keep_together": True}],
            {},
            "overflow='split' cuts examples between their segments, and the examples have "
            "keep_together, as those of tokenize_preferences: the loss of a pair needs both",
        ),
        (
            lambda: [{**TURNS, "margin": 0.5}],
            {"margin": PerExample(torch.float32)},
            "overflow='split' cuts examples between their segments, and margin is of a whole "
            "example (PerExample); make it a field per token, leave it out, or pass overflow=",
        ),
        (
            lambda: [{**TURNS, "source": "web"}],
            {"source": PerExample(str)},
            "overflow='split' cuts examples between their segments, and source is of a whole",
        ),
    ],
)
def test_what_belongs_together_is_refused(examples: Any, fields: Any, message: str) -> None:
    options = {"max_tokens": 99, "share_prefixes": True, "fields": fields}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        PackedCollator(0, overflow="split", **options)(examples())
    assert len(PackedCollator(0, **options)(examples())) == 1


def test_response_fields_follow_their_segments() -> None:
    example = {
        "input_ids": TURNS["input_ids"],
        "loss_mask": [[1], [0, 1], [1, 1]],
        "num_actions": [1, 2, 2],
        "old": [[0.5], [0.25, 0.75], [0.125, 1.0]],
    }
    fields = {"old": PerResponseToken(torch.float32)}
    collate = PackedCollator(
        0, max_tokens=5, overflow="split", share_prefixes=True, normalize_loss=False, fields=fields
    )
    batch = collate([example])
    assert batch["old"].tolist() == [[0, 0.5, 0, 0, 0.25, 0.75], [0, 0, 0.125, 1, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 1, 0, 0, 0, 1], [0, 0, 1, 1, 0, 0]]
    assert [of.tolist() for of in batch.row_metadata["num_actions"]] == [[1, 2], [2]]
