"""What a user would ask, answered from the results of the scripts: the first table of each page.

Every figure is read from the JSON of a run. One that a run lacks, say because a library was not
installed, is shown as "not measured".
"""

from __future__ import annotations

from collections.abc import Callable

from figures import MISSING, Results, bytes_per_token, cell, duration, ms, times
from plan_answers import PLAN_ANSWERS


def _collate(r: Results) -> dict[str, str]:
    packed, padded = "packed, real mix", "padded, real mix"
    others = {"packed": "packed, other collators", "padded": "padded, other collators"}
    stored, cells = (
        [bytes_per_token(r, f"{mix}, bytes", of) for mix in (padded, packed)]
        for of in ("stored", "fields")
    )
    return {
        "How long does packing a batch of 1,024 examples take?": (
            f"{ms(r, packed, 'collate, columns')} from columns, "
            f"{ms(r, packed, 'collate, lists')} from Python lists; with every field made that a "
            f"step reads {ms(r, packed, 'ready, columns')} and {ms(r, packed, 'ready, lists')}"
        ),
        "And padding one?": (
            f"{ms(r, padded, 'collate, columns')} and {ms(r, padded, 'collate, lists')}; with "
            f"every field {ms(r, padded, 'ready, columns')} and {ms(r, padded, 'ready, lists')}"
        ),
        "How often does a DataLoader worker deliver one?": (
            f"every {ms(r, packed, 'delivered, columns')} packed, every "
            f"{ms(r, padded, 'delivered, columns')} padded (plain NumPy: "
            f"{ms(r, packed, 'delivered, row by row, ndarrays')} and "
            f"{ms(r, padded, 'delivered, row by row, ndarrays')})"
        ),
        "How large is a batch?": (
            f"{stored[0]} bytes per token padded and {stored[1]} packed, until its fields are "
            f"made; then {cells[0]} bytes per token padded, {cells[1]} packed"
        ),
        "Against TRL, from lists and from arrays?": (
            f"packed, TRL takes {times(r, others['packed'], 'TRL padding-free, lists', 'lists')} "
            f"and {times(r, others['packed'], 'TRL padding-free, ndarrays', 'ndarrays')} as long; "
            f"padded {times(r, others['padded'], 'TRL padded, lists', 'lists')} and "
            f"{times(r, others['padded'], 'TRL padded, ndarrays', 'ndarrays')}"
        ),
        "Against NumPy code written for the purpose, from arrays?": (
            f"packed it takes {times(r, packed, 'row by row, ndarrays', 'collate, ndarrays')}, "
            f"padded {times(r, padded, 'row by row, ndarrays', 'collate, ndarrays')} as long as "
            f"the call, {times(r, packed, 'row by row, ndarrays', 'ready, ndarrays')} and "
            f"{times(r, padded, 'row by row, ndarrays', 'ready, ndarrays')} as long as the call "
            "with every field made"
        ),
    }


def _packing(r: Results) -> dict[str, str]:
    small, large = "1,024 lengths, real mix", "300,000 lengths, real mix"
    keys = {heading: heading.replace(",", "", 1) for heading in (small, large)}
    ours, axolotl = "pack, best fit", "axolotl first fit, groups of 100k"
    return {
        "How long does planning take?": (
            f"{ms(r, keys[small], ours)} for 1,024 examples, {ms(r, keys[large], ours)} for "
            f"300,000, {duration(cell(r, 'Growth', '10,000,000', 'median'))} for 10,000,000 (one "
            "core)"
        ),
        "How full are the rows?": (
            f"{cell(r, small, ours, 'filled')} with 1,024 examples, "
            f"{cell(r, large, ours, 'filled')} with 300,000"
        ),
        "Against TRL's best fit?": (
            f"for 1,024 examples it takes {times(r, keys[small], 'TRL best fit', ours)} as long, "
            f"for 300,000 {times(r, keys[large], 'TRL best fit', ours)}; as many rows"
        ),
        "Against axolotl's first fit (numba)?": (
            f"for 1,024 examples it takes {times(r, keys[small], axolotl, ours)} as long, for "
            f"300,000 {times(r, keys[large], axolotl, ours)}; its rows are "
            f"{cell(r, large, axolotl, 'filled')} full"
        ),
        "Against SkyRL's first fit?": (
            f"for 1,024 examples it takes {times(r, keys[small], 'SkyRL 0.3.0 first fit', ours)} "
            "as long"
        ),
    }


