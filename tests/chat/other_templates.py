"""Templates of shapes that trl's do not have, shortened, each with what is known of it by hand."""

from __future__ import annotations

from tests.chat.families import Family

__all__ = ["OTHERS"]

# DeepSeek-V3.1: no header after a tool, thinking closed in the prompt. trl has only the template of
# DeepSeek-R1, which opens <think> for every answer.
_DEEPSEEK = (
    "{%- set ns = namespace(asked=false, tool=false) -%}{{ bos_token }}"
    "{%- for m in messages -%}{%- if m.role == 'system' -%}{{ m.content }}"
    "{%- if tools %}{{ '\n\n## Tools\n' + (tools | tojson) }}{% endif -%}"
    "{%- elif m.role == 'user' -%}{%- set ns.tool = false -%}{%- set ns.asked = true -%}"
    "{{ '<\uff5cUser\uff5c>' + m.content }}"
    "{%- elif m.role == 'assistant' -%}"
    "{%- if ns.asked -%}{{ '<\uff5cAssistant\uff5c></think>' }}{%- endif -%}"
    "{%- set ns.asked = false -%}{%- set ns.tool = false -%}{{ m.content or '' }}"
    "{%- if m.tool_calls -%}{{ '<\uff5ctool▁calls▁begin\uff5c>' }}{%- for call in m.tool_calls -%}"
    "{{ '<\uff5ctool▁call▁begin\uff5c>' + call.function.name + '<\uff5ctool▁sep\uff5c>'"
    " + call.function.arguments + '<\uff5ctool▁call▁end\uff5c>' }}{%- endfor -%}"
    "{{ '<\uff5ctool▁calls▁end\uff5c>' }}{%- endif -%}"
    "{{ '<\uff5cend▁of▁sentence\uff5c>' }}"
    "{%- elif m.role == 'tool' -%}{%- set ns.tool = true -%}"
    "{{ '<\uff5ctool▁output▁begin\uff5c>' + m.content + '<\uff5ctool▁output▁end\uff5c>' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt and ns.asked and not ns.tool -%}"
    "{{ '<\uff5cAssistant\uff5c></think>' }}{%- endif -%}"
)
_LLAMA_2 = (
    "{% set ns = namespace(rules='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.rules = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}"
    "{% elif m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + ns.rules + m.content.strip() + ' [/INST]' }}{% set ns.rules = '' %}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
_VICUNA = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + ' ' }}"
    "{% elif m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
    "{% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_ALPACA = (
    "{% for m in messages %}{{ '### ' + {'user': 'Instruction', 'assistant': 'Response',"
    " 'system': 'System'}[m.role] + ':\n' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
# Apertus: the end of an answer is written with the next question, or never.
_APERTUS = (
    "{% set ns = namespace(open=false) %}{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% if not ns.open %}{{ '<|assistant_start|>' }}{% endif %}"
    "{% set ns.open = true %}{{ m.content }}{% else %}"
    "{% if ns.open %}{{ '<|assistant_end|>' }}{% endif %}{% set ns.open = false %}"
    "{{ '<|' + m.role + '_start|>' + m.content + '<|' + m.role + '_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.open %}{{ '<|assistant_start|>' }}{% endif %}"
)
# GigaChat3, Reka: after an answer there is no generation prompt.
_NO_SECOND_PROMPT = (
    "{% for m in messages %}{{ '<|role|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt and messages[-1].role != 'assistant' %}"
    "{{ '<|role|>assistant<|message|>' }}{% endif %}"
)
# Granite: documents are printed.
_GRANITE = (
    "{% for d in documents or [] %}{{ '<|start_of_role|>document<|end_of_role|>' + d.title + ' '"
    " + d.text + '<|end_of_text|>\n' }}{% endfor %}{% for m in messages %}"
    "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
# Laguna: its own tags hold the header.
_LAGUNA = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ '<assistant>\n' + m.content + '</assistant>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<' + m.role + '>\n' + m.content + '</' + m.role + '>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}"
)
# QwQ: the prompt opens <think>, earlier thinking is dropped, nothing is put where none was.
_QWQ = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# Two tokens at the end, and white space before the first.
_TWO_ENDS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% else %}{{ '</s>' }}{% endif %}"
)
# Consecutive messages of one role are one turn.
_MERGING = (
    "{% for m in messages %}{% if loop.first or messages[loop.index0 - 1].role != m.role %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% endif %}{{ m.content }}"
    "{% if loop.last or messages[loop.index0 + 1].role != m.role %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The content is JSON in ASCII.
_ASCII = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n'"
    " + (m.content | tojson(ensure_ascii=true)) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_IM = "<|im_start|>assistant\n"
_V3 = ("<\uff5cAssistant\uff5c></think>", ("<\uff5cend▁of▁sentence\uff5c>",))
_ROLE = "<|start_of_role|>assistant<|end_of_role|>"
_CHATML = Family("", _IM, ("<|im_end|>",), "<|im_end|>")
OTHERS = {
    "deepseek_v3_1": (_DEEPSEEK, Family("", *_V3, "<\uff5cend▁of▁sentence\uff5c>",
        after_tool=("<\uff5ctool▁output▁end\uff5c>",), verbatim="deepseek_v3_1")),
    "llama_2": (_LLAMA_2, Family("", " [/INST]", ("</s>",), "</s>")),
    "vicuna": (_VICUNA, Family("", "ASSISTANT:", ("</s>",), "</s>")),
    "alpaca": (_ALPACA, Family("", "### Response:\n", ("</s>",), "</s>")),
    "apertus": (_APERTUS, Family("", "<|assistant_start|>", ("<|assistant_end|>",), "</s>")),
    "no second prompt": (
        _NO_SECOND_PROMPT, Family("", "<|role|>assistant<|message|>", ("<|end|>",), "</s>")),
    "granite": (_GRANITE, Family("", _ROLE, ("<|end_of_text|>",), "<|end_of_text|>")),
    "laguna": (_LAGUNA, Family("", "<assistant>\n", ("</assistant>",), "</assistant>")),
    "qwq": (_QWQ, Family("", _IM, ("<|im_end|>",), "<|im_end|>", opens=("<think>\n",))),
    "two ends": (_TWO_ENDS, Family("", _IM, ("<|im_end|>",), "</s>")),
    "merging": (_MERGING, _CHATML),
    "ascii": (_ASCII, _CHATML),
}  # fmt: skip
