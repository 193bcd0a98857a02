"""Conversations with a target per turn: what their contexts share, for `--train-on each`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from checkpoints import fail

import torch_collate_kit as kit

_LEAST = 1.15  # tokens per cell from which `--share-prefixes auto` shares


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--train-on` and `--share-prefixes`."""
    add = parser.add_argument_group("turns").add_argument
    each = "trained turns; each: every one in its context of inference, for thinking models"
    add("--train-on", default="all", choices=["all", "last", "each"], help=each)
    share = {"default": "auto", "choices": ["auto", "yes", "no"]}
    add("--share-prefixes", **share, help="of the contexts of --train-on each; auto: if it saves")


def check(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other."""
    if args.share_prefixes == "yes" and (args.no_packing or args.train_on != "each"):
        fail("--share-prefixes yes: contexts share them in packed rows, with --train-on each")
    if args.compile and args.train_on == "each" and args.share_prefixes != "no":
        fail("--compile: paths of shared prefixes differ in size; pass --share-prefixes no")


def chat_options(args: argparse.Namespace) -> kit.ChatOptions:
    """A conversation is one example, so that a step has the same ones however turns are trained."""
    turns = {"train_on": args.train_on, "group_turns": args.train_on == "each"}
    return kit.ChatOptions(max_length=args.max_tokens, overflow="drop", **turns)  # no cut answers


def num_tokens(examples: kit.TokenizedDataset) -> np.ndarray:
    """Return the tokens of each conversation, those of all its contexts."""
    lengths = examples.lengths
    return lengths if isinstance(lengths, np.ndarray) else np.array([of.sum() for of in lengths])


def packing_options(examples: kit.TokenizedDataset, args: argparse.Namespace) -> dict[str, Any]:
    """Return whether contexts share what they begin with, and print what that saves."""
    if args.train_on != "each" or args.no_packing:
        return {}
    tokens, shared = num_tokens(examples), examples.shared_lengths
    cells = tokens - [of.sum() for of in shared]
    factor = float(tokens.sum() / cells.sum())
    shares = args.share_prefixes == "yes" or (args.share_prefixes == "auto" and factor >= _LEAST)
    in_rows = cells if shares else tokens
    too_long = int((in_rows > args.max_tokens).sum())
    if args.rank == 0:
        print(
            f"{len(shared.values)} contexts of turns: {tokens.sum():,} tokens in {cells.sum():,} "
            f"cells, {factor:.2f} each; prefixes are {'' if shares else 'not '}shared"
        )
    if too_long == len(tokens):
        fail(f"no conversation fits in --max-tokens {args.max_tokens}; raise it")
    if too_long and args.rank == 0:
        print(f"{too_long} conversations are longer than a row and dropped; raise --max-tokens")
    return {"share_prefixes": shares, "overflow": "drop"}
