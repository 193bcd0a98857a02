"""Log-probs of trained tokens, and reductions over segments, against a loop over the examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.devices import NoWaiting
from tests.test_losses import EXAMPLES, LAYOUTS, VOCABULARY, Model, examples_strategy
from torch_collate_kit import (
    Batch,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    RolloutCollator,
    segment_sums,
    token_logps,
)
from torch_collate_kit.losses import global_num_examples, segment_ends, sums_by, trained_values

MORE: dict[str, Callable[[bool], Any]] = {
    "split": lambda normalize: PackedCollator(
        0, max_tokens=4, overflow="split", normalize_loss=normalize
    ),
    "rollouts": lambda normalize: RolloutCollator(0, normalize_loss=normalize),
    "packed rollouts": lambda normalize: PackedCollator(0, max_tokens=9, normalize_loss=normalize),
}
KINDS = {**LAYOUTS, **MORE}


def as_rollout(example: dict[str, Any]) -> dict[str, Any]:
    """The first token is the prompt, and weights are 0 or 1."""
    ids, mask = example["input_ids"], [float(w != 0) for w in example["loss_mask"]]
    responses = {"response_ids": ids[1:] or [1], "loss_mask": mask[1:] or [0]}
    return {"prompt_ids": ids[:1], "rewards": 0.0, **responses}


def collated(name: str, examples: list[dict[str, Any]], normalize: bool) -> tuple[Batch, Any]:
    """The batch, and the examples as they went in."""
    if name in ("packed", "dummy rows"):
        examples = [{key: row[:8] for key, row in example.items()} for example in examples]
    if "rollouts" not in name:
        return KINDS[name](normalize)(examples), examples
    given = [as_rollout(example) for example in examples]
    whole = [
        {"input_ids": e["prompt_ids"] + e["response_ids"], "loss_mask": [0, *e["loss_mask"]]}
        for e in given
    ]
    return KINDS[name](normalize)(given), whole


def loop(model: Model, examples: Sequence[Any], batch: Batch) -> list[list[Tensor]]:
    """The log-probs of each segment's trained tokens; where they lie in rows is of no matter."""
    found = []
    which = (batch.row_metadata[k].values for k in ("example_indices", "example_starts"))
    for i, start, length in zip(*which, batch["sub_seq_lengths"].values.tolist(), strict=True):
        piece = slice(start, start + length)
        ids, mask = examples[i]["input_ids"][piece], examples[i]["loss_mask"][piece]
        trained = [t for t in range(1, length) if mask[t]]
        found.append([model.table[ids[t - 1], t - 1].log_softmax(0)[ids[t]] for t in trained])
    return found