def _rollout(r: Results) -> dict[str, str]:
    mix = "real mix"
    return {
        "How long does collating 1,024 rollouts take?": (
            f"{ms(r, mix, 'collate, columns')} from columns, {ms(r, mix, 'collate, lists')} from "
            f"lists; with every field made {ms(r, mix, 'ready, columns')} and "
            f"{ms(r, mix, 'ready, lists')}"
        ),
        "How often does a DataLoader worker deliver a batch?": (
            f"every {ms(r, mix, 'delivered, columns')} (plain NumPy: "
            f"{ms(r, mix, 'delivered, row by row, ndarrays')})"
        ),
        "How large is a batch sent to another process?": (
            f"{bytes_per_token(r, f'{mix}, bytes', 'stored')} bytes per token; its dense fields "
            f"would be {bytes_per_token(r, f'{mix}, bytes', 'fields')}"
        ),
        "What do prompt and response side by side save?": (
            "with a long prompt and a long response in one batch, padding them apart takes "
            f"{cell(r, 'Width', 'prompts and responses padded apart', 'of one block')} the memory"
        ),
    }


def _skyrl(r: Results) -> dict[str, str]:
    main = next((row[1] for part in r["parts"] for row in part.get("rows", ())
                 if row[1].startswith("SkyRL main")), MISSING).partition(",")[0]  # fmt: skip

    def over(layout: str, form: str, other: str = main, ours: str = "all fields") -> str:
        theirs = f"{other}, {'arrays' if form == 'columns' else form}"
        return times(r, layout, theirs, f"{ours}, {form}")

    def of(layout: str) -> str:
        forms = (f"{over(layout, form)} from {form}" for form in ("columns", "arrays", "lists"))
        release = over(layout, "lists", "SkyRL 0.3.0")
        call = over(layout, "arrays", ours="call")
        return (
            f"the main branch takes {', '.join(forms)}, with the same fields made on the CPU; "
            f"{call} as long as the call alone, which is the host's part where a step reads fields "
            f"on the device, from arrays; the release 0.3.0 takes {release} from lists"
        )

    return {
        "Against SkyRL, packed?": of("packed"),
        "Against SkyRL, padded?": (
            f"{of('padded')}; its function that does not divide the mask takes "
            f"{over('padded', 'arrays', f'{main}, undivided')} from arrays"
        ),
        "Against SkyRL, rollouts?": of("rollouts"),
    }


def _loader(r: Results) -> dict[str, str]:
    def step(name: str) -> str:
        way = f"PackedCollator under {name}"
        off, on, alone = (ms(r, way, w) for w in ("prefetch off", "prefetch on", "step alone"))
        return f"{off} per step without prefetch, {on} with it; the step alone takes {alone}"

    busy = "PackedCollator under small ops"
    return {
        "How much of a step is collation, if a batch takes 20 ms?": (
            f"{step('sleep')} (it sleeps, as a process does that waits for its GPU)"
        ),
        "And if the step computes on the CPU?": step("matmul"),
        "And if the step is Python code, which holds the GIL?": (
            f"{step('small ops')}; with one worker process {ms(r, busy, '1 worker')}"
        ),
        "What does the loader cost per step?": (
            f"{ms(r, 'overhead, an empty step', 'prefetch on')} (a bare DataLoader: "
            f"{ms(r, 'overhead, an empty step', 'DataLoader')})"
        ),
    }


def _stream(r: Results) -> dict[str, str]:
    return {
        "What does packing on the fly cost, against a plan of the whole dataset?": (
            f"a pass takes {times(r, 'pass', 'list of dicts of arrays', 'offline')} as long over a "
            f"list, {times(r, 'pass', 'TokenizedDataset', 'offline')} over a TokenizedDataset, "
            f"{times(r, 'pass', 'datasets.Dataset', 'offline')} over a "
            "datasets.Dataset, "
            f"{times(r, 'pass', 'datasets.IterableDataset', 'offline')} over an IterableDataset"
        ),
        "How much time is that per example?": (
            f"{cell(r, 'A pass', 'list of dicts of arrays', 'median')} us from a list, of which "
            f"{cell(r, 'A pass', 'list, no batch', 'median')} us are reading and planning"
        ),
    }


