"""What exact loss masks cost: tokenize_chat beside transformers' apply_chat_template alone.

Claimed: at most 1.5 times the CPU time of ``apply_chat_template(tokenize=True)``, on templates with
and without ``{% generation %}`` tags, and no more per message in long conversations. A dataset is
tokenized with every check at nearly the rate of ``datasets.map`` of transformers' masks alone.

    python benchmarks/bench_chat.py

The conversations are real (GSM8K, Taskmaster-4, SQuALITY). "masks of transformers and TRL" is
``apply_chat_template(return_assistant_tokens_mask=True)``, which needs the tags and which TRL's
SFTTrainer calls. The figures are CPU seconds of the whole process, because a batch is tokenized on
several threads.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable
from typing import Any

from harness import Report, alternate, arguments

from torch_collate_kit import tokenize_chat, tokenize_chat_dataset
from torch_collate_kit.chat.options import DEFAULT_OPTIONS, ChatSetup
from torch_collate_kit.chat.tokenize import tokenize_records

_FILES = {
    "gsm8k_train_2k.jsonl": 400,
    "chat_tools_tm4_900.jsonl": 100,
    "chat_long_squality_50.jsonl": 10,
}
_TAGS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def runs_over(records: list[dict[str, Any]], tokenizer: Any) -> dict[str, Callable[[], float]]:
    """CPU seconds of each way to tokenize ``records``."""
    setup = ChatSetup(tokenizer, DEFAULT_OPTIONS)

    def alone(**masks: Any) -> None:
        for record in records:
            tokenizer.apply_chat_template(record["messages"], return_dict=True, **masks)

    def batched() -> None:
        found = tokenize_records(records, setup, from_arrow=True)
        assert not any(isinstance(result, Exception) for result in found)

    def single() -> None:
        for record in records:
            tokenize_chat(record, tokenizer)

    found = {
        "apply_chat_template": alone,
        "tokenize_chat_dataset": batched,
        "tokenize_chat": single,
    }
    if _TAGS.search(tokenizer.chat_template):
        found["masks of transformers and TRL"] = lambda: alone(return_assistant_tokens_mask=True)
    return {name: _cpu_seconds(run) for name, run in found.items()}


def _cpu_seconds(run: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        began = time.process_time()
        run()
        return time.process_time() - began

    return seconds


def whole_datasets(
    report: Report, records: list[dict[str, Any]], tagged: Any, plain: Any, rounds: int
) -> None:
    """Tokens per CPU second of a whole dataset, beside ``datasets.map`` of transformers' masks."""
    import datasets

    datasets.disable_caching()
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list(records * 2)

    def masks(columns: dict[str, Any]) -> dict[str, Any]:
        return tagged.apply_chat_template(
            columns["messages"], return_dict=True, return_assistant_tokens_mask=True
        )

    def mapped() -> Any:
        return rows.map(masks, batched=True, batch_size=256, remove_columns=rows.column_names)

    runs = {
        "datasets.map of masks": mapped,
        "tokenize_chat_dataset": lambda: tokenize_chat_dataset(rows, plain)[0],
    }
    times = alternate(
        {name: _cpu_seconds(run) for name, run in runs.items()}, rounds=rounds, warm_up=1
    )
    num_tokens = sum(map(len, mapped()["input_ids"]))
    report.times("whole dataset, CPU seconds", times)
    for name, t in times.items():
        print(f"{name}: {num_tokens / t.median:,.0f} tokens per CPU second")
    ratio = times["tokenize_chat_dataset"].median / times["datasets.map of masks"].median
    report.target("whole dataset against datasets.map", ratio, "<x", 1.5)


def growth(report: Report, tokenizer: Any, rounds: int) -> None:
    """Time per message of conversations with 8 and with 64 turns."""
    per_message = {}
    for turns in (8, 64):
        turn = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Nine."}]
        run = _cpu_seconds(lambda turns=turns, turn=turn: _repeat(turn * turns, tokenizer))
        times = alternate({"run": run}, rounds=rounds)
        per_message[turns] = times["run"].least / turns
    report.target("64 turns against 8, per turn", per_message[64] / per_message[8], "<x", 1.2)


def _repeat(messages: list[dict[str, Any]], tokenizer: Any) -> None:
    for _ in range(20):
        tokenize_chat({"messages": messages}, tokenizer)


def main() -> None:
    from transformers import AutoTokenizer

    parser = arguments(__doc__, rounds=5)
    options = parser.parse_args()
    tagged = AutoTokenizer.from_pretrained(options.data / "tokenizers" / "mistral-32k-chatml")
    plain = copy.deepcopy(tagged)
    plain.chat_template = _TAGS.sub("", tagged.chat_template)
    report = Report(
        "chat", "Exact loss masks cost at most half of what rendering and tokenizing does."
    )
    rows = []
    for file, count in _FILES.items():
        lines = (options.data / file).read_text(encoding="utf-8").splitlines()[:count]
        records = [json.loads(line) for line in lines]
        for kind, tokenizer in (("tags", tagged), ("no tags", plain)):
            times = alternate(runs_over(records, tokenizer), rounds=options.rounds, warm_up=1)
            report.times(f"{file}, {kind}", times)
            for name, t in times.items():
                ratio = t.median / times["apply_chat_template"].median
                if name == "tokenize_chat_dataset":
                    report.target(f"{file}, {kind}", ratio, "<x", 1.5)
                rows.append([file, kind, name, f"{count / t.median:,.0f}", f"{ratio:.2f}"])
    header = ["conversations", "template", "by", "per CPU second", "times apply_chat_template"]
    report.table("Conversations per CPU second", header, rows)
    lines = (options.data / "chat_tools_tm4_900.jsonl").read_text(encoding="utf-8").splitlines()
    whole_datasets(report, [json.loads(line) for line in lines], tagged, plain, options.rounds)
    growth(report, plain, options.rounds)
    report.write(options.out)


if __name__ == "__main__":
    main()
