"""What agents' histories cost that are rewritten between steps: as samples, branches and trees.

Claimed: rollouts of several segments, packed with ``share_prefixes``, take at most 1.06 times the
cells of a history that was never rewritten where 1% of the sampled pieces are tokenized again, and
``merge_steps`` merges 10,000 steps in less than 5 CPU seconds.

    python benchmarks/bench_agents.py

12 airline dialogues of tau-bench with their tools, 167 steps; the tokenizer is a Mistral one, the
templates are its ChatML and Qwen3's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from harness import Report, arguments

from torch_collate_kit import PackedCollator, rl

_TRACES, _MANY = 12, 60
_THOUGHT = "I should look at what the policy says about this request before I answer the customer"
# Breaks in percent, and cells of trees, of a prototype; the three that are drawn in another draw.
_EXPECTED = {
    "ChatML, tokens kept": (0.0, 99_974),
    "0.1% tokenized again": (1.9, 100_270),
    "0.3% tokenized again": (9.0, 101_194),
    "1% tokenized again": (37.4, 105_642),
    "Qwen3, thinking in each turn": (37.4, 142_896),
    "Qwen3, no thinking": (100.0, 118_815),
}
Step = dict[str, Any]


def steps_of(
    number: int, messages: list[dict], tokenizer: Any, options: dict, thought: str | None
) -> list[Step]:
    """A step for each message of the assistant, tokenized with all that it follows."""
    thinking = {} if thought is None else {"reasoning_content": thought}
    messages = [m | thinking if m["role"] == "assistant" else m for m in messages]
    steps = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        texts = [
            tokenizer.apply_chat_template(messages[:stop], tokenize=False, **options, **more)
            for stop, more in ((i, {"add_generation_prompt": True}), (i + 1, {}))
        ]
        prompt, whole = (
            tokenizer(text.removesuffix("\n") if is_whole else text, add_special_tokens=False)
            for is_whole, text in enumerate(texts)
        )
        ids = whole["input_ids"][len(prompt["input_ids"]) :]
        step = {"uid": str(number), "is_last_step": False, "prompt_ids": prompt["input_ids"]}
        steps.append(step | {"response_ids": ids, "loss_mask": [1] * len(ids), "rewards": 0.0})
    steps[-1]["is_last_step"] = True
    return steps


def tokenized_again(steps: list[Step], tokenizer: Any, share: float) -> list[Step]:
    """This share of the sampled tokens are two pieces, which the next prompt has as one."""
    rng, vocabulary = np.random.default_rng(0), tokenizer.get_vocab()
    found = []
    for step in steps:
        ids: list[int] = []
        for token in step["response_ids"]:
            text = tokenizer.convert_ids_to_tokens(token)
            cuts = [k for k in range(1, len(text)) if {text[:k], text[k:]} <= vocabulary.keys()]
            if rng.random() < share and cuts and token not in tokenizer.all_special_ids:
                k = int(rng.choice(cuts))
                ids += [vocabulary[text[:k]], vocabulary[text[k:]]]
            else:
                ids.append(token)
        found.append(step | {"response_ids": ids, "loss_mask": [1] * len(ids)})
    return found


def renderings(folder: Path) -> dict[str, list[Step]]:
    import trl

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder / "tokenizers" / "mistral-32k-chatml"
    )
    lines = (folder / "chat_tools_tau_airline_128.jsonl").read_text(encoding="utf-8").splitlines()
    tools = (folder / "chat_tools_tau_airline.tools.json").read_text(encoding="utf-8")
    traces = [json.loads(line)["messages"] for line in lines[:_TRACES]]

    def rendered(thought: Callable[[int], str | None]) -> list[Step]:
        options = {"tools": json.loads(tools)}
        pairs = enumerate(traces)
        return [s for n, of in pairs for s in steps_of(n, of, tokenizer, options, thought(n))]

    names = iter(_EXPECTED)
    found = {next(names): rendered(lambda n: None)}
    for share in (0.001, 0.003, 0.01):
        found[next(names)] = tokenized_again(next(iter(found.values())), tokenizer, share)
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text(encoding="utf-8")
    words = _THOUGHT.split()
    for thinks in (True, False):
        thoughts = [" ".join((words * 3)[n : n + 30]) if thinks else None for n in range(_TRACES)]
        found[next(names)] = rendered(lambda n, of=thoughts: of[n])
    return found


def branches(report: Report, folder: Path) -> None:
    """Tokens of a sample per step and per branch, and cells of a tree."""
    rows, farthest, kept = [], 0.0, 0
    found = renderings(folder)
    for name, steps in found.items():
        rollouts = rl.merge_steps(steps, rewritten="branch")
        packing = {"max_tokens": 1 << 18, "share_prefixes": True}
        metadata = PackedCollator(0, **packing)(rollouts).metadata
        tokens = sum(len(step["prompt_ids"]) + len(step["response_ids"]) for step in steps)
        later = len(steps) - len(rollouts)
        broken = 100 * (sum(metadata["num_segments"]) - len(rollouts)) / later
        cells, wanted = metadata["step_num_filled_cells"], _EXPECTED[name]
        kept = kept or cells
        farthest = max(farthest, 100 * abs(cells / wanted[1] - 1))
        rows.append([name, f"{broken:.1f}%", f"{tokens:,}", f"{metadata['step_num_tokens']:,}"])
        rows[-1] += [f"{cells:,}", f"{cells / kept:.2f}x", f"{wanted[0]}%; {wanted[1]:,}"]
        if name.startswith("1%"):
            report.target("cells where 1% is tokenized again", cells / kept, "<x", 1.06)
    header = [
        "rendering",
        "breaks",
        "tokens: a sample per step",
        "a sample per branch",
        "tree: cells",
    ]
    note = (
        f"{_TRACES} airline dialogues of tau-bench, {len(steps)} steps. Which pieces are tokenized "
        "again is drawn, and so is how many steps break."
    )
    report.table(
        "Rewritten histories", [*header, "of kept", "prototype: breaks; cells"], rows, note
    )
    report.target("cells against those of the prototype, farthest", farthest, "<%", 3)
    many = [
        s | {"uid": f"{s['uid']}.{k}"} for k in range(_MANY) for s in found["1% tokenized again"]
    ]
    for name in ("prompt_ids", "response_ids", "loss_mask"):
        arrays = [np.array(step[name]) for step in many[: len(steps)]]
        many = [step | {name: arrays[i % len(steps)]} for i, step in enumerate(many)]
    began = time.process_time()
    rl.merge_steps(many, rewritten="branch")
    seconds = time.process_time() - began
    report.target(f"merging {len(many):,} steps, CPU seconds", seconds, "<s", 5)


def main() -> None:
    options = arguments(__doc__, rounds=1).parse_args()
    transformers.logging.set_verbosity_error()
    report = Report("agents", "Histories that are rewritten cost little more than kept ones.")
    branches(report, options.data)
    report.write(options.out)


if __name__ == "__main__":
    main()
