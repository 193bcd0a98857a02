"""Examples of several sources, and how many of them and of their tokens are of which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from torch_collate_kit.packing.rows import Ints


class SourceName(str):
    """The name of a source, which a ``Mixture`` has added to an example."""


class MixedExamples(list[Any]):
    """Examples as a ``Mixture`` reads them: a list, with the source of each.

    >>> mixed = MixedExamples([{"input_ids": [5, 6]}, {"input_ids": [7]}], ["web", "math"], [1, 0])
    >>> counts_by_source(mixed, np.arange(2), np.array([2, 1]))["source_tokens"]
    {'web': 1, 'math': 2}
    """

    def __init__(
        self, examples: Iterable[Any], names: Sequence[str], sources: Sequence[int] | Ints
    ) -> None:
        super().__init__(examples)
        self.names, self.sources = names, np.asarray(sources, dtype=np.int64)


def counts_by_source(examples: Any, numbers: Ints, lengths: Ints) -> dict[str, dict[str, int]]:
    """Return metadata: the examples and tokens of each source; none unless they are mixed.

    ``numbers`` and ``lengths``, int64 [S], are the example and the tokens of each piece of a batch.
    """
    if not isinstance(examples, MixedExamples):
        return {}
    return source_counts(examples.names, examples.sources, numbers, lengths)


def source_counts(
    names: Sequence[str], sources: Ints, numbers: Ints, lengths: Ints
) -> dict[str, dict[str, int]]:
    """Return metadata: the examples and tokens of each source in pieces of a batch, by name.

    ``sources``, int64 [N], are those of the examples that ``numbers`` count.
    """
    of_examples, of_pieces = sources[np.unique(numbers)], sources[numbers]
    examples = np.bincount(of_examples, minlength=len(names)).tolist()
    tokens = np.bincount(of_pieces, lengths, minlength=len(names)).astype(np.int64).tolist()
    return {
        "source_examples": dict(zip(names, examples, strict=True)),
        "source_tokens": dict(zip(names, tokens, strict=True)),
    }
