"""`python -m torch_collate_kit ...` in this process, and the tokenizer of its examples."""

from __future__ import annotations

import runpy
import sys

import pytest

from torch_collate_kit.__main__ import parser
from torch_collate_kit.chat.preview import byte_tokenizer, preview
from torch_collate_kit.commands import as_flags

__all__ = ["as_flags", "byte_tokenizer", "parser", "preview", "run_command"]


def run_command(*arguments: object) -> int:
    """Run the command line with these arguments and return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["torch_collate_kit", *map(str, arguments)])
        patch.delitem(sys.modules, "torch_collate_kit.__main__", raising=False)  # run anew
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("torch_collate_kit", run_name="__main__")
    return ended.value.code
