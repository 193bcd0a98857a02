"""Verdicts of transformers 5.23 with kernels, and the tables of docs/isolation.md."""

from __future__ import annotations

from torch_collate_kit import families

_OURS = {
    "one row": "exact",
    "two rows": "exact",
    "without seq_idx": "leak",
    "seq_idx int64": "error",
}
_FLA = {**_OURS, "without cu_seqlens_cpu": "waits", "rows kept": "error"}
_GROUPS = {
    ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"): {
        **_FLA,
        "without cu_seq_lens": "leak",
    },
    ("kimi_linear", "bailing_hybrid"): {**_FLA, "without cu_seqlens": "leak"},
    ("bamba", "falcon_h1", "nemotron_h", "zamba2", "lfm2", "lfm2_moe"): _OURS,
    ("granitemoehybrid",): {**_OURS, "without attention_mask": "leak"},
}
SERVED = {name: cases for names, cases in _GROUPS.items() for name in names}
"""The families that keywords serve, and the verdict of each case, in eval as in training."""
REFUSED = {
    family.name: "leak" for family in families.FAMILIES if family.mixers and not family.keywords
}
REFUSED["zamba"] = "error"
"""What the others do with the keywords that transformers documents, up to 5.23."""
SINCE_5_24 = {"inkling2": "exact", "lfm3": "error"}
"""What has changed: boundaries reach the convolutions, of which the kernel takes widths up to 4."""
FLASH = ("llama", "mistral", "gemma3", "qwen3_5", "granitemoehybrid")
FLASH_CASES = {
    "one row": "exact",
    "two rows": "exact",
    "without cu_seq_lens, 1": "exact",  # of one row transformers reads the positions
    "without cu_seq_lens, 2": "leak",
    "int64": "error",
}
MESSAGES = {
    "seq_idx int64": "seq_idx must be int32",
    "rows kept": "The batch size is expected to be 1 rather than 2",
    "int64": "must be contiguous int32",
    "all keywords": "seq_idx needs the channels last",
    "lfm3": "width must be between 2 and 4, got 7",
}
"""What the kernel says in the cases that are errors."""
_SHOWN = {
    "one row": "our inputs, one row",
    "two rows": "two rows",
    "without seq_idx": "without `seq_idx`",
    "without cu_seq_lens": "without `cu_seq_lens_q/k`",
    "without cu_seqlens": "without `cu_seqlens`",
    "without cu_seqlens_cpu": "without `cu_seqlens_cpu`",
    "without attention_mask": "without the block mask",
    "seq_idx int64": "`seq_idx` int64",
    "rows kept": "two rows not joined",
}


def _table(*rows: tuple[str, ...]) -> str:
    ruled = (rows[0], ("---",) * len(rows[0]), *rows[1:])
    return "\n".join(f"| {' | '.join(row)} |" for row in ruled)


def _names(family: families.Family) -> str:
    others = [name for name in family.model_types if name != family.name]
    return f"{family.name} ({', '.join(others)})" if others else family.name


def served_table() -> str:
    """Return what keeps segments apart in the families that keywords serve."""
    rows = []
    for family in families.FAMILIES:
        if family.keywords:
            inputs = [name.replace("cu_seq_lens", "cu_seq_lens_q/k") for name in family.keywords]
            apart = ", ".join(f"`{name}`" for name in inputs)
            apart += ", and a block mask with sdpa or eager" * family.blind_mask
            passed = "as one, `[1, R * W]`" if family.one_row else "`[R, W]`"
            rows.append((_names(family), apart, passed, ", ".join(family.packages)))
    head = ("family (other `model_type`s)", "kept apart by", "rows are passed", "packages")
    return _table(head, *rows)


def refused_table() -> str:
    """Return why the other families are refused, and what they do with all keywords."""
    rows = []
    for family in families.FAMILIES:
        if family.mixers and not family.keywords:
            way_out = "no" if family.refused else "yes"
            reason = family.needs_isolation or family.refused
            rows.append((_names(family), reason, REFUSED[family.name], way_out))
    head = ("family", "reason", "with all keywords", "exact with `isolate_mixers`")
    return _table(head, *rows)


def verdict_table() -> str:
    """Return the verdicts of the families that keywords serve, a row for equal ones."""
    head = ("inputs", *(", ".join(names) for names in _GROUPS))
    groups = _GROUPS.values()
    cells = [(shown, *(cases.get(name, "-") for cases in groups)) for name, shown in _SHOWN.items()]
    return _table(head, *cells)
