"""Templates of shapes that trl's do not have, shortened, each with what is known of it by hand.

That is the header that the generation prompt ends with, and the tokens at which generation stops.
"""

from __future__ import annotations

from tests.chat.families import Family

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


_ARGUMENTS = (
    "{% macro args(call) %}{% set found = call.function.arguments %}"
    "{{ found if found is string else found | tojson }}{% endmacro %}"
)

# ---- Kimi-K3: one opening tag and one closing tag for everything, then a token that is EOS.
_KIMI = (
    _ARGUMENTS + "{% macro block(name, text) %}{{ '<|open|>' + name + '<|sep|>' + text + CLOSE }}"
    "{% endmacro %}"
    "{% if tools %}{{ block('tools', tools | tojson) + '<|end_of_msg|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|open|>' + m.role + '<|sep|>' }}"
    "{% if m.reasoning_content %}{{ block('think', m.reasoning_content) }}{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ block('call ' + c.function.name, args(c)) }}{% endfor %}{{ CLOSE + '<|end_of_msg|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|open|>assistant<|sep|>' }}{% endif %}"
)
_KIMI_PLAIN = "{% set CLOSE = '<|close|>' %}" + _KIMI
# The name of what is closed is text after the tag, and a tag of the header follows.
_KIMI_NAMED = "{% set CLOSE = '<|close|>it<|sep|>' %}" + _KIMI
# The closing tag is all that ends a turn.
_CLOSE_ALONE = "{% set CLOSE = '<|close|>' %}" + _KIMI.replace("<|end_of_msg|>", "\n")

# ---- Command R7B and Command A: a response has tags of its own inside the turn.
_SAYS = (
    "{% if m.reasoning_content %}"
    "{{ '<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' }}{% endif %}"
    "{% if m.tool_calls %}{{ '<|START_ACTION|>[' }}{% for c in m.tool_calls %}"
    "{{ '{\"tool_name\": \"' + c.function.name + '\", \"parameters\": ' + args(c) + '}' }}"
    "{{ ', ' if not loop.last }}{% endfor %}{{ ']<|END_ACTION|>' }}"
    "{% else %}{{ OPEN + m.content + '<|END_RESPONSE|>' }}{% endif %}{{ '<|END_OF_TURN_TOKEN|>' }}"
)
_BOT = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
_SYSTEM = (
    "{{ bos_token }}{% if tools %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + (tools | tojson)"
    " + '<|END_OF_TURN_TOKEN|>' }}{% endif %}"
)
_R7B = (
    _ARGUMENTS + "{% set OPEN = '<|START_RESPONSE|>' %}" + _SYSTEM + "{% for m in messages %}"
    "{{ '<|START_OF_TURN_TOKEN|>' + {'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}"
    ".get(m.role, '<|SYSTEM_TOKEN|>') }}{% if m.role == 'assistant' %}" + _SAYS + "{% else %}"
    "{{ m.content + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + _BOT + "' }}{% endif %}"
)
# The header of the answer is written with the question or the results; OPEN by the prompt, too.
_COMMAND_A = (
    _ARGUMENTS
    + _SYSTEM
    + "{% for m in messages %}{% if m.role == 'assistant' %}"
    + _SAYS
    + "{% elif m.role == 'system' %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + m.content"
    " + '<|END_OF_TURN_TOKEN|>' }}{% else %}{{ '<|START_OF_TURN_TOKEN|>' + ('<|USER_TOKEN|>'"
    " if m.role == 'user' else '<|SYSTEM_TOKEN|>') + m.content + '<|END_OF_TURN_TOKEN|>' + HEAD }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ OPEN }}{% endif %}"
)
_COMMAND_A_PROMPT = f"{{% set HEAD, OPEN = '{_BOT}', '<|START_RESPONSE|>' %}}" + _COMMAND_A
_COMMAND_A_BARE = f"{{% set HEAD, OPEN = '{_BOT}<|START_RESPONSE|>', '' %}}" + _COMMAND_A

# ---- Mistral: [/INST] ends the prompt, and the model writes what follows it.
_MISTRAL = (
    _ARGUMENTS + "{{ bos_token }}{% set ns = namespace(last=0, rules='') %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'system' %}RULES"
    "{% elif m.role == 'user' %}{% if tools and AT %}"
    "{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]' + GAP + ns.rules + m.content + '[/INST]' }}{% set ns.rules = '' %}"
    "{% elif m.role == 'tool' %}RESULT"
    "{% else %}{% if m.reasoning_content and THINKS %}"
    "{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}"
    "{% if m.content %}{{ GAP + m.content }}{% endif %}"
    "{% if m.tool_calls %}CALLS{% endif %}{{ eos_token }}{% endif %}{% endfor %}"
)
_LIST_OF_CALLS = (
    "{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + args(c)'
    " + ', \"id\": \"' + c.id + '\"}' }}{{ ', ' if not loop.last }}{% endfor %}{{ ']' }}"
)
_CALLS_ALONE = (
    "{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + args(c) }}"
    "{% endfor %}"
)
_RESULT_AS_JSON = (
    '{{ \'[TOOL_RESULTS] {"content": \' + (m.content | tojson) + \', "call_id": "\''
    " + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
)
_SYSTEM_PROMPT = "{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"


