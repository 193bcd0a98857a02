"""What labels are of: the next token, the token itself, or nothing per token (`targets=`)."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.batch_checks import assert_contract_dtypes, assert_equals_oracle, assert_round_trips
from tests.building import packed_collator
from tests.oracle import packed_batch, padded_batch, pooled, token_losses
from tests.strategies import FUZZ, batches, packed_options, padded_options
from torch_collate_kit import (
    Batch,
    DataError,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    StateError,
    TokenizedDataset,
    audit,
    token_logps,
    token_loss,
    unpack,
)
from torch_collate_kit.loading import Mixture, map_segments
from torch_collate_kit.losses import (
    ModelWithLoss,
    global_num_examples,
    global_num_loss_tokens,
    segment_pool,
    segment_sums,
    sums_by,
    trained_values,
)

WORKED = [{"input_ids": [5, 6, 7], "labels": [2, -100, 1]}, {"input_ids": [8], "labels": [0]}]
CLASSES = [{"input_ids": [5, 6, 7], "label": 2}, {"input_ids": [8], "label": 0}]
LABEL = {"label": PerExample(torch.int64)}
ROLLOUT = {"prompt_ids": [5], "response_ids": [6], "rewards": 1.0, "loss_mask": [1]}


class Ends:
    """A tokenizer, as far as collators ask it."""

    pad_token_id, eos_token_id = 0, 9


def same(**options: Any) -> PackedCollator:
    return PackedCollator(0, **{"max_tokens": 8, "targets": "same_token", **options})


def nothing(**options: Any) -> PackedCollator:
    return PackedCollator(0, **{"max_tokens": 8, "targets": None, "fields": LABEL, **options})


def _drawn(data: st.DataObject, targets: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Examples for a collator with these targets: as they are given, and plain ones."""
    drawn = data.draw(batches("labels" if targets else "none", columns=bool(targets)))
    if targets is None:
        drawn.given[:] = [{k: v for k, v in of.items() if k != "weight"} for of in drawn.given]
        drawn.plain[:] = [{"input_ids": of["input_ids"]} for of in drawn.plain]
    return drawn.given, drawn.plain


def _check(batch: Batch, expected: dict[str, Any], targets: Any, data: st.DataObject) -> None:
    assert_equals_oracle(batch, expected)
    assert_contract_dtypes(batch)
    assert_round_trips(batch, data.draw(st.integers(0, len(batch))))
    generator = torch.Generator().manual_seed(len(batch))
    values = torch.randn(*batch["input_ids"].shape, 3, generator=generator, dtype=torch.float64)
    weights = torch.randint(0, 3, values.shape[:2], generator=generator)
    for how, of in (("first", None), ("last", None), ("mean", None), ("mean", weights)):
        found = segment_pool(values, batch, how=how, weights=of)
        torch.testing.assert_close(found, pooled(values, expected, how, of), rtol=0, atol=1e-12)
    if targets is None or batch["labels"].max() > 2:
        return
    found = token_loss(values, batch, num_loss_tokens=1) / batch.metadata["loss_mask_divisor"]
    log_probs = values.log_softmax(-1)
    torch.testing.assert_close(found, token_losses(log_probs, expected, targets))


@FUZZ
@given(data=st.data(), targets=st.sampled_from(["same_token", "same_token", None]))
def test_packed_rows_equal_the_oracle(data: st.DataObject, targets: Any) -> None:
    given, plain = _drawn(data, targets)
    lengths = [len(example["input_ids"]) for example in plain]
    overflow = None if targets else data.draw(st.sampled_from(("raise", "truncate", "drop")))
    options = data.draw(packed_options(lengths, overflow=overflow))
    layout = ParallelLayout(**options.layout)
    collate = packed_collator(0, parallel=layout, targets=targets, **options.collator)
    kept = {k: options.collator[k] for k in ("max_tokens", "fixed_width", "normalize_loss")}
    aligns = {"align": options.align, "row_align": options.row_align}
    plan = collate.plan(lengths)
    expected = packed_batch(plain, plan, pad_token_id=0, targets=targets, **kept, **aligns)
    _check(collate(given), expected, targets, data)


