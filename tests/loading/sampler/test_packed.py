"""PackedBatchSampler: the ranks' batches, one below the other, are the controller's batch."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from tests.building import ForTrainer, packed_collator, packed_sampler
from tests.loading.hang_guard import fails_when_it_hangs, our_threads
from tests.strategies import FORMS, FUZZ, DrawnBatch, PackedOptions, batches, packed_options
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading import (
    Mixture,
    PackedBatchSampler,
    PrefetchingSampler,
    TokenizedDataset,
)
from torch_collate_kit.packing import ParallelLayout, RankPlan

EXAMPLES = [
    {"input_ids": list(range(10 * i, 10 * i + 1 + i % 5)), "loss_mask": [i % 2] * (1 + i % 5)}
    for i in range(13)
]
LENGTHS = [1 + i % 5 for i in range(13)]
DATASET = TokenizedDataset(EXAMPLES)
TWO = ParallelLayout(dp=2)
OF_4: dict[str, Any] = {"examples": [8, 9], "batch_size": 1, "parallel": ParallelLayout(tp=4)}


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    with fails_when_it_hangs():
        yield
    assert our_threads() == []


def make_sampler(examples: Any = LENGTHS, **options: Any) -> PackedBatchSampler:
    return packed_sampler(
        examples, **{"batch_size": 4, "max_tokens": 8, "parallel": TWO, "seed": 3, **options}
    )


def make_collator(**options: Any) -> PackedCollator:
    return packed_collator(
        0, **{"max_tokens": 8, "parallel": TWO, "normalize_loss": False, **options}
    )


def sampler_of(
    drawn: DrawnBatch, options: PackedOptions, rank: int, **more: Any
) -> PackedBatchSampler:
    names = ("max_tokens", "strategy", "overflow", "max_sequences_per_row", "balance")
    chosen = {name: options.collator[name] for name in names}
    layout = ParallelLayout(**options.layout)
    return packed_sampler(drawn.lengths, parallel=layout, dp_rank=rank, **chosen, **more)


@pytest.mark.parametrize("form", FORMS)
@FUZZ
@given(data=st.data())
def test_the_ranks_together_are_the_controller(form: str, data: st.DataObject) -> None:
    """Every field, dtype and entry of metadata: what `chunk` of the controller's batch gives."""
    drawn = data.draw(batches(form))
    options = data.draw(packed_options(drawn.lengths))
    dataset = TokenizedDataset(drawn.plain)
    layout = ParallelLayout(**options.layout)
    is_cut = max(drawn.lengths) > options.capacity
    is_cut = is_cut and options.collator["overflow"] in ("truncate", "split")
    counts = None if is_cut else dataset.num_loss_tokens
    normalize = options.collator["normalize_loss"] and not is_cut
    collate = packed_collator(
        7, parallel=layout, **{**options.collator, "normalize_loss": normalize}
    )
    batch_size = data.draw(st.integers(1, len(drawn.plain) + 2))
    order = {"batch_size": batch_size, "seed": data.draw(st.integers(0, 5))}

    whole = list(PrefetchingSampler(len(drawn.plain), **order))
    parts = [
        list(sampler_of(drawn, options, rank, num_loss_tokens=counts, **order))
        for rank in range(layout.dp)
    ]
    assert [len(steps) for steps in parts] == [len(whole)] * layout.dp
    for step, indices in enumerate(whole):
        controller = collate([drawn.plain[i] for i in indices])
        ranks = [collate(dataset.__getitems__(steps[step])) for steps in parts]
        read = [i for steps in parts for i in steps[step].indices]
        kept = [i for at, i in enumerate(indices) if at not in controller.metadata["dropped"]]
        assert set(read) == set(kept)
        assert len(read) == len(kept) or is_cut  # a split example may lie on two ranks
        known = {}
        if counts is None:  # then each rank counts its own
            total = sum(rank.metadata["num_loss_tokens"] for rank in ranks)
            assert total == controller.metadata["num_loss_tokens"]
            known = {"num_loss_tokens": total}
            for rank in ranks:
                rank.metadata |= known
        assert ranks == controller.chunk(layout.dp)
        assert Batch.cat(ranks, known) == controller


