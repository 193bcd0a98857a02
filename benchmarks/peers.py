"""Other people's packers and collators, each ``None`` where it is not installed.

They are imported as they are, and called as their own trainers call them. SkyRL's package imports
Ray and more at its top, so its modules are loaded one by one, without the packages around them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

__all__ = [
    "axolotl_packers",
    "collators",
    "skyrl_packed",
    "skyrl_packer",
    "trl_packer",
    "trl_vision",
]

Packer = Callable[[np.ndarray, int], int]  # lengths and row size in, number of rows out
Collator = Callable[[Sequence[Mapping[str, Any]]], Any]


def trl_packer() -> Packer | None:
    """TRL's best fit. It packs a table, so it moves tokens as well: here of one byte."""
    try:
        import pyarrow as pa
        from trl.data_utils import _pack_bfd
    except ImportError:
        return None
    tables: dict[int, Any] = {}

    def pack(lengths: np.ndarray, max_tokens: int) -> int:
        if id(lengths) not in tables:
            offsets = pa.array(np.append(0, np.cumsum(lengths)), type=pa.int64())
            tokens = pa.array(np.zeros(int(lengths.sum()), dtype=np.int8))
            tables[id(lengths)] = pa.table({"t": pa.LargeListArray.from_arrays(offsets, tokens)})
        return len(_pack_bfd(tables[id(lengths)], max_tokens))

    return pack


def axolotl_packers() -> dict[str, Packer]:
    """First fit in numba: in groups of 100,000, as axolotl does by default, and in one group."""
    try:
        from axolotl.utils.samplers.multipack import pack_group
    except ImportError:
        return {}

    def in_groups(lengths: np.ndarray, max_tokens: int, size: int = 100_000) -> int:
        parts = [lengths[i : i + size] for i in range(0, len(lengths), size)]
        return sum(len(pack_group(part, 0, max_tokens, len(part), 200, True)) for part in parts)

    def at_once(lengths: np.ndarray, max_tokens: int) -> int:
        return in_groups(lengths, max_tokens, size=len(lengths))

    pack_group(np.array([2, 1]), 0, 4, 2, 200, True)  # compile
    return {"axolotl first fit, groups of 100k": in_groups, "axolotl first fit, one group": at_once}


def skyrl_packer() -> Packer | None:
    """SkyRL's first fit decreasing, a Python loop over rows."""
    packing = _skyrl_module("skyrl.train.dataset.bin_packing")
    if packing is None:
        return None

    def pack(lengths: np.ndarray, max_tokens: int) -> int:
        packer = packing.make_seq_packer("first_fit_decreasing", bin_capacity=max_tokens)
        return len(packer.pack(lengths.tolist()))

    return pack


def collators(max_tokens: int) -> dict[str, tuple[str, Collator | None, str]]:
    """By name: what the collator takes, the collator, and the fields that it makes."""
    return {
        "TRL padding-free": ("labels", _trl(True), "ids, labels, positions, seq_idx; one row"),
        "transformers flattening": ("labels", _flattening(), "ids, labels, positions; one row"),
        "SkyRL packed": ("actions", skyrl_packed(max_tokens), "ids, mask, loss_mask"),
        "TRL padded": ("labels", _trl(False), "ids, labels, mask"),
        "transformers Seq2Seq padded": ("labels", _seq2seq(), "ids, labels, mask"),
        "SkyRL padded": ("actions", _skyrl_padded(), "ids, mask, loss_mask (int64)"),
    }


def _trl(padding_free: bool) -> Collator | None:
    try:
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    except ImportError:
        return None
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=padding_free)


def trl_vision(processor: Any) -> Collator | None:
    """Its collator for conversations with images, which calls the processor."""
    try:
        from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
    except ImportError:
        return None
    return DataCollatorForVisionLanguageModeling(processor)


def _flattening() -> Collator:
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)


def _seq2seq() -> Collator:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", padding_side="left"
    )
    return DataCollatorForSeq2Seq(tokenizer, return_tensors="pt")


def skyrl_packed(max_tokens: int, *, tp: int = 1, dp: int = 1) -> Collator | None:
    """Its packed collator for the given tensor and data parallelism."""
    module = _skyrl_module("skyrl.train.dataset.collators")
    if module is None:
        return None
    module.logger.remove()  # it logs every batch
    collator = module.PackedDataCollator(
        SimpleNamespace(pad_token_id=0), max_tokens, tp, 1, 1, dp, -1, 1
    )
    return lambda examples: collator(examples, batch_size=-1)


def _skyrl_padded() -> Collator | None:
    """The one function out of a module that imports a whole trainer."""
    module = _skyrl_module("skyrl.train.dataset.collators")
    if module is None:
        return None
    source = Path(module.__file__ or "").parents[1] / "sft_trainer.py"
    tree = ast.parse(source.read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "collate_sft_batch"
    ]
    import torch

    names = {
        "torch": torch,
        "TensorList": module.TensorList,
        "TrainingInputBatch": module.TrainingInputBatch,
    }
    exec(compile(tree, str(source), "exec"), names)
    collate: Any = names["collate_sft_batch"]
    tokenizer = SimpleNamespace(pad_token_id=0)
    return lambda examples: collate(examples, tokenizer)


def skyrl_rollouts() -> Collator | None:
    """Its loops over prompts and responses; lists in."""
    module = _skyrl_module("skyrl.train.dataset.preprocess")
    if module is None:
        return None
    names = ("prompt_ids", "response_ids", "rewards", "loss_mask", "logprobs")
    tokenizer = SimpleNamespace(pad_token_id=0)

    def collate(examples: Any) -> Any:
        columns = [[example[name] for example in examples] for name in names]
        return module.convert_prompts_responses_to_batch_tensors(tokenizer, *columns)

    return collate


def _skyrl_module(name: str) -> ModuleType | None:
    """A module of SkyRL; the packages above it become empty ones that only know their folder."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec("skyrl")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    megatron = "skyrl.backends.skyrl_train.distributed.megatron"
    for leaf in (name, f"{megatron}.packing_utils"):
        parts = leaf.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            package = ModuleType(".".join(parts[:depth]))
            package.__path__ = [str(root.joinpath(*parts[1:depth]))]
            sys.modules.setdefault(package.__name__, package)
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