def check(batch: Batch, examples: Any, model: Model) -> None:
    expected = loop(model, examples, batch)
    logps = token_logps(model(batch), batch)
    zero = model.table.sum() * 0
    flat = torch.stack([zero, *(value for part in expected for value in part)])[1:]
    torch.testing.assert_close(logps, flat, rtol=1e-12, atol=1e-12)
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(len(logps), generator=generator, dtype=torch.float64)
    of_parts = weights.split([len(part) for part in expected])
    for options in ({}, {"mean": True}, {"weights": weights}, {"weights": weights, "mean": True}):
        factors = of_parts if "weights" in options else [torch.ones_like(w) for w in of_parts]
        sums = [
            sum((v * w for v, w in zip(part, ws, strict=True)), zero)
            / (ws.sum() if "mean" in options and len(part) else 1)
            for part, ws in zip(expected, factors, strict=True)
        ]
        wanted = torch.stack([zero, *sums])[1:]
        found = segment_sums(logps, batch, **options)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        slopes = torch.arange(1.0, len(sums) + 1, dtype=torch.float64)
        gradients = [model.gradient((of * slopes).sum() + zero) for of in (found, wanted)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    ends = segment_ends(batch)
    lengths = batch["sub_seq_lengths"].values
    assert ends.dtype == torch.int64
    assert batch["position_ids"].flatten()[ends].tolist() == (lengths - 1).tolist()
    assert batch["attention_mask"].flatten()[ends].tolist() == [1] * len(lengths)
    mask = batch["loss_mask"]
    assert trained_values(mask, batch).tolist() == mask[mask != 0].tolist()
    ids = batch["input_ids"]
    of_mask = ids[:, ids.shape[1] - mask.shape[1] :]
    assert trained_values(ids, batch).tolist() == of_mask[mask != 0].tolist()


@given(
    examples=examples_strategy,
    name=st.sampled_from(list(KINDS)),
    normalize=st.booleans(),
    data=st.data(),
)
def test_log_probs_sums_and_ends_are_those_of_a_loop(
    examples: Any, name: str, normalize: bool, data: Any
) -> None:
    batch, examples = collated(name, examples, normalize)
    model = Model()
    rows = data.draw(st.lists(st.integers(0, len(batch) - 1), unique=True, min_size=1))
    for part in (batch, batch.select(rows), batch.pad_rows(multiple_of=3), batch[-1:]):
        check(part, examples, model)
    dense = Batch(dict(batch), row_metadata=batch.row_metadata, metadata=batch.metadata)
    check(dense, examples, model)


PAIR = [
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    {"input_ids": [4, 5], "loss_mask": [0, 0]},
]


def test_a_segment_without_trained_tokens_has_0_and_an_infinite_value_may_weigh_nothing() -> None:
    batch = PackedCollator(0, max_tokens=9)(PAIR)
    values = torch.tensor([-torch.inf, -2.0], requires_grad=True)
    for mean, expected in ((False, [-6.0, 0.0]), (True, [-2.0, 0.0])):
        sums = segment_sums(values, batch, weights=torch.tensor([0.0, 3.0]), mean=mean)
        assert sums.tolist() == expected
    (gradient,) = torch.autograd.grad(sums.sum(), values)
    assert gradient.tolist() == [0, 1]
    assert segment_sums(values.detach().bfloat16(), batch).dtype == torch.float32


@pytest.mark.parametrize(
    ("collate", "trained"),
    [
        (PackedCollator(0, max_tokens=9), [2, 2]),
        (PackedCollator(0, max_tokens=8, parallel=ParallelLayout(tp=4)), [2, 2]),
        (PaddedCollator(0), [2, 2]),
        (PaddedCollator(0, padding_side="right"), [2, 1]),
    ],
)
def test_a_mask_of_your_own_decides_what_is_trained(collate: Any, trained: list[int]) -> None:
    """It may train pads, which belong to no segment, and what has no label: scored by its id."""
    batch = collate(PAIR)
    batch["loss_mask"].fill_(1)
    logits = torch.randn(*batch["input_ids"].shape, 6, generator=torch.Generator().manual_seed(0))
    logps = token_logps(logits, batch)
    assert len(logps) == batch["loss_mask"].numel()
    assert segment_sums(torch.ones_like(logps), batch).tolist() == trained
    row = batch["input_ids"][0]
    expected = logits[0, :-1].log_softmax(1).gather(1, row[1:, None])[:, 0]
    torch.testing.assert_close(logps[: len(row) - 1], expected[-batch["loss_mask"].shape[1] :])


def test_labels_that_are_not_the_ids_are_scored() -> None:
    batch = PaddedCollator(0)([{"input_ids": [1, 2, 3], "labels": [-100, 0, -100]}])
    logits = torch.tensor([[[3.0, 0, 0, 0], [0.0] * 4, [0.0] * 4]])
    assert token_logps(logits, batch).tolist() == logits[0, 0].log_softmax(0)[:1].tolist()


@pytest.mark.parametrize("name", KINDS)
def test_nothing_waits_for_the_device(name: str) -> None:
    batch = collated(name, EXAMPLES, True)[0].pad_rows(multiple_of=4)
    number, num_segments = int((batch["loss_mask"] != 0).sum()), len(segment_ends(batch))
    moved = batch.to("meta")
    for size, head in ((VOCABULARY, None), (6, torch.nn.Linear(6, VOCABULARY, device="meta"))):
        outputs = torch.zeros(*batch["input_ids"].shape, size, device="meta", requires_grad=True)
        with NoWaiting() as mode:
            logps = token_logps(outputs, moved, head=head)
            sums = segment_sums(logps, moved, weights=torch.ones_like(logps), mean=True)
            sums.sum().backward()
            ends = segment_ends(moved)
        assert mode.seen > 20
        assert (logps.shape, sums.shape) == ((number,), (num_segments,))
        assert ends.is_meta
        assert outputs.grad is not None


@pytest.mark.parametrize("name", KINDS)
def test_examples_are_counted_once_over_micro_batches(name: str) -> None:
    batch, examples = collated(name, EXAMPLES, True)
    assert global_num_examples(batch).item() == len(examples)
    micro_batches = iter(batch.pad_rows(multiple_of=3).split(1))
    assert global_num_examples(micro_batches).item() == len(examples)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [str, torch.int64])