def test_written_out_by_hand():
    sampler = packed_sampler(
        [3, 1, 4, 2], batch_size=4, max_tokens=8, parallel=TWO, dp_rank=1, shuffle=False
    )
    (part,) = sampler
    assert part.plan.bins == [[2, 1], [0, 3]]
    assert part.indices == [0, 3]
    dataset = TokenizedDataset([{"input_ids": [n] * n} for n in (3, 1, 4, 2)])
    batch = make_collator()(dataset.__getitems__(part))
    assert batch["input_ids"].tolist() == [[3, 3, 3, 2, 2]]
    assert batch.row_metadata["example_indices"].tolist() == [[0, 3]]
    assert batch.metadata["num_loss_tokens"] == 3  # of this rank
    assert batch.metadata["num_examples"] == 4
    assert batch.step.num_tokens == 10


class _OwnDataset(Dataset):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return EXAMPLES[index]

    def __getitems__(self, indices: Any) -> Any:
        return indices.with_examples([self[i] for i in indices.indices])


def test_a_dataset_of_ones_own():
    (mine, *_), (theirs, *_) = (
        list(
            DataLoader(
                dataset, batch_sampler=make_sampler(shuffle=False), collate_fn=make_collator()
            )
        )
        for dataset in (_OwnDataset(), DATASET)
    )
    assert mine == theirs


@pytest.mark.parametrize("dataset", [EXAMPLES, datasets.Dataset.from_list(EXAMPLES)])
def test_a_dataset_that_would_lose_the_plan_is_an_error(dataset):
    loader = DataLoader(dataset, batch_sampler=make_sampler(), collate_fn=make_collator())
    with pytest.raises(TypeError, match=r"wrap it: TokenizedDataset\(dataset\), or give it a"):
        next(iter(loader))


