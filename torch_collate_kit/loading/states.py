"""Positions in a stream, and its states: one record per shard, as small JSON, sealed and merged."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading.checks import LOADER_VERSION, differences, is_same, sealed, unsealed
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.dataset.fingerprints import fingerprint_of, sampled_rows
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.reading.source import are_nested, is_a

_VERSION = 8  # it goes up with any change to which examples make a batch


class MixedPlace(NamedTuple):
    """The sources of a mixture at a place, one entry each."""

    weights: tuple[str, ...]  # with which the next entry is chosen
    taken: tuple[int, ...]  # examples or tokens since these weights apply
    places: tuple[Place, ...]


class Place(NamedTuple):
    """A place between two examples of the source, or between two pieces of one."""

    num_read: int = 0  # examples of the source before it, those of other shards included
    start: int = 0  # tokens of the next example before it
    taken: int = 0  # entries of the shuffled block that begins here, before it
    source: Any = None  # the source's own state after num_read examples, if it has one
    mixed: MixedPlace | None = None  # of a mixture, whose num_read are entries


class ShardPosition(NamedTuple):
    """The position in a shard: the place where its window began, and what is counted since."""

    place: Place = Place()
    num_batches: int = 0  # since the window began
    num_given: int = 0  # batches since the pass began
    has_ended: bool = False  # known only after the turn that follows the last batch
    num_skipped: int = 0  # examples that were left out of what was given
    num_in_a_row: int = 0  # of the last examples, as many as were left out


def state_of(settings: Mapping[str, Any], positions: Mapping[int, ShardPosition]) -> dict[str, Any]:
    """Return the sealed state of some shards.

    Each has the counts of its position that are not 0. The states of sources lie beside, under
    "sources": they are not sealed.
    """
    shards = {str(shard): _record_of(positions[shard]) for shard in sorted(positions)}
    states = {str(shard): _own_states(positions[shard].place) for shard in sorted(positions)}
    sources = {shard: state for shard, state in states.items() if state is not None}
    return _sealed({"version": _VERSION, **settings}, shards, sources)


def _record_of(position: ShardPosition) -> dict[str, Any]:
    place = position.place
    counts = {
        name: value
        for part in (place, position)
        for name, value in part._asdict().items()
        if type(value) in (int, bool) and value
    }
    if place.mixed is None:
        return counts
    weights, taken, places = place.mixed
    return counts | {
        "weights": list(weights),
        "mixed": [[units, *own[:3]] for units, own in zip(taken, places, strict=True)],
    }


def _own_states(place: Place) -> Any:
    """Return the source's own state, of a mixture the list of those of its sources; or None."""
    if place.mixed is None:
        return place.source
    states = [own.source for own in place.mixed.places]
    return states if any(state is not None for state in states) else None


def _position_of(record: Mapping[str, Any], own: Any) -> ShardPosition:
    counts = dict(record)
    weights, mixed = counts.pop("weights", ()), counts.pop("mixed", None)
    place = Place(**{name: counts.pop(name) for name in Place._fields if name in counts})
    if mixed is None:
        return ShardPosition(place._replace(source=own), **counts)
    states = [None] * len(mixed) if own is None else own
    places = tuple(
        Place(num_read, start, taken, state)
        for (_, num_read, start, taken), state in zip(mixed, states, strict=True)
    )
    units = tuple(record[0] for record in mixed)
    return ShardPosition(place._replace(mixed=MixedPlace(tuple(weights), units, places)), **counts)


def _sealed(
    settings: Mapping[str, Any], shards: Mapping[str, Any], sources: Mapping[str, Any]
) -> dict[str, Any]:
    state = {**settings, "shards": shards, **({"sources": sources} if sources else {})}
    return sealed(copy.deepcopy(state))


