"""Several datasets mixed by weight: a dataset of their examples, and how they are mixed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from torch_collate_kit._checks import (
    KindAndSize,
    call_repr,
    checked_choice,
    checked_int,
    type_name,
)
from torch_collate_kit.batch.placement import TargetKind
from torch_collate_kit.loading.checks import Indices, checked_length
from torch_collate_kit.loading.dataset import TokenizedDataset
from torch_collate_kit.loading.dataset.fingerprints import digest_in_blocks
from torch_collate_kit.packing import PackingPlan, RankPlan
from torch_collate_kit.packing.atoms import checked_sizes
from torch_collate_kit.packing.rank_plan import MixedExamples, SourceName, source_counts
from torch_collate_kit.packing.rows import row_sums
from torch_collate_kit.ragged import Ragged, unchecked

_STOPS = ("first_exhausted", "all_exhausted")


class Mixture:
    """Several datasets as one, with the shares in which their examples come.

    Args:
        sources: datasets, end to end: ``mixture[i]`` is an example of the first one that has so
            many. For a sampler that only needs sizes, also numbers of examples, or int arrays of
            the lengths of a source's examples. For a PackedIterableDataset, also streams.
        weights: the share of each source, positive numbers, 0 for a source that is not read. By
            default the sizes of the sources.
        by: whether these are shares of the "examples" or of the "tokens".
        schedule: ``[(amount, weights), ...]``: these weights from the first example on before which
            an epoch has at least this amount of what ``by`` names, tokens before any are cut off.
            Not of streams.
        max_passes: the most passes over a source in the whole run, a number or one for each source
            (None: no limit). The others then share its weight. Not of streams.
        stop: an epoch ends when the "first_exhausted" source has been read once, or when all have
            been ("all_exhausted"), in the words of ``datasets.interleave_datasets``.
        names: a name for each source, for ``source_counts``. Examples then have the key "source";
            declare it with ``fields={"source": PerExample(str)}`` to have it in batches.

    Samplers accept it as their examples, and yield batches of its indices in its order. A source
    goes on from epoch to epoch, and none of its examples comes again before all have come.

    Raises:
        TypeError, ValueError, DataError: an argument is wrong.

    >>> from torch_collate_kit import PrefetchingSampler
    >>> mixture = Mixture([100, 10], weights=[3, 1])
    >>> sampler = PrefetchingSampler(mixture, batch_size=4, shuffle=False)
    >>> [sampler.examples(0, step).tolist() for step in (0, 1)]
    [[0, 1, 100, 2], [3, 4, 101, 5]]
    """

    def __init__(
        self,
        sources: Sequence[Any],
        *,
        weights: Sequence[float | Fraction] | None = None,
        by: Literal["examples", "tokens"] = "examples",
        schedule: Sequence[tuple[int, Sequence[float | Fraction]]] | None = None,
        max_passes: float | Sequence[float | Fraction | None] | None = None,
        stop: Literal["first_exhausted", "all_exhausted"] = "first_exhausted",
        names: Sequence[str] | None = None,
    ) -> None:
        if isinstance(sources, (str, bytes)) or not hasattr(sources, "__len__") or not len(sources):
            raise ValueError(
                f"sources must be a sequence of at least one dataset or number of examples, "
                f"got {sources!r}"
            )
        self.sources = list(sources)
        if wrong := [s for s in self.sources if isinstance(s, (str, Mapping))]:
            raise TypeError(
                f"a source is {type_name(wrong[0])}, got sources={type_name(sources)}; pass a list "
                "of datasets, of a mapping list(data.values()) and names=list(data)"
            )
        self.has_streams = not all(hasattr(s, "__len__") or _is_number(s) for s in self.sources)
        if self.has_streams and weights is None and not schedule:
            raise ValueError("the mixture has streams, whose sizes are not known; pass weights=")
        self.sizes = [
            0 if self.has_streams else checked_length(s, f"sources[{i}]")
            for i, s in enumerate(self.sources)
        ]
        self._is_named = names is not None
        self.names = _checked_names(names, len(self.sources))
        checked_choice("by", by, ("examples", "tokens"))
        checked_choice("stop", stop, _STOPS)
        self.by, self.stop = by, stop
        read = [] if self.has_streams else self.sources
        self._lengths: list[Any] = [_lengths_of(s, i, by) for i, s in enumerate(read)]
        sums = [int(getattr(lengths, "values", lengths).sum()) for lengths in self._lengths]
        units = sums if by == "tokens" and read else self.sizes
        first = units if weights is None else _checked_weights("weights", weights, len(self.sizes))
        self.stages = [(0, [Fraction(w) for w in first])]
        for number, stage in enumerate(schedule or []):
            self.stages = _with_stage(self.stages, number, stage, weights is not None)
        self.max_passes = _checked_passes(max_passes, self.sizes)
        self.offsets: Indices = np.cumsum([0, *self.sizes])
        self._all_lengths: Indices | Ragged | None = None  # all joined, when first read

    def __len__(self) -> int:
        if self.has_streams:
            raise TypeError(
                "the mixture has streams, so it has no length and no sampler; pass it to a "
                "PackedIterableDataset"
            )
        return int(self.offsets[-1])

    def __repr__(self) -> str:
        sources = [repr(s) if isinstance(s, int) else repr(KindAndSize(s)) for s in self.sources]
        shown: dict[str, Any] = {"weights": [str(weight) for weight in self.stages[0][1]]}
        shown |= {"by": self.by} if self.by != "examples" else {}
        if len(self.stages) > 1:
            shown["schedule"] = [(amount, list(map(str, w))) for amount, w in self.stages[1:]]
        if any(passes is not None for passes in self.max_passes):
            shown["max_passes"] = self.max_passes
        shown |= {"stop": self.stop} if self.stop != _STOPS[0] else {}
        return call_repr(self, f"[{', '.join(sources)}]", **shown)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Any) -> Any:
        """Return the examples of these indices as a list, or of a ``RankPlan`` with it."""
        if isinstance(indices, RankPlan):
            return indices.with_examples(self.__getitems__(indices.indices))
        picked = np.asarray(indices, dtype=np.int64)
        outside = (picked < 0) | (picked >= len(self))
        if outside.any():
            raise IndexError(
                f"index {picked[outside][0]} is outside the mixture, which has {len(self)} examples"
            )
        found: list[Any] = [None] * len(picked)
        sources = self.source_of(picked)
        for source in np.unique(sources).tolist():
            data, places = self.sources[source], np.flatnonzero(sources == source)
            if not hasattr(data, "__getitem__") or isinstance(data, np.ndarray):
                raise TypeError(
                    f"source {self.names[source]!r} of the mixture is {data!r:.60}, which has no "
                    "examples to read; pass the dataset itself"
                )
            for place, row in zip(
                places.tolist(), (picked[places] - self.offsets[source]).tolist(), strict=True
            ):
                name = {"source": SourceName(self.names[source])} if self._is_named else {}
                found[place] = {**data[row], **name}
        return MixedExamples(found, self.names, sources)

    def source_of(self, indices: Any) -> Indices:
        """Return the number of the source of each index: int64, their shape."""
        return np.searchsorted(self.offsets, np.asarray(indices), side="right") - 1

    def source_counts(self, indices: Any) -> dict[str, int]:
        """Return how many of these indices are of each source, by its name.

        >>> Mixture([100, 10], names=["web", "math"]).source_counts([0, 5, 103])
        {'web': 2, 'math': 1}
        """
        counts = np.bincount(self.source_of(indices), minlength=len(self.sizes)).tolist()
        return dict(zip(self.names, counts, strict=True))

    def counts_in(self, sources: Indices, plan: PackingPlan) -> dict[str, dict[str, int]]:
        """Return metadata: examples and tokens of each source in a plan, by name.

        ``sources`` are those of the examples that the plan numbers.
        """
        return source_counts(self.names, sources, plan.example_indices, plan.lengths)

    @property
    def lengths(self) -> Indices | Ragged:
        """Tokens of every example: int64 [N], or a Ragged with those of the segments of each."""
        if self._all_lengths is None:
            self._all_lengths = self._joined_lengths()
        return self._all_lengths

    def _joined_lengths(self) -> Indices | Ragged:
        found = [_lengths_of(source, i, "tokens") for i, source in enumerate(self.sources)]
        ragged = [lengths for lengths in found if isinstance(lengths, Ragged)]
        flat_ones = [lengths for lengths in found if not isinstance(lengths, Ragged)]
        if ragged and flat_ones:
            kinds = [isinstance(lengths, Ragged) for lengths in found]
            nested, flat = (self.names[kinds.index(kind)] for kind in (True, False))
            raise ValueError(
                f"examples of source {nested!r} are lists of segments, those of source {flat!r} "
                "are not; give every example a list, of one where it has one segment"
            )
        return Ragged.cat(ragged) if ragged else np.concatenate(flat_ones)

    @property
    def shared_lengths(self) -> Ragged | None:
        """Tokens that each segment shares, of sources that are TokenizedDatasets; see there."""
        found = [s for source in self._tokenized() if (s := source.shared_lengths) is not None]
        return Ragged.cat(found) if found else None

    @property
    def num_tokens(self) -> Indices:
        """Tokens of every example, with all its segments: int64 [N]; raises as ``lengths``."""
        lengths = self.lengths
        return row_sums(lengths.values, lengths.offsets) if isinstance(lengths, Ragged) else lengths

    @property
    def num_loss_tokens(self) -> Indices:
        """Trained tokens of every example: int64 [N], of sources that are TokenizedDatasets."""
        return self.count_loss_tokens("next_token")

    def count_loss_tokens(self, targets: TargetKind) -> Indices:
        """Return the trained tokens of every example with these targets: int64 [N]."""
        return np.concatenate([source.count_loss_tokens(targets) for source in self._tokenized()])

    @property
    def patches(self) -> list[list[int]]:
        """[N] lists, patches of each image, of sources that are TokenizedDatasets."""
        return [patches for source in self._tokenized() for patches in source.patches]

    @property
    def is_tokenized(self) -> bool:
        """Whether all sources are TokenizedDatasets."""
        return all(isinstance(source, TokenizedDataset) for source in self.sources)

    def _tokenized(self) -> list[TokenizedDataset]:
        for name, source in zip(self.names, self.sources, strict=True):
            if not isinstance(source, TokenizedDataset):
                raise ValueError(f"source {name!r} is no TokenizedDataset")
        return self.sources

    def fingerprint(self, num_examples: int | None = None) -> dict[str, Any]:
        """Return the settings and the fingerprints of the sources: small JSON."""
        makers = [getattr(source, "fingerprint", None) for source in self.sources]
        lengths = self.num_tokens if self.by == "tokens" else None
        return {
            "lengths_digest": None if lengths is None else digest_in_blocks(lengths),
            "sizes": self.sizes,
            "by": self.by,
            "stop": self.stop,
            "stages": [[amount, list(map(str, weights))] for amount, weights in self.stages],
            "max_passes": [None if passes is None else str(passes) for passes in self.max_passes],
            "sources": [make() if callable(make) else None for make in makers],
        }


def _is_number(source: Any) -> bool:
    return hasattr(source, "__index__")


def _lengths_of(source: Any, number: int, by: str) -> Indices | Ragged:
    """Return the lengths of a source's examples; none by examples."""
    if by == "examples":
        return np.zeros(0, dtype=np.int64)
    found = source if isinstance(source, np.ndarray) else getattr(source, "lengths", None)
    if found is None:
        hint = "TokenizedDataset(source), or an int array of the lengths"
        if isinstance(source, list | tuple) and _is_number(source[0]):
            hint = f"np.array(source) if the numbers in this {type(source).__name__} are they"
        raise ValueError(
            f"the length of every example is needed, and sources[{number}] has no lengths; pass "
            f"{hint}"
        )
    try:
        values, offsets = checked_sizes(found)
        return values if offsets is None else unchecked(values, offsets)
    except (TypeError, ValueError) as error:
        raise type(error)(f"lengths of sources[{number}]: {error}") from error