@pytest.mark.parametrize("overflow", ["truncate", "split", "drop"])
def test_counts_of_examples_that_are_cut(overflow):
    def make() -> PackedBatchSampler:
        counts = DATASET.num_loss_tokens
        return make_sampler(max_tokens=4, overflow=overflow, num_loss_tokens=counts)

    if overflow == "drop":
        whole = list(PrefetchingSampler(13, batch_size=4, seed=3))
        kept = [[i for i in step if LENGTHS[i] <= 4] for step in whole]
        counts = [DATASET.num_loss_tokens[step].sum() for step in kept]
        assert [part.num_loss_tokens for part in make()] == counts
        assert sum(counts) < DATASET.num_loss_tokens.sum(), "what is dropped has loss tokens too"
        parts = [part for part in make() if len(part.plan.dropped)]
        assert parts
        collate = make_collator(max_tokens=4, normalize_loss=True)
        for part in parts:
            plan = part.plan
            assert set(plan.example_indices.tolist()).isdisjoint(plan.dropped.tolist())
            assert collate(DATASET.__getitems__(part)).metadata["num_dropped"] == len(plan.dropped)
        return
    message = r"left of example 4, cut to 4 tokens by overflow='\w+'; cut it when tokenizing, or co"
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": 4}, DataError, r"example 4 has 5 tokens, more than the 4 that .*overflow="),
        ({"dp_rank": 2}, ValueError, r"dp_rank must be below parallel\.dp=2, got 2"),
        ({"parallel": 2}, TypeError, r"must be a ParallelLayout, got 2; ParallelLayout\(dp=2\)"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": 14, "tail": "drop"}, ValueError, "tail='drop' leaves no step; lower"),
        ({"num_loss_tokens": [1, 2]}, ValueError, r"one int for each of the 13 examples, got"),
        ({"num_loss_tokens": [0.5] * 13}, ValueError, r"one int for each of the 13 examples, got"),
        ({"num_loss_tokens": LENGTHS}, DataError, "example 0 has num_loss_tokens=1 of 1 tokens; "),
        ({"num_loss_tokens": [-1] * 13}, DataError, "example 0 has num_loss_tokens=-1 of 1 tokens"),
        ({"examples": [3, 0]}, DataError, "example 1 has length 0, but a length must be at least"),
        ({"examples": []}, ValueError, r"^examples must be at least 1"),
        ({"examples": EXAMPLES}, TypeError, r"^lengths is a list( of examples|, not its lengths)"),
        ({"max_tokens": 10, **OF_4}, DataError, "example 1 has 9 tokens, more than the 8 that"),
        (
            {"max_tokens": 10, **OF_4, "num_loss_tokens": [7, 8], "overflow": "split"},
            ValueError,
            "left of example 1, cut to 8 tokens by overflow='split'",
        ),
        (
            {"examples": DATASET, "max_tokens": 4, "overflow": "truncate"},
            ValueError,
            "it is not known how many loss tokens are left",
        ),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        make_sampler(**options)


OTHERS = [
    {"max_tokens": 9},
    {"parallel": ParallelLayout(dp=2, tp=2)},
    {"parallel": ParallelLayout(dp=4)},
]


@pytest.mark.parametrize("other", OTHERS)
def test_a_plan_of_another_collator_is_refused(other):
    part = next(iter(make_sampler()))
    plan = r"planned for \{'max_tokens': 8, 'align': 1, 'rows_multiple_of': 2\}, this collator has "
    message = plan + r"\{.*give the sampler the collator of the DataLoader"
    with pytest.raises(ValueError, match=message):
        make_collator(**other)(DATASET.__getitems__(part))


def test_a_mask_cannot_be_divided_by_what_is_not_known():
    with pytest.raises(ValueError, match=r"bare lengths do not tell; pass a TokenizedDataset, or"):
        make_sampler(normalize_loss=True)
    part = next(iter(make_sampler()))
    with pytest.raises(ValueError, match="was planned with normalize_loss=False, this collator"):
        make_collator(normalize_loss=True)(DATASET.__getitems__(part))
    one = ParallelLayout()
    part = next(iter(make_sampler(parallel=one, normalize_loss=True)))
    batch = make_collator(parallel=one, normalize_loss=True)(DATASET.__getitems__(part))
    assert batch.metadata["loss_mask_divisor"] == max(1, batch.metadata["num_loss_tokens"])


def test_a_dataset_has_lengths_loss_tokens_and_fingerprint():
    counts = DATASET.num_loss_tokens
    of_lengths = list(make_sampler(num_loss_tokens=counts))
    for mine, other in zip(make_sampler(DATASET), of_lengths, strict=True):
        assert mine.plan.bins == other.plan.bins
        assert mine.num_loss_tokens == other.num_loss_tokens
    edited = [
        {**EXAMPLES[4], "input_ids": [9] * 5} if i == 4 else e for i, e in enumerate(EXAMPLES)
    ]
    other = make_sampler(TokenizedDataset(edited))
    with pytest.raises(StateError, match=r"^state is of fingerprint=|^state is of token_ids="):
        other.load_state_dict(make_sampler(DATASET).state_at(0, 1))
    other.load_state_dict(make_sampler(num_loss_tokens=counts).state_at(0, 1))  # ids unknown
    with pytest.raises(TypeError, match="are read from the TokenizedDataset; pass them only"):
        make_sampler(DATASET, num_loss_tokens=counts)


class Eos:
    pad_token_id, eos_token_id = 0, 9


PLAIN = TokenizedDataset([{"input_ids": [7] * n} for n in LENGTHS])
SPLIT = {"overflow": "split", "max_tokens": 4}
ENDED = TokenizedDataset([{"input_ids": [7] * n + [9]} for n in (1, 3, 2, 5, 4, 6)])
TREES = TokenizedDataset([{"input_ids": [[5] * 4, [6] * n]} for n in (1, 3, 2, 4)])
WRONG = TokenizedDataset([*EXAMPLES[:-1], {"input_ids": [1, 2], "loss_mask": [0, float("nan")]}])


@pytest.mark.parametrize("rows", [{"batch_size": 4}, {"batch_rows": 2}])
@pytest.mark.parametrize(
    ("examples", "options", "is_of_the_step"),
    [
        (DATASET, {}, True),
        (Mixture([DATASET, TokenizedDataset(EXAMPLES[1:6])]), {}, True),
        (PLAIN, {"overflow": "drop", "max_tokens": 4}, True),
        (TREES, {}, True),
        (LENGTHS, {}, False),
        (PLAIN, SPLIT, False),
        (PLAIN, {**SPLIT, "overflow": "truncate"}, False),
        (TREES, {"overflow": "drop", "max_tokens": 7, "share_prefixes": True}, True),
        (ENDED, {"strategy": "wrapped"}, False),
        (WRONG, {}, False),  # its example 12 raises at its batch, as ever
    ],
)
def test_loss_tokens_are_those_of_the_step_for_either_normalization(
    examples, options, is_of_the_step, rows
):
    if options.get("strategy") == "wrapped":
        rows = {"batch_rows": 2}
    chosen = {"max_tokens": 8, "parallel": TWO, "normalize_loss": False, **options}
    collate = packed_collator(Eos(), **chosen)
    data = DATASET if isinstance(examples, list) else examples
    ranks = [
        PackedBatchSampler(examples, collate, **rows, dp_rank=rank, seed=1) for rank in range(2)
    ]
    is_several = False
    for parts in zip(*ranks, strict=True):
        if data is WRONG and any(12 in part.indices for part in parts):
            continue
        batches = [collate(data.__getitems__(part)) for part in parts]
        own = [int(batch.row_metadata["num_trained"].values.sum()) for batch in batches]
        found = [batch.metadata["num_loss_tokens"] for batch in batches]
        assert found == ([sum(own)] * 2 if is_of_the_step else own)
        assert {batch.metadata["loss_mask_divisor"] for batch in batches} == {1}
        is_several |= min(own) > 0
    assert is_several


def test_loss_tokens_of_other_data_are_counted_by_rank_where_nothing_is_divided():
    """Examples that train other tokens than the sampler's are an error only if they are divided."""
    part = next(iter(make_sampler(DATASET, normalize_loss=False)))
    trained = [{"input_ids": [7] * LENGTHS[i], "weight": 0} for i in part.indices]
    batch = make_collator()(part.with_examples(trained))
    assert (batch.metadata["num_loss_tokens"], part.num_loss_tokens) == (0, 5)
    with pytest.raises(ValueError, match="was planned with normalize_loss=False, this collator"):
        make_collator(normalize_loss=True)(part.with_examples(trained))
    one = make_sampler(DATASET, normalize_loss=False, parallel=ParallelLayout())
    one.load_state_dict(make_sampler(DATASET, normalize_loss=False).state_at(0, 1))


def test_the_collator_may_be_held_by_another():
    collate = make_collator()
    plans = [
        next(iter(PackedBatchSampler(LENGTHS, given, batch_size=4))).plan.bins
        for given in (collate, ForTrainer(collate))
    ]
    assert plans[0] == plans[1]
    for wrong in (PaddedCollator(0), ForTrainer(PaddedCollator(0)), None):
        message = f"collate must be a PackedCollator, got a {type(wrong).__name__}: it says how"
        with pytest.raises(TypeError, match=message):
            PackedBatchSampler(LENGTHS, wrong, batch_size=4)


def test_lengths_and_counts_that_are_not_those_of_the_dataset():
    for length in (3, max(LENGTHS)):  # some of the sampler's are longer, then all are shorter
        rows = [{"input_ids": [1] * length, "loss_mask": [0] * (length - 1) + [1]}] * 13
        part = next(iter(make_sampler(shuffle=False)))
        message = rf"example \d of the dataset has {length} tokens, the sampler has"
        with pytest.raises(DataError, match=message):
            make_collator()(TokenizedDataset(rows).__getitems__(part))
    part = next(iter(make_sampler(num_loss_tokens=np.zeros(13, dtype=int), shuffle=False)))
    message = r"the examples at \[.*\] of the dataset have \d loss tokens, the sampler has 0;"
    with pytest.raises(DataError, match=message):
        make_collator()(DATASET.__getitems__(part))
    with pytest.raises(DataError, match=r"has 1 examples where \d were asked for"):
        make_collator()(part.with_examples(EXAMPLES[:1]))


@pytest.mark.parametrize("form", [list, TokenizedDataset])
def test_an_error_names_the_example_of_the_dataset(form):
    rows = [{**e, "loss_mask": [9, -1]} if i == 7 else e for i, e in enumerate(EXAMPLES)]
    parts = [next(iter(make_sampler(batch_size=13, dp_rank=rank))) for rank in (0, 1)]
    (part,) = [of for of in parts if 7 in of.indices]
    assert part.indices.index(7) < 7, "its place in the rank's batch is another number"
    planned = TokenizedDataset(rows).__getitems__(part)
    if form is list:
        planned = part.with_examples([rows[i] for i in part.indices])
    with pytest.raises(DataError, match=r"^example 7 of the dataset: loss_mask has 2 entries, inp"):
        make_collator()(planned)


def test_what_a_worker_is_sent_is_small():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2048, size=20_000)
    sampler = packed_sampler(
        lengths, batch_size=1024, max_tokens=4096, parallel=ParallelLayout(dp=8), dp_rank=3
    )
    part = next(iter(sampler))
    assert len(pickle.dumps(part)) < 60_000
    assert isinstance(pickle.loads(pickle.dumps(part)), RankPlan)