def positions_in(
    state: Mapping[str, Any], settings: Mapping[str, Any], shards: range
) -> dict[int, ShardPosition]:
    """Return the positions of ``shards`` in a state that has them, and may have more."""
    state = unsealed(state, _VERSION)
    _check_settings(state, settings)
    if missing := [shard for shard in shards if str(shard) not in state["shards"]]:
        raise StateError(
            f"the state has {len(state['shards'])} shards, but not {missing}, which this rank "
            "reads; it is the state of another rank or worker: with num_shards= load "
            "merge_states([...]) of the states of all ranks"
        )
    sources = copy.deepcopy(state.get("sources", {}))
    return {
        shard: _position_of(state["shards"][str(shard)], sources.get(str(shard)))
        for shard in shards
    }


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks into one, which any number of ranks can load.

    Args:
        states: what ``state_dict()`` of a ``PackedIterableDataset`` with ``num_shards``, or of a
            ``PrefetchLoader`` of one, gave on each rank, in any order. They are not changed.

    Raises:
        StateError: states of other settings or passes, or two states with the same shard.

    >>> from torch_collate_kit import PackedCollator, PackedIterableDataset, ParallelLayout
    >>> examples = [{"input_ids": [7] * n} for n in (3, 2, 4, 1, 5)]
    >>> def make(dp_rank, dp_size):
    ...     collate = PackedCollator(0, max_tokens=6, parallel=ParallelLayout(dp=dp_size))
    ...     return PackedIterableDataset(examples, collate, dp_rank=dp_rank, num_shards=2)
    >>> ranks, whole = [make(0, 2), make(1, 2)], make(0, 1)
    >>> whole.load_state_dict(merge_states([rank.state_dict() for rank in ranks]))
    >>> list(whole.state_dict()["shards"])
    ['0', '1']
    """
    all_states = list(states)
    if not all_states:
        raise StateError("there is no state to merge; pass the states of all ranks")
    is_of_loaders = all("stream" in state for state in all_states if isinstance(state, Mapping))
    version = LOADER_VERSION if is_of_loaders else _VERSION
    all_states = [unsealed(state, version, f"state {i}") for i, state in enumerate(all_states)]
    if is_of_loaders:
        around = [{k: v for k, v in state.items() if k != "stream"} for state in all_states]
        _check_agree(around)
        streams = [unsealed(state["stream"], _VERSION) for state in all_states]
        return sealed({**copy.deepcopy(around[0]), "stream": _merged(streams)})
    return _merged(all_states)


def of_all_ranks(state: dict[str, Any]) -> dict[str, Any]:
    """Merge the states of all ranks, each of which calls it."""
    if not (dist.is_available() and dist.is_initialized()):
        return state
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    different = {one["checksum"]: one for one in states}  # ranks of a layout read the same rows
    return merge_states(different.values()) if len(different) > 1 else state


def _merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    settings = []
    for number, state in enumerate(states):
        if "shards" not in state:
            raise StateError(
                f"state {number} has {sorted(map(str, state))}, no shards; pass the state of a "
                "PackedIterableDataset with num_shards=, or of a PrefetchLoader of one"
            )
        if state.get("num_shards") is None:
            raise StateError(
                f"state {number} is of a stream without num_shards, whose shards depend on the "
                "number of ranks and workers; only that number can go on with it; pass num_shards"
            )
        settings.append({k: v for k, v in state.items() if k not in ("shards", "sources")})
    _check_agree(settings)
    shards: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    for number, state in enumerate(states):
        if twice := sorted(shards.keys() & state["shards"].keys(), key=int):
            raise StateError(
                f"state {number} has the shards {', '.join(twice)} of a state before it; pass the "
                "state of each rank once"
            )
        shards |= state["shards"]
        sources |= state.get("sources", {})
    shards = {shard: shards[shard] for shard in sorted(shards, key=int)}
    return _sealed(settings[0], shards, sources)


def _check_agree(states: list[dict[str, Any]]) -> None:
    for number, state in enumerate(states[1:], 1):
        for name in sorted(state.keys() | states[0].keys(), key=str):
            mine, first = state.get(name), states[0].get(name)
            if not is_same(mine, first):
                raise StateError(
                    f"state {number} is of {name}={mine!r}, state 0 of {name}={first!r}; merge "
                    "the states that all ranks saved after the same step"
                )


def _check_settings(state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for name, expected in settings.items():
        if name == "fingerprint":
            check_same_data(state.get(name), expected)
        elif not is_same(state.get(name), expected):
            hint = "resume with the settings it was saved with"
            if name == "rows_per_rank":
                hint = "batch_rows / parallel.dp must stay as it was"
            raise StateError(
                f"the state is of {name}={state.get(name)!r}, the dataset has {name}={expected!r}; "
                f"{hint}"
            )


class SourceFingerprint:
    """The fingerprint of a source, made when it is first asked for.

    Of a list it is made again when the list has other examples than before: ``on_epoch`` of a
    loader may change the data between two epochs.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._made: dict[str, Any] | None = None
        self._seen: list[Any] = []  # examples of a list when it was made

    def __call__(self) -> dict[str, Any] | None:
        """Small JSON; None if the source can only be consumed."""
        source = self._source
        if type(source) not in (list, tuple):
            self._made = self._made or _fingerprint(source)
            return self._made
        seen = [len(source), *(source[i] for i in sampled_rows(len(source)).tolist())]
        is_same = len(seen) == len(self._seen) and seen[:1] == self._seen[:1]
        if not is_same or any(a is not b for a, b in zip(seen[1:], self._seen[1:], strict=True)):
            self._made, self._seen = _of_examples(source), seen
        return self._made


