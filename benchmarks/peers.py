"""Other people's packers and collators, each ``None`` where it is not installed.

They are imported as they are, and called as their own trainers call them. SkyRL's package imports
Ray and more at its top, so its modules are loaded one by one, without the packages around them.

SkyRL is there twice: the release that pip installs, and its main branch, whose collation has been
vectorised since. Main is loaded from the checkout that the environment variable ``SKYRL_MAIN``
names; without one its loops stand in, written again from their description (skyrl_main.py), and
the tables say so.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import skyrl_main

__all__ = [
    "axolotl_packers",
    "collators",
    "skyrl_main_name",
    "skyrl_packed",
    "skyrl_packer",
    "skyrl_padded",
    "skyrl_rollouts",
    "trl_packer",
    "trl_vision",
]

Packer = Callable[[np.ndarray, int], int]  # lengths and row size in, number of rows out
Collator = Callable[[Sequence[Mapping[str, Any]]], Any]
_SKYRL: dict[Path, dict[str, ModuleType]] = {}  # its modules, by the folder of the package
_SKYRL_NEEDS = ("skyrl.backends.skyrl_train.distributed.megatron.packing_utils",)


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


def collators() -> dict[str, tuple[Collator | None, str]]:
    """By name: the collator, and the fields that it makes."""
    return {
        "TRL padding-free": (_trl(True), "ids, labels, positions, seq_idx; one row"),
        "transformers flattening": (_flattening(), "ids, labels, positions; one row"),
        "TRL padded": (_trl(False), "ids, labels, mask"),
        "transformers Seq2Seq padded": (_seq2seq(), "ids, labels, mask"),
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


def skyrl_packed(
    max_tokens: int, *, tp: int = 1, dp: int = 1, main: bool = False
) -> Collator | None:
    """Its packed collator for the given tensor and data parallelism."""
    module = _skyrl_module("skyrl.train.dataset.collators", main=main)
    if module is None:
        return partial(skyrl_main.packed, max_tokens=max_tokens) if main else None
    module.logger.remove()  # it logs every batch
    collator = module.PackedDataCollator(
        SimpleNamespace(pad_token_id=0), max_tokens, tp, 1, 1, dp, -1, 1
    )
    return lambda examples: collator(examples, batch_size=-1)


def skyrl_padded(*, main: bool = False, normalized: bool = True) -> Collator | None:
    """The one function out of a module that imports a whole trainer, and the collator around it.

    ``normalized``: with the pass over the loss mask that its ``DefaultCollator`` adds.
    """
    module = _skyrl_module("skyrl.train.dataset.collators", main=main)
    if module is None:
        return partial(skyrl_main.padded, normalized=normalized) if main else None
    source = Path(module.__file__ or "").parents[1] / "sft_trainer.py"
    tree = ast.parse(source.read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "collate_sft_batch"
    ]
    import torch

    names = {
        "np": np,
        "torch": torch,
        "TensorList": module.TensorList,
        "TrainingInputBatch": module.TrainingInputBatch,
    }
    exec(compile(tree, str(source), "exec"), names)
    collate: Any = names["collate_sft_batch"]
    tokenizer = SimpleNamespace(pad_token_id=0)
    if not normalized:
        return lambda examples: collate(examples, tokenizer)
    trainer: Any = SimpleNamespace(collate_sft_batch=collate)
    default = module.DefaultCollator(tokenizer, 1)

    def collated(examples: Any) -> Any:
        sys.modules["skyrl.train.sft_trainer"] = trainer  # it is imported in the call
        return default(examples, batch_size=-1)

    return collated


def skyrl_rollouts(*, main: bool = False) -> Collator | None:
    """Its loops over prompts and responses; the release takes lists."""
    module = _skyrl_module("skyrl.train.dataset.preprocess", main=main)
    if module is None:
        return skyrl_main.rollouts if main else None
    names = ("prompt_ids", "response_ids", "rewards", "loss_mask", "logprobs")
    # main takes the pad id, the release a tokenizer
    first: Any = 0 if main else SimpleNamespace(pad_token_id=0)

    def collate(examples: Any) -> Any:
        columns = [[example[name] for example in examples] for name in names]
        return module.convert_prompts_responses_to_batch_tensors(first, *columns)

    return collate


def skyrl_main_name() -> str:
    """What stands for SkyRL's main branch in tables."""
    if _skyrl_root(main=True) is None:
        return "SkyRL main (its loops, written again)"
    return "SkyRL main"


def _skyrl_root(*, main: bool) -> Path | None:
    """The folder of the package: of the checkout in ``SKYRL_MAIN``, or of the release."""
    if main:
        checkout = os.environ.get("SKYRL_MAIN")
        return Path(checkout, "skyrl") if checkout else None
    spec = importlib.util.find_spec("skyrl")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _skyrl_module(name: str, *, main: bool = False) -> ModuleType | None:
    """A module of SkyRL; the packages above it become empty ones that only know their folder.

    Its own imports are absolute, so while it is loaded the modules of another SkyRL are away.
    """
    if (root := _skyrl_root(main=main)) is None:
        return None
    loaded = _SKYRL.setdefault(root, {})
    others = {key: sys.modules.pop(key) for key in [*sys.modules] if key.split(".")[0] == "skyrl"}
    sys.modules.update(loaded)
    try:
        for module in (name, *_SKYRL_NEEDS):
            parts = module.split(".")[:-1]
            for depth in range(1, len(parts) + 1):
                package = ModuleType(".".join(parts[:depth]))
                package.__path__ = [str(root.joinpath(*parts[1:depth]))]
                sys.modules.setdefault(package.__name__, package)
        return importlib.import_module(name)
    except ImportError as error:
        if main:  # a checkout that was named and cannot be loaded
            raise ImportError(f"{name} of {root}: {error}") from error
        return None
    finally:
        found = [key for key in sys.modules if key.split(".")[0] == "skyrl"]
        loaded.update({key: sys.modules.pop(key) for key in found})
        sys.modules.update(others)
