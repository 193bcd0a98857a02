"""``step``: the examples of any step of a saved run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torch_collate_kit.commands.arguments import (
    Records,
    add_data_arguments,
    number,
    read_data,
    tokenized_chats,
)
from torch_collate_kit.commands.saved_sampler import sampler_of, saved_state
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset
from torch_collate_kit.vision import load_processor

__all__ = ["add_step"]


def add_step(commands: Any) -> None:
    """The command's parser."""
    parser = commands.add_parser(
        "step",
        help="show the examples of any step of a saved run",
        description="Show the examples of any step of a saved run, past or future.",
    )
    parser.add_argument(
        "state",
        metavar="STATE",
        type=Path,
        help="a JSON file with the state of a sampler or loader, or a checkpoint's folder",
    )
    add_data_arguments(
        parser,
        "what the run read: tokenized rows, or the chats that they were made of, in its order",
    )
    parser.add_argument("--epoch", type=int, default=0, metavar="N", help="from 0 (0)")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="of the epoch, from 0")
    parser.add_argument("--rank", type=int, metavar="N", help="only what this rank read")
    parser.add_argument("--max-length", type=number, metavar="N", help="chats were cut to N tokens")
    parser.add_argument(
        "--train-all", action="store_true", help="tokenized rows without a loss target are meant"
    )
    parser.add_argument(
        "--show", type=number, default=200, metavar="N", help="characters of each example (200)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    state = saved_state(options.state)
    records = read_data(options)
    if records.kind == "rollouts":
        raise DataError(f"{options.data} holds rollouts, which no sampler has an order of")
    data = _tokenized(records, options)
    sampler = sampler_of(state, data)
    indices = sampler.examples(options.epoch, options.step, options.rank).tolist()
    found = _described(data, indices, options)
    if options.json:
        where = {"epoch": options.epoch, "step": options.step, "rank": options.rank}
        print(json.dumps({**where, "examples": found}, indent=2))
        return 0
    rank = "" if options.rank is None else f", rank {options.rank}"
    print(f"epoch {options.epoch}, step {options.step}{rank}: {len(indices)} examples")
    for one in found:
        counts = f"{one['num_tokens']:,} tokens, {one['num_trained']:,} trained"
        print(f"\nexample {one['index']:,}, {counts}")
        print("    " + one["text"].rstrip().replace("\n", "\n    "))
    return 0


def _tokenized(records: Records, options: argparse.Namespace) -> TokenizedDataset:
    if records.kind == "tokens":
        return TokenizedDataset(records.rows, train_all=options.train_all)
    return tokenized_chats(records.rows, options, max_length=options.max_length)


def _described(
    data: TokenizedDataset, indices: list[int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """What there is to say of each example; its text is cut to what is to be shown."""
    loaded = None if options.tokenizer is None else load_processor(options.tokenizer)
    tokenizer = getattr(loaded, "tokenizer", loaded)
    rows = [data[index] for index in indices]
    alone = TokenizedDataset(rows, train_all=options.train_all, vision=data.vision)
    found = []
    for index, row, trained in zip(indices, rows, alone.num_loss_tokens.tolist(), strict=True):
        ids = row["input_ids"].tolist()
        text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
        shown = text if len(text) <= options.show else text[: options.show] + "..."
        counts = {"num_tokens": len(ids), "num_trained": trained}
        found.append({"index": index, **counts, "text": shown})
    return found
