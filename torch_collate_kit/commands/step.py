"""The command ``step``: the examples of any step of a run, from its state and the data."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from torch_collate_kit._reprs import plural
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.commands.arguments import (
    add_command,
    add_data,
    read_data,
    tokenized_chats,
)
from torch_collate_kit.errors import DataError, StateError
from torch_collate_kit.loading import (
    Mixture,
    PackedBatchSampler,
    PrefetchingSampler,
    TokenizedDataset,
)
from torch_collate_kit.packing import PackingOptions
from torch_collate_kit.vision import load_processor

_Sampler: TypeAlias = PrefetchingSampler | PackedBatchSampler
_KEYS = {"epoch", "step", "seed", "tail", "shuffle"}


def add_step(commands: Any) -> None:
    """Add the command ``step``."""
    summary = "show the examples of any step of a saved run, past or future"
    parser = add_command(commands, "step", _run, summary)
    parser.add_argument(
        "state",
        metavar="STATE",
        type=Path,
        help="a JSON file with the state of a sampler or loader, or a checkpoint's folder",
    )
    what = "what the run read: tokenized rows, or the chats that they were made of, in its order"
    add_data(
        parser,
        "--train-all",
        "--allow-empty",
        what=what,
        max_length="chats over N tokens were dropped or cut",
        show="characters of each example (200)",
    )
    parser.set_defaults(show=200)
    parser.add_argument("--epoch", type=int, default=0, metavar="N", help="from 0 (0)")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="of the epoch, from 0")
    parser.add_argument(
        "--overflow",
        choices=("drop", "truncate"),
        default="drop",
        help="whether chats over --max-length were dropped or cut (drop)",
    )


def _run(options: argparse.Namespace) -> int:
    state = _saved_state(options.state)
    rows, kind = read_data(options)
    if kind == "rollouts":
        raise DataError(f"{options.data} holds rollouts, which no sampler has an order of")
    if kind == "tokens":
        data = TokenizedDataset(rows, train_all=options.train_all)
    else:
        data = tokenized_chats(rows, options)
    sampler = _sampler_of(state, data)
    indices = sampler.examples(options.epoch, options.step).tolist()
    found = _described(data, indices, options)
    if options.json:
        where = {"epoch": options.epoch, "step": options.step}
        print(json.dumps({**where, "examples": found}, indent=2))
        return 0
    print(f"epoch {options.epoch}, step {options.step}: {plural(len(indices), 'example')}")
    for one in found:
        counts = f"{one['num_tokens']:,} tokens, {one['num_trained']:,} trained"
        print(f"\nexample {one['index']:,}, {counts}")
        print("    " + one["text"].rstrip().replace("\n", "\n    "))
    return 0


def _described(
    data: TokenizedDataset, indices: list[int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the number, counts and text of each example; a long text is cut."""
    loaded = None if options.tokenizer is None else load_processor(options.tokenizer)
    tokenizer = getattr(loaded, "tokenizer", loaded)
    rows = [data[index] for index in indices]
    num_trained = TokenizedDataset(rows, vision=data.vision).num_loss_tokens.tolist()
    found = []
    for index, row, trained in zip(indices, rows, num_trained, strict=True):
        ids = row["input_ids"].tolist()
        text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
        text = text if len(text) <= options.show else text[: options.show] + "..."
        counts = {"num_tokens": len(ids), "num_trained": trained}
        found.append({"index": index, **counts, "text": text})
    return found


def _saved_state(path: Path) -> dict[str, Any]:
    """Read the state of a sampler in a JSON file, at any depth, or in a folder's ``run.json``."""
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    if path.is_dir():
        found = sorted(path.rglob("run.json"))
        if not found:
            raise DataError(f"{path}: there is no run.json in it; name the file with the state")
        path = found[-1]
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON: {error}") from error
    state = _find(content)
    if state is None:
        raise DataError(
            f"{path}: there is no state of a sampler in it; save sampler.state_dict() or "
            "loader.state_dict() as JSON"
        )
    return state


def _find(content: Any) -> dict[str, Any] | None:
    if isinstance(content, Mapping):
        if content.keys() >= _KEYS:
            return dict(content)
        content = list(content.values())
    if isinstance(content, list):
        return next((state for state in map(_find, content) if state is not None), None)
    return None


def _sampler_of(state: Mapping[str, Any], data: TokenizedDataset) -> _Sampler:
    """Build a sampler over ``data`` and load the state."""
    if state.get("custom_order"):
        raise StateError(
            "the order of this run is a function of its own, order=; build its sampler and call "
            "examples(epoch, step)"
        )
    shared = {"dp_rank": 0, **{key: state[key] for key in ("seed", "shuffle", "tail")}}
    examples = _mixture(state["fingerprint"], data) if "taken" in state else data
    sampler: _Sampler
    if "lengths_digest" in state:
        sampler = _packed(state, examples, data, shared)
    else:
        size = state["batch_size"]
        sampler = PrefetchingSampler(examples, batch_size=size, **state["layout"], **shared)
    sampler.load_state_dict(state)
    return sampler


def _packed(
    state: Mapping[str, Any],
    examples: TokenizedDataset | Mixture,
    data: TokenizedDataset,
    shared: dict[str, Any],
) -> PackedBatchSampler:
    by_rows = "batch_rows" in state
    settings = {**state, **state["layout"]} if by_rows else state["layout"]
    known = PackingOptions(1).as_state()
    packing = {key: value for key, value in settings.items() if key in known}
    is_counted = state["loss_tokens_digest"] is not None
    collate = PackedCollator(
        0,
        packing=PackingOptions.from_state(packing),
        normalize_loss=is_counted,
        vision=None if state["patches_digest"] is None else data.vision,
    )
    names = ("batch_rows", "window") if by_rows else ("batch_size",)
    if isinstance(examples, Mixture):
        shared["num_loss_tokens"] = data.num_loss_tokens if is_counted else None
        shared["patches"] = None if state["patches_digest"] is None else data.patches
    return PackedBatchSampler(examples, collate, **{name: state[name] for name in names}, **shared)


def _mixture(settings: Mapping[str, Any], data: TokenizedDataset) -> Mixture:
    """Return a mixture with the settings of a state, of the same data end to end."""
    sizes = settings["sizes"]
    if sum(sizes) != len(data):
        raise StateError(
            f"state is of sources of {sizes} examples, the data has {len(data)}; pass the sources "
            "one after the other"
        )
    first, *later = [(step, list(map(Fraction, weights))) for step, weights in settings["stages"]]
    passes = [None if of is None else Fraction(of) for of in settings["max_passes"]]
    return Mixture(
        [data.lengths[start:stop] for start, stop in pairwise([0, *np.cumsum(sizes).tolist()])],
        weights=first[1],
        by=settings["by"],
        schedule=later,
        max_passes=passes,
        stop=settings["stop"],
    )
