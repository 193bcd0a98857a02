"""Tokenised rows, read at random without a Python object per token; and the files of records."""

from torch_collate_kit.loading.dataset.foreign_rows import unpack_dataset
from torch_collate_kit.loading.dataset.sources import read_records
from torch_collate_kit.loading.dataset.token_file_kinds import token_files
from torch_collate_kit.loading.dataset.tokenized import TokenizedDataset

__all__ = ["TokenizedDataset", "read_records", "token_files", "unpack_dataset"]