def check_same_data(saved: Any, mine: Mapping[str, Any] | None) -> None:
    """Check that the fingerprint in a state does not contradict that of the source."""
    if saved is None or (mine is None and isinstance(saved, Mapping)):
        return
    assert mine is not None
    if was := differences(saved, mine):
        raise StateError(
            f"the state is of data with {was}, the source has {differences(mine, saved)}; resume "
            "with the data of the run that saved it, or start without the state"
        )


def _fingerprint(source: Any) -> dict[str, Any] | None:
    if is_a(source, "datasets", "IterableDataset"):
        return {"num_files": getattr(source, "num_shards", None)}
    if not hasattr(source, "__len__"):
        return None
    number = {"num_examples": len(source)}
    try:
        if is_a(source, "datasets", "Dataset"):
            source = TokenizedDataset(source, columns=["input_ids"])
        return number | (source.fingerprint() if isinstance(source, TokenizedDataset) else {})
    except (DataError, TypeError, ValueError):  # no ids in columns, or a null among them
        return number


def _of_examples(examples: Sequence[Any]) -> dict[str, Any]:
    lengths: Any = np.fromiter(map(_length, examples), dtype=np.int64, count=len(examples))
    if examples and are_nested([_ids(examples[0])]):
        found = [[*map(len, ids)] for ids in map(_ids, examples) if are_nested([ids])]
        lengths = Ragged.from_rows(found, dtype=np.int64)
    return {
        "num_examples": len(examples),
        **fingerprint_of(lengths, lambda rows: _token_ids([examples[i] for i in rows.tolist()])),
    }


def _ids(example: Any) -> Any:
    try:
        return example["input_ids"]
    except (TypeError, LookupError, AttributeError):
        return ()


def _length(example: Any) -> int:
    try:
        return len(_ids(example))
    except TypeError:
        return 0


def _token_ids(examples: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Return the ids of all examples that have some, end to end."""
    found = [np.empty(0, dtype=np.int64)]
    for example in examples:
        ids = _ids(example)
        for part in ids if are_nested([ids]) else [ids]:
            try:
                row = np.asarray(part)
            except (TypeError, ValueError):
                continue
            if row.ndim == 1 and row.dtype.kind in "iu":
                found.append(row.astype(np.int64))
    return np.concatenate(found)
