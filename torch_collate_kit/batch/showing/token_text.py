"""The text of single tokens, with everything in it visible."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["token_texts"]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte in a SentencePiece vocabulary
_SPACE = "\u2581"  # a space there


def token_texts(ids: list[int], tokenizer: Any) -> list[str]:
    r"""The text of every id by itself, quoted, with white space and control characters escaped.

    A token that is a part of a character in UTF-8 gives its bytes, ``b'\xe2\x82'``, and one that
    is not in the vocabulary ``?``. ``tokenizer`` is one of transformers, or a processor.

    Raises:
        TypeError: no tokenizer.

    >>> token_texts([1], tokenizer="gpt2")
    Traceback (most recent call last):
    TypeError: tokenizer must have decode(), got str; load it with AutoTokenizer.from_pretrained
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(tokenizer, "decode"):
        raise TypeError(
            f"tokenizer must have decode(), got {type(tokenizer).__name__}; load it with "
            "AutoTokenizer.from_pretrained"
        )
    texts = {token: _text(token, tokenizer) for token in set(ids)}
    return [texts[token] for token in ids]


def _text(token: int, tokenizer: Any) -> str:
    piece = _piece(token, tokenizer)
    if piece is None:
        return "?"
    text: str = tokenizer.decode([token])
    if "\ufffd" in text:
        part = _bytes_of(piece)
        if part is not None:
            return repr(part)
    if piece.startswith(_SPACE) and not text.startswith(" "):
        text = " " + text  # decode() drops it at the beginning of a text
    return repr(text)


def _piece(token: int, tokenizer: Any) -> str | None:
    """How the vocabulary writes it; None if it is not there."""
    if token < 0:
        return None
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        return ""
    try:
        piece: str | None = tokenizer.convert_ids_to_tokens(token)
    except (IndexError, KeyError, OverflowError):
        return None
    return piece


def _bytes_of(piece: str) -> bytes | None:
    """The bytes of a piece of a byte-level vocabulary; None if it is of another kind."""
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    alphabet = _byte_alphabet()
    return bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else None


def _byte_alphabet() -> dict[str, int]:
    """How byte-level BPE writes bytes: printable ones as they are, others from U+0100 on.

    >>> _byte_alphabet()["\u0120"]
    32
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
