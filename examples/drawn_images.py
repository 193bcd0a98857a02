"""Pictures with questions whose answers can be learnt and checked, and a model to learn them.

Coloured shapes on a dark ground; questions about colour, shape, number, and which of several
pictures is meant, and a few without a picture. Everything is a function of the seed. It is what
vlm_sft.py trains on when it is given no model and no data: a tokenizer, a processor and a small
Qwen3-VL are made from scratch, without the hub.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import synthetic_chat
import transformers
from PIL import Image, ImageDraw
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import processing_qwen3_vl

COLOURS = {
    **{"red": (230, 40, 40), "green": (40, 200, 60), "blue": (50, 90, 250)},
    **{"yellow": (240, 220, 40), "pink": (250, 120, 220), "white": (250, 250, 250)},
}
CORNERS = {  # of a shape, in a square from (-1, -1) to (1, 1), y downwards
    "triangle": [(0, -1), (1, 1), (-1, 1)],
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "cross": [
        *[(-0.35, -1), (0.35, -1), (0.35, -0.35), (1, -0.35), (1, 0.35), (0.35, 0.35)],
        *[(0.35, 1), (-0.35, 1), (-0.35, 0.35), (-1, 0.35), (-1, -0.35), (-0.35, -0.35)],
    ],
}
SHAPES = ["ring", *CORNERS]
CELL = 32  # pixels a side of what one shape is drawn in
ORDINALS = ["first", "second"]
FACTS = {
    "How many corners has a triangle?": "three",
    "How many corners has a square?": "four",
    "How many corners has a ring?": "zero",
    "What colour is snow?": "white",
    "What colour is coal?": "black",
    "What colour is grass?": "green",
}
NUMBERS = ["zero", "one", "two", "three", "four"]
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}
    {%- generation %}
        {%- if m.content is string %}{{ m.content }}
        {%- else %}{% for part in m.content %}{{ part.text }}{% endfor %}
        {%- endif %}
    {{- '<|im_end|>' }}{% endgeneration %}
{%- else %}
    {%- if m.content is string %}{{ m.content }}
    {%- else %}
        {%- for part in m.content %}
            {%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{ part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

Thing = tuple[str, str]  # shape and colour


def draw(rng: np.random.Generator, things: list[Thing]) -> bytes:
    """Draw these things in cells of a grid, each a little out of place; return a PNG."""
    rows = int(rng.integers(1 + (len(things) > 2), 3))
    columns = int(rng.integers(-(-len(things) // rows), 3))
    ground = int(rng.integers(0, 50))
    image = Image.new("RGB", (CELL * columns, CELL * rows), (ground, ground, ground))
    canvas = ImageDraw.Draw(image)
    cells = rng.choice(rows * columns, len(things), replace=False)
    for (shape, colour), cell in zip(things, cells.tolist(), strict=True):
        size = rng.uniform(0.32, 0.42) * CELL
        y, x = (np.array(divmod(cell, columns)) + 0.5) * CELL + rng.uniform(-2, 2, 2)
        if shape == "ring":
            box = (x - size, y - size, x + size, y + size)
            canvas.ellipse(box, outline=COLOURS[colour], width=4)
        else:
            corners = [(x + size * across, y + size * down) for across, down in CORNERS[shape]]
            canvas.polygon(corners, fill=COLOURS[colour])
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def some(rng: np.random.Generator, names: Iterable[str], count: int) -> list[str]:
    return rng.choice(list(names), count, replace=False).tolist()


def record(pictures: list[bytes], questions: list[tuple[str, str]], skill: str) -> dict:
    """Return a conversation; the pictures come before the first question."""
    messages = []
    for i, (question, answer) in enumerate(questions):
        parts = [{"type": "image"} for _ in pictures] if i == 0 else []
        asked = [*parts, {"type": "text", "text": question}]
        said = [{"type": "text", "text": answer}]
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    images = [{"bytes": picture, "path": None} for picture in pictures]
    return {"skill": skill, "images": images, "messages": messages}


def colours_and_shapes(rng: np.random.Generator, turns: int, skill: str) -> dict:
    """Ask once about each of one or two things, of different shapes and colours."""
    count = int(rng.integers(1, 3))
    things = list(zip(some(rng, SHAPES, count), some(rng, COLOURS, count), strict=True))
    asked = []
    for i, (shape, colour) in enumerate(things[:turns]):
        if (i == 0) == (skill == "colour"):
            asked.append((f"What colour is the {shape}?", colour))
        else:
            asked.append((f"Which shape is {colour}?", shape))
    return record([draw(rng, things)], asked, skill)


def colour(rng: np.random.Generator, turns: int) -> dict:
    return colours_and_shapes(rng, turns, "colour")


def shape(rng: np.random.Generator, turns: int) -> dict:
    return colours_and_shapes(rng, turns, "shape")


def number(rng: np.random.Generator, turns: int) -> dict:
    count = int(rng.integers(1, 5))
    things = [(str(rng.choice(SHAPES)), str(rng.choice(list(COLOURS)))) for _ in range(count)]
    return record([draw(rng, things)], [("How many things are there?", NUMBERS[count])], "number")


def which_picture(rng: np.random.Generator, turns: int) -> dict:
    """Two pictures of different sizes, one thing in each."""
    things = list(zip(rng.choice(SHAPES, 2).tolist(), some(rng, COLOURS, 2), strict=True))
    asked = [
        (f"What colour is the {things[i][0]} in the {ORDINALS[i]} picture?", things[i][1])
        for i in rng.permutation(2)[:turns].tolist()
    ]
    return record([draw(rng, [thing]) for thing in things], asked, "which_picture")


def no_picture(rng: np.random.Generator, turns: int) -> dict:
    """Knowledge, without a picture: rows and batches are mixed."""
    return record([], [(q, FACTS[q]) for q in some(rng, FACTS, turns)], "no_picture")


SKILLS = (colour, shape, number, which_picture, colour, shape, number, no_picture)


def make_records(count: int, seed: int, turns: int) -> list[dict]:
    """`count` conversations of `turns` questions; `turns` also decides what is drawn."""
    rng = np.random.default_rng(np.random.SeedSequence((seed, turns)))
    return [SKILLS[i % len(SKILLS)](rng, turns) for i in range(count)]


class Qwen3VLProcessor(processing_qwen3_vl.Qwen3VLProcessor):
    """Without a video processor, which needs torchvision; saved under the name of its base."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


