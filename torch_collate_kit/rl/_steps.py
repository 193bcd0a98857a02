"""Reading one rollout example: every key as an ndarray of the right shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_collate_kit.errors import DataError

__all__ = ["array_of", "flag_of", "ids_of", "per_token", "rewards_of", "routes_of"]


def array_of(value: Any) -> np.ndarray:
    """A list, ndarray or tensor as an ndarray in host memory; bfloat16 as float32.

    >>> array_of(torch.ones(2, dtype=torch.bfloat16)).dtype
    dtype('float32')
    """
    if isinstance(value, Tensor):
        on_host = value.detach().cpu()
        return (on_host.float() if on_host.dtype == torch.bfloat16 else on_host).numpy()
    try:
        return np.asarray(value)
    except ValueError:  # rows of different lengths
        return np.asarray(value, dtype=object)


def ids_of(index: int, example: Mapping[str, Any], key: str) -> np.ndarray:
    """``prompt_ids`` or ``response_ids``: int64, one or more."""
    ids = array_of(example[key])
    if ids.ndim != 1:
        raise DataError(
            f"example {index}: {key} has shape {list(ids.shape)}; it is one flat list of token ids"
        )
    if not len(ids):
        raise DataError(f"example {index}: {key} has 0 tokens; filter it out")
    if ids.dtype.kind not in "iu":
        raise DataError(f"example {index}: {key} has dtype {ids.dtype}; token ids are integers")
    return ids.astype(np.int64, copy=False)


def flag_of(index: int, example: Mapping[str, Any]) -> bool:
    """``is_last_step`` as a bool."""
    flag = array_of(example["is_last_step"])
    if flag.ndim or flag.dtype.kind != "b":
        raise DataError(
            f"example {index}: is_last_step is {example['is_last_step']!r}; it is True or False"
        )
    return bool(flag)


def per_token(index: int, example: Mapping[str, Any], key: str, length: int) -> np.ndarray:
    """``loss_mask`` or ``logprobs``: numbers, one a response token."""
    values = array_of(example[key])
    if values.shape != (length,):
        raise DataError(
            f"example {index}: {key} has shape {list(values.shape)}, but there are {length} "
            "response tokens; give one entry a response token"
        )
    _check_numbers(index, key, values)
    return values


def rewards_of(index: int, example: Mapping[str, Any], length: int) -> np.ndarray:
    """``rewards``, floating point, one a response token; a scalar is that of the last."""
    rewards = array_of(example["rewards"])
    _check_numbers(index, "rewards", rewards)
    dtype = np.result_type(rewards.dtype, np.float32)
    if rewards.ndim == 0:
        spread = np.zeros(length, dtype)
        spread[-1] = rewards
        return spread
    if rewards.shape != (length,):
        raise DataError(
            f"example {index}: rewards has shape {list(rewards.shape)}, but there are {length} "
            "response tokens; give one number, or one a response token"
        )
    return rewards.astype(dtype, copy=False)


def routes_of(index: int, example: Mapping[str, Any], key: str, num_tokens: int) -> np.ndarray:
    """``rollout_expert_indices``: [tokens, layers, top_k], of a prefix of the tokens."""
    routes = array_of(example[key])
    if routes.ndim != 3:
        raise DataError(
            f"example {index}: {key} has shape {list(routes.shape)}; it is [tokens, layers, top_k]"
        )
    if len(routes) > num_tokens:
        raise DataError(
            f"example {index}: {key} has routes of {len(routes)} tokens, but prompt and response "
            f"have {num_tokens}; it is of the first tokens, at most all of them"
        )
    return routes


def _check_numbers(index: int, key: str, values: np.ndarray) -> None:
    if values.dtype.kind not in "biuf":
        raise DataError(f"example {index}: {key} has dtype {values.dtype}; give numbers")
