"""Wrong examples of a stream are left out: which, from which batch, how many at most."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.batch_checks import assert_same_batch
from tests.building import packed_stream
from tests.loading.streaming.streaming_oracle import (
    SETTINGS,
    StatefulSource,
    all_tokens,
    datasets,
    tokens_of,
)
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import PackedIterableDataset, PrefetchLoader, merge_states
from torch_collate_kit.testing import assert_exact_resume, batch_digest

LENGTHS = np.random.default_rng(3).integers(1, 9, size=60).tolist()
GOOD = [{"input_ids": np.arange(100 * i, 100 * i + n)} for i, n in enumerate(LENGTHS)]
UNREADABLE = (7, 8, 30, 58, 59)  # without a length, or longer than a row
WRONG = (3, 20, 21, 41)  # found when their batch is made


def examples() -> list[dict[str, Any]]:
    made = list(GOOD)
    for i in UNREADABLE:
        made[i] = {"input_ids": np.arange(13 if i == 30 else 0)}
    for i in WRONG:
        made[i] = {"input_ids": np.array([5, -9])}
    return made


dataset_of = datasets.Dataset.from_list
LEFT = [e for i, e in enumerate(GOOD) if i not in UNREADABLE + WRONG]
SOURCES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "list": list,
    "stateful": StatefulSource,
    "columns": dataset_of,
    "stream": lambda made: dataset_of(made).to_iterable_dataset(),
}
NAMED = sorted(UNREADABLE + WRONG)


def make(source: Any, **more: Any) -> PackedIterableDataset:
    return packed_stream(source, **SETTINGS | {"on_error": "skip"} | more)


def skipped_in(batches: list[Any]) -> list[int]:
    return [i for batch in batches for i in batch.metadata.get("skipped", [])]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("more", [{}, {"rows": 2}, {"strategy": "sequential"}])
def test_all_other_examples_are_given_out_and_what_is_not_is_named(
    name: str, more: dict[str, Any]
) -> None:
    batches = list(make(SOURCES[name](examples()), **more))
    assert tokens_of(batches) == all_tokens(LEFT)
    assert sorted(skipped_in(batches)) == NAMED
    assert sum(batch.metadata["num_examples"] for batch in batches) == len(LEFT)
    assert all(batch.metadata.get("skipped") != [] for batch in batches)


@pytest.mark.parametrize("name", SOURCES)
def test_until_the_first_wrong_example_nothing_changes(name: str) -> None:
    """Then the row of the wrong example lacks it, and all others are what they were."""
    found, expected = list(make(SOURCES[name](examples()))), []
    good = [{"input_ids": [6, 7]} if i in WRONG else e for i, e in enumerate(examples())]
    good = [e for i, e in enumerate(good) if i not in UNREADABLE]
    planned = list(packed_stream(good, **SETTINGS))
    assert len(found) == len(planned)
    for batch, whole in zip(found, planned, strict=True):
        wanted = [e for e in rows_of(whole) if e != [6, 7]]
        assert rows_of(batch) == wanted
        expected.append(whole.metadata["num_examples"] - len(wanted))
    assert sum(expected) == len(WRONG)


def rows_of(batch: Any) -> list[list[int]]:
    """The tokens of each example of a batch of one row."""
    lengths = batch["sub_seq_lengths"].tolist()[0]
    bounds = np.cumsum([0, *lengths])
    return [batch["input_ids"][0, a:b].tolist() for a, b in pairwise(bounds)]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("more", [{}, {"num_shards": 2}, {"buffer_size": 1}])
def test_exact_resume(name: str, more: dict[str, Any]) -> None:
    def stream() -> PackedIterableDataset:
        source = SOURCES[name](examples())
        one_for_each = more.get("num_shards") and name == "stateful"
        return make((lambda: StatefulSource(examples())) if one_for_each else source, **more)

    num_batches = len(list(stream()))
    assert_exact_resume(stream, num_steps=num_batches + 2, stops=range(0, num_batches + 2, 5))


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("first", [0, 5, 22, 31])
def test_a_run_that_an_example_has_ended_goes_on_without_it(name: str, first: int) -> None:
    source = SOURCES[name](examples()[first:])
    expected = list(make(source))
    found, state = given_before_the_error(make(source, on_error="raise"))
    assert len(found) < len(expected)
    resumed = make(source)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    for batch, wanted in zip([*found, *resumed], expected, strict=True):
        assert_same_batch(batch, wanted)


def given_before_the_error(dataset: PackedIterableDataset) -> tuple[list[Any], dict[str, Any]]:
    found: list[Any] = []
    batches = iter(dataset)
    while True:
        try:
            found.append(next(batches))
        except DataError:
            return found, dataset.state_dict()


def test_skipped_examples_are_counted_once_and_logged_once(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="torch_collate_kit.loading"):
        whole = list(make(examples()))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == len(UNREADABLE + WRONG)
    assert (
        "skipped: example 3 of the stream: input_ids is -9 at token 1; token ids are 0 or more "
        "(-100 belongs into labels) (1 of at most 100)" in texts
    )
    assert texts[-1].startswith("skipped: example 59 of the stream is empty")
    assert texts[-1].endswith("(9 of at most 100)")
    caplog.clear()
    num_given, texts_again = 0, []
    state = make(examples()).state_dict()
    for batch in whole:  # a new process for each
        dataset = make(examples())
        dataset.load_state_dict(json.loads(json.dumps(state)))
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="torch_collate_kit.loading"):
            assert_same_batch(next(iter(dataset)), batch)
        texts_again += [record.getMessage() for record in caplog.records]
        num_given += len(batch.metadata.get("skipped", []))
        state = dataset.state_dict()
        assert state["shards"]["0"].get("num_skipped", 0) == num_given
    assert texts_again == texts
    assert num_given == len(NAMED)


EMPTY, NEGATIVE = {"input_ids": np.arange(0)}, {"input_ids": np.array([5, -9])}


@pytest.mark.parametrize("last", [[EMPTY] * 3, [NEGATIVE] * 3, [NEGATIVE, EMPTY, EMPTY, NEGATIVE]])
@pytest.mark.parametrize(("name", "buffer_size"), [("list", 1), ("columns", 5), ("list", 40)])
def test_wrong_examples_after_the_last_batch_are_named_in_it(
    name: str, last: list[Any], buffer_size: int, caplog: Any
) -> None:
    data = [*GOOD[:12], *last]

    def stream() -> PackedIterableDataset:
        return make(SOURCES[name](data), buffer_size=buffer_size)

    batches = list(stream())
    assert tokens_of(batches) == all_tokens(GOOD[:12])
    assert sorted(skipped_in(batches)) == [*range(12, len(data))]
    assert_exact_resume(stream, num_steps=len(batches) + 2)
    saved, ended = stream(), stream()
    list(islice(saved, len(batches)))
    ended.load_state_dict(saved.state_dict())
    caplog.clear()
    assert list(ended) == []
    assert ended.state_dict() == saved.state_dict(), "nothing is counted twice"
    assert saved.state_dict()["shards"]["0"]["num_skipped"] == len(last)
    assert caplog.records == []
    with pytest.raises(DataError, match=f"{len(last)} examples are wrong, more than max_skipped="):
        list(make(SOURCES[name](data), buffer_size=buffer_size, max_skipped=len(last) - 1))


@pytest.mark.parametrize("wrong", [EMPTY, NEGATIVE])
@pytest.mark.parametrize("name", ["list", "columns"])
def test_a_shard_of_which_nothing_is_left_raises(name: str, wrong: Any) -> None:
    message = (
        "nothing is left of {}: all of its 3 examples are wrong; the last one: example {} of {}"
    )
    source = SOURCES[name]
    with pytest.raises(DataError, match=message.format("the stream", 2, "the stream")):
        list(make(source([wrong] * 3)))
    of_shard = "shard 1 of the stream"
    with pytest.raises(DataError, match=message.format(of_shard, 5, "the stream")):
        list(make(source([GOOD[0], wrong] * 3), num_shards=2))
    parts = [GOOD[:4], [wrong] * 3]
    with pytest.raises(DataError, match=message.format(of_shard, 2, of_shard)):
        list(make(lambda shard: source(parts[shard]), num_shards=2, presharded=True))


def test_a_rest_that_is_all_wrong_is_counted_at_the_end() -> None:
    """The last batch was given out by a run that raises, so no batch can name it."""
    data = [*GOOD[:3], EMPTY, NEGATIVE]
    found, state = given_before_the_error(make(data, on_error="raise", buffer_size=1, num_shards=1))
    resumed = make(data, buffer_size=1, num_shards=1)
    resumed.load_state_dict(state)
    assert tokens_of(found) == all_tokens(GOOD[:3])
    assert list(resumed) == []
    record = resumed.state_dict()["shards"]["0"]
    assert (record["num_skipped"], record["num_in_a_row"]) == (2, 2)


@pytest.mark.parametrize("source", [list, dataset_of])
def test_too_many_in_a_row_raise(source: Any) -> None:
    some = GOOD[:6]
    empty = [{"input_ids": np.arange(0)}] * 4
    data = source([*some, *empty, *GOOD[10:20]])
    assert len(tokens_of(list(make(data, max_skipped_in_a_row=4)))) > 0
    message = (
        "4 examples in a row are wrong, more than max_skipped_in_a_row=3; the last one: example 9 "
        "of the stream is empty"
    )
    with pytest.raises(DataError, match=message):
        list(make(data, max_skipped_in_a_row=3))
    wrong = [{"input_ids": np.array([1, -1, 1])}] * 3
    options = {"max_skipped_in_a_row": 2, "buffer_size": 2, "strategy": "sequential"}
    data = source([GOOD[0], *wrong[:2], GOOD[3], wrong[0], GOOD[5], *wrong, GOOD[9]])
    message = (
        "3 examples in a row are wrong, more than max_skipped_in_a_row=2; the last one: example 8 "
        "of the stream: input_ids is -1 at token 1"
    )
    with pytest.raises(DataError, match=message):
        list(make(data, **options))
    batches = list(make(data, **options | {"max_skipped_in_a_row": 3}))
    assert tokens_of(batches) == all_tokens([GOOD[0], GOOD[3], GOOD[5], GOOD[9]])


@pytest.mark.parametrize("resumed_after", [None, 3])
def test_too_many_raise(resumed_after: int | None) -> None:
    options = {"max_skipped": 4, "max_skipped_in_a_row": 100}
    dataset = make(examples(), **options)
    if resumed_after is not None:
        list(islice(dataset, resumed_after))
        state = dataset.state_dict()
        dataset = make(examples(), **options)
        dataset.load_state_dict(state)
    message = r"5 examples are wrong, more than max_skipped=4; the last one: example \d+ of the s"
    with pytest.raises(DataError, match=message):
        list(dataset)
    assert dataset.state_dict()["shards"]["0"].get("num_skipped", 0) <= 4


@pytest.mark.parametrize("more", [{}, {"num_shards": 2}, {"rows": 2}])
def test_an_example_that_overflow_drops_may_be_wrong_too(more: dict[str, Any]) -> None:
    """Nothing of it is given out, but its ids are read with those of its batch."""
    long = [{"input_ids": ["a"] * 13}, {"input_ids": [1.5] * 13}, {"input_ids": [7] * 13}]

    def stream(examples: Any = (*GOOD[:6], *long, *GOOD[9:20])) -> PackedIterableDataset:
        return make(list(examples), overflow="drop", **more)

    batches = list(stream())
    assert tokens_of(batches) == all_tokens([*GOOD[:6], *GOOD[9:20]])
    assert sorted(skipped_in(batches)) == [6, 7]
    assert sum(batch.metadata["num_dropped"] for batch in batches) == 1  # the one of sevens
    assert_exact_resume(stream, num_steps=len(batches))
    first = list(stream(long[:1] + GOOD[:3]))
    assert (skipped_in(first), tokens_of(first)) == ([0], all_tokens(GOOD[:3]))


def test_shards_count_for_themselves_with_any_ranks_and_workers() -> None:
    def loader(rank: int, dp_size: int) -> PrefetchLoader:
        dataset = make(examples(), num_shards=4, dp_rank=rank, dp_size=dp_size)
        return PrefetchLoader(
            DataLoader(dataset, batch_size=None, num_workers=1, collate_fn=dataset.as_is)
        )

    with loader(0, 1) as whole:
        expected = [batch_digest(batch) for batch in whole]
    states, found = [], []
    for rank in range(2):
        with loader(rank, 2) as part:
            found += [batch_digest(batch) for batch in islice(part, 8)]
            states.append(part.state_dict())
    merged = json.loads(json.dumps(merge_states(states)))
    shards = merged["stream"]["shards"]
    assert sum(record.get("num_skipped", 0) for record in shards.values()) >= 4
    with loader(0, 1) as rest:
        rest.load_state_dict(merged)
        assert rest.state_dict()["stream"]["shards"] == shards
        found += [batch_digest(batch) for batch in rest]
    assert sorted(found) == sorted(expected)


def test_of_a_split_example_the_wrong_pieces_are_left_out() -> None:
    long = {"input_ids": [*range(9000, 9018), -1, 9019, 9020, -2]}
    options = {"overflow": "split", "max_tokens": 5, "rows": 2}
    batches = list(make([*GOOD[:3], long, *GOOD[4:9]], **options))
    pieces = {"input_ids": range(9000, 9015)}
    assert tokens_of(batches) == all_tokens([*GOOD[:3], pieces, *GOOD[4:9]])
    assert set(skipped_in(batches)) == {3}