def test_sums_for_each_value_of_a_field(name: str, dtype: Any) -> None:
    keys = ["b", "a", "b", "c", "a", "a"] if dtype is str else [7, 3, 7, 9, 3, 3]
    collate = KINDS[name](True)
    options = {"fields": {"part": PerExample(dtype)}, "normalize_loss": False}
    if isinstance(collate, PackedCollator):
        collate = PackedCollator(0, packing=collate.packing, **options)
    else:
        collate = type(collate)(0, **options)
    given = [as_rollout(e) for e in EXAMPLES] if "rollouts" in name else EXAMPLES
    batch = collate([e | {"part": key} for e, key in zip(given, keys, strict=True)])
    parts = batch.pad_rows(multiple_of=3).split(1)
    model = Model()
    expected: dict[Any, list[float]] = {key: [0.0, 0] for key in keys}
    lists = loop(model, collated(name, EXAMPLES, True)[1], batch)
    for i, logps in zip(batch.row_metadata["example_indices"].values, lists, strict=True):
        expected[keys[i]][0] += sum(v.item() for v in logps)
        expected[keys[i]][1] += len(logps)
    found = sums_by([token_logps(model(part), part) for part in parts], parts, "part")
    assert list(found) == sorted(expected)
    for key, (total, count) in found.items():
        assert (total, count) == (pytest.approx(expected[key][0]), expected[key][1])
    if name != "split":  # there a value stands once for each piece
        ones = [torch.ones(int(global_num_examples(part))) for part in parts]
        counted = sums_by(ones, parts, "part", per="example")
        assert counted == {key: (keys.count(key), keys.count(key)) for key in sorted(expected)}


BATCH = PackedCollator(0, max_tokens=9)(PAIR)
ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: token_logps(torch.zeros(1, 5, 4), {}), TypeError, "collator returned, got dict"),
        (lambda: token_logps([], BATCH), TypeError, "floats, got list; pass model"),
        (lambda: token_logps(torch.zeros(2, 5, 4), BATCH), ValueError, r"shape \[2, 5, 4\]"),
        (lambda: segment_sums(torch.ones(3), BATCH), ValueError, r"\[3\], the batch has 2 trained"),
        (lambda: segment_sums(torch.ones(1, 4), BATCH), ValueError, r"pass \[2\]"),
        (lambda: segment_sums(ONES, BATCH, weights=torch.ones(3)), ValueError, r"weights have sh"),
        (lambda: segment_sums(ONES, BATCH, weights=[1, 1]), TypeError, "weights must be a tensor"),
        (lambda: segment_sums(ONES.long(), BATCH), TypeError, "got torch.int64; pass one value"),
        (lambda: segment_sums(ONES, BATCH, mean=1), TypeError, "mean must be True or False"),
        (lambda: segment_sums(ONES, Batch(dict(PaddedCollator(0)(PAIR)))), ValueError, "without"),
        (lambda: segment_ends(ONES), TypeError, "got Tensor"),
        (lambda: trained_values(torch.ones(1, 3), BATCH), ValueError, r"loss_mask \[1, 4\]"),
        (lambda: trained_values([1], BATCH), TypeError, "tensor, got list"),
        (
            lambda: global_num_examples(Batch(dict(PaddedCollator(0)(PAIR)))),
            ValueError,
            "where examples begin; pass",
        ),
        (lambda: global_num_examples([7]), TypeError, "got int; pass the Batch"),
        (lambda: sums_by(ONES, BATCH, "x"), ValueError, "no PerExample field 'x'; declare it"),
        (lambda: sums_by(ONES, BATCH, "x", per="row"), ValueError, "one of 'token', 'example'"),
    ],
)
def test_refuses(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
