"""A chat corpus whose answers can be learnt and checked, and a tokenizer and a model to learn it.

Five skills, from recalling a word pair to finding one fact in a story; several turns, tool calls,
and lengths with a long tail. Everything is a function of the seed. It is what sft.py trains on when
it is given no model and no dataset. And a game of several turns, which grpo.py learns.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import torch_collate_kit as kit

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
    """A name from the first turn, asked for in the last."""
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


def texts_of(record: dict) -> list[str]:
    """What is said in a conversation; whether it is one, the tokenization says."""
    messages = record.get("messages")
    if not isinstance(messages, list):  # Alpaca form
        return [value for value in record.values() if isinstance(value, str)]
    said = [(m.get("content"), m.get("tool_calls", "")) for m in messages if isinstance(m, dict)]
    return [(text if isinstance(text, str) else "") + json.dumps(calls) for text, calls in said]


def train_tokenizer(corpus: Iterable[dict]) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE of the corpus, digits one by one, with a ChatML template."""
    bpe = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((text for record in corpus for text in texts_of(record)), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )


def make_model(
    tokenizer: Any, hidden_size: int = 256, **config: Any
) -> transformers.Qwen3ForCausalLM:
    """Return a Qwen3 of two layers; torch's random state decides its weights."""
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        initializer_range=0.06,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **config,
    )
    return transformers.Qwen3ForCausalLM(config)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # every length would be compiled
def exact_match(
    model: Any, tokenizer: Any, corpus: Iterable[dict], accelerator: Accelerator
) -> tuple[dict[str, float], dict[str, str]]:
    """Ask for the last answer of every conversation.

    Returns the share of exactly right answers by skill, and by skill the shortest conversation's
    last question with what the model wrote.
    """
    model.eval()
    tasks = []
    for record in corpus:
        tokens = kit.tokenize_chat(record, tokenizer, kit.ChatOptions(train_on="last"))
        start, ids = tokens["loss_mask"].index(1), tokens["input_ids"]
        answer = ids[start : start + sum(tokens["loss_mask"])]
        question = [m["content"] for m in record["messages"] if m["role"] == "user"][-1]
        tasks.append((ids[:start], answer, record["skill"], question))
    tasks.sort(key=lambda task: len(task[0]))  # prompts of one length need no pads
    tasks = tasks[accelerator.process_index :: accelerator.num_processes]
    results = []
    for i in range(0, len(tasks), 50):
        prompts, answers, skills, questions = zip(*tasks[i : i + 50], strict=True)
        batch = kit.PaddedCollator(tokenizer)([{"input_ids": prompt} for prompt in prompts])
        output = model.generate(
            **{name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")},
            max_new_tokens=max(map(len, answers)),
            do_sample=False,
        )
        written = output[:, batch["input_ids"].shape[1] :].tolist()
        for skill, question, answer, ids in zip(skills, questions, answers, written, strict=True):
            said = tokenizer.decode(ids, skip_special_tokens=True)
            results.append((skill, ids[: len(answer)] == answer, f"{question}  ->  {said}"))
    asked, right, shown = Counter(), Counter(), {}
    for skill, is_right, line in gather_object(results):
        asked[skill] += 1
        right[skill] += is_right
        shown.setdefault(skill, line)
    return {skill: right[skill] / asked[skill] for skill in sorted(asked)}, shown


# --- the game of grpo.py

PEOPLE, HIDING_PLACES = NAMES[:4], PLACES[:6]


@dataclass(frozen=True)
class Game:
    """A game of several turns, which grpo.py learns: where is the thing?

    Somebody had it and may have passed it on; the player asks people, and then says where it is.
    An answer ends the game, so the player has to ask first, and the last reply tells whom.

        Ada had the lamp.  ->  Ada?
        Ben has it.        ->  Ben?
        in the barn        ->  in the barn
    """

    uid: str
    thing: str
    people: list[str]  # each passed it on to the next; the last put it away
    place: str

    def question(self) -> str:
        return f"{self.people[0]} had the {self.thing}."

    def reply(self, said: str) -> str | None:
        """What the player is told; None ends the game: an answer, or nonsense."""
        if said.removesuffix("?") not in PEOPLE or not said.endswith("?"):
            return None
        if said[:-1] not in self.people:
            return "not me"
        later = self.people[self.people.index(said[:-1]) + 1 :]
        return f"{later[0]} has it." if later else f"in the {self.place}"

    def reward(self, said: str) -> float:
        return float(said == f"in the {self.place}")


def make_games(count: int, *seed: int) -> list[Game]:
    """Games that are a function of the seed; half of the things were passed on."""
    rng, games = np.random.default_rng(np.random.SeedSequence(seed)), []
    for i in range(count):
        people = rng.choice(PEOPLE, rng.integers(1, 3), replace=False).tolist()
        uid = f"{'-'.join(map(str, seed))}-{i}"
        games.append(Game(uid, str(rng.choice(THINGS)), people, str(rng.choice(HIDING_PLACES))))
    return games


def make_game_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of what is said in games: nearly every word and role is a token."""
    said = [f"{person} had it. {person} has it. not me {person}?\n" for person in PEOPLE]
    said += [f" the {thing}. in the {place}" for thing in THINGS for place in HIDING_PLACES]
    texts = said + ["user\nassistant\n", *PEOPLE] * len(said)
    return train_tokenizer([{"messages": [{"content": text}]} for text in texts])


def clumsy_turn(text: str, rng: np.random.Generator) -> str:
    """Speaks as one should, but mostly asks just anybody, and sometimes says just anything.

    A fifth of the time it guesses instead of asking.
    """
    told, owners = re.findall(r"in the (\w+)", text), re.findall(r"(\w+) ha[sd] ", text)
    if told or rng.random() < 0.2:
        return f"in the {told[0] if told and rng.random() < 0.9 else rng.choice(HIDING_PLACES)}"
    return f"{owners[-1] if rng.random() < 0.3 else rng.choice(PEOPLE)}?"
