"""Positions in a stream, and its states: where each shard is, as small JSON, checked and joined."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.orders.checks import (
    LOADER_VERSION,
    is_same,
    sealed,
    unsealed,
)
from torch_collate_kit.loading.streaming.fingerprints import check_same_data

# It goes up with the number of buffers in a window, and with any change to which examples make a
# batch.
_VERSION = 7
_MOST_APART = 2**20  # rounds between two shards of a state: the rounds between are counted


class Place(NamedTuple):
    """A place between two examples of the source, or between two pieces of one."""

    num_read: int = 0  # examples of the source before it, those of other shards included
    start: int = 0  # tokens of the next example before it
    source: Any = None  # the source's own state after num_read examples, if it has one
    taken: int = 0  # entries of the shuffled block that begins here, before it


class Position(NamedTuple):
    """Position in a shard."""

    place: Place = Place()  # where its window began
    num_batches: int = 0  # since then
    num_given: int = 0  # batches since the pass began
    has_ended: bool = False  # known only after the turn that follows the last batch
    num_skipped: int = 0  # examples that were left out of what was given
    num_in_a_row: int = 0  # of the last examples, as many as were left out


def state_of(settings: Mapping[str, Any], positions: Mapping[int, Position]) -> dict[str, Any]:
    """Return the state of some shards.

    Each has num_read, start, num_batches, num_given, of a shuffled stream taken. The states of
    sources lie beside, under "sources": they are not sealed.
    """
    is_shuffled = settings["seed"] is not None
    shards = {str(shard): _entry_of(at, is_shuffled) for shard, at in positions.items()}
    ended = [shard for shard, at in positions.items() if at.has_ended]
    skipped = {str(shard): _skipped_of(at) for shard, at in positions.items() if at.num_skipped}
    states = {shard: at.place.source for shard, at in positions.items()}
    sources = {str(shard): state for shard, state in states.items() if state is not None}
    return _with_shards({"version": _VERSION, **settings}, shards, ended, skipped, sources)


def _entry_of(at: Position, is_shuffled: bool) -> list[int]:
    counts = [at.place.num_read, at.place.start, at.num_batches, at.num_given]
    return [*counts, at.place.taken] if is_shuffled else counts


def _skipped_of(at: Position) -> list[int]:
    return [at.num_skipped, at.num_in_a_row]


def _with_shards(
    state: dict[str, Any],
    shards: dict[str, Any],
    ended: list[int],
    skipped: dict[str, Any],
    sources: dict[str, Any],
) -> dict[str, Any]:
    state["shards"] = {shard: shards[shard] for shard in sorted(shards, key=int)}
    state["ended"] = sorted(ended)
    if skipped:
        state["skipped"] = skipped
    if sources:
        state["sources"] = sources
    return sealed(copy.deepcopy(state))


def positions_in(
    state: Mapping[str, Any], settings: Mapping[str, Any], shards: range
) -> dict[int, Position]:
    """Return the positions of ``shards`` in a state that has them, and may have more.

    Raises:
        StateError: the state does not fit, is damaged, or has not all of the shards.
    """
    state = unsealed(state, _VERSION)
    _check_settings(state, settings)
    if missing := [shard for shard in shards if str(shard) not in state["shards"]]:
        raise StateError(
            f"the state has {len(state['shards'])} shards, but not {missing}, which this rank "
            "reads; it is the state of another rank or worker: with num_shards= load "
            "merge_states([...]) of the states of all ranks"
        )
    positions = {}
    for shard in shards:
        num_read, start, num_batches, num_given, *taken = state["shards"][str(shard)]
        source = copy.deepcopy(state.get("sources", {}).get(str(shard)))
        place = Place(num_read, start, source, *taken)
        skipped = state.get("skipped", {}).get(str(shard), (0, 0))
        has_ended = shard in state["ended"]
        positions[shard] = Position(place, num_batches, num_given, has_ended, *skipped)
    rounds = [at.num_given for at in positions.values() if not at.has_ended]
    if rounds and max(rounds) - min(rounds) > _MOST_APART:
        raise StateError(
            f"the state has shards that are {max(rounds) - min(rounds)} rounds apart, more than "
            f"{_MOST_APART}; merge states that were saved after the same step"
        )
    return positions


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
                "number of ranks and workers; only that number can go on with it"
            )
        of_shards = ("shards", "ended", "skipped", "sources")
        settings.append({k: v for k, v in state.items() if k not in of_shards})
    _check_agree(settings)
    shards: dict[str, Any] = {}
    ended: list[int] = []
    skipped: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    for number, state in enumerate(states):
        if twice := sorted(shards.keys() & state["shards"].keys(), key=int):
            raise StateError(
                f"state {number} has the shards {', '.join(twice)} of a state before it; pass the "
                "state of each rank once"
            )
        shards |= state["shards"]
        ended += state["ended"]
        skipped |= state.get("skipped", {})
        sources |= state.get("sources", {})
    return _with_shards(settings[0], shards, ended, skipped, sources)


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
            if name == "stages":
                hint = (
                    "stages begin after so many rows of all ranks, and a schedule counts steps of "
                    "batch_rows rows: with half the rows a step, give twice the steps"
                )
            raise StateError(
                f"the state is of {name}={state.get(name)!r}, the dataset has {name}={expected!r}; "
                f"{hint}"
            )
