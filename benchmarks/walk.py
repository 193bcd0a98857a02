"""How much of the package a batch walks through, and how large the package is.

    python benchmarks/walk.py [-v]

Files and functions of the package that the second call enters, on all threads: a loader is made,
two batches are read, it is closed; a stream, the same; a collator makes one batch. Then lines and
files by folder, and modules that import each other in circles, also for types only. ``-v`` lists
functions, and the classes of loading and packing.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import torch_collate_kit
from torch_collate_kit import (
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PrefetchLoader,
    TokenizedDataset,
    pack,
)

ROOT = Path(torch_collate_kit.__file__).parent
LENGTHS = [5, 3, 7, 2, 6, 4, 4, 8]
EXAMPLES = [{"input_ids": list(range(1, n + 1)), "loss_mask": [0] + [1] * (n - 1)} for n in LENGTHS]
PAIRS = 4 * [{"input_ids": [[1, 2, 3, 4], [1, 2, 5]], "loss_mask": [[0, 1, 1, 1], [0, 1, 1]]}]
COLLATE = PackedCollator(0, max_tokens=12)
SHARING = PackedCollator(0, max_tokens=24, share_prefixes=True)
DATASET = TokenizedDataset(EXAMPLES)

CALLS: Counter[tuple[str, str]] = Counter()


def note(frame: Any, event: str, arg: object) -> None:
    path = Path(frame.f_code.co_filename)
    if event == "call" and path.is_relative_to(ROOT):
        CALLS[str(path.relative_to(ROOT)), frame.f_code.co_qualname] += 1


def loader() -> None:
    sampler = PackedBatchSampler(DATASET, COLLATE, batch_rows=2, window=2)
    batches = DataLoader(DATASET, batch_sampler=sampler, collate_fn=COLLATE)
    with PrefetchLoader(batches) as prefetching:
        for number, _ in enumerate(prefetching):
            if number == 1:
                break


def stream() -> None:
    batches = iter(PackedIterableDataset(EXAMPLES, COLLATE, buffer_size=4))
    next(batches)
    next(batches)


WALKS: dict[str, Callable[[], object]] = {
    "PrefetchLoader(DataLoader(PackedBatchSampler))": loader,
    "PackedIterableDataset": stream,
    "PackedCollator": lambda: COLLATE(EXAMPLES),
    "PackedCollator, model_inputs()": lambda: COLLATE(EXAMPLES).model_inputs(),
    "PackedCollator, pairs": lambda: COLLATE(PAIRS),
    "PackedCollator, trees": lambda: SHARING(PAIRS),
    "pack()": lambda: pack(LENGTHS, 12),
}


def walk(name: str, *, verbose: bool) -> None:
    WALKS[name]()
    CALLS.clear()
    threading.setprofile(note)
    sys.setprofile(note)
    WALKS[name]()
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    found = {key: count for key, count in CALLS.items() if not key[1].endswith("<module>")}
    print(f"| {name} | {len({path for path, _ in found})} | {len(found)} | {sum(found.values())} |")
    for (path, function), count in sorted(found.items()) if verbose else ():
        print(f"  {count:4d} {path}: {function}")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles() -> list[list[str]]:
    """Groups of modules that import each other; packages' ``__init__`` are left out."""
    paths = {module_of(path): path for path in ROOT.rglob("*.py")}
    imported: dict[str, set[str]] = {}
    for name, path in paths.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in paths:
                of = (f"{node.module}.{alias.name}" for alias in node.names)
                found |= {one if one in paths else node.module for one in of}
        imported[name] = {of for of in found - {name} if paths[of].name != "__init__.py"}
    reached: dict[str, set[str]] = {}
    for name in imported:
        todo, seen = [name], set()
        while todo:
            new = imported[todo.pop()] - seen
            seen |= new
            todo += new
        reached[name] = seen
    groups = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in imported
        if name in reached[name]
    }
    return sorted(sorted(group) for group in groups)


def sizes(*, verbose: bool) -> None:
    lines = {path: len(path.read_text().splitlines()) for path in sorted(ROOT.rglob("*.py"))}
    print("\n| folder | lines | files | longest |\n| --- | --- | --- | --- |")
    print(f"| all | {sum(lines.values()):,} | {len(lines)} | {max(lines.values())} |")
    for folder in sorted({path.relative_to(ROOT).parts[0] for path in lines}):
        if (ROOT / folder).is_dir():
            own = [n for path, n in lines.items() if path.is_relative_to(ROOT / folder)]
            print(f"| {folder} | {sum(own):,} | {len(own)} | {max(own)} |")
    for folder in ("loading", "packing") if verbose else ():
        trees = [ast.parse(path.read_text()) for path in (ROOT / folder).rglob("*.py")]
        names = [n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        print(f"\n{len(names)} classes of {folder}: {', '.join(sorted(names))}")


def main() -> None:
    verbose = "-v" in sys.argv
    print("| entered by the second call | files | functions | calls |\n| --- | --- | --- | --- |")
    for name in WALKS:
        walk(name, verbose=verbose)
    print(f"\ncircles: {circles() or 'none'}")
    sizes(verbose=verbose)


if __name__ == "__main__":
    main()
