"""The second segment of KTO rows: the prompt of each with the answer of another row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from torch_collate_kit.batch import IGNORE_INDEX
from torch_collate_kit.chat.dataset import bars_of_rank_0
from torch_collate_kit.chat.options import ChatSetup
from torch_collate_kit.errors import DataError

_BATCH_SIZE = 256


def prompt_key(prompt_ids: Sequence[int]) -> int:
    """Return a hash of the prompt: int64, equal for different prompts once in 10**19."""
    digest = blake2b(np.array(prompt_ids, np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@bars_of_rank_0()
def with_other_answers(kept: Any, setup: ChatSetup, seed: int, num_proc: int | None) -> Any:
    """Return examples with a second segment: the prompt of each, and the answer of another."""
    import datasets

    inner = ["num_prompt", "prompt_key"]
    if len(kept) == 0:
        return kept.remove_columns(inner)
    if len(kept) == 1:
        raise DataError(
            "KTO compares each answer with that of another row, and only 1 is left; give more rows"
        )
    target, fill = ("labels", IGNORE_INDEX) if setup.options.labels else ("loss_mask", 0)
    partners = _partners(np.asarray(kept["prompt_key"][:]), seed)
    named = {name: f"other_{name}" for name in ("input_ids", target, "num_prompt")}
    others = kept.select_columns(list(named)).select(partners).rename_columns(named)
    both = datasets.concatenate_datasets([kept, others], axis=1)
    return both.map(
        _add_answers,
        batched=True,
        batch_size=_BATCH_SIZE,
        fn_kwargs={"names": list(named), "fill": fill, "limit": setup.options.max_length},
        remove_columns=[*inner, *named.values()],
        features=kept.remove_columns(inner).features,
        num_proc=num_proc,
        desc="Adding answers of other rows",
    )


def _partners(prompt_keys_N: np.ndarray, seed: int) -> np.ndarray:
    """Return for each row another one, of another prompt where that can be: a permutation [N]."""
    # a random order with the rows of a prompt together, moved on by the most rows of a prompt
    generator = np.random.default_rng(seed)
    _, groups, counts = np.unique(prompt_keys_N, return_inverse=True, return_counts=True)
    places = generator.permutation(len(counts))[groups]
    order = np.lexsort((generator.random(len(groups)), places))
    partners = np.empty_like(order)
    partners[order] = np.roll(order, -max(int(counts.max()) % len(order), 1))
    return partners


def _add_answers(
    columns: Mapping[str, list[Any]], *, names: list[str], fill: int, limit: int | None
) -> dict[str, list[Any]]:
    ids, target, _ = names
    found: dict[str, list[Any]] = {ids: [], target: []}
    own = zip(*(columns[name] for name in names), strict=True)
    other = zip(*(columns[f"other_{name}"] for name in names), strict=True)
    for ([asked], [trained], n), ([answer], [answered], m) in zip(own, other, strict=True):
        found[ids].append([asked, (asked[:n] + answer[m:])[:limit]])
        found[target].append([trained, ([fill] * n + answered[m:])[:limit]])
    return found
