"""Supervised fine-tuning of a vision-language model on packed rows, from conversations with images.

Without arguments it draws pictures whose questions can be checked (drawn_images.py), makes a
tokenizer, a processor and a small Qwen3-VL, trains it in two minutes on two CPU cores, and asks it
about pictures that it has not seen:

    accelerate launch examples/vlm_sft.py --model Qwen/Qwen3-VL-2B-Instruct --dataset prepared

prepare_vlm_data.py makes such a dataset. Images are stored as files, and processed in the
DataLoader's workers, never all at once. Rows have two budgets, tokens and patches; both are known
from the text and the headers of the images, so every rank plans the whole batch and reads its own
rows. Training steps, checkpoints and resuming are those of sft.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import checkpoints
import datasets
import drawn_images
import evaluation
import numpy as np
import sft
import synthetic_chat
import transformers
from accelerate.utils import DistributedDataParallelKwargs
from checkpoints import fail
from options import argument_parser, parse_arguments
from torch.utils.data import DataLoader, Dataset
from trained_model import prepare, weight_dtype

import torch_collate_kit as kit
from torch_collate_kit import DataError

# A rank whose last row has no image has no gradient of the vision tower in the backward pass that
# DDP exchanges; if no other rank has one in its last row either, there is no dummy image for it.
UNUSED_ALLOWED = DistributedDataParallelKwargs(find_unused_parameters=True)


def vision_arguments() -> argparse.Namespace:
    parser = argument_parser()
    parser.set_defaults(output_dir=Path("outputs/vlm_sft"), num_conversations=7200)
    parser.set_defaults(batch_size=16)
    add = parser.add_argument_group("images").add_argument
    add("--image-root", type=Path, help="folder that paths of images start at and may not leave")
    add("--max-patches", type=int, help="of a row's images; none: 128, with --model no limit")
    add("--padded", dest="no_packing", action="store_true", help="as --no-packing")
    args = parse_arguments(parser, from_scratch=1.5e-3, packed_rows=1)
    args.example_log = None  # the losses of examples are logged by sft.py alone
    if args.context_parallel > 1 or args.align > 1:
        fail("--context-parallel and --align are for text: an image may be on several ranks")
    if args.max_patches is None and not args.model:
        args.max_patches = 128
    if args.max_patches == 0:
        fail(f"--max-patches {args.max_patches}: must be 1 or more")
    if args.image_root and not args.image_root.is_dir():
        fail(f"--image-root {args.image_root}: there is no such folder")
    return args


def load_conversations(args: argparse.Namespace) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Conversations to train on, and others to evaluate on; their images are not decoded."""
    if not args.dataset:
        num_held_out = 350 if args.num_held_out is None else args.num_held_out
        train = drawn_images.make_records(args.num_conversations, args.seed, turns=2)
        held_out = drawn_images.make_records(num_held_out, args.seed, turns=1)
        made = numbered(datasets.Dataset.from_list(train + held_out))
        train_indices, held_out_indices = np.split(np.arange(len(made)), [len(train)])
        return made.select(train_indices), made.select(held_out_indices)
    found = numbered(images_as_files(sft.read_dataset(args.dataset, args.split)))
    return sft.hold_out(found, args)


def images_as_files(found: datasets.Dataset) -> datasets.Dataset:
    """Return the dataset with its images as files, not decoded."""
    for name in {"image", "images"} & set(found.column_names):
        files, feature = datasets.Image(decode=False), found.features[name]
        if isinstance(feature, datasets.Image):
            found = found.cast_column(name, files)
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            found = found.cast_column(name, datasets.Sequence(files))
    return found


def numbered(records: datasets.Dataset) -> datasets.Dataset:
    """Add the number of each record, so that errors can name it after a selection."""
    return records.add_column("record_number", np.arange(len(records)))


def load_processor(args: argparse.Namespace, conversations: datasets.Dataset) -> Any:
    if not args.model:
        return drawn_images.make_processor(conversations.remove_columns("images"))
    try:
        processor = kit.vision.load_processor(args.model)
    except (OSError, ImportError) as error:
        fail(f"--model {args.model}: {str(error).splitlines()[0]}")
    if not hasattr(processor, "image_processor"):
        fail(f"--model {args.model} is a text model; take a vision-language model, or use sft.py")
    if args.chat_template:
        processor.chat_template = args.chat_template.read_text()
    tokenizer = processor.tokenizer
    if not (processor.chat_template or tokenizer.chat_template):
        fail(f"{args.model} has no chat template; take its chat version, or pass --chat-template")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # pads are never trained
    return processor