THREE: dict[str, Any] = {"examples": [2, 3, 4]}
ONES = np.ones(2**22, dtype=np.int64)  # lengths are hashed in blocks of 2**22
MANY: dict[str, Any] = {"batch_size": 2**20, "shuffle": False}
OTHER_LENGTHS = (
    r"^state is of lengths_digest='\w{32}', this sampler has lengths_digest='\w{32}'; build"
)
OTHER_COUNTS = r"^state is of loss_tokens_digest='\w{32}', this sampler"


@pytest.mark.parametrize(
    ("saved", "other", "message"),
    [
        ({}, {"batch_size": 2}, "batch_size=4, this sampler has batch_size=2"),
        ({}, {"seed": 4}, "seed=3, this sampler has seed=4"),
        (THREE, {"examples": [2, 3, 3]}, r"num_tokens=9, .* this sampler has num_tokens=8"),
        (THREE, {"examples": [2, 4, 3]}, OTHER_LENGTHS),
        (THREE, {"examples": [1, 4, 4]}, OTHER_LENGTHS),
        (THREE | {"num_loss_tokens": [1, 2, 3]}, THREE, OTHER_COUNTS),
        (
            THREE | {"num_loss_tokens": [1, 2, 3]},
            THREE | {"num_loss_tokens": [1, 1, 3]},
            OTHER_COUNTS,
        ),
        (
            MANY | {"examples": np.append(ONES, [1, 2])},
            MANY | {"examples": np.append(ONES, [2, 1])},
            OTHER_LENGTHS,
        ),
    ],
)
def test_a_state_of_another_run_is_refused(saved, other, message):
    state = json.loads(json.dumps(make_sampler(**saved).state_at(0, 1)))
    sampler = make_sampler(**other)
    before = sampler.state_dict()
    with pytest.raises(StateError, match=message):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before
    make_sampler(**saved).load_state_dict(state)


def test_counts_and_patches_are_copied_and_lengths_read_in_place():
    given = {"examples": np.array(LENGTHS), "num_loss_tokens": np.array(LENGTHS) - 1}
    given |= {"patches": np.ones(13, dtype=np.int64)}

    def planned(sampler: PackedBatchSampler) -> list[Any]:
        return [(p.plan.bins, p.num_loss_tokens, p.plan.atoms.patches.tolist()) for p in sampler]

    sampler, expected = make_sampler(**given), planned(make_sampler(**given))
    lengths = sampler._division.sizes.lengths
    assert np.shares_memory(lengths, given["examples"])
    assert not lengths.flags.writeable
    assert given["examples"].flags.writeable
    for name in ("num_loss_tokens", "patches"):
        given[name][:] = 7
    assert planned(sampler) == expected
