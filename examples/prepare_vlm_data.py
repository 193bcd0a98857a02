r"""Image-question-answer datasets into conversations that vlm_sft.py trains on.

    python examples/prepare_vlm_data.py llava.json prepared --image-root images
    python examples/prepare_vlm_data.py HuggingFaceM4/ChartQA prepared \
        --question query --answer label --first-answer
    accelerate launch examples/vlm_sft.py --model Qwen/Qwen3-VL-2B-Instruct --dataset prepared

Four forms are read: `messages`, with image parts; `conversations`, as LLaVA has them, with
`<image>` markers; `texts`, as the_cauldron has them, questions and answers in turn about all
images; or a question and an answer. Their images are in the column `images` or `image`.
The result has two columns: `messages`, whose contents are lists of parts, and `images`, one for
each image part in order, as paths or, where the dataset holds files, as bytes.

A record is checked before it is written: its form, the number of its images, and the header of
each image file (`--check-pixels`: all of it). The first bad one ends the run; `--skip-bad` leaves
them out and counts them.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import datasets
import drawn_images
from sft import fail, read_dataset
from vlm_sft import images_as_files

from torch_collate_kit import ChatOptions, DataError, VisionLanguageCollator

ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant"}
ROLES["system"] = "system"
CHATS = {"messages", "texts", "conversations"}
MARKER = "<image>"
PART_KEYS = {"text": {"type", "text"}, "image": {"type", "index"}}
FILE = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
PART = {"type": datasets.Value("string"), "text": datasets.Value("string")}
FEATURES = datasets.Features(
    {
        "messages": [{"role": datasets.Value("string"), "content": [PART]}],
        "images": [FILE],
        "problem": datasets.Value("string"),
    }
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("dataset", help="JSON, JSON Lines or Parquet file, saved folder, or hub name")
    add("output", type=Path, help="folder to write; it must not exist")
    add("--split", default="train", help="split of a hub dataset or saved folder")
    add("--question", help="column of questions; none: `question`, if there are no conversations")
    add("--answer", help="column of answers; none: `answer`")
    add("--first-answer", action="store_true", help="of a list of answers take the first")
    add("--image-root", type=Path, help="where paths of images start; none: beside a local file")
    add("--limit", type=int, help="take no more records than that, from the beginning")
    add("--check-pixels", action="store_true", help="decode every image, not only its header")
    add("--skip-bad", action="store_true", help="leave bad records out, and count them")
    add("--num-proc", type=int, help="processes")
    args = parser.parse_args()
    if args.output.exists():
        fail(f"{args.output} exists; remove it, or choose another folder")
    for name in ("limit", "num_proc"):
        value = getattr(args, name)
        if value is not None and value < 1:
            fail(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    args.only_inside = args.image_root
    if args.image_root is None and Path(args.dataset).is_file():
        args.image_root = Path(args.dataset).parent
    if args.image_root is not None and not args.image_root.is_dir():
        fail(f"--image-root {args.image_root}: there is no such folder")
    return args


def read_records(args: argparse.Namespace) -> datasets.Dataset:
    """Read the records, with images as files that are not decoded."""
    found = read_dataset(args.dataset, args.split)
    names = found.column_names
    if not {"image", "images"} & set(names):
        fail(f"{args.dataset} has no column `image` or `images`, only {names}; rename one")
    if args.question is None and args.answer is None:
        is_chat = CHATS & set(names)
        args.question, args.answer = (None, None) if is_chat else ("question", "answer")
    else:
        args.question, args.answer = args.question or "question", args.answer or "answer"
    missing = [name for name in (args.question, args.answer) if name and name not in names]
    if missing:
        fail(
            f"{args.dataset} has no column {missing[0]!r}, only {names}; name the columns with "
            "--question and --answer"
        )
    found = images_as_files(found)
    return found.select(range(min(args.limit or len(found), len(found))))


def conversation(record: dict, args: argparse.Namespace) -> dict[str, Any]:
    """`messages` and `images` of a record in any of the four forms."""
    given = [record[name] for name in ("images", "image") if record.get(name) is not None]
    if len(given) > 1:
        raise DataError("`images` and `image` are both given; remove one of the two columns")
    images = given[0] if given and isinstance(given[0], list) else given
    if args.question:
        answer = record[args.answer]
        if isinstance(answer, list) and args.first_answer and answer:
            answer = answer[0]
        if isinstance(answer, list):
            raise DataError(
                f"{args.answer!r} is a list of {len(answer)} answers; pass --first-answer, or "
                "choose one yourself"
            )
        messages = question_and_answer(record[args.question], answer, len(images))
    elif record.get("messages") is not None:
        messages = [from_message(found) for found in record["messages"]]
        check_indices(messages)
    elif record.get("texts") is not None:
        messages = []
        for found in record["texts"]:
            shown = 0 if messages else len(images)  # before the first question
            messages += question_and_answer(found.get("user"), found.get("assistant"), shown)
    else:
        messages = [from_llava(found) for found in record["conversations"] or []]
    files = [image_file(image, args.image_root) for image in images]
    return {"messages": messages, "images": files}


def question_and_answer(question: Any, answer: Any, num_images: int) -> list[dict]:
    asked = [*({"type": "image"} for _ in range(num_images)), text_part(question)]
    return [message("user", asked), message("assistant", [text_part(answer)])]


def message(role: str, content: list[dict]) -> dict:
    return {"role": role, "content": content}


def text_part(text: Any) -> dict:
    if not isinstance(text, str | int | float) or not str(text).strip():
        raise DataError(f"a question or answer is {text!r:.60}, which is no text")
    return {"type": "text", "text": str(text)}


def from_message(found: dict) -> dict:
    """Return a message with its content as parts; images are in a column, not in the part."""
    other = sorted(k for k, v in found.items() if k not in ("role", "content") and v)
    content, parts = found.get("content"), []
    if isinstance(content, str):
        content, parts = [], split_markers(content)
    for part in content or []:
        given = {k: v for k, v in part.items() if v is not None}
        if "type" in given and set(given) <= PART_KEYS.get(given["type"], set()):
            parts.append(given)
        else:
            other.append(f"a part {given!r:.60}")
    if other:
        raise DataError(
            f"a message has {', '.join(other)}, which would be lost; vlm_sft.py reads tool calls, "
            "and images inside messages, from the dataset as it is"
        )
    return message(found.get("role"), parts)


def check_indices(messages: list[dict]) -> None:
    """Replace the numbers that some datasets give image parts: here a part is the next image."""
    parts = [part for m in messages for part in m["content"] if part["type"] == "image"]
    numbers = [part.pop("index", i) for i, part in enumerate(parts)]
    if numbers != list(range(len(parts))):
        raise DataError(
            f"the image parts have the indices {numbers}, and only 0, 1, 2, ... is read; repeat or "
            "sort the images in the column, one for each part"
        )


def from_llava(found: dict) -> dict:
    speaker, text = found.get("from"), found.get("value")
    if speaker not in ROLES or not isinstance(text, str):
        raise DataError(f"a turn is from {speaker!r} and says {text!r:.60}; expected {list(ROLES)}")
    return message(ROLES[speaker], split_markers(text))


def split_markers(text: str) -> list[dict]:
    """Parts of a text with `<image>` markers; LLaVA sets a marker on a line of its own."""
    parts: list[dict] = []
    for i, piece in enumerate(text.split(MARKER)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def image_file(image: Any, root: Path | None) -> dict[str, Any]:
    """Bytes as they are, and a path so that it is found from any working directory."""
    path, content = image, None
    if isinstance(image, dict):
        path, content = image.get("path"), image.get("bytes")
    if content:
        return {"bytes": content, "path": None}
    if not isinstance(path, str) or not path:
        raise DataError(f"an image is {image!r:.60}; expected a path or the contents of a file")
    if "://" not in path and not path.startswith("data:"):
        path = str(((root or Path()) / path).absolute())
    return {"bytes": None, "path": path}


def prepare(record: dict, index: int, collate: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return the conversation of a record, checked, or what is wrong with it as `problem`."""
    try:
        made = conversation(record, args)
        collate.sizes([made])
        if args.check_pixels:
            collate([made])
    except DataError as error:
        problem = f"record {index}: {str(error).removeprefix('example 0: ')}"
        if not args.skip_bad:
            raise DataError(f"{problem} (--skip-bad leaves such records out)") from error
        return {"messages": [], "images": [], "problem": problem}
    return {**made, "problem": ""}