def load_model(args: argparse.Namespace, processor: Any) -> Any:
    """Load or make the model; the attention of its text is chosen later."""
    options: dict[str, Any] = {"dtype": weight_dtype(args)}
    options["attn_implementation"] = {"vision_config": "sdpa"}
    if args.model:
        auto = transformers.AutoModelForImageTextToText
        model = auto.from_pretrained(args.model, **options)
    else:
        model = drawn_images.make_model(processor, **options)
    return prepare(model, args)


def make_collator(processor: Any, model: Any, args: argparse.Namespace) -> Any:
    chat = kit.ChatOptions(image_root=args.image_root)
    options: dict[str, Any] = {"chat": chat, "config": model.config}
    options["pixel_dtype"] = (
        "bfloat16" if args.precision == "bf16" else "float32"
    )  # what they are computed in
    if not args.no_packing:
        packing = {"max_tokens": args.max_tokens, "max_patches": args.max_patches}
        packing |= {"strategy": "balanced", "cost": kit.ModelCost.of(model.config)}
        packing |= {"parallel": kit.ParallelLayout(dp=args.num_ranks)}
        if args.compile:
            packing["max_sequences_per_row"] = 1 + args.max_tokens // 16
        options |= {"packing": kit.PackingOptions(**packing), "fixed_width": args.compile}
    try:
        collate = kit.VisionLanguageCollator(processor, **options)
    except ValueError as error:
        fail(
            f"--model {args.model}: {error}" + (", with --padded" if "Padded" in str(error) else "")
        )
    if not args.no_packing and collate.vision.family_name == "gemma3":
        fail(f"--model {args.model}: packed Gemma-3 needs a mask of its own; take --padded")
    return collate


def measure(record: dict, collate: Any) -> dict[str, Any]:
    """Return the sizes of a record, as columns of a dataset; its images are not decoded.

    Not `kit.DataError`: datasets would hash the whole package to name its cache.
    """
    try:
        [length], [patches], [num_loss_tokens] = collate.sizes([record])
    except DataError as error:
        reason = str(error).removeprefix("example 0: ")
        raise DataError(f"record {record['record_number']} of the dataset: {reason}") from error
    return {"length": length, "patches": patches, "num_loss_tokens": num_loss_tokens}


class Conversations(Dataset):
    """Records with their sizes, for a sampler that plans and for one that does not."""

    def __init__(self, records: datasets.Dataset, collate: Any, args: argparse.Namespace) -> None:
        options = {"remove_columns": records.column_names, "fn_kwargs": {"collate": collate}}
        options |= {"num_proc": args.num_workers or None}
        measured: Any = {"length": [], "patches": [], "num_loss_tokens": []}
        if len(records):  # datasets maps nothing to no columns
            measured = records.map(measure, **options, desc="reading sizes")
        self.lengths = np.array(measured["length"], dtype=np.int64)
        self.patches: list[list[int]] = list(measured["patches"])
        self.num_loss_tokens = np.array(measured["num_loss_tokens"], dtype=np.int64)
        per_row = np.array([sum(patches) for patches in self.patches], dtype=np.int64)
        fits = (self.lengths <= args.max_tokens) & (per_row <= (args.max_patches or np.inf))
        self.num_left_out = int((~fits).sum())
        kept = np.flatnonzero(fits)
        self.records = records.select(kept)
        self.lengths, self.num_loss_tokens = self.lengths[kept], self.num_loss_tokens[kept]
        self.patches = [self.patches[i] for i in kept]

    def __len__(self) -> int:
        return len(self.records)

    def __getitems__(self, wanted: Any) -> Any:
        """Return the records at these indices, or at those of a rank's part of a plan."""
        if isinstance(wanted, list):
            return self.records.select(wanted).to_list()
        return wanted.with_examples(self.records.select(wanted.indices).to_list())


