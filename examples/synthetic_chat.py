"""A chat corpus whose answers can be learnt and checked, and a tokenizer and a model to learn it.

Five skills, from recalling a word pair to finding one fact in a story; several turns, tool calls,
and lengths with a long tail. Everything is a function of the seed. sft.py trains on it without
--dataset; vlm_sft.py and grpo.py train their tokenizers and evaluate with the same functions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import torch_collate_kit as kit
from torch_collate_kit.families import left_padding_fault

PAIRS = """hot cold,big small,fast slow,light dark,happy sad,old young,open shut,high low,wet dry,
loud quiet,rich poor,soft hard,full empty,early late,near far,strong weak,clean dirty,thick thin"""
OPPOSITES = dict(pair.split()[::way] for pair in PAIRS.split(",") for way in (1, -1))
LISTS = """Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jana Kai Lena Milo Nora Omar Pia Rosa Sam Tara Uma
apple book chair drum egg flute glove hat iron jug kite lamp map oven pen rope scarf tent whistle
bear cat dog eagle fox goat hare ibis koala lion mole newt otter pig seal tiger wolf
attic barn cave forest garden harbour kitchen library market museum park river school tower
dances hides plays rests runs sings sleeps waits"""
NAMES, THINGS, ANIMALS, PLACES, VERBS = (line.split() for line in LISTS.splitlines())

FEW = 16  # words of a kind in the corpus: as many as a minute of training is enough for


def qa(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def opposites(rng: np.random.Generator) -> list[dict]:
    """Knowledge, the easiest: 36 words."""
    ask = ["What is the opposite of {}?", "Tell me the opposite of {}.", "And the opposite of {}?"]
    messages = []
    for word in rng.choice(list(OPPOSITES), rng.integers(1, 4)):
        messages += qa(
            rng.choice(ask).format(word), f"The opposite of {word} is {OPPOSITES[word]}."
        )
    return messages


def addition(rng: np.random.Generator) -> list[dict]:
    messages = []
    for a, b in rng.integers(0, 10, (rng.integers(1, 3), 2)).tolist():
        messages += qa(f"How much is {a} plus {b}?", f"{a} plus {b} is {a + b}.")
    return messages


def memory(rng: np.random.Generator) -> list[dict]:
    """Ask in the last turn for a name from the first."""
    name, hello = rng.choice(NAMES[:FEW]), rng.choice(["My name is {}.", "I am {}.", "{} here."])
    between = opposites(rng) if rng.random() < 0.4 else []
    told = qa(hello.format(name), f"Hello {name}!")
    return told + between + qa("What is my name?", f"Your name is {name}.")


def tool_use(rng: np.random.Generator) -> list[dict]:
    item, price = str(rng.choice(THINGS[:FEW])), int(rng.integers(10, 100))
    call = {"name": "get_price", "arguments": json.dumps({"item": item})}
    call = {"id": "call_0", "type": "function", "function": call}
    result = {"role": "tool", "tool_call_id": "call_0", "content": json.dumps({"price": price})}
    question = rng.choice(["What does the {} cost?", "How much is the {}?"]).format(item)
    ask, answer = qa(question, f"The {item} costs {price} coins.")
    return [ask, {"role": "assistant", "content": "", "tool_calls": [call]}, result, answer]


def story(rng: np.random.Generator) -> list[dict]:
    """One fact in a story of mostly a few, sometimes sixty sentences: the long tail."""
    lines = [
        f"The {rng.choice(ANIMALS[:FEW])} {rng.choice(VERBS[:FEW])}."
        for _ in range(min(60, int(rng.lognormal(1.0, 1.1))))
    ]
    thing, place = rng.choice(THINGS[:FEW]), rng.choice(PLACES[:FEW])
    lines.insert(rng.integers(len(lines) + 1), f"I put the {thing} in the {place}.")
    return qa(" ".join([*lines, f"Where is the {thing}?"]), f"The {thing} is in the {place}.")


SKILLS = (opposites, addition, memory, tool_use, story)
MAX_REPEATS = 20_000  # in a row; then a skill has nothing new: the smallest has 2,880 conversations
# ChatML; {% generation %} marks what the assistant writes, its end mark included.
TEMPLATE = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}
    {%- generation %}{{ m.content }}
        {%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
    {{- '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}
{%- endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def make_corpus(count: int, seed: int) -> list[dict]:
    """`count` conversations, no two alike, the skills in turn; DataError if there are fewer."""
    rng, seen, corpus = np.random.default_rng(np.random.SeedSequence((seed, 0))), set(), []
    repeats = 0
    while len(corpus) < count:
        skill = SKILLS[len(corpus) % len(SKILLS)]
        messages = skill(rng)
        if json.dumps(messages) not in seen:
            seen.add(json.dumps(messages))
            corpus.append({"skill": skill.__name__, "messages": messages})
            repeats = 0
        elif (repeats := repeats + 1) == MAX_REPEATS:
            raise kit.DataError(
                f"a made-up corpus of {count} conversations is not possible: {skill.__name__} has "
                f"no more than {len(corpus) // len(SKILLS)} different ones, all {len(SKILLS)} "
                f"skills together {len(corpus)}; make fewer"
            )
    return corpus


def make_pairs(count: int, seed: int) -> list[dict]:
    """`count` preferences, no two prompts alike: of two to eight words the first in the alphabet.

    All words of a kind are in the data, but a held-out list of them is not.
    """
    rng, pairs = np.random.default_rng(np.random.SeedSequence((seed, 0))), {}
    while len(pairs) < count:
        kind = (NAMES, THINGS, ANIMALS)[rng.integers(3)][:14]
        words = rng.choice(kind, rng.integers(2, 9), replace=False).tolist()
        first, *others = sorted(words)
        asked = f"Choose one: {', '.join(words)}."
        sides = {"chosen": first, "rejected": str(rng.choice(others))}
        said = {side: qa(asked, f"I choose {word}.") for side, word in sides.items()}
        pairs[asked] = {"prompt": said["chosen"][:1]} | {k: of[1:] for k, of in said.items()}
    return list(pairs.values())


def rated(pairs: list[dict]) -> list[dict]:
    """Return each answer of pairs alone, and whether it is good: what KTO is trained on."""
    return [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in pairs
        for side in ("chosen", "rejected")
    ]


def texts_of(record: dict) -> list[str]:
    """Return what a record says; whether it is a conversation, its tokenization finds out."""
    messages = record.get("messages")
    if not isinstance(messages, list):  # Alpaca form
        return [value for value in record.values() if isinstance(value, str)]
    texts: list[str] = []
    for message in (m for m in messages if isinstance(m, dict)):
        content = message.get("content")
        if isinstance(content, list):  # parts, as of messages with images
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            texts += [text for text in parts if isinstance(text, str)]
        else:
            said = content if isinstance(content, str) else ""
            texts.append(said + json.dumps(message.get("tool_calls", "")))
    return texts


def train_tokenizer(
    records: Iterable[dict],
    vocab_size: int = 1024,
    special_tokens: Iterable[str] = (),
    chat_template: str | None = TEMPLATE,
    **options: Any,
) -> transformers.PreTrainedTokenizerFast:
    """Train a byte-level BPE on what records say, digits one by one, with a ChatML template."""
    bpe = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>", *special_tokens],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((text for record in records for text in texts_of(record)), trainer)
    ends = {"pad_token": "<|pad|>", "eos_token": "<|im_end|>", "chat_template": chat_template}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **ends, **options)


def make_model(
    tokenizer: Any, hidden_size: int = 256, arch: str = "qwen3", **config: Any
) -> transformers.PreTrainedModel:
    """Return a Qwen3 or a hybrid Qwen3.5 of two layers, weights by torch's random state."""
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "initializer_range": 0.06,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if arch == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **config))
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    sizes |= heads | {
        "linear_key_head_dim": hidden_size // 4,
        "linear_value_head_dim": hidden_size // 4,
    }
    layers = ["linear_attention", "full_attention"]
    found = transformers.Qwen3_5TextConfig(**sizes, layer_types=layers, **config)
    return transformers.Qwen3_5ForCausalLM(found)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # every length would be compiled
