"""Reading the datasets that people have: a file, a saved folder, or a name of the hub."""

from __future__ import annotations

import argparse
from typing import NoReturn

import datasets

from torch_collate_kit import DataError
from torch_collate_kit.loading import read_records


def fail(message: str) -> NoReturn:
    """End the script, whose name precedes the message."""
    raise SystemExit(f"{argparse.ArgumentParser().prog}: {message}")


def read_dataset(name: str, split: str) -> datasets.Dataset:
    """The records, or the end of the script with a message."""
    try:
        return read_records(name, split=split)
    except DataError as error:
        fail(f"--dataset {error}")


def images_as_files(found: datasets.Dataset) -> datasets.Dataset:
    """The dataset with the files of the columns `image` and `images`, not decoded."""
    for name in {"image", "images"} & set(found.column_names):
        files, feature = datasets.Image(decode=False), found.features[name]
        if isinstance(feature, datasets.Image):
            found = found.cast_column(name, files)
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            found = found.cast_column(name, datasets.Sequence(files))
    return found
