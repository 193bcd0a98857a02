"""What a training step of an encoder costs: packed, padded at random, padded in order of length.

Claimed: packed rows of 4,096 cells hold at most 1.02 cells per token, are at least 1.5 times faster
than random padding in every case, at least 1.7 times faster than batches sorted by length where
queries and passages are in one batch, and take at most 1.1 of the time of those for passages.

    python benchmarks/bench_encoders.py

Pairs from installed packages: the first paragraph of a docstring (a query, cut at 64 tokens) and
the source of its function (a passage, cut at 512). A random BERT and ModernBERT (2 layers, hidden
size 128), float32, one thread, forward and backward pass; then BERT on texts of one kind by their
mean length: from which lengths on are boundaries faster on a CPU? "boundaries" is torch_varlen, one
SDPA per segment on a CPU; "block mask" is sdpa with a mask per row; "padded" is sdpa with batches
of 16 texts: of random pairs, or of pairs (or texts of one kind) in the order of their lengths. All
run the texts of some batches of the sorted pool, short, middling and long ones.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from harness import Report, Times, alternate, arguments, timed

from torch_collate_kit import Batch, PackedCollator, PaddedCollator, register_torch_varlen

_PACKAGES = ("numpy", "torch", "transformers", "datasets")
_VOCAB, _QUERY, _PASSAGE, _PADDED_BATCH = 1000, 64, 512, 16
_PACKED = "boundaries, 4,096"
_RANDOM, _SORTED = "padded, random", "padded, sorted"
_SIZES = {
    **{"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "pad_token_id": 0},
    **{"num_attention_heads": 4, "max_position_embeddings": _PASSAGE},
}
Texts = list[np.ndarray]


def sources() -> Iterator[tuple[str, str]]:
    """Docstrings and functions of installed packages, file by file in a fixed random order."""
    paths = []
    for name in _PACKAGES:
        spec = find_spec(name)
        paths += sorted(Path(str(spec and spec.origin)).parent.rglob("*.py"))
    random.Random(0).shuffle(paths)
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
            nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, UnicodeDecodeError, RecursionError):
            continue
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        functions = [node for node in functions if len((ast.get_docstring(node) or "").split()) > 4]
        if functions:  # one of a file
            node = random.Random(len(text)).choice(functions)
            doc, node.body = ast.get_docstring(node) or "", node.body[1:] or node.body
            yield doc.split("\n\n")[0], ast.unparse(node)


def pairs(folder: Path, number: int) -> tuple[Texts, Texts]:
    """Ids of queries and passages, of the first ``number`` pairs."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder / "tokenizers" / "mistral-32k-chatml"
    )
    found: tuple[Texts, Texts] = ([], [])
    for _, texts in zip(range(number), sources(), strict=False):
        for column, text, most in zip(found, texts, (_QUERY, _PASSAGE), strict=True):
            ids = tokenizer(text, add_special_tokens=False).input_ids[:most]
            column.append(np.array(ids) % _VOCAB)  # which ids these are takes no time
    return found


def model_of(kind: str, attention: str) -> Any:
    """The same weights for every attention."""
    torch.manual_seed(0)
    if kind == "BERT":
        config: Any = transformers.BertConfig(
            vocab_size=_VOCAB,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **_SIZES,
        )
        model: Any = transformers.BertModel
    else:
        config = transformers.ModernBertConfig(vocab_size=_VOCAB, **_SIZES)
        model = transformers.ModernBertModel
    config._attn_implementation = attention
    return model(config).train()


def batches_of(texts: Sequence[Texts], row: int) -> list[Batch]:
    """Packed rows of all texts, one by one."""
    examples = [{"input_ids": list(of)} if len(of) > 1 else {"input_ids": of[0]} for of in texts]
    batch = PackedCollator(0, max_tokens=row)(examples)
    return batch.chunk(len(batch))


