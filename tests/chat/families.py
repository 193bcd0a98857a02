"""The chat templates of the trl package by family, read by hand, and a tokenizer for each."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ["FAMILY_OF", "Family", "bytes_of", "templates", "tokenizer_for"]


@dataclass(frozen=True)
class Family:
    """Templates that write an assistant turn in the same way."""

    templates: str  # names of files, without .jinja; * stands for the name and its _training copy
    header: str
    ends: tuple[str, ...]  # tokens at which generation stops
    eos: str
    opens: tuple[str, ...] = ("",)  # what a generation prompt may add to the header
    after_tool: tuple[str, ...] = ()  # what may stand before an answer to a tool, for the header
    only_parts: bool = False  # the template loops over the parts of the content
    verbatim: str = ""  # templates (as above) that print an argument string as it is

    def prints_strings(self, name: str) -> bool:
        return name in _names(self.verbatim)


_IM, _THINK, _NO_THINK = "<|im_start|>assistant\n", "<think>\n", "<think>\n\n</think>\n\n"
_COHERE, _COHERE_END = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"
_LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_DEEPSEEK_END = "<\uff5cend▁of▁sentence\uff5c>"
_IM_END, _UTTERANCE = "<|im_end|>", "<end_of_utterance>"
FAMILIES = [
    Family("cohere*", _COHERE, (_COHERE_END,), _COHERE_END),
    Family("cohere2*", _COHERE + "<|START_RESPONSE|>", (_COHERE_END,), _COHERE_END),
    Family("deepseek_r1_distill* deepseekv3*", "<\uff5cAssistant\uff5c>", (_DEEPSEEK_END,),
           _DEEPSEEK_END, opens=(_THINK,), after_tool=("<\uff5ctool▁outputs▁end\uff5c>",),
           verbatim="deepseek_r1_distill* deepseekv3"),
    Family("gemma* gemma3*", "<start_of_turn>model\n", ("<end_of_turn>",), "<eos>"),
    Family("gemma4 gemma4_v3 gemma4_v4 gemma4_v5 diffusion_gemma*", "<|turn>model\n",
           ("<turn|>", "<|tool_response>"), "<turn|>", opens=("", "<|channel>thought\n"),
           after_tool=("<tool_response|>", "<turn|>\n")),  # text beside the call is after it
    Family("gemma4_v2", "<|turn>model\n", ("<turn|>",), "<turn|>"),
    Family("glm4moe*", "<|assistant|>", ("<|user|>", "<|observation|>", "<|system|>"),
           "<|endoftext|>", opens=("", "\n<think></think>")),
    Family("gptoss*", "<|start|>assistant", ("<|return|>", "<|call|>"), "<|return|>"),
    Family("idefics3* smolvlm*", "Assistant:", (_UTTERANCE,), _UTTERANCE, only_parts=True),
    Family("lfm2* lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl lfm2_v2*", _IM, (_IM_END,), _IM_END),
    Family("llama3* llama3_1 llama3_2", _LLAMA, ("<|eot_id|>",), "<|eot_id|>"),
    Family("llava_next*", " [/INST]", ("</s>",), "</s>", only_parts=True),
    Family("muse_glimmer*", "<|start|>assistant", ("<|eot|>",), "<|eot|>"),
    Family("nemotron_3_nano* nemotron_3_super* nemotron_3_ultra* nemotron_3_5_lightning*", _IM,
           (_IM_END,), _IM_END, opens=(_THINK, "<think></think>")),
    Family("phi3* phi3_5*", "<|assistant|>\n", ("<|end|>",), "<|endoftext|>"),
    Family("qwen2_5* qwen2_5_vl* qwen3* qwen3_instruct_2507* qwen3_vl*", _IM, (_IM_END,), _IM_END,
           opens=("", _NO_THINK), verbatim="qwen3* qwen3_instruct_2507* qwen3_vl*"),
    Family("qwen3_5_think* qwen3_5_nothink* qwen3_6* qwen3_8*", _IM, (_IM_END,), _IM_END,
           opens=(_THINK, _NO_THINK)),
]  # fmt: skip


def _names(listed: str) -> set[str]:
    names = {name.rstrip("*") for name in listed.split()}
    return names | {name[:-1] + "_training" for name in listed.split() if name.endswith("*")}


FAMILY_OF = {name: family for family in FAMILIES for name in _names(family.templates)}


def templates() -> dict[str, str]:
    """The chat templates of the trl package by name; its code is not imported.

    Without them most of what is known about chats would not be tested, so this is an error.
    """
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "these tests need the chat templates of trl: run `make test`, or "
            "`pip install --no-deps -c constraints.txt trl`"
        )
    files = sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


# ---- a tokenizer with one token per byte, and the template's own tokens

_TOKEN = re.compile(
    r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|<\|[\w\"]+>|<[\w\"]+\|>|<(?:start|end)_of_\w+>|</?s>"
    r"|</?think>|</?tool_call>|</?tool_response>|\[gMASK\]|<sop>"
)


@cache
def byte_of() -> dict[str, int]:
    """The byte-level alphabet, found by encoding each byte of each character once."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def tokenizer_for(template: str, eos: str) -> PreTrainedTokenizerFast:
    """Byte-level, without merges: every character keeps tokens of its own."""
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(byte_of())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token=eos)
    found = sorted(set(_TOKEN.findall(template)))
    tokenizer.add_tokens([t for t in found if "think" in t or "tool" in t])
    tokenizer.add_tokens([t for t in found if t not in tokenizer.get_vocab()], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


@cache
def bytes_of(tokenizer: Any) -> list[bytes]:
    """The bytes that each id stands for."""
    added = {i: token.content.encode() for i, token in tokenizer.added_tokens_decoder.items()}
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return [
        added[i] if i in added else bytes(byte_of()[char] for char in token)
        for i, token in enumerate(tokens)
    ]
