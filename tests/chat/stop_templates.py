"""Templates that end and open turns in many ways, in the manner of public ones, written for tests.

The second entry says what the author of such a template knows: the header that the generation
prompt ends with, and the tokens at which generation stops.
"""

from __future__ import annotations

from tests.chat.families import Family

__all__ = ["STOPS"]

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
_CALLS_WITH_IDS = (
    "{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id"
    " + '[ARGS]' + args(c) }}{% endfor %}"
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
_MISTRAL_V11 = _mistral(_CALLS_WITH_IDS)
_MISTRAL_V13 = _mistral(_CALLS_ALONE, at="loop.index0 < 2", thinks=True)
_MISTRAL_V15 = (
    "{{ '[MODEL_SETTINGS]{\"reasoning_effort\": \"' + (reasoning_effort or 'none')"
    " + '\"}[/MODEL_SETTINGS]' }}" + _mistral(_CALLS_ALONE, at="loop.index0 < 2", thinks=True)
)

# ---- gpt-oss: one end for a message, one for a call, one for the last answer.
_GPT_OSS = (
    _ARGUMENTS + "{% set ns = namespace(name='') %}{% if tools %}"
    "{{ '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and (loop.last or m.tool_calls) %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}"
    "{% endif %}{% if m.tool_calls %}{% for c in m.tool_calls[:1] %}"
    "{% set ns.name = c.function.name %}{{ '<|start|>assistant to=' + ns.name"
    " + '<|channel|>commentary json<|message|>' + args(c)"
    " + '<|call|>' }}{% endfor %}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content"
    " + ('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}{% endif %}"
    "{% elif m.role == 'tool' %}{{ '<|start|>' + ns.name + ' to=assistant<|message|>' + m.content"
    " + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# ---- Gemma 4: tags of calls and results, and a call ends where its result begins.
_GEMMA_4 = (
    _ARGUMENTS + "{{ bos_token }}{% if tools %}{{ '<|turn>system\n<|tool>' + (tools | tojson)"
    " + '<tool|><turn|>\n' }}{% endif %}{% set ns = namespace(open=false) %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ 'response:' + m.name + '{' + m.content + '}<tool_response|>' }}"
    "{% if not loop.last and messages[loop.index0 + 1].role == 'tool' %}{{ '<|tool_response>' }}"
    "{% endif %}{% else %}{% if not ns.open %}"
    "{{ '<|turn>' + {'assistant': 'model'}.get(m.role, m.role) + '\n' }}{% endif %}"
    "{% if m.reasoning_content %}"
    "{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ '<|tool_call>call:' + c.function.name + args(c) + '<tool_call|>' }}{% endfor %}"
    "{% set ns.open = m.tool_calls is defined %}"
    "{{ '<|tool_response>' if ns.open else '<turn|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.open %}{{ '<|turn>model\n' }}{% endif %}"
)
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
_GEMMA = _of("<|turn>model\n", "<turn|>", "<|tool_response>", after_tool=("<tool_response|>",))
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
    "mistral_v11": (_MISTRAL_V11, _INST),
    "mistral_v13": (_MISTRAL_V13, _INST),
    "mistral_v15": (_MISTRAL_V15, _INST),
    "gpt_oss": (_GPT_OSS, _of("<|start|>assistant", "<|return|>", "<|call|>")),
    "gemma_4": (_GEMMA_4, _GEMMA),
    "two stops": (_TWO_STOPS, _of("<|head|>assistant<|/head|>", "<|eot|>", "<|eom|>")),
    "a named closing tag, then EOS": (_NAMED_THEN_EOS, _of("<s><|assistant_start|>", _S)),
    "header in the question": (_HEADER_IN_QUESTION, _of("<|start_reply|>", "<|stop|>")),
}
