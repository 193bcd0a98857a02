"""What samplers, streams and loaders check: arguments, the rank that reads, and seals of states."""

from __future__ import annotations

import json
import logging
import os
import sys
import zlib
from collections.abc import Mapping, Sized
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from torch_collate_kit._checks import checked_int
from torch_collate_kit.errors import StateError
from torch_collate_kit.packing import ParallelLayout

Indices: TypeAlias = npt.NDArray[np.int64]
Shuffle: TypeAlias = bool | Literal["keyed"]
Tail: TypeAlias = Literal["keep", "drop", "wrap"]
LOADER_VERSION = 2  # of the states of PrefetchLoader, which merge_states reads, too
MAX_COUNT = 2**63 - 1
NEW_RUN = "build the sampler with the arguments of the saved run, or start without the state"
MAX_WORD = 2**32 - 1  # one word of a SeedSequence each, or (2**32 + 1, 0) would be (1, 1)
_logger = logging.getLogger("torch_collate_kit.loading")


def checked_length(data: int | Sized, name: str = "examples") -> int:
    """Return the number of examples of ``data``, at least 1."""
    hint = "an empty dataset has no batches"
    if not isinstance(data, bool) and hasattr(data, "__index__") and not hasattr(data, "__len__"):
        return checked_int(name, data, hint=hint)
    if not hasattr(data, "__len__"):
        raise TypeError(
            f"{name} must be a number of examples or have len(), got {data!r} of type "
            f"{type(data).__name__}; for a stream use an iterable dataset, without a sampler"
        )
    return checked_int(f"len({name})", len(data), hint=hint)


def checked_batch_size(batch_size: int, least: int) -> int:
    """Return ``batch_size`` as an int of at least ``least``, the number of ranks."""
    batch_size = checked_int("batch_size", batch_size)
    if batch_size < least:
        raise ValueError(
            f"batch_size counts the examples of all ranks and must be at least dp_size={least}, "
            f"got {batch_size}; with {batch_size} per rank it is {batch_size * least}"
        )
    return batch_size


def checked_order(indices: npt.ArrayLike, epoch: int, length: int) -> Indices:
    """Return a user's order as a read-only int64 array, copied and checked."""
    what = f"order(epoch={epoch}, rng)"
    array = np.asarray(indices)
    if array.ndim != 1:
        raise ValueError(f"{what} must return a 1-D sequence of indices, got shape {array.shape}")
    if not array.size:
        raise ValueError(f"{what} returned no index; an epoch needs at least one example")
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"{what} must return ints, got dtype {array.dtype}; return indices, no mask"
        )
    outside = (array < 0) | (array >= length)
    if outside.any():
        place = int(outside.argmax())
        raise ValueError(
            f"{what}[{place}] is {array[place]}, but the {length} examples have indices 0 to "
            f"{length - 1}"
        )
    own = array.astype(np.int64)
    own.flags.writeable = False
    return own


def checked_word(name: str, value: Any) -> int:
    """``value`` as an int that fills one word of a SeedSequence: 0 .. 2**32 - 1."""
    number = checked_int(name, value, minimum=0)
    if number > MAX_WORD:
        raise ValueError(f"{name} must be at most {MAX_WORD}, got {number}; take it modulo 2**32")
    return number