def exact_match(
    model: Any, tokenizer: Any, corpus: Iterable[dict], accelerator: Accelerator
) -> tuple[dict[str, float], dict[str, str]]:
    """Ask for the last answer of every conversation; `tokenizer` may be a processor of images.

    Returns the share of exactly right answers by skill, and by skill the shortest conversation's
    last question with what the model wrote.
    """
    model.eval()
    collate, tasks = kit.PaddedCollator(tokenizer, train_all=True), []
    for record in list(corpus)[accelerator.process_index :: accelerator.num_processes]:
        tokens = kit.tokenize_chat(record, tokenizer, kit.ChatOptions(train_on="last"))
        unused = ("loss_mask", "num_cut_tokens", "skip_reason")
        prompt = {name: value for name, value in tokens.items() if name not in unused}
        start, ids = tokens["loss_mask"].index(1), tokens["input_ids"]
        answer = ids[start : start + sum(tokens["loss_mask"])]
        question = [m["content"] for m in record["messages"] if m["role"] == "user"][-1]
        tasks.append((prompt | {"input_ids": ids[:start]}, answer, record["skill"], question))
    tasks.sort(key=lambda task: len(task[0]["input_ids"]))  # little padding
    results = []
    size = 1 if left_padding_fault(model.config) else 50  # such a model reads pads as tokens
    for i in range(0, len(tasks), size):
        prompts, answers, skills, questions = zip(*tasks[i : i + size], strict=True)
        batch = collate(list(prompts)).to(model.device)
        inputs = batch.model_inputs(labels=False)
        for name in ("use_cache", "position_ids"):  # `generate` makes its own
            inputs.pop(name, None)
        output = model.generate(**inputs, max_new_tokens=max(map(len, answers)), do_sample=False)
        written = output[:, batch["input_ids"].shape[1] :].tolist()
        for skill, question, answer, ids in zip(skills, questions, answers, written, strict=True):
            said = getattr(tokenizer, "tokenizer", tokenizer).decode(ids, skip_special_tokens=True)
            results.append((skill, ids[: len(answer)] == answer, f"{question}  ->  {said}"))
    asked, right, shown = Counter(), Counter(), {}
    for skill, is_right, line in gather_object(results):
        asked[skill] += 1
        right[skill] += is_right
        shown.setdefault(skill, line)
    return {skill: right[skill] / asked[skill] for skill in sorted(asked)}, shown
