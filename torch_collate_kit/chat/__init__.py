"""Chat records -> examples with ``input_ids`` and a loss target."""

from torch_collate_kit.chat.dataset import tokenize_chat_dataset
from torch_collate_kit.chat.options import ChatOptions
from torch_collate_kit.chat.tokenize import tokenize_chat

__all__ = ["ChatOptions", "tokenize_chat", "tokenize_chat_dataset"]