def is_same(found: Any, expected: Any) -> bool:
    """Return whether an entry of a state is the expected JSON value, of the same types."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        same_keys = found.keys() == expected.keys()
        return same_keys and all(is_same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    return bool(found == expected)


def differences(these: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Return the entries that differ from those of ``others``, as text."""
    found = []
    for key in [key for key in these if key in others]:
        mine, other = these[key], others[key]
        if isinstance(mine, dict) and isinstance(other, dict) and mine.keys() == other.keys():
            found += [f"{k}={v!r}" for k, v in mine.items() if not is_same(v, other[k])]
        elif not is_same(mine, other):
            found.append(f"{key}={mine!r}")
    return ", ".join(found)


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with the checksum of its content, by which ``unsealed`` notices damage.

    Sealed is what the kit wrote. The states of sources, and of a sampler that is not the kit's, are
    not: they may hold objects, or change in JSON. A sealed state inside counts by its checksum.
    """
    return {**state, "checksum": _checksum(state)}


def unsealed(state: Any, version: int, name: str = "the state") -> dict[str, Any]:
    """Return the content of a sealed state. Raises StateError if it is not one, or was changed."""
    if not isinstance(state, Mapping):
        raise StateError(
            f"{name} must be a mapping, got {type(state).__name__}; pass what state_dict() returned"
        )
    if not is_same(state.get("version"), version):
        raise StateError(
            f"{name} has version {state.get('version')!r}, this release reads version {version}; "
            "pass what state_dict() of the same kind of object (sampler, stream or loader) "
            "returned, in the release that saved it"
        )
    content = {key: value for key, value in state.items() if key != "checksum"}
    try:
        is_whole = is_same(state.get("checksum"), _checksum(content))
    except (TypeError, ValueError):  # not what JSON can hold
        is_whole = False
    if not is_whole:
        raise StateError(
            f"{name} is damaged, was edited, or mixes parts of several: its checksum does not fit "
            "its content; pass what state_dict() returned"
        )
    return content


def _checksum(state: Mapping[str, Any]) -> int:
    inner = {
        key: value["checksum"] if isinstance(value, Mapping) and "checksum" in value else None
        for key, value in state.items()
        if key in ("sampler", "stream")
    }
    content = {key: value for key, value in state.items() if key not in ("checksum", "sources")}
    return zlib.crc32(json.dumps({**content, **inner}, sort_keys=True).encode())


def checked_rank(rank: int, size: int, name: str = "dp_size", hint: str = "") -> int:
    """Return ``rank`` as an int of 0 .. ``size`` - 1."""
    rank = checked_int("dp_rank", rank, minimum=0, hint=hint)
    if rank >= size:
        raise ValueError(f"dp_rank must be below {name}={size}, got {rank}; ranks count from 0")
    return rank


def rank_and_size(dp_rank: int | None, dp_size: int | None) -> tuple[int, int]:
    """Return the part of each batch that is read, and how many there are; None: this process's."""
    if (dp_rank is None) != (dp_size is None):
        raise TypeError(
            "pass both dp_rank and dp_size, or neither for those of torch.distributed; got "
            f"dp_rank={dp_rank!r}, dp_size={dp_size!r}"
        )
    if dp_rank is not None:
        size = checked_int("dp_size", dp_size)
        return checked_rank(dp_rank, size), size
    rank, size = _of_process("dp_rank and dp_size")
    if size > 1:
        _logger.warning(
            "PrefetchingSampler reads part %d of %d; pass dp_rank and dp_size where ranks share "
            "data, or dp_rank=0, dp_size=1 for all of it",
            *(rank, size),
        )
    return rank, size


def rank_in(parallel: ParallelLayout, dp_rank: int | None, *, hint: str = "") -> int:
    """Return ``dp_rank``; None: that of this process in a layout of all processes."""
    if dp_rank is not None:
        return checked_rank(dp_rank, parallel.dp, "parallel.dp", hint)
    (rank, size), inner = _of_process("dp_rank"), parallel.cp * parallel.tp
    if size == parallel.dp * inner:
        return parallel.place(rank)[0]
    if size > 1:
        fitting = ParallelLayout(dp=size) if size % inner else replace(parallel, dp=size // inner)
        raise ValueError(
            f"torch.distributed has {size} ranks, the collator's layout dp * cp * tp = "
            f"{parallel.dp * inner}; pass the collator parallel={fitting!r}, or dp_rank= of your "
            "own mesh (pipelines, another order), or dp_rank=0 for the same data on all ranks"
        )
    if parallel.dp > 1:
        _logger.warning(
            "a single process reads the rows of rank 0, of parallel.dp=%d ranks; pass dp_rank%s",
            *(parallel.dp, f" ({hint})" if hint else ""),
        )
    return 0


class DividedOnce:
    """A sampler that no tool divides again: what tools ask for has no value, or is refused."""

    _num_ranks: int  # that read or compute the batches of a step together

    @property
    def batch_size(self) -> int:
        """No value. Tools that divide batches ask for it; with several ranks they are refused."""
        if self._num_ranks > 1:
            raise divided_again(self, "batch_sampler=sampler, collate_fn=collate")
        raise AttributeError(f"a {type(self).__name__} has no batch_size and no drop_last")

    drop_last = batch_size

    @property
    def sampler(self) -> object:
        """No value. A loader of one process that reads for all is refused with several ranks."""
        asking = sys._getframe(1).f_locals.get("self")
        if self._num_ranks > 1 and type(asking).__name__ == "DataLoaderDispatcher":
            raise divided_again(self, "batch_sampler=sampler, collate_fn=collate")
        raise AttributeError(f"a {type(self).__name__} has no sampler")


def divided_again(of: object, parts: str) -> TypeError:
    """Return the error of a tool that would divide a loader of ``parts``."""
    return TypeError(
        "accelerator.prepare, or Lightning's use_distributed_sampler=True, would divide the "
        f"batches of a {type(of).__name__} over the ranks by itself, and cut or lose what "
        "belongs together; make it after Accelerator(), from which it has its rank, and wrap its "
        "loader in a PrefetchLoader, which they leave as it is: PrefetchLoader(DataLoader(dataset, "
        f"{parts}), device=accelerator.device); or pass Lightning use_distributed_sampler=False; "
        "transformers.Trainer resumes neither: give it PackedRows"
    )


def _of_process(names: str) -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    started = os.environ.get("WORLD_SIZE", "")
    if started.strip().isdecimal() and int(started) > 1:
        raise ValueError(
            f"WORLD_SIZE={started}, but torch.distributed is not initialized, so the rank is "
            f"unknown; make it after Accelerator() or init_process_group, or pass {names}"
        )
    return 0, 1
