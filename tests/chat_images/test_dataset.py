"""tokenize_chat_dataset: each row read back is what tokenize_chat returns; and real records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from tests.chat.chats import tokenize, trained_text
from tests.chat_images.truth import (
    KINDS,
    assert_fields,
    chat,
    expected,
    ids_of,
    question,
    random_chat,
    text,
    turns_of,
)
from tests.vision.families import FAMILIES
from tests.vision.images import draw
from torch_collate_kit import ChatOptions, DataError, tokenize_chat_dataset

datasets = pytest.importorskip("datasets")
IMAGES = datasets.Sequence(datasets.Image())


def random_records(count: int) -> list[dict[str, Any]]:
    """Records with images of PNG files, some of text alone; contents are lists of parts."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        messages, images = random_chat(rng)
        for message in messages:
            if isinstance(message["content"], str):
                message["content"] = [text(message["content"])]
        found.append({"messages": messages, "images": images})
    assert any(not record["images"] for record in found)
    return found


def assert_rows(dataset: Any, wanted: list[dict[str, Any]]) -> None:
    """In both formats, field by field; what a row does not have is None."""
    assert len(dataset) == len(wanted)
    for form in (None, "numpy"):
        for row, own in zip(dataset.with_format(form), wanted, strict=True):
            for name in dataset.column_names:
                if name not in own:
                    assert row[name] is None, (name, form)
                    continue
                value = np.asarray(own[name])
                assert np.array_equal(np.asarray(row[name]), value), (name, form)
                if form and isinstance(own[name], np.ndarray):
                    assert row[name].dtype == value.dtype, name


def of_images(records: list[dict[str, Any]]) -> Any:
    return datasets.Dataset.from_list(records).cast_column("images", IMAGES)


def check(dataset: Any, records: list[dict[str, Any]], processor: Any, **options: Any) -> Any:
    """Return the rows of the dataset, which are those of its records."""
    found, skipped = tokenize_chat_dataset(dataset, processor, ChatOptions(**options))
    wanted: list[Any] = [tokenize(record, processor, **options) for record in records]
    if options.get("train_on") == "each":
        wanted = [{**row, "record_index": i} for i, rows in enumerate(wanted) for row in rows]
    kept = [row for row in wanted if not row["skip_reason"]]
    assert sum(skipped.values()) == len(wanted) - len(kept)
    assert_rows(found, kept)
    return found


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("pixels", [True, False])
def test_rows_are_those_of_tokenize_chat(name: str, pixels: bool) -> None:
    records = random_records(12)
    found = check(of_images(records), records, FAMILIES[name].processor(), pixels=pixels)
    assert len(found) == 12
    assert ("pixel_values" in found.column_names) == pixels


@pytest.mark.parametrize("train_on", ["all", "last", "each"])
def test_options_reach_the_records(train_on: Any) -> None:
    records, processor = random_records(12), FAMILIES["qwen3_vl"].processor()
    options: Any = {"train_on": train_on, "max_length": 60, "overflow": "truncate"}
    assert len(check(of_images(records), records, processor, labels=True, **options)) < 12