def _checked_names(names: Sequence[str] | None, num_sources: int) -> list[str]:
    if names is None:
        return [str(number) for number in range(num_sources)]
    found = list(names)
    are_texts = all(isinstance(name, str) for name in found)
    if len(found) != num_sources or not are_texts or len(set(found)) != len(found):
        raise ValueError(
            f"names must be {num_sources} different strings, one for each source, got {names!r}"
        )
    return found


def _checked_weights(name: str, weights: Any, num_sources: int) -> list[Fraction]:
    """Return weights as fractions; a float means the decimal it is written as."""
    if isinstance(weights, (str, bytes)) or not hasattr(weights, "__len__"):
        raise TypeError(f"{name} must be a sequence with a number for each source, got {weights!r}")
    if len(weights) != num_sources:
        raise ValueError(
            f"{name} must have one number for each of the {num_sources} sources, got {len(weights)}"
        )
    exact = []
    for source, weight in enumerate(weights):
        try:
            exact.append(Fraction(str(weight)))
        except (ValueError, ZeroDivisionError):
            exact.append(Fraction(-1))
        if isinstance(weight, (bool, str)) or exact[-1] < 0:
            raise ValueError(
                f"{name}[{source}] must be a finite number of at least 0, got {weight!r}"
            )
    if not any(exact):
        raise ValueError(f"{name} are all 0; at least one source must be read")
    if max(exact) * math.lcm(*(weight.denominator for weight in exact)) > 2**900:  # a float
        raise ValueError(
            f"{name} are too large or too far apart, got {weights!r}; pass numbers nearer to 1"
        )
    return exact