def _chat(r: Results) -> dict[str, str]:
    def more(data: str) -> str:
        ways = [times(r, f"{data}.jsonl, {kind}", "tokenize_chat_dataset", "apply_chat_template")
                for kind in ("tags", "no tags")]  # fmt: skip
        return f"{ways[0]} as long with generation tags in the template, {ways[1]} without"

    return {
        "How much longer than apply_chat_template do exact masks take?": (
            f"short questions: {more('gsm8k_train_2k')}"
        ),
        "In dialogues with tools?": more("chat_tools_tm4_900"),
        "In long documents?": more("chat_long_squality_50"),
    }


def _vision(r: Results) -> dict[str, str]:
    images, records = "processed examples, float32", "records"
    return {
        "How long does a batch of 32 examples with 144 MB of pixels take?": (
            f"{ms(r, images, 'packed, collate')}; torch.cat of the pixels alone takes "
            f"{ms(r, images, 'torch.cat of the pixels')}"
        ),
        "What does a training step gain over padding?": (
            f"{cell(r, 'Training step', 'packed, torch_varlen', 'times padded')} the tokens per "
            "second of padding with torch_varlen, "
            f"{cell(r, 'Training step', 'packed, sdpa', 'times padded')} with sdpa (a small "
            "Qwen3-VL on a CPU)"
        ),
        "Against TRL, conversations with images that the collator processes?": (
            f"TRL {ms(r, records, 'TRL vision')}, ours {ms(r, records, 'padded, ready')} padded "
            f"and {ms(r, records, 'packed, ready')} packed for 32 (TRL makes no positions and "
            "masks nothing)"
        ),
        "How long does a plan of 1,000,000 examples with two budgets take?": ms(
            r, "planning, 1000000", "tokens and patches"
        ),
    }


def _hybrids(r: Results) -> dict[str, str]:
    heading, speed = "Isolated against leaking", "Packed against padded"
    short, long = (cell(r, heading, row, "ratio") for row in ("1 x 2,048", "1 x 8,192"))
    packed, padded = (
        cell(r, speed, rows, "real tokens per second") for rows in ("packed", "padded")
    )
    return {
        "What does isolate_mixers cost a hybrid model?": (
            f"a training step takes {long} (8,192 tokens) and {short} (2,048) of the same row "
            "leaking (Qwen3.5, one core)"
        ),
        "What does packing a hybrid save, without kernels?": (
            f"{times(r, 'padded', 'padded', 'packed')} the real tokens per second of right-padded "
            f"batches: {packed}, padded {padded}"
        ),
    }


def _encoders(r: Results) -> dict[str, str]:
    pairs, passages, packed = "BERT, both in one batch", "BERT, passages", "boundaries, 4,096"
    modern = "ModernBERT, both in one batch"
    return {
        "What does packing an encoder save?": (
            f"batches of queries and passages padded at random take "
            f"{times(r, pairs, 'padded, random', packed)} as long (BERT) and "
            f"{times(r, modern, 'padded, random', packed)} (ModernBERT), sorted by length "
            f"{times(r, pairs, 'padded, sorted', packed)} and "
            f"{times(r, modern, 'padded, sorted', packed)}; passages alone, sorted, "
            f"{times(r, passages, 'padded, sorted', packed)}"
        ),
        "And with block masks?": (
            f"rows of 2,048 under sdpa take {times(r, pairs, 'block mask, 2,048', packed)} as long "
            "as boundaries"
        ),
    }


def _trees(r: Results) -> dict[str, str]:
    tokens, cells, factor = (
        cell(r, "Cells", "32,768", column) for column in ("tokens", "cells", "tokens per cell")
    )
    shared, packed = (
        cell(r, "Training", rows, "training tokens per CPU second") for rows in ("shared", "packed")
    )
    return {
        "What do shared prefixes save where every turn is trained?": (
            f"{factor} tokens per cell: {cells} cells for {tokens} tokens of 30 airline dialogues "
            f"(Qwen3's template); {times(r, 'dialogues', 'packed', 'shared')} the training tokens "
            f"per CPU second, {shared} against {packed}"
        ),
        "And what does it cost where nothing is shared?": (
            f'a step with "auto" takes {times(r, "nothing shared", "auto", "without")} the time'
        ),
    }


