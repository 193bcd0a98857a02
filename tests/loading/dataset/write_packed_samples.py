"""Write packed_samples.json: our documents, packed by the functions of other tools.

Their wheels (``pip download --no-deps``, versions in SAMPLES) are unpacked side by side in a folder
and not installed: ``python -m tests.loading.dataset.write_packed_samples FOLDER``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import torch

from tests.command import byte_tokenizer
from tests.loading.dataset.packed_forms import Document, drawn

DOCUMENTS = [of for row in drawn(np.random.default_rng(7), 8) for of in row if len(of[0]) > 1]
SIZE = 16  # of a row
STUBS: dict[str, dict[str, Any]] = {  # what the files import beside what is installed
    "torchtune.data._common": {"CROSS_ENTROPY_IGNORE_IDX": -100, "PACK_TYPE": dict},
    "composer.utils": {"dist": None},
    "llmfoundry.utils.consts": {"CROSS_ENTROPY_IGNORE_INDEX": -100},
}


def loaded(file: Path) -> Any:
    for name, values in STUBS.items():
        sys.modules.setdefault(name, ModuleType(name)).__dict__.update(values)
    spec: Any = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def labels(document: Document) -> list[int]:
    return [i if trained else -100 for i, trained in zip(*document, strict=True)]


def batches(count: int = 3) -> list[list[Document]]:
    return [DOCUMENTS[i : i + count] for i in range(0, len(DOCUMENTS), count)]


def axolotl(folder: Path, **options: Any) -> list[Any]:
    collators = loaded(folder / "axolotl/axolotl/utils/collators/batching.py")
    tokenizer = byte_tokenizer("")
    tokenizer.pad_token = "</s>"
    collate = collators.V2BatchSamplerDataCollatorForSeq2Seq(
        tokenizer, pad_to_multiple_of=SIZE, **options
    )
    rows: list[Any] = []
    for batch in batches():
        features = [
            {"input_ids": of[0], "labels": labels(of), "attention_mask": [1] * len(of[0]),
             "position_ids": [*range(len(of[0]))]} for of in batch
        ]  # fmt: skip
        rows += [dict(zip(found, row, strict=True)) for found in [collate([features])]
                 for row in zip(*found.values(), strict=True)]  # fmt: skip
    return rows


def shifted() -> Any:
    ids, own = [of[0] for of in DOCUMENTS], [[*labels(of)[1:], -100] for of in DOCUMENTS]
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": own})


def automodel_neat(folder: Path) -> list[Any]:
    file = folder / "nemo_automodel/nemo_automodel/components/datasets/llm/neat_packing.py"
    return [*loaded(file).neat_pack_dataset({"train": shifted()}, "train", SIZE)]


def automodel(folder: Path) -> list[Any]:
    file = folder / "nemo_automodel/nemo_automodel/components/datasets/llm/packed_sequence.py"
    return [*loaded(file).pack_dataset(shifted(), "train", SIZE, pad_to_multiple_of=4)]


def bridge(folder: Path) -> list[Any]:
    file = folder / "megatron_bridge/megatron/bridge/data/datasets/packing_utils.py"
    packing, rows = loaded(file), [{"input_ids": of[0], "loss_mask": of[1]} for of in DOCUMENTS]
    np.random.seed(0)
    sequences, counts = packing.create_hist(rows, SIZE)
    packs, _ = packing.create_packing_strategy(counts, SIZE, "first_fit_decreasing")
    return [*packing.fill_packing_strategy(packs, sequences, SIZE, 0)]


def torchtune(folder: Path) -> list[Any]:
    rows = [{"tokens": of[0], "labels": labels(of)} for of in DOCUMENTS]
    file = folder / "torchtune/torchtune/datasets/_packed.py"
    return [*loaded(file).PackedDataset(rows, max_seq_len=SIZE)]


def llm_foundry(folder: Path, side: str) -> list[Any]:
    packing = loaded(folder / "llm_foundry/llmfoundry/data/packing.py")
    rows: list[Any] = []
    for batch in batches(4):
        columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "attention_mask": []}
        for of in batch:
            pads = SIZE - len(of[0])
            for column, values, pad in zip(
                columns.values(), (of[0], labels(of), [1] * len(of[0])), (0, -100, 0), strict=True
            ):
                column.append(values + [pad] * pads)
        collate = packing.BinPackCollator(None, 2, SIZE, 0, side)
        found = collate.pack({name: torch.tensor(column) for name, column in columns.items()})
        rows += [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
    return rows


SAMPLES: dict[str, Callable[[Path], list[Any]]] = {
    "axolotl 0.19.0": axolotl,
    "axolotl 0.19.0, squash": lambda folder: axolotl(folder, squash_position_ids=True),
    "nemo-automodel 0.7.0, neat": automodel_neat,
    "nemo-automodel 0.7.0, packed": automodel,
    "megatron-bridge 0.3.1": bridge,
    "torchtune 0.6.1": torchtune,
    "llm-foundry 0.22.0": lambda folder: llm_foundry(folder, "right"),
    "llm-foundry 0.22.0, left": lambda folder: llm_foundry(folder, "left"),
}

if __name__ == "__main__":
    written = {name: write(Path(sys.argv[1])) for name, write in SAMPLES.items()}
    plain = {
        name: [{k: np.asarray(of).astype(int).tolist() for k, of in row.items()} for row in rows]
        for name, rows in written.items()
    }
    text = json.dumps(plain, separators=(",", ":")).replace("],[", "],\n[").replace("},{", "},\n{")
    Path(__file__).with_name("packed_samples.json").write_text(text + "\n")