def _with_stage(
    stages: list[tuple[int, list[Fraction]]], number: int, stage: Any, has_weights: bool
) -> list[tuple[int, list[Fraction]]]:
    """Return the stages with one more of a schedule."""
    if not isinstance(stage, Sequence) or len(stage) != 2:
        raise TypeError(f"schedule[{number}] must be a pair (amount, weights), got {stage!r}")
    amount = checked_int(f"schedule[{number}] amount", stage[0], minimum=0)
    weights = _checked_weights(f"schedule[{number}] weights", stage[1], len(stages[0][1]))
    if number == 0 and amount == 0:
        if has_weights:
            raise ValueError("schedule begins at 0, and weights= says so too; pass one")
        return [(0, weights)]
    if number == 0 and not has_weights:
        raise ValueError(
            f"schedule begins at {amount}; pass the weights before it, weights=[...], or begin it "
            "at 0"
        )
    if amount <= stages[-1][0]:
        raise ValueError(
            f"schedule[{number}] begins at {amount}, not after {stages[-1][0]}, where the stage "
            "before it begins"
        )
    return [*stages, (amount, weights)]


def _checked_passes(passes: Any, sizes: list[int]) -> list[Fraction | None]:
    num_sources = len(sizes)
    given = passes if isinstance(passes, list | tuple) else [passes] * num_sources
    if len(given) != num_sources:
        raise ValueError(
            f"max_passes must be a number, or one for each of the {num_sources} sources, "
            f"got {len(given)}"
        )
    found: list[Fraction | None] = []
    for source, number in enumerate(given):
        is_number = isinstance(number, int | float | Fraction) and not isinstance(number, bool)
        if number is not None and not (is_number and 0 < number < 2**31):
            raise ValueError(
                f"max_passes of source {source} must be a number above 0, or None for no limit, "
                f"got {number!r}"
            )
        exact = None if number is None else Fraction(str(number))
        if exact is not None and sizes[source] and exact * sizes[source] < 1:
            raise ValueError(
                f"max_passes={number} of source {source} is less than one of its {sizes[source]} "
                "examples; raise it, or give the source the weight 0"
            )
        found.append(exact)
    return found
