"""Variable-length examples into training batches for PyTorch.

Importing the package loads torch and NumPy and nothing heavier.
"""

from torch_collate_kit import attention as attention
from torch_collate_kit import batch as batch
from torch_collate_kit import chat as chat
from torch_collate_kit import collators as collators
from torch_collate_kit import errors as errors
from torch_collate_kit import loading as loading
from torch_collate_kit import losses as losses
from torch_collate_kit import packing as packing
from torch_collate_kit import preference as preference
from torch_collate_kit import ragged as ragged
from torch_collate_kit import reporting as reporting
from torch_collate_kit import rl as rl
from torch_collate_kit import testing as testing
from torch_collate_kit import vision as vision
from torch_collate_kit._version import __version__
from torch_collate_kit.attention import check_isolation, isolate_mixers, register_torch_varlen
from torch_collate_kit.batch import Batch, PerExample, PerResponseToken, PerToken, unpack
from torch_collate_kit.chat import ChatOptions, tokenize_chat, tokenize_chat_dataset
from torch_collate_kit.collators import (
    PackedCollator,
    PaddedCollator,
    RolloutCollator,
    VisionLanguageCollator,
)
from torch_collate_kit.errors import DataError, IsolationError, StateError
from torch_collate_kit.loading import (
    Mixture,
    PackedBatchSampler,
    PackedIterableDataset,
    PackedRows,
    PrefetchingSampler,
    PrefetchLoader,
    TokenizedDataset,
)
from torch_collate_kit.losses import global_num_loss_tokens, segment_sums, token_logps, token_loss
from torch_collate_kit.packing import ModelCost, PackingOptions, ParallelLayout, pack
from torch_collate_kit.reporting import audit, packing_report

__all__ = [
    "Batch",
    "ChatOptions",
    "DataError",
    "IsolationError",
    "Mixture",
    "ModelCost",
    "PackedBatchSampler",
    "PackedCollator",
    "PackedIterableDataset",
    "PackedRows",
    "PackingOptions",
    "PaddedCollator",
    "ParallelLayout",
    "PerExample",
    "PerResponseToken",
    "PerToken",
    "PrefetchLoader",
    "PrefetchingSampler",
    "RolloutCollator",
    "StateError",
    "TokenizedDataset",
    "VisionLanguageCollator",
    "__version__",
    "audit",
    "check_isolation",
    "global_num_loss_tokens",
    "isolate_mixers",
    "pack",
    "packing_report",
    "register_torch_varlen",
    "segment_sums",
    "token_logps",
    "token_loss",
    "tokenize_chat",
    "tokenize_chat_dataset",
    "unpack",
]
# What completion offers: these names, the packages above, and of each what it has in __all__.
_SHOWN = [name for name in globals() if name[0] != "_" and name not in ("families", "reading")]
__dir__ = ["__version__", *_SHOWN].copy
for _name in _SHOWN:
    if hasattr(_package := globals()[_name], "__all__"):
        vars(_package)["__dir__"] = _package.__all__.copy