def make_loader(
    examples: Conversations, collate: Any, accelerator: Any, args: Any, shuffle: bool
) -> kit.PrefetchLoader:
    """Load as in sft.py, with the patches of the images as the second budget of a row."""
    options = {**sft.step_size(args, shuffle), "shuffle": shuffle, "seed": args.seed}
    if args.no_packing:  # every rank collates the whole batch
        sampler: Any = kit.PrefetchingSampler(examples, dp_rank=0, dp_size=1, **options)
    else:
        options |= {"patches": examples.patches, "num_loss_tokens": examples.num_loss_tokens}
        sampler = kit.PackedBatchSampler(examples.lengths, collate, dp_rank=args.rank, **options)
    if shuffle:
        args.sampler = sampler
    options = {"collate_fn": collate, "num_workers": args.num_workers}
    options |= {"worker_init_fn": checkpoints.finish_the_step}
    loader = DataLoader(examples, batch_sampler=sampler, **options)
    return kit.PrefetchLoader(loader, prefetch=args.prefetch, device=accelerator.device)


def two_examples(model: Any, examples: Conversations, processor: Any, args: Any) -> kit.Batch:
    """Two conversations in a row, the shortest, with images if there are two with images."""
    has_image = np.array([bool(patches) for patches in examples.patches])
    two = np.lexsort((examples.lengths, ~has_image))[:2].tolist()
    chat = kit.ChatOptions(image_root=args.image_root)
    options: dict[str, Any] = {"chat": chat, "config": model.config}
    options |= {} if args.no_packing else {"max_tokens": 2 * args.max_tokens}
    collate = kit.VisionLanguageCollator(processor, **options)
    return collate(examples.__getitems__(two))


def evaluate(
    model: Any, processor: Any, conversations: Any, held_out: Any, accelerator: Any
) -> dict[str, float]:
    """Rate generated answers about drawn pictures, next to the most frequent answers."""
    rates, _ = synthetic_chat.exact_match(model, processor, held_out, accelerator)
    guessed = drawn_images.majority(conversations, held_out)
    results: dict[str, float] = {}
    for name, by_skill in {"exact match": rates, "most frequent": guessed}.items():
        results |= {f"{name}, {skill}": rate for skill, rate in by_skill.items()}
        of_pictures = [rate for skill, rate in by_skill.items() if skill != "no_picture"]
        results[f"{name}, all pictures"] = sum(of_pictures) / max(1, len(of_pictures))
    return results


def run(args: argparse.Namespace, accelerator: Any) -> None:
    if accelerator.is_fsdp2:  # it would wait for the vision tower of a rank that has no image
        fail("FSDP: the weights that some rank does not use cannot be in parts; train with DDP")
    with accelerator.main_process_first():  # the others find its result in the cache of datasets
        conversations, held_out = load_conversations(args)
        processor = load_processor(args, conversations)
        model = load_model(args, processor).to(accelerator.device).train()
        collate = make_collator(processor, model, args)
        parts = [Conversations(part, collate, args) for part in (conversations, held_out)]
    examples, held_out_examples = parts
    accelerator.print("{} conversations to train on, {} held out".format(*map(len, parts)))
    if num_left_out := sum(part.num_left_out for part in parts):
        accelerator.print(
            f"{num_left_out} others are left out; raise --max-tokens or --max-patches"
        )
    if len(examples) < 2:
        fail("too few to train on; hold out fewer (--num-held-out), or raise --max-tokens")
    loader = make_loader(examples, collate, accelerator, args, shuffle=True)
    args.run |= {"ranks:": str(args.num_ranks)}
    two, num_tokens = two_examples(model, examples, processor, args), examples.lengths.sum()
    model, optimizer = sft.prepare(model, two, num_tokens, loader, accelerator, args)
    summary = sft.train(model, loader, optimizer, accelerator, args)
    if summary is None:
        return
    model_alone = accelerator.unwrap_model(model).model
    if len(held_out_examples):
        with make_loader(held_out_examples, collate, accelerator, args, shuffle=False) as loader:
            rows = (part for batch in loader for part in sft.micro_batches(batch, args))
            summary |= evaluation.losses(model, rows, accelerator)
        if not args.dataset:
            summary |= evaluate(model_alone, processor, conversations, held_out, accelerator)
    accelerator.log({f"summary/{name}": of for name, of in summary.items()}, args.num_steps)
    if accelerator.is_main_process:
        sft.save_results(model_alone, None, processor, summary, args)


def main() -> None:
    args = vision_arguments()
    accelerator = sft.start(args, UNUSED_ALLOWED)
    run(args, accelerator)
    sft.leave(accelerator)


if __name__ == "__main__":
    try:
        main()
    except (DataError, kit.IsolationError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("stopped; --resume goes on from the last checkpoint, if --checkpoint-every saved one")