def test_files_under_image_root_and_one_image_column(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    records = []
    for i in range(3):
        draw(rng, 40 + 20 * i, 60).save(tmp_path / f"{i}.png")
        turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}]
        records.append({"conversations": turns, "image": f"{i}.png"})
    only_text = [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello!"}]
    records.append({"conversations": only_text, "image": None})
    processor = FAMILIES["idefics3"].processor()
    dataset = datasets.Dataset.from_list(records)
    check(dataset, records, processor, image_root=tmp_path)
    with pytest.raises(DataError, match=r"example 0: `image`, '0.png': the file .* does not exist"):
        tokenize_chat_dataset(dataset, processor)
    with pytest.raises(DataError, match="example 0: `image` has 40 x 60 = 2400 pixels, more than"):
        tokenize_chat_dataset(dataset, processor, ChatOptions(image_root=tmp_path, max_pixels=2000))


def test_relative_paths_in_another_working_directory(tmp_path: Path, monkeypatch: Any) -> None:
    """The cache of datasets does not give the images of another folder."""
    processor = FAMILIES["qwen3_vl"].processor()
    found = []
    record = question("a.png", [text("A cat.")])
    datasets.Dataset.from_list([record]).to_json(tmp_path / "data.jsonl")
    for side in (40, 200):
        folder = tmp_path / str(side)
        folder.mkdir()
        draw(np.random.default_rng(0), 60, side).save(folder / "a.png")
        monkeypatch.chdir(folder)
        dataset = datasets.Dataset.from_json(
            str(tmp_path / "data.jsonl"), cache_dir=str(tmp_path / "cache")
        )
        found.append(check(dataset, [record], processor))
    assert found[0][0]["image_grid_thw"] != found[1][0]["image_grid_thw"]


def test_images_inside_the_messages(tmp_path: Path) -> None:
    """Arrow gives every part all keys, so that those that are None do not count."""
    draw(np.random.default_rng(0), 60, 90).save(tmp_path / "a.png")
    parts = [{"type": "image", "path": str(tmp_path / "a.png")}, text("What?")]
    records = [{"messages": chat(parts, [text("A cat.")])}]
    check(datasets.Dataset.from_list(records), records, FAMILIES["qwen3_vl"].processor())


def test_a_column_of_images_is_not_decoded_for_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import ImageFile

    records = random_records(4)
    dataset, processor = of_images(records), FAMILIES["qwen3_vl"].processor()
    wanted = [tokenize(record, processor, pixels=False) for record in records]

    def fail(self: Any) -> None:
        raise RuntimeError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    found, _ = tokenize_chat_dataset(dataset, processor, ChatOptions(pixels=False))
    assert_rows(found, wanted)
    with pytest.raises(DataError, match=r"example \d: `images`\[0\] is damaged or cut off \(dec"):
        tokenize_chat_dataset(dataset, processor)


def test_only_text_and_nothing() -> None:
    processor = FAMILIES["internvl"].processor()
    records = [{"messages": chat("Hi.", "Hello!")}] * 3
    columns = ["input_ids", "loss_mask", "pixel_values"]
    assert check(datasets.Dataset.from_list(records), records, processor).column_names == columns
    found = check(datasets.Dataset.from_dict({"messages": []}), [], processor)
    assert (found.column_names, len(found)) == (columns, 0)


def test_two_processes() -> None:
    """The processor travels to the workers."""
    records, processor = random_records(6), FAMILIES["llava_next"].processor()
    found, _ = tokenize_chat_dataset(of_images(records), processor, num_proc=2)
    assert_rows(found, [tokenize(record, processor) for record in records])


def test_the_processor_is_not_changed() -> None:
    processor = FAMILIES["llava_next"].make_processor()
    tokenizer, images = processor.tokenizer, processor.image_processor
    before = tokenizer.get_vocab(), repr(processor)
    for pixels in (True, False):
        tokenize(question(draw(np.random.default_rng(0), 60, 90)), processor, pixels=pixels)
    assert processor.tokenizer is tokenizer
    assert processor.image_processor is images
    assert (tokenizer.get_vocab(), repr(processor)) == before


@pytest.fixture(scope="module")
def records(shared_data: Path) -> list[dict[str, Any]]:
    lines = (shared_data / "vlm_smoke_16.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", KINDS)
def test_files_and_images_in_memory(
    name: str, records: list[dict[str, Any]], shared_data: Path
) -> None:
    family = FAMILIES[name]
    processor = family.processor()
    modes, counts = set(), set()
    for record in records:
        images = [Image.open(shared_data / path) for path in record["images"]]
        modes |= {picture.mode for picture in images}
        counts.add(len(images))
        messages = record["messages"]
        ids, mask, fields = expected(family, messages, images, turns_of(messages))
        in_memory = {**record, "images": images}
        of_files = tokenize(record, processor, image_root=shared_data)
        for found in (of_files, tokenize(in_memory, processor)):
            assert (found["input_ids"], found["loss_mask"]) == (ids, mask)
            assert_fields(found, fields)
        small = tokenize(record, processor, image_root=shared_data, pixels=False)
        assert (small["input_ids"], small["loss_mask"]) == (ids, mask)
    assert modes == {"RGB", "L", "RGBA"}
    assert counts == {0, 1, 2, 3}


def test_a_real_tokenizer(records: list[dict[str, Any]], shared_data: Path) -> None:
    """Tokens of several characters, and a template of its own: the ids are the processor's."""
    processor = FAMILIES["llava_next"].make_processor()
    folder = shared_data / "tokenizers" / "mistral-32k-chatml"
    processor.tokenizer = AutoTokenizer.from_pretrained(folder)
    processor.image_token_id = processor.tokenizer.convert_tokens_to_ids("<image>")
    processor.chat_template = None  # that of the tokenizer
    for record in records:
        images = [Image.open(shared_data / path) for path in record["images"]]
        words = processor.tokenizer.apply_chat_template(record["messages"], tokenize=False)
        ids = ids_of(processor, words, images)
        found = tokenize(record, processor, image_root=shared_data)
        length = len(found["input_ids"])
        assert found["input_ids"] == ids[:length]
        assert not processor.decode(ids[length:]).strip()
        kept = trained_text(found, processor.tokenizer)
        answers = [m["content"][0]["text"] for m in record["messages"] if m["role"] == "assistant"]
        assert [words.strip() for words in kept.split("<|im_end|>")] == [*answers, ""]
