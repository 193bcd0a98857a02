"""Positions in a stream, and its states: where each shard is, as small JSON, checked and joined."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch_collate_kit.errors import StateError
from torch_collate_kit.loading.orders.checks import is_same
from torch_collate_kit.loading.streaming.fingerprints import check_same_data
from torch_collate_kit.packing import PackingOptions

# It goes up with the number of buffers in a window, and with any change to which examples make a
# batch.
_VERSION = 6
_MAX_COUNT = 2**63 - 1
_MOST_APART = 2**20  # rounds between two shards of a state: the rounds between are counted
_COUNTS = ("num_read", "start", "num_batches", "num_given")
_NONE = [0, 0]  # num_skipped and num_in_a_row of a shard that has left out nothing


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

    Each has num_read, start, num_batches, num_given, of a shuffled stream taken, and the source's
    own state, if there is one.
    """
    is_shuffled = settings["seed"] is not None
    shards = {str(shard): _entry_of(at, is_shuffled) for shard, at in positions.items()}
    ended = [shard for shard, at in positions.items() if at.has_ended]
    skipped = {str(shard): _skipped_of(at) for shard, at in positions.items() if at.num_skipped}
    return _with_shards({"version": _VERSION, **settings}, shards, ended, skipped)


def _entry_of(at: Position, is_shuffled: bool) -> list[Any]:
    counts = [at.place.num_read, at.place.start, at.num_batches, at.num_given]
    counts += [at.place.taken] if is_shuffled else []
    return counts if at.place.source is None else [*counts, at.place.source]


def _skipped_of(at: Position) -> list[int]:
    return [at.num_skipped, at.num_in_a_row]


def _with_shards(
    state: dict[str, Any], shards: dict[str, Any], ended: list[int], skipped: dict[str, Any]
) -> dict[str, Any]:
    state["shards"] = {shard: shards[shard] for shard in sorted(shards, key=int)}
    state["ended"] = sorted(ended)
    if skipped:
        state["skipped"] = skipped
    return copy.deepcopy(state)


