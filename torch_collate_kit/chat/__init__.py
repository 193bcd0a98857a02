"""Chat records and raw texts -> examples with ``input_ids`` and a loss target."""

from torch_collate_kit.chat.dataset import tokenize_chat_dataset
from torch_collate_kit.chat.documents import tokenize_documents
from torch_collate_kit.chat.options import ChatOptions
from torch_collate_kit.chat.tokenize import tokenize_chat
from torch_collate_kit.chat.traces import trace_paths
from torch_collate_kit.chat.windows import windows

__all__ = [
    "ChatOptions",
    "tokenize_chat",
    "tokenize_chat_dataset",
    "tokenize_documents",
    "trace_paths",
    "windows",
]
