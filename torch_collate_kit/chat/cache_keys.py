"""Keys of tokenized data: equal where tokenizer, options and code are, on any machine."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any


def cache_key(function: str, tokenizer: Any, options: Any) -> str:
    """Return a digest of a function's name and version, the tokenizer's content, and options.

    Neither a tokenizer's path nor the state that calls leave in it (padding, truncation) counts.
    """
    processor, tokenizer = tokenizer, getattr(tokenizer, "tokenizer", tokenizer)
    parts = [function, _as_json(options), *_content(tokenizer)]
    if processor is not tokenizer:
        parts += [type(processor).__name__, processor.image_processor.to_json_string()]
        parts.append(_as_json(getattr(processor, "chat_template", None)))
    return _digest(parts)


def fingerprint(key: str, dataset: Any) -> str:
    """Return the fingerprint of a dataset's rows under a key, for the cache of datasets."""
    return _digest([key, dataset._fingerprint])


def _content(tokenizer: Any) -> list[str]:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "to_str"):
        text = backend.to_str()
        text = text[text.index('"added_tokens"') :]  # before it: truncation and padding
    else:
        from datasets.fingerprint import Hasher

        text = Hasher.hash(tokenizer)
    splits = getattr(tokenizer, "split_special_tokens", False)
    of_text = [tokenizer.chat_template, dict(tokenizer.special_tokens_map), splits]
    return [type(tokenizer).__name__, text, _as_json(of_text)]


def _as_json(value: Any) -> str:
    def plain(other: Any) -> Any:
        if isinstance(other, os.PathLike):
            return os.fspath(other)
        from datasets.fingerprint import Hasher

        return Hasher.hash(other)

    return json.dumps(value, default=plain)


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
