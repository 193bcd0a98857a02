"""Every option of every command: what it changes in the output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from PIL import Image

from tests.command import byte_tokenizer, parser
from tests.test_command_line import CHAT, TEMPLATE, TOKENS, Run, chat, folder, run, write_data
from tests.vision.families import FAMILIES

__all__ = ["folder", "run"]  # fixtures

ROWS = [{"input_ids": [i + 1] * (2 + i % 4), "labels": [i + 1] * (2 + i % 4)} for i in range(8)]
LONG = [{"input_ids": [*range(80)]}]
EXTRA = [{"input_ids": [5, 6], "extra": 1}]
RED = [{"type": "image", "path": "red.png"}, {"type": "text", "text": "?"}]
ANSWERS = chat("?", "red", "sure?", "yes")["messages"]
EMPTY = [chat("?", " "), chat("?", "yes")]
RECORD = [{"messages": [{"role": "user", "content": RED}, *ANSWERS[1:]]}]
REWRITTEN = "chats.jsonl --tokenizer thinking"  # "all" is refused
PICTURES = "pictures.jsonl --tokenizer processor"
EMPTY_CHATS = "empty.jsonl --tokenizer tokenizer"

THINKING = TEMPLATE.replace("{{ m.content", "{{ '<think>' if loop.last else '' }}{{ m.content")

# Command, data, option, what is printed without it only, with it only.
OPTIONS = [
    ("", "", "--version", "usage: ", "0.1.0"),
    ("report", "splits", "--split test", "2 examples, 6", "1 example, 2"),
    ("report", "lengths.npy", "--limit 3", "4 examples, 19", "3 examples, 17"),
    ("report", "tokens.jsonl", "--limit 1", "2 examples, 6", "1 example, 4"),
    ("report", "chats.jsonl", "--tokenizer tokenizer", "pass --tokenizer", "3 examples, "),
    ("report", REWRITTEN, "--train-on each", "error: example 1", "4 examples, "),
    ("report", PICTURES, "--image-root images", "does not exist", "1 example, "),
    ("report", "lengths.npy", "--json", "recommended: ", '"candidates"'),
    ("report", "lengths.npy", "--max-tokens 10 11", "12  padded", "11  padded"),
    ("report", "lengths.npy", "--strategy sequential", ", balanced", ", sequential"),
    ("report", "lengths.npy --max-tokens 8", "--overflow truncate", "drops 1", "cuts 1"),
    ("report", "lengths.npy", "--batch-size 2", "packed all examples", "packed 2 examples"),
    ("report", "lengths.npy --json", "--batch-rows 1", '"steps": []', '"steps": "by_rows"'),
    ("report", "lengths.npy --json", "--dp 2", '"dp": 1', '"dp": 2'),
    ("report", "lengths.npy --cp 2", "--tp 4", "aligned to 4 ", "aligned to 16 "),
    ("report", "lengths.npy --tp 2", "--cp 4", "aligned to 2 ", "aligned to 16 "),
    ("report", "lengths.npy", "--fp8 mxfp8", "12  padded", "rows is a multiple of 32 cells"),
    (
        "report",
        "lengths.npy --json --max-tokens 12",
        "--model rwkv",
        '"notes": []',
        "left are wrong in rwkv",
    ),
    ("report", CHAT, "--num-proc 2", "chats:   0%", "chats (num_proc=2):"),
    ("report", EMPTY_CHATS, "--allow-empty", "is an empty answer", "2 examples, "),
    ("audit", "splits", "--split test", "audit of 2 rows", "audit of 1 row "),
    ("audit", "tokens.jsonl", "--limit 1", "audit of 2 rows", "audit of 1 row "),
    ("audit", "chats.jsonl", "--tokenizer tokenizer", "pass --tokenizer", "audit of 3 rows"),
    ("audit", f"{CHAT} --max-tokens 50", "--train-on last", "target_trunc", "prompt_longer_"),
    ("audit", f"{PICTURES} --max-tokens 99", "--image-root images", "refused", "(64 tokens)"),
    ("audit", "tokens.jsonl", "--json", "audit of 2 rows", '"num_rows": 2'),
    ("audit", CHAT, "--max-tokens 12", "without --max-tokens", "warning: prompt_longer_than_row"),
    ("audit", "extra.jsonl", "--train-all", "pass --train-all", "audit of 1 row "),
    ("explain", "splits", "--split test", "of 2: 4 tokens", "of 1: 2 tokens"),
    ("explain", "tokens.jsonl", "--limit 1", "record 0 of 2", "record 0 of 1"),
    ("explain", "tokens.jsonl", "--tokenizer tokenizer", "id  position", "id  text"),
    ("explain", f"{CHAT} --row 1", "--train-on last", "6 trained", "4 trained"),
    ("explain", f"{PICTURES} --image-root images", "--train-on last", "8 trained", "4 trained"),
    ("explain", PICTURES, "--image-root images", "does not exist", "64 tokens"),
    ("explain", "tokens.jsonl", "--json", "cell  id", '"record": 0'),
    ("explain", "tokens.jsonl", "--row -1", "record 0 ", "record 1 "),
    ("explain", "tokens.jsonl", "--max-tokens 3", "4 tokens in", "3 tokens in"),
    ("explain", CHAT, "--max-tokens 20", "26 tokens in", "20 tokens in"),
    ("explain", "extra.jsonl", "--train-all", "pass --train-all", "1 trained"),
    ("explain", "extra.jsonl --max-tokens 9", "--train-all", "pass --train-all", "1 trained"),
    ("explain", "tokens.jsonl", "--show 2", "1   6 ", "2 more tokens"),
    ("explain", "long.jsonl", "--all", "more tokens", "40  40  "),
    ("explain", EMPTY_CHATS, "--allow-empty", "is an empty answer", "record 0 of 2"),
    ("tokenize", "splits --out t", "--split none", "splits holds tokens", "no split 'none'"),
    ("tokenize", f"{CHAT} --out t", "--limit 1", "3 examples", "1 example of"),
    ("tokenize", "chats.jsonl --out t", "--tokenizer tokenizer", "with --tokenizer", "3 examples"),
    ("tokenize", f"{REWRITTEN} --out t", "--train-on each", "error: example 1", "4 examples"),
    ("tokenize", f"{PICTURES} --out t", "--image-root images", "does not exist", "1 example of"),
    ("tokenize", f"{CHAT} --out t", "--json", "3 examples", '"examples": 3'),
    ("tokenize", f"{EMPTY_CHATS} --out t", "--allow-empty", "is an empty answer", "2 examples"),
    ("tokenize", f"{CHAT} --out t", "--max-length 26", "3 examples of", "too_long"),
    ("tokenize", f"{CHAT} --out t", "--num-proc 2 --out u", "chats:   0%", "chats (num_proc=2):"),
    ("tokenize", CHAT, "--out t", "required: --out", "3 examples"),
    ("tokenize", f"{CHAT} --out t", "--text messages", "3 examples", "not texts"),
    ("template", "", "--all .", "no template given", "| template | one turn"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data that one of the options reads, made once."""
    rows = {"rows": ROWS, "long": LONG, "extra": EXTRA, "pictures": RECORD, "empty": EMPTY}
    at = write_data(tmp_path_factory.mktemp("data"), **rows)
    splits = {"train": TOKENS, "test": TOKENS[1:]}
    saved = {name: datasets.Dataset.from_list(records) for name, records in splits.items()}
    datasets.DatasetDict(saved).save_to_disk(at / "splits")
    byte_tokenizer(THINKING).save_pretrained(at / "thinking")
    FAMILIES["gemma3"].make_processor().save_pretrained(at / "processor")
    for name in ("rwkv", "images"):
        (at / name).mkdir()
    (at / "rwkv/config.json").write_text('{"model_type": "rwkv"}')
    Image.new("RGB", (64, 64)).save(at / "images/red.png")
    (at / "words.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return at


@pytest.fixture(autouse=True)
def without_caches() -> Iterator[None]:
    datasets.disable_caching()  # or a bar of progress is shown once only
    yield
    datasets.enable_caching()


@pytest.mark.parametrize(("command", "data", "option", "without", "given"), OPTIONS)
def test_an_option_changes_what_is_printed(
    command: str,
    data: str,
    option: str,
    without: str,
    given: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "pictures" in data and not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets reads no content of several kinds")
    if "--num-proc" in option:  # progress is shown
        datasets.enable_progress_bars()  # examples turn them off
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    words = [command, *data.split()] if command else []
    before, after = ("".join(run(*given)[1:]) for given in (words, [*words, *option.split()]))
    assert without in before
    assert without not in after
    assert given in after
    assert given not in before


def test_every_option_is_in_the_table() -> None:
    """The options of the parsers themselves: a new one needs a row."""
    found = {("", "--version")}
    (commands,) = (action for action in parser()._actions if action.choices)
    for name, command in commands.choices.items():
        options = [
            action.option_strings[-1] for action in command._actions if action.option_strings
        ]
        found |= {(name, option) for option in options if option != "--help"}
    assert len(found) > 30
    assert {(command, option.split()[0]) for command, _, option, _, _ in OPTIONS} == found
