"""Reading the datasets that people have: a file, a saved folder, or a name of the hub."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NoReturn

import datasets


def fail(message: str) -> NoReturn:
    """End the script, whose name precedes the message."""
    raise SystemExit(f"{argparse.ArgumentParser().prog}: {message}")


def read_dataset(name: str, split: str) -> datasets.Dataset:
    path = Path(name)
    kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(path.suffix)
    if kind and not path.is_file():
        fail(f"--dataset {name}: there is no such file")
    if kind:
        try:
            return datasets.load_dataset(kind, data_files=name, split="train")
        except Exception as error:  # of many types, as the file is broken
            found = broken_line(path) if path.suffix == ".jsonl" else None
            fail(f"--dataset {name}: {found or error.__cause__ or error}")
    try:
        found = datasets.load_from_disk(name) if path.is_dir() else datasets.load_dataset(name)
    except (OSError, ValueError) as error:
        fail(f"--dataset {name}: no saved dataset here, and not found on the hub: {error}")
    if isinstance(found, datasets.DatasetDict) and split not in found:
        fail(f"--split {split}: {name} has the splits {sorted(found)}")
    return found[split] if isinstance(found, datasets.DatasetDict) else found


def broken_line(path: Path) -> str | None:
    """What is wrong with a JSON Lines file, and in which line."""
    record = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line) if line.strip() else record
            except ValueError as error:
                return f"line {number} is not JSON: {getattr(error, 'msg', error)}"
            if not isinstance(record, dict | None):
                return f"line {number} is not a JSON object, but {line[:40]!r}"
    return "there is no conversation in it" if record is None else None


def images_as_files(found: datasets.Dataset) -> datasets.Dataset:
    """The dataset with the files of the columns `image` and `images`, not decoded."""
    for name in {"image", "images"} & set(found.column_names):
        files, feature = datasets.Image(decode=False), found.features[name]
        if isinstance(feature, datasets.Image):
            found = found.cast_column(name, files)
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            found = found.cast_column(name, datasets.Sequence(files))
    return found
