"""Run model inputs through transformers' CUDA paths, with stand-ins for the kernels.

``python -m tests.kernels.verdicts`` prints JSON: of each model, each case and each mode a verdict;
with ``planted`` the gradients of freshly built models in bfloat16. It is a process of its own,
since the packages must look installed before transformers is imported.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hybrid_models import ATTENTION, FAMILIES, hybrid_model
from tests.kernels.pinned import FLASH, SERVED
from tests.kernels.stand_ins import claim_cuda, device_reads, install
from tests.tiny_models import tiny_model, token_ids
from torch_collate_kit import families
from torch_collate_kit.attention import check_isolation
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator
from torch_collate_kit.errors import IsolationError

# --- Whether the examples of a packed batch are apart: by gradients, and against each alone


WIDTH = 15
LENGTHS = {1: (5, 7, 3), 2: (5, 4, 6, 7, 3)}  # by rows; the second of two ends with pads
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


def packed(rows: int) -> Batch:
    """Pack examples into one row, or two."""
    ids = token_ids(1, sum(LENGTHS[rows]))[0].split(LENGTHS[rows])
    collate = PackedCollator(0, max_tokens=WIDTH, strategy="sequential")
    batch = collate([{"input_ids": each} for each in ids])
    assert batch["input_ids"].shape == (rows, WIDTH)
    return batch


def _cells_of(batch: Batch) -> list[slice]:
    """Return the cells of each example, all rows as one."""
    cells = []
    for row, lengths in enumerate(batch["sub_seq_lengths"].tolist()):
        start = row * WIDTH
        for length in lengths:
            cells.append(slice(start, start + length))
            start += length
    return cells


def _measure(model: nn.Module, batch: Batch, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the largest gradient at other examples, and the difference from each alone."""
    seen: list[Tensor] = []
    embed = model.get_input_embeddings()
    hook = embed.register_forward_hook(lambda *args: seen.append(args[2]))
    try:
        logits = model(**inputs).logits.flatten(0, 1)
    finally:
        hook.remove()
    gradient = difference = 0.0
    for cells in _cells_of(batch):
        ids = batch["input_ids"].flatten()[cells][None]
        with torch.no_grad():
            alone = model(input_ids=ids, use_cache=False).logits[0]
            apart = (logits[cells] - alone).abs().max() / alone.abs().max()
        loss = (logits[cells] * torch.randn_like(logits[cells])).sum()
        found = torch.autograd.grad(loss, seen[0], retain_graph=True)[0].flatten(0, 1).abs()
        own = found[cells].max().item()
        assert own > 0, "the logits do not depend on the tokens"
        found[cells] = 0
        gradient = max(gradient, found.max().item() / own)
        difference = max(difference, apart.item())
    return {"gradient": gradient, "difference": difference}