def main() -> None:
    args = parse_arguments()
    records = read_records(args)
    processor = drawn_images.make_processor([])  # any will do: what is checked is the record
    collate = VisionLanguageCollator(processor, chat=ChatOptions(image_root=args.only_inside))
    prepared = records.map(
        prepare,
        with_indices=True,
        fn_kwargs={"collate": collate, "args": args},
        remove_columns=records.column_names,
        features=FEATURES,
        num_proc=args.num_proc,
        desc="preparing",
    )
    problems = [problem for problem in prepared["problem"] if problem]
    good = prepared.select([i for i, problem in enumerate(prepared["problem"]) if not problem])
    for problem in problems[:5]:
        print(f"left out: {problem}")
    if not len(good):
        fail(f"{args.dataset}: {len(problems)} records, and none can be used")
    unfinished = args.output.with_name(f"{args.output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    good.remove_columns("problem").save_to_disk(unfinished)
    unfinished.rename(args.output)
    print(f"{len(good)} conversations are in {args.output}, {len(problems)} records were left out")
    used = {args.question, args.answer} if args.question else CHATS
    dropped = sorted(set(records.column_names) - used - {"image", "images"})
    if dropped:
        print(f"columns that were not taken over: {', '.join(dropped)}")


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        fail(str(error))
