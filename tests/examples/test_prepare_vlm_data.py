"""examples/prepare_vlm_data.py: four forms of records, and what is wrong with some."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import drawn_images
import numpy as np
import prepare_vlm_data
import pytest

import torch_collate_kit as kit

QA = {"image": "a.png", "question": "What is it?", "answer": "A cat."}
LLAVA = {
    "images": ["a.png", "b.png"],
    "conversations": [
        {"from": "human", "value": "<image>\nand <image>\nWhich is red?"},
        {"from": "gpt", "value": "The first."},
    ],
}
IMAGE = {"type": "image", "text": None}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def turns(*contents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(drawn_images.draw(rng, [("ring", "red")]))
    return tmp_path


def prepare(folder: Path, records: Any, *options: object) -> list[dict[str, Any]]:
    """Run main() on the records, written as JSON Lines unless they are a file; what it wrote."""
    source = folder / "records.jsonl"
    if isinstance(records, Path):
        source = records
    else:
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["prepare_vlm_data.py", source, folder / "out", *options]
        patch.setattr(sys, "argv", [str(argument) for argument in arguments])
        prepare_vlm_data.main()
    return datasets.load_from_disk(str(folder / "out")).to_list()


def path_of(folder: Path, name: str) -> dict[str, Any]:
    return {"bytes": None, "path": str(folder / name)}


def test_texts_of_the_cauldron(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All images come before the first question; `source` names the dataset of a text."""
    record = {"images": ["a.png", "b.png"], "texts": [], "id": 3}
    for question, answer in (("Which is red?", "The first."), ("And blue?", "The second.")):
        record["texts"].append({"user": question, "assistant": answer, "source": "VQAv2"})
    [found] = prepare(folder, [record])
    asked = [IMAGE, IMAGE, text("Which is red?")]
    rest = ([text("The first.")], [text("And blue?")], [text("The second.")])
    assert found["messages"] == turns(asked, *rest)
    assert found["images"] == [path_of(folder, "a.png"), path_of(folder, "b.png")]
    assert "not taken over: id" in capsys.readouterr().out
    shutil.rmtree(folder / "out")
    unanswered = {"images": ["a.png"], "texts": [{"user": "Which?", "assistant": ""}]}
    with pytest.raises(kit.DataError, match="record 0: a question or answer is '', which is no"):
        prepare(folder, [unanswered])


def test_questions_and_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [found] = prepare(folder, [QA])
    assert found["messages"] == turns([IMAGE, text("What is it?")], [text("A cat.")])
    assert found["images"] == [path_of(folder, "a.png")]
    with pytest.raises(SystemExit, match=r"out exists; remove it, or choose another folder$"):
        prepare(folder, [LLAVA])
    shutil.rmtree(folder / "out")
    record = {"image": "a.png", "query": "How many?", "label": [3, 4], "id": "x"}
    options = ("--question", "query", "--answer", "label", "--first-answer")
    [found] = prepare(folder, [record], *options)
    assert found["messages"][1]["content"] == [text("3")]
    assert "columns that were not taken over: id\n" in capsys.readouterr().out


NUMBERED = [{"type": "image", "index": 0}, {"type": "image", "index": 1}, text("Same?")]
ASKED = [IMAGE, text("\nand "), IMAGE, text("\nWhich is red?")]
FORMS = {  # the record, its messages, its images
    "llava": (LLAVA, turns(ASKED, [text("The first.")]), ["a.png", "b.png"]),
    "numbered": (
        {"images": ["b.png", "a.png"], "messages": turns(NUMBERED, [text("No.")])},
        turns([IMAGE, IMAGE, text("Same?")], [text("No.")]),
        ["b.png", "a.png"],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_conversations(folder: Path, form: str) -> None:
    record, messages, images = FORMS[form]
    [found] = prepare(folder, [record])
    assert found["messages"] == messages
    assert found["images"] == [path_of(folder, name) for name in images]


def test_files_inside_the_dataset(folder: Path) -> None:
    """An image column of datasets: the bytes of the files, not decoded and encoded again."""
    content = (folder / "a.png").read_bytes()
    rows = datasets.Dataset.from_list([{**QA, "image": {"bytes": content, "path": "a.png"}}])
    rows.cast_column("image", datasets.Image()).save_to_disk(str(folder / "saved"))
    [found] = prepare(folder, folder / "saved")
    assert found["images"] == [{"bytes": content, "path": None}]


def test_what_it_writes_is_collated(folder: Path) -> None:
    uri = "data:image/png;base64," + base64.b64encode((folder / "b.png").read_bytes()).decode()
    records = prepare(folder, [LLAVA, {**LLAVA, "images": [uri, "a.png"]}])
    processor = drawn_images.make_processor(records)
    batch = kit.VisionLanguageCollator(processor)(records)
    grids = batch.model_inputs("sdpa")["image_grid_thw"]
    expected = [kit.vision.image_grid(folder / n, processor).tolist() for n in ("a.png", "b.png")]
    assert grids.tolist() == [*expected, *expected[::-1]]


VIDEO = [{"role": "user", "content": [{"type": "video", "text": "a"}]}]
BAD = [
    ({**QA, "answer": ""}, "a question or answer is '', which is no text"),
    ({**QA, "image": "c.png"}, "`images`[0], '{}/c.png': the file {}/c.png does not exist"),
    ({**QA, "image": "https://a.b/c.png"}, "`images`[0], 'https://a.b/c.png': images are"),
    ({**LLAVA, "images": ["a.png"]}, "the messages have 2 image parts"),
    ({**LLAVA, "image": "a.png"}, "`images` and `image` are both given"),
    ({**LLAVA, "conversations": [{"from": "bot", "value": "Hi"}]}, "a turn is from 'bot' and says"),
    ({"images": [], "messages": VIDEO}, "a message has a part {"),
]


@pytest.mark.parametrize(("record", "message"), BAD)
def test_bad_records(folder: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(kit.DataError) as caught:
        prepare(folder, [record])
    assert str(caught.value).startswith(f"record 0: {message}".replace("{}", str(folder)))
    assert str(caught.value).endswith("(--skip-bad leaves such records out)")
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        ({"question": "a", "answer": "b"}, "", "has no column `image` or `images`, only ["),
        ({"image": "a.png", "answer": "b"}, "", "has no column 'question', only ['image', 'answer"),
        (QA, "--answer reply", "has no column 'reply', only ['image', 'question', 'answer']; name"),
        (QA, "--limit 0", "--limit 0: must be 1 or more"),
        (QA, "--image-root no/folder", "--image-root no/folder: there is no such folder"),
        ({**QA, "image": "c.png"}, "--skip-bad", "1 records, and none can be used"),
    ],
)
def test_nothing_to_prepare(folder: Path, record: Any, options: str, message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        prepare(folder, [record], *options.split())
    assert str(caught.value).startswith("prepare_vlm_data.py: ")
    assert message in str(caught.value)
    assert not (folder / "out").exists()
