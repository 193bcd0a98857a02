"""python -m torch_collate_kit template: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chat.chats import CHATML, THINKS
from tests.chat.families import templates
from torch_collate_kit.__main__ import main


def test_marked_tokens_and_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "thinks.jinja"
    path.write_text(THINKS)
    assert main(["template", str(path)]) == 0
    printed = capsys.readouterr().out
    for text in (
        "one turn: accepted with train_on='all'\n    '<|im_start|>user\\nHi.<|im_end|>",
        "<|im_start|>assistant\\n⟦Hello!<|im_end|>⟧\\n'",
        "thinking twice: accepted with train_on='each': 2 examples, ",
        " (group_turns=True)\n",
        "all: messages[1]: the chat template drops its reasoning_content; pass train_on='each'",
        "tool call: refused\n",
        "tool_calls[0] name of the role 'assistant'; set a tokenizer.chat_template",
    ):
        assert " ".join(text.split()) in " ".join(printed.split())


def test_a_mode_that_trains_no_call_says_so(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "deepseekv3.jinja"
    path.write_text(templates()["deepseekv3"], encoding="utf-8")
    assert main(["template", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "tool call: accepted with train_on='last', which trains no call\n" in printed
    assert main(["template", "--all", str(tmp_path)]) == 0
    assert "| last, no call |" in capsys.readouterr().out


def test_a_long_system_text_is_cut_in_the_middle(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "long.jinja"
    path.write_text("Rules: " + "be kind, " * 400 + "so it is." + CHATML)
    assert main(["template", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" characters ...] ") == 3  # the conversations that it renders
    assert "'Rules: be kind, " in printed
    text = "so it is.<|im_start|>user\\nHi.<|im_end|>\\n<|im_start|>assistant\\n⟦"
    assert text in " ".join(printed.split())
    assert len(printed) < 6000


def test_a_tokenizer_folder(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", str(shared_data / "tokenizers" / "mistral-32k-chatml")]) == 0
    assert "tool call: accepted with train_on='all'\n" in capsys.readouterr().out


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    for name, message in (
        ("no_such.jinja", "error: no_such.jinja does not exist\n"),
        (str(broken), "error: the chat template is not valid Jinja, line 1: "),
    ):
        assert main(["template", name]) == 2
        errors = capsys.readouterr().err
        assert errors.startswith(message)
        assert errors.count("\n") == 1
    assert main(["template"]) == 2
    for arguments in ([], ["unknown"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_the_table_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gptoss", "llama3_1", "qwen3", "deepseekv3"):
        (tmp_path / f"{name}.jinja").write_text(templates()[name], encoding="utf-8")
    assert main(["template", "--all", str(tmp_path)]) == 0
    table = capsys.readouterr().out.splitlines()
    page = Path(__file__).parents[2] / "docs" / "chat.md"
    assert len(table) == 6
    assert set(table) <= set(page.read_text(encoding="utf-8").splitlines())