@FUZZ
@given(data=st.data(), targets=st.sampled_from(["same_token", "same_token", None]))
def test_padded_rows_equal_the_oracle(data: st.DataObject, targets: Any) -> None:
    given, plain = _drawn(data, targets)
    options = data.draw(padded_options([len(example["input_ids"]) for example in plain]))
    batch = PaddedCollator(0, targets=targets, **options)(given)
    _check(batch, padded_batch(plain, pad_token_id=0, targets=targets, **options), targets, data)


@FUZZ
@given(st.data())
def test_losses_of_labels_that_are_classes(data: st.DataObject) -> None:
    """Weights, pieces of split texts, through the head and not, alone and summed by segments."""
    numbers = data.draw(st.lists(st.lists(st.integers(-1, 4), min_size=1, max_size=9), min_size=1))
    examples: list[dict[str, Any]] = [
        {"input_ids": [50 + n for n in of], "labels": [-100 if n < 0 else n for n in of]}
        for of in numbers
    ]
    if data.draw(st.booleans()):
        for i, example in enumerate(examples):
            example["weight"] = (0.5, 2, 0, 1)[i % 4]
    split = data.draw(st.booleans())
    collate = same(overflow="split" if split else "raise", max_tokens=4 if split else 12)
    if data.draw(st.booleans()):
        side = data.draw(st.sampled_from(["left", "right"]))
        collate = PaddedCollator(0, targets="same_token", padding_side=side)
    batch = collate(examples)
    torch.manual_seed(len(examples))
    hidden = torch.randn(*batch["input_ids"].shape, 4, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(4, 5, dtype=torch.float64)
    logits = head(hidden)
    wanted = token_losses(logits.log_softmax(-1), batch, "same_token")
    total = sum(  # by examples, not by cells: nothing is lost or doubled by a split
        example.get("weight", 1) * (label != -100)
        for example in examples
        for label in example["labels"]
    )
    torch.testing.assert_close(
        float(batch["loss_mask"].double().sum()) * batch.metadata["loss_mask_divisor"],
        float(total),
        rtol=1e-6,
        atol=0,
    )
    divisor = batch.metadata["loss_mask_divisor"]
    wanted = wanted * divisor
    for options in ({}, {"head": head}):
        values = hidden if options else logits
        found = token_loss(values, batch, num_loss_tokens=1, **options)
        torch.testing.assert_close(found, wanted)
        logps = token_logps(values, batch, **options)
        weights = trained_values(batch["loss_mask"].double(), batch)
        torch.testing.assert_close(-(logps * weights).sum() * divisor, wanted)
        assert segment_sums(logps, batch).sum().isclose(logps.sum())
    assert global_num_loss_tokens(batch) == batch.metadata["num_loss_tokens"] == len(logps)
    _, outputs = token_loss(logits, batch, num_loss_tokens=1, return_per_token_outputs=True)
    whole = [torch.cat(parts) for parts in _by_example(batch, logits.log_softmax(-1), examples)]
    for nll, log_probs, example in zip(outputs.nll, whole, examples, strict=True):
        labels = torch.tensor(example["labels"])
        if example.get("weight", 1) == 0:
            labels = torch.full_like(labels, -100)
        picked = -log_probs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        expected = torch.where(labels == -100, 0, picked).float()
        torch.testing.assert_close(torch.from_numpy(nll), expected.detach())


def _by_example(batch: Batch, values: torch.Tensor, examples: list[Any]) -> list[Any]:
    return [[of] for of in unpack(values, batch)]


def test_the_worked_example_of_the_contract() -> None:
    batch = same(strategy="sequential")(WORKED)
    assert batch["labels"].tolist() == [[2, -100, 1, 0]]
    assert (batch["loss_mask"] * 3).tolist() == [[1, 0, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0]]
    assert batch.metadata["response_length"] == 4
    logits = torch.randn(1, 4, 3, dtype=torch.float64)
    log_probs = logits.log_softmax(-1)[0]
    wanted = -(log_probs[0, 2] + log_probs[2, 1] + log_probs[3, 0]) / 3
    torch.testing.assert_close(token_loss(logits, batch, num_loss_tokens=3), wanted)
    # plain labels are next tokens, whatever they come from
    by_labels = token_loss(logits, batch["labels"], num_loss_tokens=3)
    expected = -(log_probs[1, 1] + log_probs[2, 0]) / 3
    torch.testing.assert_close(by_labels, expected)
    assert global_num_loss_tokens(batch["labels"]) == 2
    assert "3 trained" in repr(batch).replace("\n   ", "")
    assert batch.explain(0).columns["weight"] == [1, 0, 1, 1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_mask_has_a_column_for_every_cell_of_padded_rows(side: Any) -> None:
    collate = PaddedCollator(0, targets="same_token", padding_side=side, pad_to_multiple_of=4)
    batch = collate(WORKED)
    assert batch["loss_mask"].shape == batch["input_ids"].shape == (2, 4)
    assert batch.metadata["response_length"] == 4


def test_the_batch_carries_its_targets_through_changes_of_rows() -> None:
    collate = same(strategy="sequential", max_tokens=4, fixed_width=True)
    batch = collate([*WORKED, *WORKED])
    logits = torch.randn(*batch["input_ids"].shape, 3)
    whole = token_loss(logits, batch, num_loss_tokens=6)
    sent = pickle.loads(pickle.dumps(batch))
    assert token_loss(logits, sent, num_loss_tokens=6) == whole
    parts = [batch[0:1], batch.select([1])]
    losses = [token_loss(logits[i : i + 1], of, num_loss_tokens=6) for i, of in enumerate(parts)]
    torch.testing.assert_close(sum(losses), whole)
    joined = Batch.cat(parts)
    torch.testing.assert_close(token_loss(logits, joined, num_loss_tokens=6), whole)
    padded = batch.pad_rows(multiple_of=3)
    more = torch.cat([logits, torch.randn(1, 4, 3)])
    torch.testing.assert_close(token_loss(more, padded, num_loss_tokens=6), whole)
    assert len(segment_pool(more, padded, how="first")) == 4
    doubled = batch.with_fields(loss_mask=2 * batch["loss_mask"])
    torch.testing.assert_close(token_loss(logits, doubled, num_loss_tokens=6), 2 * whole)
    every = batch.with_fields(loss_mask=torch.ones(2, 4))  # a token without a label has no loss
    assert len(token_logps(logits, every)) == global_num_loss_tokens(every) == 6
    outputs = token_loss(logits, every, num_loss_tokens=6, return_per_token_outputs=True)[1]
    assert [of[1] for of in outputs.nll if len(of) == 3] == [0, 0]
    masked = every.with_fields(labels=torch.ones(2, 4).long())  # of pads, as if drawn
    assert len(token_logps(logits, masked)) == global_num_loss_tokens(masked) == masked.num_tokens
    assert torch.equal(
        segment_sums(torch.ones(masked.num_tokens), masked),
        masked["sub_seq_lengths"].values.float(),
    )
    with pytest.raises(ValueError, match=r"with targets='next_token', batch 0 with 'same_token'"):
        Batch.cat([batch, PackedCollator(0, max_tokens=4, fixed_width=True)(WORKED)])


@pytest.mark.parametrize("side", ["left", "right"])
def test_micro_batches_of_padded_rows_keep_their_loss(side: Any) -> None:
    from torch_collate_kit.rl import micro_batches, stage_mini_batches

    examples = [{"input_ids": [9] * n, "labels": [n % 3] * n} for n in (7, 2, 3, 5)]
    batch = PaddedCollator(0, targets="same_token", padding_side=side)(examples)
    staged = stage_mini_batches(batch, [0, 4], dp_size=1)[0][0]
    losses = []
    for part in micro_batches(staged, max_tokens=8):
        assert part["loss_mask"].shape == part["input_ids"].shape
        logits = part["input_ids"][..., None] * torch.tensor([0.1, 0.2, 0.3])
        losses.append(token_loss(logits, part, num_loss_tokens=17))
    logits = batch["input_ids"][..., None] * torch.tensor([0.1, 0.2, 0.3])
    torch.testing.assert_close(sum(losses), token_loss(logits, batch, num_loss_tokens=17))


# --- samplers and streams ------------------------------------------------------------------------

LONGER = [
    {"input_ids": [7] * n, "labels": [1] + [-100] * (n - 2) + [2] * (n > 1)} for n in (3, 1, 6, 2)
]


@pytest.mark.parametrize("kind", ["dataset", "mixture", "lengths"])
@pytest.mark.parametrize("by", [{"batch_size": 4}, {"batch_rows": 2, "window": 1}])
def test_samplers_count_by_the_targets_of_their_collator(kind: str, by: dict[str, int]) -> None:
    data = TokenizedDataset(LONGER)
    assert data.num_loss_tokens.tolist() == [1, 0, 1, 1]  # its own count stays next-token
    collate = same(parallel=ParallelLayout(dp=2))
    given: Any = {"dataset": data, "mixture": Mixture([data]), "lengths": data.lengths}[kind]
    counts = {"num_loss_tokens": [2, 1, 2, 2]} if kind == "lengths" else {}
    found = []
    for rank in (0, 1):
        sampler = PackedBatchSampler(
            given, collate, dp_rank=rank, shuffle=False, tail="keep", **by, **counts
        )
        batches = [collate(data.__getitems__(part)) for part in sampler]
        found += [
            (of.metadata["num_loss_tokens"], int(global_num_loss_tokens(of))) for of in batches
        ]
    assert sum(own for _, own in found) == 7
    assert {planned for planned, _ in found} == {7}


def test_wrapped_rows_of_labels_count_every_token_that_has_one() -> None:
    rows = [{"input_ids": [5, 5, 9], "labels": [1, 2, 0]}, {"input_ids": [6, 9], "labels": [1, 0]}]
    data = TokenizedDataset(rows)

    two = ParallelLayout(dp=2)
    collate = PackedCollator(
        Ends(), max_tokens=2, strategy="wrapped", parallel=two, targets="same_token"
    )
    for isolate in (True, False):
        collate = PackedCollator(
            Ends(), max_tokens=2, strategy="wrapped", isolate=isolate, parallel=two,
            targets="same_token",
        )  # fmt: skip
        parts = [
            collate(data.__getitems__(part))
            for rank in (0, 1)
            for part in PackedBatchSampler(data, collate, batch_size=2, dp_rank=rank, shuffle=False)
        ]
        assert {part.metadata["num_loss_tokens"] for part in parts} == {5}
        assert sum(int(global_num_loss_tokens(part)) for part in parts) == 5
        assert parts[0]["labels"].tolist()[0] == [1, 2]
    rows[0]["labels"] = [1, -100, 0]
    with pytest.raises(ValueError, match="not all tokens of example 0 are trained"):
        PackedBatchSampler(TokenizedDataset(rows), collate, batch_size=2, dp_rank=0)


@pytest.mark.parametrize("source", [LONGER, [*LONGER, {"input_ids": [7] * 9, "labels": [1] * 9}]])
def test_streams_follow_their_collator(source: Any) -> None:
    collate = same(overflow="split", normalize_loss=False)
    stream = PackedIterableDataset(source, collate, batch_rows=1, buffer_size=4)
    found = list(stream)
    trained = sum(label != -100 for example in source for label in example["labels"])
    assert sum(batch.metadata["num_loss_tokens"] for batch in found) == trained
    state = PackedIterableDataset(source, collate, batch_rows=1, buffer_size=4).state_dict()
    other = PackedIterableDataset(
        source, PackedCollator(0, max_tokens=8, overflow="split", normalize_loss=False),
        batch_rows=1, buffer_size=4,
    )  # fmt: skip
    with pytest.raises(StateError, match="targets='same_token', the dataset has targets=None"):
        other.load_state_dict(state)


def test_without_targets_per_token_nothing_counts_tokens() -> None:
    data = TokenizedDataset(CLASSES, columns=["input_ids", "label"])
    collate = nothing(parallel=ParallelLayout(dp=2))
    batches = [
        collate(data.__getitems__(part))
        for rank in (0, 1)
        for part in PackedBatchSampler(data, collate, batch_size=2, dp_rank=rank, shuffle=False)
    ]
    assert int(global_num_examples(batches)) == 2
    assert sorted(n for batch in batches for n in batch["label"].values.tolist()) == [0, 2]
    for batch in batches:
        assert not {"labels", "loss_mask"} & set(batch)
        assert not {"num_loss_tokens", "loss_mask_divisor"} & set(batch.metadata)
        assert "trained" not in repr(batch) + str(batch.explain(0)).splitlines()[0]
    empty = PackedBatchSampler(data, collate, batch_size=1, dp_rank=1, shuffle=False)
    assert not len(collate(data.__getitems__(next(iter(empty))))["label"].values)
    (stream,) = PackedIterableDataset(CLASSES, nothing(), batch_rows=1, buffer_size=4)
    assert stream["label"].values.tolist() == [2, 0]
    (batch,) = [nothing(strategy="sequential")(CLASSES)]
    both = sums_by(torch.tensor([1.0, 4.0]), batch, "label", per="example")
    assert both == {0: (4.0, 1), 2: (1.0, 1)}


# --- pooling -------------------------------------------------------------------------------------


def test_pooled_vectors_have_the_gradients_of_their_cells() -> None:
    batch = nothing(strategy="sequential", fixed_width=True)(CLASSES)
    hidden = torch.randn(1, 8, 2, dtype=torch.float64, requires_grad=True)
    segment_pool(hidden, batch, how="mean").sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(
        hidden.grad[0, :, 0], torch.tensor([1 / 3] * 3 + [1.0] + [0] * 4, dtype=torch.float64)
    )
    half = hidden.detach().bfloat16().requires_grad_()
    assert segment_pool(half, batch, how="mean").dtype == torch.bfloat16
    hole = hidden.detach().clone()
    hole[0, 1] = float("inf")  # of weight 0: a prompt, or a pad
    weights = torch.tensor([[1, 0, 1, 0, 1, 1, 1, 1]])
    found = segment_pool(hole, batch, how="mean", weights=weights)
    torch.testing.assert_close(found[0], (hole[0, 0] + hole[0, 2]) / 2)
    assert found[1].tolist() == [0, 0]


@pytest.mark.parametrize("how", ["first", "last", "mean"])
def test_segments_of_examples_that_share_prefixes_are_pooled_along_their_paths(how: Any) -> None:
    lists = [{"input_ids": [[5, 6, 7], [5, 6, 8, 9], [4, 3]]}, {"input_ids": [[5, 1]]}]
    plain = PackedCollator(0, max_tokens=12, targets=None)(lists)
    tree = PackedCollator(0, max_tokens=12, targets=None, share_prefixes=True)(lists)
    assert tree.num_cells < plain.num_cells
    both = []
    for batch in (plain, tree):
        hidden = torch.stack([batch["input_ids"], batch["position_ids"]], -1).double()
        vectors = segment_pool(hidden, batch, how=how)
        keys = zip(
            batch.row_metadata["example_indices"].values.tolist(),
            batch.row_metadata["segment_numbers"].values.tolist(),
            strict=True,
        )
        both.append(dict(zip(keys, vectors.tolist(), strict=True)))
    assert both[0] == both[1]
    assert len(both[0]) == 4


def test_a_corpus_comes_back_in_the_order_of_its_examples() -> None:
    corpus = TokenizedDataset([{"input_ids": [n, n, 1]} for n in (9, 3, 7, 5)])
    collate = PackedCollator(0, max_tokens=6, targets=None, parallel=ParallelLayout(dp=2))

    def embed(batch: Batch) -> torch.Tensor:
        hidden = torch.stack([batch["input_ids"], batch["position_ids"]], -1).bfloat16()
        return segment_pool(hidden, batch, how="first")

    found = map_segments(embed, corpus, collate)
    assert (found.shape, found.dtype) == ((4, 1, 2), "float32")
    assert found[:, 0].tolist() == [[9, 0], [3, 0], [7, 0], [5, 0]]
    with pytest.raises(ValueError, match=r"shape \[2, 1, 2\] for 2 segments; return one number"):
        map_segments(lambda batch: embed(batch)[:, None], corpus, collate)


# --- bad inputs ----------------------------------------------------------------------------------

VALUES = torch.zeros(1, 4, 3)
BATCH = nothing(strategy="sequential")(CLASSES)
SAME = same(strategy="sequential")(WORKED)
IDS = {"input_ids": [5, 6]}
BAD = {
    "targets": (lambda: same(targets="in_place"), ValueError, "'next_token', 'same_token', None; got 'in_place'"),
    "train_all": (lambda: same(train_all=True), ValueError, "train_all=True trains next tokens, and targets='same_token'"),
    "train_all, padded": (lambda: PaddedCollator(0, targets=None, train_all=True), ValueError, "and targets=None"),
    "shared": (lambda: same(share_prefixes=True), ValueError, "a label of its own .* remove share_prefixes"),
    "split": (lambda: nothing(overflow="split"), ValueError, "overflow='split' cuts an example .*targets=None"),
    "wrapped": (lambda: PackedCollator(Ends(), max_tokens=4, strategy="wrapped", targets=None), ValueError, "strategy='wrapped' cuts an example"),
    "rollouts": (lambda: same()([ROLLOUT]), ValueError, "rollouts train the next tokens .* remove targets"),
    "rollouts, None": (lambda: nothing(fields=None)([ROLLOUT]), ValueError, "targets=None is for examples with input_ids"),
    "a mask": (lambda: same()([{**IDS, "labels": [1, 2]}, {**IDS, "labels": [1, 2]} | {"loss_mask": [1, 1]}]), DataError, "differ in loss_mask"),
    "only a mask": (lambda: same()([{**IDS, "loss_mask": [1, 1]}]), DataError, "example 0 has no labels, which targets=\"same_token\" reads"),
    "two targets": (lambda: same()([{**IDS, "labels": [1, 2], "assistant_masks": [1, 1]}]), DataError, "example 0 has assistant_masks; remove it"),
    "no labels": (lambda: same()([IDS]), DataError, "give every example one label per token, -100 where there is none"),
    "a short list": (lambda: same()([{**IDS, "labels": [1]}]), DataError, "example 0: labels has 1 entries, input_ids has 2 tokens"),
    "below 0": (lambda: same()([{**IDS, "labels": [1, -1]}]), DataError, "example 0: labels is -1 at token 1; a label is the id of a token or class"),
    "floats": (lambda: same()([{**IDS, "labels": [1.5, 2]}]), DataError, r"example 0: labels\[0\] is 1.5"),
    "labels with None": (lambda: nothing()([{**IDS, "labels": [1, 2], "label": 1}]), DataError, "example 0 has labels; .*targets=None: remove it, or declare"),
    "weight with None": (lambda: nothing()([{**IDS, "weight": 1, "label": 1}]), DataError, "example 0 has weight; .*under another name"),
    "label undeclared": (lambda: nothing(fields=None)(CLASSES), DataError, "fields={'label': PerExample.*targets=None"),
    "label, default": (lambda: TokenizedDataset(CLASSES), DataError, r"columns=\['input_ids', 'label'\]"),
    "loss of none": (lambda: token_loss(VALUES, BATCH, num_loss_tokens=1), ValueError, "targets=None, so no token has a target; pool .*segment_pool"),
    "logps of none": (lambda: token_logps(VALUES, BATCH), ValueError, "segment_pool"),
    "sums of none": (lambda: segment_sums(torch.zeros(0), BATCH), ValueError, "segment_pool"),
    "values of none": (lambda: trained_values(VALUES, BATCH), ValueError, "segment_pool"),
    "count of none": (lambda: global_num_loss_tokens(BATCH), ValueError, "global_num_examples"),
    "shard": (lambda: SAME.context_shard(0, 2, layout="contiguous"), ValueError, "targets='same_token', and .*shards .* predict them"),
    "shard of none": (lambda: BATCH.context_shard(0, 2, layout="contiguous"), ValueError, "targets=None"),
    "a name": (lambda: SAME.model_inputs("sdpa"), ValueError, r"does not say which way a model looks; pass the model: model_inputs\(model\)"),
    "no name": (lambda: BATCH.model_inputs(), ValueError, "targets=None"),
    "logits cut": (lambda: token_loss(VALUES[:, 1:], SAME, num_loss_tokens=1), ValueError, r"not shifted: \[1, 4, 'V'\]$"),
    "predicted": (lambda: unpack(VALUES[:, 1:], SAME), ValueError, r"give \[1, 4, \.\.\.\], one entry per cell$"),
    "a narrower mask": (lambda: SAME.with_fields(loss_mask=torch.ones(1, 3)), ValueError, r"shape \[1, 3\], and of these rows it is \[1, 4\]"),
    "how": (lambda: segment_pool(VALUES, BATCH, how="max"), ValueError, "how must be one of 'first', 'last', 'mean'; got 'max'"),
    "one vector per row": (lambda: segment_pool(VALUES[:, 0], BATCH, how="mean"), ValueError, r"hidden has shape \[1, 3\], the batch has 1 rows of 4 cells; .*pooler_output"),
    "weights of first": (lambda: segment_pool(VALUES, BATCH, how="first", weights=VALUES[..., 0]), ValueError, "factors in a mean, and how='first'"),
    "other weights": (lambda: segment_pool(VALUES, BATCH, how="mean", weights=torch.ones(4)), ValueError, r"weights have shape \[4\], the batch has 1 x 4 cells; pass \[1, 4\]"),
    "ids": (lambda: segment_pool(BATCH["input_ids"], BATCH, how="mean"), TypeError, "hidden must be a tensor of floats"),
    "no batch": (lambda: segment_pool(VALUES, {}, how="mean"), TypeError, "batch must be the Batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_is_wrong(name: str) -> None:
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


def test_a_mask_wider_than_next_tokens_is_an_error_with_both_widths() -> None:
    batch = PackedCollator(0, max_tokens=8)(WORKED)
    logits = torch.zeros(1, 4, 9)
    with pytest.raises(ValueError, match=r"shape \[1, 4\], and of these rows it is \[1, 3\]"):
        batch.with_fields(loss_mask=torch.ones(1, 4))
    tensors = Batch({**dict(batch), "loss_mask": torch.ones(1, 4)}, row_metadata=batch.row_metadata)
    same_token = Batch(dict(SAME), row_metadata=SAME.row_metadata)
    for wide in (tensors, same_token):
        for call in (
            lambda wide=wide: token_loss(logits, wide, num_loss_tokens=1),
            lambda wide=wide: token_logps(logits, wide),
        ):
            with pytest.raises(
                ValueError, match="loss_mask has 4 columns, rows have 4 cells.*same_t"
            ):
                call()


def test_a_head_behind_other_layers_is_not_taken_for_the_whole() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    trained = ModelWithLoss(transformers.BertForMaskedLM(config))
    with pytest.raises(ValueError, match="layers of ForMaskedLM before it"):
        trained(same()(WORKED), num_loss_tokens=3)


def test_an_audit_checks_what_holds_for_these_targets() -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [5, 6, 7, 8], "labels": [1, -100, 1, 1]}] * 2
    rows.append({"input_ids": [5, 6], "labels": [-100, -100]})
    report = audit(rows, targets="same_token", max_tokens=3)
    found = ["text_longer_than_positions", "one_class", "no_trained_token", "duplicates"]
    assert report.names == found
    assert report["text_longer_than_positions"].rows.tolist() == [0, 1]
    assert report.not_checked["labels_not_input_ids"] == "targets='next_token'"
    classes: list[dict[str, Any]] = [{"input_ids": [5, n], "label": n % 2} for n in range(4)]
    assert audit(classes, targets=None, max_tokens=2).ok
    report = audit([*classes, {"input_ids": [5, 9]}], targets=None)
    assert "the others have no loss target, label" in report["refused"].example
    data = TokenizedDataset(classes[::2], columns=["input_ids", "label"])
    assert audit(data, targets=None).names == ["one_class"]
    with pytest.raises(
        ValueError, match="targets=None is for examples with input_ids, and the rows"
    ):
        audit([ROLLOUT], targets=None)