def positions_in(
    state: Mapping[str, Any], settings: Mapping[str, Any], packing: PackingOptions, shards: range
) -> dict[int, Position]:
    """Return the positions of ``shards`` in a state that has them, and may have more.

    Raises:
        StateError: the state does not fit, is damaged, or has not all of the shards.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if not is_same(version, _VERSION):
        raise StateError(
            f"the state has version {version!r}, this one reads version {_VERSION}; pass what "
            "state_dict() of a PackedIterableDataset gave, in the same version of the library"
        )
    _check_settings(state, settings)
    if not _has_shards(state):
        found, ended = state.get("shards"), state.get("ended")
        raise StateError(f"the state has shards={found!r}, ended={ended!r}; it is damaged")
    if missing := [shard for shard in shards if str(shard) not in state["shards"]]:
        raise StateError(
            f"the state has {len(state['shards'])} shards, but not {missing}, which this rank "
            "reads; it is the state of another rank or worker: with num_shards= load "
            "merge_states([...]) of the states of all ranks"
        )
    skipped = _skipped_in(state)
    positions = {}
    names = _COUNTS if settings["seed"] is None else (*_COUNTS, "taken")
    for shard in shards:
        entry = state["shards"][str(shard)]
        of, sizes = len(names), (len(names), len(names) + 1)
        if not isinstance(entry, list) or len(entry) not in sizes or not _are_counts(entry[:of]):
            raise StateError(
                f"the state's shard {shard} is {entry!r}, not [{', '.join(names)}] with a state of "
                "the source or without; it is damaged"
            )
        position = _position(entry, of, skipped.get(str(shard), _NONE), packing)
        if position.place.taken >= max(1, settings["buffer_size"]):
            raise StateError(
                f"the state has taken={position.place.taken} in shard {shard}, but a block has "
                f"buffer_size={settings['buffer_size']} examples; it is damaged"
            )
        positions[shard] = position._replace(has_ended=shard in state["ended"])
    _check_rounds(state, positions.values(), packing)
    return positions


def _position(entry: list[Any], of: int, skipped: Any, packing: PackingOptions) -> Position:
    num_read, start, num_batches, num_given, *taken = entry[:of]
    source = copy.deepcopy(entry[of]) if len(entry) > of else None
    _check_start(start, packing)
    is_pair = isinstance(skipped, list) and len(skipped) == 2 and _are_counts(skipped)
    if not is_pair or skipped[1] > skipped[0]:
        raise StateError(
            f"the state has skipped={skipped!r}, not [num_skipped, num_in_a_row]; it is damaged"
        )
    place = Place(num_read, start, source, *taken)
    return Position(place, num_batches, num_given, False, *skipped)


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
    for number, state in enumerate(all_states):
        if not isinstance(state, Mapping):
            raise StateError(f"state {number} is a {type(state).__name__}, not a mapping")
    if all(isinstance(state.get("stream"), Mapping) for state in all_states):
        around = [{k: v for k, v in state.items() if k != "stream"} for state in all_states]
        _check_agree(around)
        return {**copy.deepcopy(around[0]), "stream": _merged([s["stream"] for s in all_states])}
    return _merged(all_states)


def _merged(states: list[Mapping[str, Any]]) -> dict[str, Any]:
    settings = []
    for number, state in enumerate(states):
        if not _has_shards(state):
            raise StateError(
                f"state {number} has {sorted(map(str, state))}, no shards; pass the state of a "
                "PackedIterableDataset with num_shards=, or of a PrefetchLoader of one"
            )
        if state.get("num_shards") is None:
            raise StateError(
                f"state {number} is of a stream without num_shards, whose shards depend on the "
                "number of ranks and workers; only that number can go on with it"
            )
        of_shards = ("shards", "ended", "skipped")
        settings.append({k: v for k, v in state.items() if k not in of_shards})
    _check_agree(settings)
    shards: dict[str, Any] = {}
    ended: list[int] = []
    skipped: dict[str, Any] = {}
    for number, state in enumerate(states):
        if twice := sorted(shards.keys() & state["shards"].keys(), key=int):
            raise StateError(
                f"state {number} has the shards {', '.join(twice)} of a state before it; pass the "
                "state of each rank once"
            )
        shards |= state["shards"]
        ended += state["ended"]
        skipped |= _skipped_in(state)
    return _with_shards(settings[0], shards, ended, skipped)


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
        if name not in state:
            raise StateError(f"the state has no {name}; it is damaged")
        if name == "fingerprint":
            check_same_data(state[name], expected)
        elif not is_same(state[name], expected):
            hint = "resume with the settings it was saved with"
            if name == "rows_per_rank":
                hint = "batch_rows / parallel.dp must stay as it was"
            if name == "stages":
                hint = (
                    "stages begin after so many rows of all ranks, and a schedule counts steps of "
                    "batch_rows rows: with half the rows a step, give twice the steps"
                )
            raise StateError(
                f"the state is of {name}={state[name]!r}, the dataset has {name}={expected!r}; "
                f"{hint}"
            )


def _has_shards(state: Mapping[str, Any]) -> bool:
    """Return whether a state has shards by number, and a list of those that have ended."""
    shards, ended = state.get("shards"), state.get("ended")
    if not isinstance(shards, Mapping) or not isinstance(ended, list):
        return False
    are_numbered = all(isinstance(shard, str) and shard.isdecimal() for shard in shards)
    return are_numbered and all(type(shard) is int and str(shard) in shards for shard in ended)


def _skipped_in(state: Mapping[str, Any]) -> Mapping[str, Any]:
    skipped = state.get("skipped", {})
    if not isinstance(skipped, Mapping) or not skipped.keys() <= state["shards"].keys():
        raise StateError(f"the state has skipped={skipped!r}; it is damaged")
    return skipped


def _are_counts(counts: list[Any]) -> bool:
    return all(type(count) is int and 0 <= count <= _MAX_COUNT for count in counts)


def _check_rounds(
    state: Mapping[str, Any], positions: Iterable[Position], packing: PackingOptions
) -> None:
    """Check that shards can have given out so many batches, and are not too many rounds apart."""
    rounds = [at.num_given for at in positions if not at.has_ended]
    if rounds and max(rounds) - min(rounds) > _MOST_APART:
        raise StateError(
            f"the state has shards that are {max(rounds) - min(rounds)} rounds apart, more than "
            f"{_MOST_APART}; it is damaged, or merged of states that were not saved after the same "
            "step"
        )
    for at in positions:
        # a batch has an example at least, a given one or a skipped one
        too_few = at.num_batches > at.num_given + at.num_skipped
        too_many = at.num_given > at.place.num_read + at.place.taken + at.num_batches
        if too_few or (too_many and packing.overflow != "split" and packing.strategy != "wrapped"):
            raise StateError(
                f"the state has a shard with {at.num_batches} batches after "
                f"{at.place.num_read} examples, but {at.num_given} batches in all; it is damaged"
            )


def _check_start(start: int, packing: PackingOptions) -> None:
    overflow, capacity = packing.overflow, packing.capacity - packing.reserved
    if packing.strategy == "wrapped":  # documents are cut anywhere
        return
    if start and overflow != "split":
        raise StateError(
            f"the state's start is {start}, within an example, but with overflow={overflow!r} "
            "none is split; it is damaged"
        )
    if start % capacity:
        raise StateError(
            f"the state's start is {start}, but pieces of examples begin every {capacity} "
            "tokens; it is damaged"
        )
