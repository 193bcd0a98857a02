"""What a stream refuses: settings, states, other data, loaders that would divide it again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.building import packed_stream
from tests.loading.seals import resealed
from tests.loading.streaming.streaming_oracle import (
    EXAMPLES,
    SETTINGS,
    SOURCES,
    all_tokens,
    datasets,
    moved,
    tokens_of,
)
from tests.ranks import on_two_ranks
from torch_collate_kit import PackedCollator, PackedIterableDataset, ParallelLayout, PrefetchLoader
from torch_collate_kit.errors import StateError
from torch_collate_kit.loading import TokenizedDataset

split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node
TWO = ParallelLayout(dp=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 13}, "state is of max_tokens=12, the dataset has max_tokens=13; resume"),
        ({"buffer_size": 8}, "buffer_size=7, the dataset has buffer_size=8"),
        ({"rows": 2}, "rows_per_rank=1, the dataset has rows_per_rank=2; batch_rows / parallel"),
        ({"parallel": ParallelLayout(tp=2)}, "align=1, the dataset has align=2"),
        ({"dp_size": 2}, "dp_size=1, the dataset has dp_size=2"),
        ({"presharded": True}, "presharded=False, the dataset has presharded=True"),
        ({"tokenizer": 7}, "pad_token_id=0, the dataset has pad_token_id=7"),
        ({"balance": "tokens"}, "balance='attention', the dataset has balance='tokens'"),
        ({"train_all": True}, "train_all=False, the dataset has train_all=True"),
        ({"fixed_width": True}, "fixed_width=False, the dataset has fixed_width=True"),
    ],
)
def test_a_state_of_other_settings_is_refused(change: dict[str, Any], message: str) -> None:
    dataset = packed_stream(EXAMPLES, **SETTINGS)
    next(iter(dataset))
    other = packed_stream(EXAMPLES, **SETTINGS | change)
    before = other.state_dict()
    with pytest.raises(StateError, match=message):
        other.load_state_dict(dataset.state_dict())
    assert other.state_dict() == before
    assert tokens_of(list(other)) == all_tokens(EXAMPLES[:: change.get("dp_size", 1)])


def test_a_state_of_a_longer_or_another_stream_is_refused() -> None:
    dataset = packed_stream(EXAMPLES, **SETTINGS)
    state = dataset.state_dict()
    shorter = packed_stream(EXAMPLES[:9], **SETTINGS)
    shorter.load_state_dict(resealed(moved(state, num_read=20), fingerprint=None))
    with pytest.raises(StateError, match="after example 20 of the stream, which has 9; the source"):
        next(iter(shorter))
    dataset.load_state_dict(moved(state, num_batches=80))
    with pytest.raises(StateError, match=r"is 80 batches after example 0 .* at most 3 follow now"):
        next(iter(dataset))
    dataset.load_state_dict(moved(state, num_read=len(EXAMPLES), num_batches=1))
    with pytest.raises(StateError, match=r"is 1 batches after example 43 .* at most 1 follow now"):
        next(iter(dataset))
    dataset.load_state_dict(moved(state, source={"next": 20}))
    with pytest.raises(
        StateError, match="holds a state of the source, but this source cannot load one"
    ):
        next(iter(dataset))


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"source": iter(EXAMPLES)}, TypeError, "stream is a list_iterator, an iterator that can"),
    ({"source": 5}, TypeError, "stream must be an iterable of examples or a callable .* got"),
    ({"buffer_size": 0}, ValueError, "buffer_size must be at least 1, got 0"),
    ({"rows": 0}, ValueError, "batch_rows must be at least 1, got 0"),
    ({"rows": 9}, ValueError, "buffer_size must be at least 9, the rows of a batch, got 7"),
    ({"dp_rank": 2, "dp_size": 2}, ValueError, r"dp_rank must be below parallel\.dp=2, got 2"),
    ({"tokenizer": None}, TypeError, "tokenizer must be an int pad id or have .pad_token_id"),
    ({"max_length": 5}, TypeError, "got an unexpected keyword argument .max_length."),
    (
        {"parallel": TWO, "rows": 3},
        ValueError,
        r"batch_rows must be a multiple of parallel\.dp=2, ",
    ),
    ({"dp_size": 2, "rows_multiple_of": 4}, ValueError, "^rows_multiple_of=4 levels rows that ran"),
    ({"shuffle": "keyed"}, TypeError, "shuffle must be True or False, got 'keyed'"),
    ({"shuffle": True, "seed": -1}, ValueError, "seed must be at least 0, got -1"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), REFUSED)
def test_bad_arguments(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        packed_stream(**{"source": EXAMPLES, **SETTINGS, **arguments})


def test_an_epoch_is_an_int_and_only_of_shuffled_streams() -> None:
    with pytest.raises(TypeError, match="epoch must be an int, got '1' of type str"):
        packed_stream(EXAMPLES, shuffle=True, max_tokens=8).set_epoch("1")
    dataset = packed_stream(EXAMPLES, max_tokens=8)
    assert not hasattr(dataset, "set_epoch")
    with pytest.raises(AttributeError, match="without shuffle=True has no set_epoch; its order is"):
        dataset.set_epoch(1)


def test_a_source_is_not_split_twice() -> None:
    stream = split_dataset_by_node(SOURCES["shards"](), 1, 2)
    with pytest.raises(
        ValueError, match=r"already \(rank 1 of 2\) .* again by parallel\.dp=2; pass"
    ):
        packed_stream(stream, **SETTINGS, dp_rank=1, dp_size=2)
    with pytest.raises(ValueError, match=r"already \(rank 1 of 2\)"):
        next(iter(packed_stream(lambda: stream, **SETTINGS, dp_size=2)))
    with pytest.raises(TypeError, match="the callable source returned an int; it must return"):
        next(iter(packed_stream(lambda: 5, **SETTINGS)))


def test_rows_for_more_ranks_where_one_plans_them_all() -> None:
    whole = packed_stream(
        EXAMPLES, **SETTINGS, dp_size=2, rows_multiple_of=4, dp_rank="all", rows=2
    )
    assert tokens_of(list(whole)) == all_tokens(EXAMPLES)


Examples = list[dict[str, Any]]
DATA: Examples = [{"input_ids": [i, i + 1, i + 2][: 1 + i % 3]} for i in range(2, 102)]


class Sized:
    """Examples that have a number, but cannot be indexed."""

    def __init__(self, examples: Examples) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._examples)


def of_files(examples: Examples) -> Any:
    return datasets.Dataset.from_list(examples).to_iterable_dataset(num_shards=len(examples) // 20)


KINDS: dict[str, Callable[[Examples], Any]] = {
    "list": list,
    "columns": TokenizedDataset,
    "dataset": datasets.Dataset.from_list,
    "numpy": lambda made: datasets.Dataset.from_list(made).with_format("numpy"),
    "transformed": lambda made: datasets.Dataset.from_list(made).with_transform(lambda rows: rows),
    "sized": Sized,
    "files": of_files,
    "callable": lambda made: lambda: iter(made),
}
OTHERS: dict[str, Examples] = {
    "fewer": DATA[:40],
    "more": DATA + DATA[:2],
    "a length": [{"input_ids": [7] * 9}, *DATA[1:]],
    "ids": [{"input_ids": [i + 1 for i in DATA[0]["input_ids"]]}, *DATA[1:]],
    "order": DATA[::-1],
    "ids of row 71": [*DATA[:71], {"input_ids": [5] * len(DATA[71]["input_ids"])}, *DATA[72:]],
}
NUMBER = {"fewer", "more"}
READ = {"fewer", "more", "a length", "ids", "order"}  # row 71 is none of the 64 of 100
NOTICED: dict[str, set[str]] = {
    **dict.fromkeys(("list", "columns", "dataset", "numpy"), READ),
    **dict.fromkeys(("transformed", "sized"), NUMBER),
    "files": {"fewer"},
    "callable": set(),
}


@pytest.mark.parametrize("change", OTHERS)
@pytest.mark.parametrize("name", KINDS)
def test_other_data_are_noticed(name: str, change: str) -> None:
    options = SETTINGS | {"num_shards": 2 if change in ("ids", "more") else None}
    saved, other, again = (
        packed_stream(KINDS[name](data), **options) for data in (DATA, OTHERS[change], DATA)
    )
    batches = iter(saved)
    next(batches)
    state = json.loads(json.dumps(saved.state_dict()))
    again.load_state_dict(state)
    assert again.state_dict() == state
    if change in NOTICED[name]:
        before = other.state_dict()
        with pytest.raises(StateError, match=r"the state is of data with .*, the source has .*; r"):
            other.load_state_dict(state)
        assert other.state_dict() == before
    else:
        other.load_state_dict(state)


def test_wrong_examples_have_a_fingerprint_too() -> None:
    wrong = [{}, {"input_ids": None}, {"input_ids": ["a"]}, {"input_ids": [[1], [2]]}, None, 3]
    wrong += [{"input_ids": np.array(5)}, {"input_ids": [1.5]}, {"input_ids": [2**70]}]
    state = packed_stream([*wrong, *DATA], **SETTINGS).state_dict()
    assert state["fingerprint"]["num_examples"] == len(wrong) + 100
    nulls = datasets.Dataset.from_dict({"input_ids": [[1, 2], None, [3]]})
    state = packed_stream(nulls, **SETTINGS).state_dict()
    assert state["fingerprint"] == {"num_examples": 3}


# ---- under Accelerate: it works, or ends in one message that says what to do ----

FEW = [{"input_ids": [i + 1] * (1 + i % 5)} for i in range(41)]


def few(dp_rank: int = 0, dp_size: int = 1) -> PackedIterableDataset:
    collate = PackedCollator(0, max_tokens=12, parallel=ParallelLayout(dp=dp_size))
    return PackedIterableDataset(FEW, collate, buffer_size=7, dp_rank=dp_rank)


def in_order(loader: Any) -> list[int]:
    """The tokens of all its batches in their order, or what it raised."""
    return [t for batch in loader for row in batch["input_ids"].tolist() for t in row if t]


def what_came(accelerator: Any, loader: Any) -> Any:
    try:
        return in_order(accelerator.prepare(loader))
    except TypeError as error:
        return str(error)


def all_ways() -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    found: dict[str, Any] = {}
    for dispatch in (None, True, False):
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        part = {"dp_rank": accelerator.process_index, "dp_size": accelerator.num_processes}
        dataset = few(**part)
        loader = DataLoader(dataset, batch_size=None, collate_fn=dataset.as_is)
        found[str(dispatch)] = what_came(accelerator, loader)
    loader = DataLoader(dataset, batch_size=None, collate_fn=dataset.as_is)
    with PrefetchLoader(loader, device=accelerator.device) as prefetching:
        found["PrefetchLoader"] = what_came(accelerator, prefetching)
    accelerator.wait_for_everyone()  # a rank that leaves while gloo is in use may abort
    accelerator.end_training()
    return found | part


DIVIDED = (
    "accelerator.prepare, or Lightning's use_distributed_sampler=True, would divide the batches of "
    "a PackedIterableDataset over the ranks by itself, and cut or lose what belongs together; make "
    "it after Accelerator(), from which it has its rank, and wrap its loader in a PrefetchLoader, "
    "which they leave as it is: PrefetchLoader(DataLoader(dataset, batch_size=None, "
    "collate_fn=dataset.as_is), device=accelerator.device); or pass Lightning "
    "use_distributed_sampler=False; transformers.Trainer resumes neither: give it PackedRows"
)


def check(found: dict[str, Any]) -> None:
    expected = in_order(few(found["dp_rank"], found["dp_size"]))
    assert len(expected) > 10
    assert found["None"] == found["True"] == DIVIDED
    assert found["False"] == (expected if found["dp_size"] == 1 else DIVIDED)
    assert found["PrefetchLoader"] == expected


def test_under_accelerate_on_one_rank() -> None:
    check(all_ways())


def test_under_accelerate_on_two_ranks() -> None:
    found = on_two_ranks(all_ways)
    assert [of["dp_rank"] for of in found] == [0, 1]
    for of in found:
        check(of)
