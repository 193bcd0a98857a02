"""Packed attention for transformers models, and the check that packed examples stay apart."""

from torch_collate_kit.attention.context import context_attention, context_join
from torch_collate_kit.attention.isolate_mixers import isolate_mixers
from torch_collate_kit.attention.isolation import check_isolation
from torch_collate_kit.attention.varlen import register_torch_varlen

__all__ = [
    "check_isolation",
    "context_attention",
    "context_join",
    "isolate_mixers",
    "register_torch_varlen",
]