def _mistral(calls: str, *, gap: str = "", result: str = "", rules: str = _SYSTEM_PROMPT,
             at: str = "loop.index0 == ns.last", thinks: bool = False) -> str:  # fmt: skip
    result = result or "{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    names = {"CALLS": calls, "RESULT": result, "RULES": rules, "AT": at}
    template = _MISTRAL
    for name, text in names.items():
        marked = f"{{% if tools and {name} %}}" if name == "AT" else f"%}}{name}{{%"
        template = template.replace(marked, marked.replace(name, text))
    return f"{{% set GAP, THINKS = '{gap}', {str(thinks).lower()} %}}" + template


_MISTRAL_V3 = _mistral(
    _LIST_OF_CALLS,
    gap=" ",
    result=_RESULT_AS_JSON,
    rules="{% set ns.rules = m.content + '\n\n' %}",
)
_MISTRAL_V7 = _mistral(_LIST_OF_CALLS, gap=" ")
_MISTRAL_V13 = _mistral(_CALLS_ALONE, at="loop.index0 < 2", thinks=True)

# ---- Llama 3.1: calls end with a token of their own, which EOS is not.
_TWO_STOPS = (
    _ARGUMENTS + "{{ bos_token }}{% if tools %}{{ '<|tools|>' + (tools | tojson) + '<|eot|>' }}"
    "{% endif %}{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<|python|>' + c.function.name + args(c) }}{% endfor %}"
    "{{ '<|eom|>' if m.tool_calls else '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>' }}{% endif %}"
)
# ---- A closing tag with a name, then a token that is EOS; the next message has its own first one.
_NAMED_THEN_EOS = (
    "{% for m in messages %}{{ '<s>' + '<|' + m.role + '_start|>' + m.content + '<|' + m.role"
    " + '_end|>' + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s><|assistant_start|>' }}{% endif %}"
)
# ---- The header of the answer is written with the question, its tag is closed after the answer.
_HEADER_IN_QUESTION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ m.content + '<|end_reply|><|stop|>\n' }}{% else %}"
    "{{ '<|start_' + m.role + '|>' + m.content + '<|end_' + m.role + '|><|stop|>\n' }}"
    "{% if m.role == 'user' %}{{ '<|start_reply|>' }}{% endif %}{% endif %}{% endfor %}"
)

_S = "</s>"


def _of(header: str, *ends: str, eos: str = "", after_tool: tuple[str, ...] = ()) -> Family:
    return Family("", header, ends, eos or ends[0], after_tool=after_tool)


_KIMI_END = _of("<|open|>assistant<|sep|>", "<|end_of_msg|>")
_RESPONSE = _of(_BOT + "<|START_RESPONSE|>", "<|END_OF_TURN_TOKEN|>")
_INST = _of("[/INST]", _S, after_tool=("[/TOOL_RESULTS]", _S))
STOPS = {
    "kimi_k3": (_KIMI_PLAIN, _KIMI_END),
    "kimi_k3, names after tags": (_KIMI_NAMED, _KIMI_END),
    # Which of the two tags stops a model is not to be told, so nothing may be accepted.
    "kimi_k3, names after tags, no EOS": (_KIMI_NAMED.replace("<|end_of_msg|>", "\n"), _KIMI_END),
    "nameless closing tag alone": (_CLOSE_ALONE, _of(_KIMI_END.header, "<|close|>", eos=_S)),
    "command_r7b": (_R7B, _of(_BOT, "<|END_OF_TURN_TOKEN|>")),
    "command_a": (_COMMAND_A_PROMPT, _RESPONSE),
    "command_a, no prompt": (_COMMAND_A_BARE, _RESPONSE),
    "mistral_v3": (_MISTRAL_V3, _INST),
    "mistral_v7": (_MISTRAL_V7, _INST),
    "mistral_v13": (_MISTRAL_V13, _INST),
    "two stops": (_TWO_STOPS, _of("<|head|>assistant<|/head|>", "<|eot|>", "<|eom|>")),
    "a named closing tag, then EOS": (_NAMED_THEN_EOS, _of("<s><|assistant_start|>", _S)),
    "header in the question": (_HEADER_IN_QUESTION, _of("<|start_reply|>", "<|stop|>")),
}
