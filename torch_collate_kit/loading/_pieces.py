"""An over-long example as consecutive pieces, each an example of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch_collate_kit.errors import DataError
from torch_collate_kit.loading._stream import Example
from torch_collate_kit.reading.numbers import joined
from torch_collate_kit.reading.sft import read_columns

__all__ = ["at_position", "pieces_of"]


def pieces_of(
    example: Example, limit: int, *, train_all: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Pieces of ``limit`` tokens and a rest: (first token, piece). Arrays are views.

    Raises:
        DataError: the example is wrong; it is called example 0.

    >>> [(start, p["input_ids"].tolist()) for start, p in pieces_of({"input_ids": [4, 5, 6]}, 2)]
    [(0, [4, 5]), (2, [6])]
    """
    columns = read_columns([example], train_all=train_all)
    num_tokens = int(columns.lengths[0])
    target = None if columns.target is None else joined(columns.target)[0]
    # A loss_mask may be of the last num_actions tokens only.
    prompt = 0 if columns.num_actions is None else num_tokens - int(columns.num_actions[0])
    for start in range(0, num_tokens, limit):
        stop = min(start + limit, num_tokens)
        piece: dict[str, Any] = {"input_ids": joined(columns.input_ids)[0][start:stop]}
        if columns.target_name is not None and target is not None:
            piece[columns.target_name] = target[max(start - prompt, 0) : max(stop - prompt, 0)]
        if columns.num_actions is not None:
            piece["num_actions"] = len(piece["loss_mask"])
        if "attention_mask" in example:
            piece["attention_mask"] = example["attention_mask"][start:stop]
        yield start, piece


def at_position(error: DataError, position: int) -> DataError:
    """The error of an example that was looked at alone, with its position in the stream.

    >>> at_position(DataError("example 0 is empty"), 7)
    DataError('example 7 of the stream is empty')
    """
    name = f"example {position} of the stream"
    message = str(error).removeprefix(f"row {position}: ")
    if "example 0" in message:
        return DataError(message.replace("example 0", name, 1))
    return DataError(f"{name}: {message}")