def sorted_groups(texts: Sequence[Texts], number: int) -> list[list[Texts]]:
    """Batches of 16 texts in the order of their lengths: ``number`` of those of the whole pool."""
    size, ordered = _PADDED_BATCH // len(texts[0]), sorted(texts, key=lambda of: max(map(len, of)))
    groups = [ordered[i : i + size] for i in range(0, len(ordered) - size + 1, size)]
    return [groups[(2 * i + 1) * len(groups) // (2 * number)] for i in range(number)]


def padded(groups: Sequence[Sequence[Texts]]) -> list[Batch]:
    """Batches of 16 texts, each padded to its longest; pairs stay in one batch."""
    collate = PaddedCollator(0, padding_side="right")
    return [collate([{"input_ids": t} for of in group for t in of]) for group in groups]


def step(model: Any, batches: Sequence[Batch]) -> Callable[[], float]:
    inputs = [batch.model_inputs(model, labels=False) for batch in batches]

    def run() -> None:
        for each in inputs:
            model(**each).last_hidden_state.square().mean().backward()
        model.zero_grad()

    return timed(run)


def compared(
    kind: str, groups: list[list[Texts]], rounds: int
) -> tuple[dict[str, Times], list[float]]:
    """Times of all texts once, and cells per token, in the order of the times."""
    texts = [of for group in groups for of in group]
    random.Random(1).shuffle(texts)
    size = len(groups[0])
    at_random = [texts[i : i + size] for i in range(0, len(texts), size)]
    varlen, masked = model_of(kind, "torch_varlen"), model_of(kind, "sdpa")
    ways = {_PACKED: (varlen, batches_of(texts, 4096))}
    shortest = max(512, max(sum(map(len, of)) for of in texts))  # pairs stay in one row
    ways |= {f"block mask, {row:,}": (masked, batches_of(texts, row)) for row in (shortest, 2048)}
    ways[_RANDOM] = masked, padded(at_random)
    ways[_SORTED] = masked, padded(groups)
    tokens = sum(len(t) for of in texts for t in of)
    cells = [sum(b["input_ids"].numel() for b in batches) / tokens for _, batches in ways.values()]
    runs = {name: step(*way) for name, way in ways.items()}
    return alternate(runs, rounds=rounds, warm_up=0), cells


def by_length(mean: int, rounds: int) -> list[object]:
    """Compare sorted padding with boundaries where all texts are about equally long."""
    lengths = np.random.default_rng(mean).integers(mean // 2, mean * 3 // 2 + 1, 64)
    groups = sorted_groups([[np.arange(n) % _VOCAB] for n in lengths], 4)
    packed = step(
        model_of("BERT", "torch_varlen"), batches_of([of for group in groups for of in group], 4096)
    )
    in_order = step(model_of("BERT", "sdpa"), padded(groups))
    times = alternate({_PACKED: packed, _SORTED: in_order}, rounds=rounds)
    return [f"{mean}", f"{times[_SORTED].median / times[_PACKED].median:.2f}x"]


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--pairs", type=int, default=256, help="queries and their passages")
    parser.add_argument("--batches", type=int, default=4, help="sorted batches of them that run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    register_torch_varlen()
    transformers.logging.set_verbosity_error()
    queries, passages = pairs(options.data, options.pairs)
    both = [list(pair) for pair in zip(queries, passages, strict=True)]
    number = options.batches
    cases = {
        "both in one batch": sorted_groups(both, number),
        "passages": sorted_groups([[t] for t in passages], number - 1),
        "queries": sorted_groups([[t] for t in queries], 4 * number),
    }
    report = Report("encoders", "Packed encoders cost what their tokens cost, in every batch.")
    for kind, names in (("BERT", list(cases)), ("ModernBERT", list(cases)[:2])):
        rows = []
        for name in names:
            times, cells = compared(kind, cases[name], options.rounds)
            report.times(f"{kind}, {name}", times)
            least = times[_PACKED].median
            for (way, each), share in zip(times.items(), cells, strict=True):
                row = [name, way, f"{share:.2f}", *each.cells()[:2], f"{each.median / least:.2f}"]
                rows.append(row)
            targets(report, f"{kind}, {name}", times, cells[0])
        header = ["texts", "batches", "cells per token", "ms", "quartiles", "times the first"]
        report.table(kind, header, rows, f"Forward and backward pass, {options.rounds} rounds.")
    report.table(
        "BERT, one kind of text by length",
        ["mean length", "sorted padding over boundaries"],
        [by_length(mean, options.rounds) for mean in (8, 16, 32, 64, 128, 256)],
        "64 texts in batches of 16, lengths spread evenly over half to one and a half of the mean.",
    )
    means = [f"{np.mean([len(t) for t in of]):.0f} tokens" for of in (queries, passages)]
    cut = np.mean([len(t) == _PASSAGE for t in passages])
    report.text(
        f"{len(both)} pairs of {', '.join(_PACKAGES)}: queries of {means[0]} in the mean, passages "
        f"of {means[1]}, {cut:.0%} of them cut at {_PASSAGE}."
    )
    report.write(options.out)


def targets(report: Report, what: str, times: dict[str, Times], cells: float) -> None:
    """Compare with what was aimed at."""
    packed, at_random, in_order = (times[name].median for name in (_PACKED, _RANDOM, _SORTED))
    report.target(f"{what}: cells per token at 4,096", cells, "<", 1.02)
    report.target(f"{what}: random padding over packed", at_random / packed, "x", 1.5)
    if "both" in what:
        report.target(f"{what}: sorted padding over packed", in_order / packed, "x", 1.7)
    elif "passages" in what:
        report.target(f"{what}: packed over sorted padding", packed / in_order, "<x", 1.1)


if __name__ == "__main__":
    main()
