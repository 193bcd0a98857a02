"""Log-probs of trained tokens, and reductions over segments, against a loop over the examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from tests.devices import NoWaiting
from tests.ranks import on_two_ranks
from tests.test_losses import EXAMPLES, LAYOUTS, VOCABULARY, Model, examples_strategy
from torch_collate_kit import (
    Batch,
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    PrefetchingSampler,
    PrefetchLoader,
    RolloutCollator,
    TokenizedDataset,
    segment_sums,
    token_logps,
)
from torch_collate_kit.losses import (
    example_losses,
    global_num_examples,
    segment_ends,
    sums_by,
    trained_values,
)

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
    "collate",
    [
        PackedCollator(0, max_tokens=9),
        PackedCollator(0, max_tokens=8, parallel=ParallelLayout(tp=4)),
        PaddedCollator(0),
        PaddedCollator(0, padding_side="right"),
    ],
)
def test_a_mask_of_your_own_decides_what_is_trained(collate: Any) -> None:
    """What has no label is scored by its id; pads and first tokens are predicted by nothing."""
    batch = collate(PAIR)
    batch["loss_mask"].fill_(1)
    logits = torch.randn(*batch["input_ids"].shape, 6, generator=torch.Generator().manual_seed(0))
    logps = token_logps(logits, batch)
    assert segment_sums(torch.ones_like(logps), batch).tolist() == [2, 1]
    cells = batch.placement.first_cells()[[0, 0, 1]] + [0, 1, 0]
    ids = torch.tensor([i for one in PAIR for i in one["input_ids"][1:]])
    expected = logits.flatten(0, 1)[cells].log_softmax(1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logps, expected)


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
        (lambda: sums_by(ONES, BATCH, "x"), ValueError, "field 'x' of one value; declare it"),
        (lambda: sums_by(ONES, BATCH, "example_indices"), ValueError, "no PerExample field"),
        (
            lambda: sums_by(ONES, Batch(dict(PaddedCollator(0)(PAIR))), "x"),
            ValueError,
            "no PerExample field",
        ),
        (lambda: sums_by(ONES, BATCH, "x", per="row"), ValueError, "one of 'token', 'example'"),
    ],
)
def test_refuses(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@given(
    examples=examples_strategy,
    name=st.sampled_from(list(KINDS)),
    data=st.data(),
)
def test_against_a_loop(examples: Any, name: str, data: st.DataObject) -> None:
    batch, given_examples = collated(name, examples, normalize=False)
    model = Model()
    expected: dict[int, list[float]] = {}
    parts = loop(model, given_examples, batch)
    indices = batch.row_metadata["example_indices"].values.tolist()
    for i, part in zip(indices, parts, strict=True):
        expected.setdefault(i, []).extend(-value.item() for value in part)
    cut = data.draw(st.integers(1, len(batch)))
    rows = [batch] if cut == len(batch) else [batch[cut:], batch[:cut]]
    sums = [segment_sums(-token_logps(model(part), part), part) for part in rows]
    table = example_losses(sums, rows)
    assert table["example"].tolist() == sorted(expected)
    wanted = [sum(expected[i]) for i in sorted(expected)]
    np.testing.assert_allclose(table["loss"], wanted, rtol=1e-12, atol=1e-12)
    assert table["tokens"].tolist() == [len(expected[i]) for i in sorted(expected)]
    ones = [segment_sums(torch.ones_like(token_logps(model(p), p)), p) for p in rows]
    assert example_losses(ones, rows)["loss"].tolist() == table["tokens"].tolist()


# ---- with a sampler: the loss of a token is its id, so an example tells which one it is ----

IDS = [[i + 1] * (2 + i % 4) for i in range(24)]
SOURCES = ["web", "math"]


class Failing(TokenizedDataset):
    def __getitems__(self, indices: Any) -> Any:
        if 4 in getattr(indices, "indices", indices):
            raise OSError("broken")
        return super().__getitems__(indices)


def dataset(ids: list[list[int]], kind: type = TokenizedDataset) -> TokenizedDataset:
    return kind([{"input_ids": row} for row in ids], train_all=True)


def kept(kind: str, rank: int, steps: int = 3) -> tuple[list[Any], list[Batch], Any]:
    """The sums and the micro-batches of some steps of a rank of two, and its sampler."""
    data: Any = dataset(IDS)
    if "mixture" in kind:
        data = Mixture([dataset(IDS[:16]), dataset(IDS[16:])], names=SOURCES)
    if "failing" in kind:
        data = dataset(IDS, Failing)
    if "padded" in kind:
        collate: Any = PaddedCollator(0, train_all=True)
        sampler: Any = PrefetchingSampler(data, batch_size=7, seed=3, dp_rank=rank, dp_size=2)
    else:
        layout = ParallelLayout(dp=2)
        collate = PackedCollator(0, max_tokens=12, parallel=layout, train_all=True)
        sampler = PackedBatchSampler(data, collate, batch_size=7, seed=3, dp_rank=rank)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    sums, parts = [], []
    how = {"on_error": "skip"} if "failing" in kind else {}
    for batch in PrefetchLoader(loader, **how).steps(steps):
        for part in batch.split(1):
            values = trained_values(part["input_ids"], part).float()
            sums.append(segment_sums(values, part))
            parts.append(part)
    return sums, parts, sampler


@pytest.mark.parametrize("more", ["", " mixture", " failing"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_examples_are_those_of_the_dataset(layout: str, more: str) -> None:
    kind, seen = layout + more, []
    for rank in range(2):
        sums, parts, sampler = kept(kind, rank)
        table = example_losses(sums, parts, sampler=sampler)
        check_table(table, kind)
        seen += table["example"].tolist()
    expected = np.concatenate([sampler.examples(0, step) for step in range(3)])
    if "failing" in kind:
        assert 4 in expected
        expected = expected[expected != 4]
    assert sorted(seen) == sorted(expected.tolist())


def check_table(table: dict[str, np.ndarray], kind: str) -> None:
    examples = table["example"]
    counts = np.array([len(IDS[i]) - 1 for i in examples])
    assert table["tokens"].tolist() == counts.tolist()
    assert table["loss"].tolist() == ((examples + 1) * counts).tolist()
    assert ("source" in table) == ("mixture" in kind)
    if "mixture" in kind:
        assert table["source"].tolist() == [SOURCES[int(i >= 16)] for i in examples]


def on_rank(kind: str) -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sums, parts, sampler = kept(kind, rank)
    found = example_losses(sums, parts, sampler=sampler)
    none = example_losses(*((sums, parts) if rank else ([], [])), sampler=sampler)
    alone = dist.new_group([0]), dist.new_group([1])
    own = example_losses(sums, parts, sampler=sampler, group=alone[rank])
    try:  # both ranks' collators begin at 0
        example_losses(sums, parts)
        message = ""
    except ValueError as error:
        message = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return {"table": found, "own": own, "none": none["example"].tolist(), "message": message}


def test_two_processes_have_the_same_table() -> None:
    kind = "packed mixture"
    ranks = on_two_ranks(on_rank, kind)
    first, second = (rank["table"] for rank in ranks)
    for name, column in first.items():
        np.testing.assert_array_equal(column, second[name])
    check_table(first, kind)
    assert all("an example comes twice" in rank["message"] for rank in ranks)
    own = [rank["own"]["example"].tolist() for rank in ranks]
    assert sorted(own[0] + own[1]) == first["example"].tolist()
    assert own[0]
    assert ranks[0]["none"] == own[1], "a rank without batches has the table of the others"


def test_a_declared_source_pairs_and_a_mask_of_your_own() -> None:
    pairs = [
        {"input_ids": [[1, 2, 2], [1, 3]], "loss_mask": [[0, 1, 1], [0, 1]], "source": "a"},
        {"input_ids": [[1, 4], [1, 5]], "loss_mask": [[0, 1], [0, 0]], "source": "b"},
    ]
    for collate in (PackedCollator, PaddedCollator):
        options: Any = {"max_tokens": 9} if collate is PackedCollator else {}
        batch = collate(0, fields={"source": PerExample(str)}, **options)(pairs[::-1])
        values = trained_values(batch["input_ids"], batch).double()
        table = example_losses(segment_sums(values, batch), batch)
        assert {k: column.tolist() for k, column in table.items()} == {
            **{"example": [0, 1], "source": ["b", "a"], "loss": [4.0, 7.0], "tokens": [1, 3]}
        }
        batch["loss_mask"][...] = (batch["loss_mask"] != 0) & (
            batch["input_ids"][:, 1:][:, -batch["loss_mask"].shape[1] :] != 2
        )
        values = trained_values(batch["input_ids"], batch).double()
        table = example_losses(segment_sums(values, batch), batch)
        assert table["loss"].tolist() == [4.0, 3.0]
        assert table["tokens"].tolist() == [1, 1]


def test_no_batches_are_a_table_without_rows() -> None:
    table = example_losses([], [])
    assert {k: (len(of), of.dtype.kind) for k, of in table.items()} == {
        **{"example": (0, "i"), "loss": (0, "f"), "tokens": (0, "i")}
    }


def batch_of(**options: Any) -> Batch:
    return PackedCollator(0, max_tokens=8, **options)(
        [{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}]
    )


def test_bad_inputs() -> None:
    batch, two = batch_of(), torch.ones(2)
    sums, parts, sampler = kept("padded", 0)
    other = PrefetchingSampler(24, batch_size=9, seed=3)
    wrapped = PackedCollator(
        type("Tokenizer", (), {"pad_token_id": 0, "eos_token_id": 9}),
        max_tokens=8, strategy="wrapped", isolate=False, train_all=True,
    )([{"input_ids": [5, 9]}, {"input_ids": [7, 9]}])  # fmt: skip
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (
            (two[:1], batch),
            {},
            ValueError,
            r"^sums have shape \[1\], the batch has 2 segments",
        ),
        (([two], [batch, batch]), {}, ValueError, "^1 sums for 2 batches; pass one for each"),
        (([two] * 2, [batch] * 2), {}, ValueError, "^an example comes twice: the batches are of "),
        (([1, 2], batch), {}, TypeError, "^sums must be a tensor of floats, got list; pass those"),
        (([two], [dict(batch)]), {}, TypeError, "^batch must be the Batch that the collator"),
        ((two, batch.context_shard(0, 1)), {}, ValueError, "is the shard of context rank 0"),
        ((two[:1], wrapped), {}, ValueError, "^a segment of isolate=False has several examples"),
        ((two, batch), {"sampler": sampler}, ValueError, "^the batch has no epoch and step"),
        ((sums, parts), {"sampler": other}, ValueError, "^the batch has 4 examples, step 0 of epo"),
    ]
    for given_arguments, options, error, message in cases:
        with pytest.raises(error, match=message):
            example_losses(*given_arguments, **options)