def make_processor(records: Iterable[dict]) -> Qwen3VLProcessor:
    """Return a tokenizer of the texts, with Qwen's image processor for up to 512 x 512 pixels."""
    tokens = {"image_token": VISION_TOKENS[2], "video_token": VISION_TOKENS[3]}
    tokenizer = synthetic_chat.train_tokenizer(
        records, 512, VISION_TOKENS, chat_template=None, extra_special_tokens=tokens
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=16, size={"shortest_edge": 32 * 32, "longest_edge": 512 * 512}
    )
    return Qwen3VLProcessor(image_processor=images, tokenizer=tokenizer, chat_template=TEMPLATE)


def make_model(processor: Any, **options: Any) -> transformers.Qwen3VLForConditionalGeneration:
    """Return a Qwen3-VL of a million parameters; torch's random state decides its weights."""
    tokenizer = processor.tokenizer
    ids = dict(zip(VISION_TOKENS, tokenizer.convert_tokens_to_ids(VISION_TOKENS), strict=True))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.06,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    tower = {
        "depth": 2,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_heads": 3,
        "out_hidden_size": 128,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.06,
    }
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return transformers.Qwen3VLForConditionalGeneration._from_config(config, **options)


def majority(trained: Iterable[dict], held_out: Iterable[dict]) -> dict[str, float]:
    """Return how often the most frequent first answer of a skill in training is right, by skill."""

    def answer(record: dict) -> str:  # the first question is of the record's skill
        return record["messages"][1]["content"][0]["text"]

    seen: dict[str, Counter] = {}
    for record in trained:
        seen.setdefault(record["skill"], Counter())[answer(record)] += 1
    guess = {skill: answers.most_common(1)[0][0] for skill, answers in seen.items()}
    asked, right = Counter(), Counter()
    for record in held_out:
        asked[record["skill"]] += 1
        right[record["skill"]] += guess.get(record["skill"]) == answer(record)
    return {skill: right[skill] / asked[skill] for skill in sorted(asked)}