def verdict(model: nn.Module, batch: Batch, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return exact, leak or error, and what it was told by.

    ``gradient`` is relative to the example's own, ``difference`` to its largest logit, ``reads``
    counts how often a kernel read boundaries from the device.
    """
    device_reads[0] = 0
    try:
        found = _measure(model, batch, inputs)
    except Exception as error:  # of the model or a kernel: its message is compared
        return {"verdict": "error", "message": f"{type(error).__name__}: {error}"}
    is_exact = found["gradient"] == 0 and found["difference"] < _TOLERANCE[model.dtype]
    reads = device_reads[0]
    return {"verdict": "exact" if is_exact else "leak", "reads": reads, **found}


# --- Vision and audio models around a tiny hybrid, whose towers are on the meta device


FAMILY_OF_WRAPPER = {
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "minicpm_ocr": "qwen3_5",
    "minicpmv4_6": "qwen3_5",
    "minicpmv4_7": "qwen3_5",
    "nemotron_h_omni": "nemotron_h",
    "nemo_speechlm": "nemotron_h",
    "lfm2_vl": "lfm2",
}
"""The text model's family of each ``model_type``; jev has a test of its own."""


def wrapped_model(model_type: str, attention: str) -> Any:
    """Build the outer model of ``model_type`` with a tiny text model; its towers cannot run."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto import configuration_auto, modeling_auto

    text = hybrid_model(FAMILY_OF_WRAPPER[model_type], attention, scale=5.0)
    if model_type not in configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config = configuration_auto.CONFIG_MAPPING[model_type](text_config=text.config.to_dict())
    config._attn_implementation = attention
    name = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[model_type]
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    owner = getattr(model, "model", model)
    is_inner = isinstance(text.model, type(owner.language_model))
    owner.language_model = text.model if is_inner else text
    if hasattr(model, "lm_head"):
        model.lm_head = text.lm_head
    return model.eval()


# --- the runs

PARTS = {name: (name,) for name in ("seq_idx", "cu_seqlens", "cu_seqlens_cpu", "attention_mask")}
PARTS["cu_seq_lens"] = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
WITHOUT_ATTENTION = ("mamba2", "mamba", "falcon_mamba", "rwkv", "xlstm")  # they refuse "sdpa"
Cases = dict[str, tuple[int, dict[str, Any]]]  # name: rows, model inputs


def without(inputs: dict[str, Any], part: str) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name not in PARTS[part]}


def our_inputs(model: nn.Module) -> Cases:
    inputs = {rows: packed(rows).model_inputs(model, labels=False) for rows in (1, 2)}
    return {"one row": (1, inputs[1]), "two rows": (2, inputs[2])}


def hybrid_cases(model: nn.Module) -> Cases:
    """Our inputs, each keyword left out, seq_idx as int64, and rows that are not made one."""
    cases = our_inputs(model)
    (_, ours), (_, two_rows) = cases.values()
    for part, names in PARTS.items():
        if names[0] in ours:
            cases[f"without {part}"] = (1, without(ours, part))
    cases["seq_idx int64"] = (1, {**ours, "seq_idx": ours["seq_idx"].long()})
    if len(two_rows["input_ids"]) == 1:
        is_cells = {name for name, each in two_rows.items() if isinstance(each, Tensor)}
        is_cells -= {"cu_seqlens", "cu_seqlens_cpu", *PARTS["cu_seq_lens"]}
        kept = {name: two_rows[name].view(2, WIDTH) for name in is_cells}
        cases["rows kept"] = (2, two_rows | kept)
    return cases


def flash_cases(model: nn.Module) -> Cases:
    """Our inputs, positions alone, and boundaries as int64."""
    cases = our_inputs(model)
    for rows, ours in tuple(cases.values()):
        cases[f"without cu_seq_lens, {rows}"] = (rows, without(ours, "cu_seq_lens"))
    wide = {name: cases["one row"][1][name].long() for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    return cases | {"int64": (1, cases["one row"][1] | wide)}


def refused_cases(model: nn.Module) -> Cases:
    """The keywords that transformers documents, for a model that we refuse."""
    batch, family = packed(1), families.family_of(model.config)
    for check in (batch.model_inputs, partial(check_isolation, batch=batch)):
        with pytest.raises(IsolationError) as refused:
            check(model)
        assert (family.needs_isolation or family.refused) in str(refused.value)
    inputs = batch.model_inputs("torch_varlen", labels=False)
    inputs["seq_idx"] = ((inputs["position_ids"] == 0).cumsum(1) - 1).int()
    return {"all keywords": (1, inputs)}


class Backbone(nn.Module):
    """Mamba-2 called by its backbone, as the guide says."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.dtype = model, model.dtype
        self.get_input_embeddings = model.get_input_embeddings

    def forward(self, input_ids: Tensor, seq_idx: Tensor | None = None, **_: Any) -> Any:
        hidden = self.model.backbone(input_ids, seq_idx=seq_idx, use_cache=False)[0]
        return SimpleNamespace(logits=self.model.lm_head(hidden))


def judged(model: nn.Module, cases: Cases) -> dict[str, Any]:
    """Return the verdict of each case in each mode."""
    found: dict[str, Any] = {case: {} for case in cases}
    for mode in ("train", "eval"):
        model.train(mode == "train")
        for case, (rows, inputs) in cases.items():
            found[case][mode] = verdict(model, packed(rows), inputs)
    if "two rows" in cases:
        check_isolation(model, packed(2))
    return found


def run_hybrid(name: str) -> dict[str, Any]:
    if name in SERVED:
        model = hybrid_model(name, "sdpa", scale=5.0)
        return judged(model, hybrid_cases(model))
    attention = "torch_varlen" if name in WITHOUT_ATTENTION else ATTENTION.get(name, "sdpa")
    model = hybrid_model(name, attention, scale=5.0)
    cases = refused_cases(model)
    if name != "mamba2":
        return judged(model, cases)
    by_backbone = judged(Backbone(model), {"by the backbone": cases["all keywords"]})
    return judged(model, cases) | by_backbone


def run_wrapper(model_type: str) -> dict[str, Any]:
    model = wrapped_model(model_type, "sdpa")
    return judged(model, our_inputs(model))


def run_flash(name: str, version: int) -> dict[str, Any]:
    build = hybrid_model if name in SERVED else tiny_model
    model = build(name, f"flash_attention_{version}", dtype=torch.bfloat16)
    return judged(model, our_inputs(model) if name in SERVED else flash_cases(model))


def run_planted(name: str, seeds: int = 8) -> dict[str, Any]:
    """Our inputs and those without seq_idx, of models with fresh weights in bfloat16."""
    found: dict[str, Any] = {"ours": [], "without seq_idx": []}
    built = hybrid_model(name, "sdpa")
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = type(built)(built.config).to(torch.bfloat16)
        _, ours = our_inputs(model)["one row"]
        found["ours"].append(verdict(model, packed(1), ours))
        found["without seq_idx"].append(verdict(model, packed(1), without(ours, "seq_idx")))
    return found


def is_older() -> bool:
    """Check whether transformers is older than the one of the table, whose models may differ."""
    import transformers

    return tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)


def main() -> None:
    """Print the verdicts of all models."""
    install()
    runs = {name: partial(run_hybrid, name) for name in FAMILIES}
    runs |= {f"{name} (outer)": partial(run_wrapper, name) for name in FAMILY_OF_WRAPPER}
    if sys.argv[1:] == ["planted"]:
        runs = {name: partial(run_planted, name) for name in SERVED}
    else:
        for name in FLASH:
            runs |= {f"{name}, flash {n}": partial(run_flash, name, n) for n in (2, 3)}
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = {}
    for name, run in runs.items():
        if ", flash" in name:
            claim_cuda()
        try:
            found[name] = run()
        except pytest.skip.Exception as skipped:
            found[name] = {"skipped": str(skipped)}
        except Exception as error:
            if not is_older() or isinstance(error, IsolationError | AssertionError):
                raise
            found[name] = {"skipped": f"{name}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