def _windows(r: Results) -> dict[str, str]:
    def of(row: str, column: str) -> str:
        return cell(r, "What is kept, and at what cost", row, column)

    lost = "truncate: trained, ends, rows cut in an answer"
    return {
        "What is kept of airline traces cut at 4,096 tokens?": (
            f"by truncation {of('plain, 4,096', lost)} (trained tokens, ends, rows cut in an "
            f"answer); by windows {of('plain, 4,096', 'windows: trained')} of the trained tokens, "
            f"in {of('plain, 4,096', 'cells')} times the tokens of the traces, as a tree "
            f"{of('plain, 4,096', 'tree')}"
        ),
    }


def _agents(r: Results) -> dict[str, str]:
    tokens, branches, cells = (
        cell(r, "Rewritten histories", "1% tokenized again", column)
        for column in ("tokens: a sample per step", "a sample per branch", "tree: cells")
    )
    return {
        "What do an agent's steps cost where 1% of the sampled pieces are tokenized again?": (
            f"{tokens} tokens as samples, {branches} as a sample per branch, {cells} cells as a "
            "tree of branches (167 steps of 12 airline dialogues)"
        ),
    }


def _audit(r: Results) -> dict[str, str]:
    def speed(of: str) -> str:
        found = cell(r, "From columns", of, "million tokens/s")
        return found if found == MISSING else f"{found} million tokens per second"

    return {
        "How fast does audit read a dataset?": (
            f"{speed('examples with loss_mask')} of one core from columns, "
            f"{speed('TokenizedDataset')} from an Arrow table"
        ),
        "And of rollouts?": speed("rollouts with logprobs"),
    }


def _gpu(r: Results) -> dict[str, str]:
    """One row per model that was measured; a page of one machine has no others."""
    rows = {}
    for size in ("0.6B", "1.7B", "4B"):
        found = {v["variant"]: v for v in r.get(f"padding-{size}", [])}
        ours, padded = found.get("packed, torch_varlen", {}), found.get("padded, sdpa", {})
        if "tokens_per_second" in ours:
            answer = f"{ours['tokens_per_second']:,.0f} real tokens per second packed"
            if "tokens_per_second" in padded:
                times = ours["tokens_per_second"] / padded["tokens_per_second"]
                answer += f", {times:.2f}x as many as padded"
            rows[f"How fast is a Qwen3-{size} fine-tuned on {r['device']}?"] = answer
    checks = r.get("checks", {})
    if checks:
        answer = f"{checks['passed']} checks pass, {checks['failed']} fail"
        rows["Is packed attention exact on the GPU?"] = answer
    return rows


def _preference(r: Results) -> dict[str, str]:
    packed, padded = (
        cell(r, "Packed against padded", rows, "real tokens per second")
        for rows in ("packed", "padded")
    )
    pairs, segments = r["rows"]["pairs"], r["rows"]["segments"]
    return {
        "What does packing preference pairs save?": (
            f"{times(r, 'padded', 'padded', 'packed')} the real tokens per second of TRL-style "
            f"padded batches: {packed}, padded {padded} (DPO, one core)"
        ),
        "What does it cost to keep pairs together?": (
            f"{pairs / segments - 1:.1%} more rows, and a plan takes "
            f"{times(r, 'planning', 'pairs', 'singles')} that of single examples"
        ),
    }


def _shapes(r: Results) -> dict[str, str]:
    found = {of["what"]: of["measured"] for of in r["targets"]}
    counts = [cell(r, "Recompilations", f"no limit, {how}", "compiled again")
              for how in ("default", "dynamic=False")]  # fmt: skip
    mask = found["create_block_mask against the closed form, 8,192 cells"]
    return {
        "How often is a step of real lengths compiled again?": (
            f"{found['compiled again, default']} times with max_sequences_per_row, also with "
            f"dynamic=False; without a limit {counts[0]} and {counts[1]} in 20 steps"
        ),
        "How long does create_block_mask take?": f"{mask} as long as the closed form, 8,192 cells",
    }


ANSWERS: dict[str, Callable[[Results], dict[str, str]]] = {
    **PLAN_ANSWERS,
    "agents": _agents,
    "audit": _audit,
    "chat": _chat,
    "collate": _collate,
    "encoders": _encoders,
    "gpu": _gpu,
    "hybrids": _hybrids,
    "loader": _loader,
    "packing": _packing,
    "preference": _preference,
    "rollout": _rollout,
    "shapes": _shapes,
    "skyrl": _skyrl,
    "trees": _trees,
    "stream": _stream,
    "vision": _vision,
    "windows": _windows,
}
