"""Plant faults in the package, one at a time, and see whether the tests notice.

    python -m tests.mutations [--only packing,rl] [--list] [--limit 120]

Each fault replaces a text that stands once in the package, in a copy of the checkout, and runs the
tests named beside it. Caught: a test fails. Missed: all pass. Hung: they were stopped at the limit,
which counts as caught where the machine is quiet. A text that moved to another file is found there;
one that is gone, or whose tests are, is named: plant the fault where the code is now, or remove it
with the code. The exit code is the number of faults missed or gone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """A text that is replaced, the file that should have it, and the tests that should notice."""

    path: str
    before: str
    after: str
    tests: str


FAULTS = [
    # sources
    Fault("loading/dataset/foreign_rows.py", "np.diff(self._whole(name)) != 1", "np.diff(self._numpy(name)) != 1", "loading/dataset/test_unpack_dataset.py"),
    Fault("loading/dataset/foreign_rows.py", "target = np.roll(target, 1) if shifted else target.copy()", "target = target.copy()", "loading/dataset/test_unpack_dataset.py"),
    Fault("loading/dataset/foreign_rows.py", "np.flatnonzero(~is_pad) if has_pads else slice(None)", "slice(None)", "loading/dataset/test_unpack_dataset.py"),
    Fault("loading/dataset/foreign_rows.py", "target[self._starts] = ignored", "pass", "loading/dataset/test_unpack_dataset.py"),
    Fault("loading/dataset/foreign_rows.py", "if fits:\n", "if fits or shifted is None:\n            fits = fits or [False]\n", "loading/dataset/test_unpack_dataset.py"),
    Fault("loading/dataset/foreign_rows.py", "self._check_agreement(is_trained)\n        counts", "counts", "loading/dataset/test_unpack_dataset.py"),
    Fault("loading/dataset/token_file_kinds.py", "places, [len(tokens)]", "places", "loading/dataset/test_token_files.py"),
    Fault("loading/dataset/token_file_kinds.py", '(name == "end_id")', "0", "loading/dataset/test_token_files.py"),
    Fault("loading/dataset/token_file_kinds.py", "return dtype, before[ends]", "return dtype, before", "loading/dataset/test_token_files.py"),
    Fault("loading/dataset/token_file_kinds.py", "pointers != before[:-1] * dtype.itemsize", "pointers < 0", "loading/dataset/test_token_files.py"),
    Fault("loading/dataset/columns.py", "offsets = np.append(0, np.cumsum(counts.to_numpy(), dtype=np.int64))", "return array.cast(pa.large_list(array.type.value_type))", "loading/dataset/test_source.py"),
    Fault("chat/tokenize.py", "alone, ids = (tokenizer", "ids, alone = (tokenizer", "chat/test_documents.py"),
    Fault("chat/documents.py", "[] if has_head else before", "before + before", "chat/test_documents.py"),
    Fault("chat/documents.py", "after[-1:] != [tokenizer.eos_token_id]", "True", "chat/test_documents.py"),
    Fault("chat/documents.py", "backend.encode_special_tokens, not parse_special", "backend.encode_special_tokens, False", "chat/test_documents.py"),
    Fault("chat/cache_keys.py", "of_text = [tokenizer.chat_template,", "of_text = [", "chat/test_documents.py"),
    Fault("chat/cache_keys.py", "_digest([key, dataset._fingerprint])", "_digest([key])", "chat/test_documents.py"),
    Fault("chat/cache_keys.py", "text = text[text.index('\"added_tokens\"') :]", "pass", "chat/test_documents.py"),
    Fault("chat/traces.py", "            parents.update(zip(chain[1:], chain, strict=False))\n", "", "chat/test_documents.py"),
    Fault("chat/traces.py", "_marked(event, i in known)", "_marked(event, False)", "chat/test_documents.py"),
    Fault("chat/traces.py", "if key is not None and not is_side:", "if key is not None:", "chat/test_documents.py"),
    Fault("preference/tokenize.py", "[1] * (loss_mask.index(1) - num_prompt)", "[0] * (loss_mask.index(1) - num_prompt)", "preference/test_tokenize.py"),
    Fault("loading/shards.py", "return is_ours or is_map_style or", "return is_ours or", "loading/streaming/test_sources.py"),
    Fault("loading/reader.py", "        if _is_of_a_batch(error):", "        if False:", "loading/prefetch/test_loader_faults.py"),
    Fault("loading/resumable_loaders.py", 'raise RuntimeError("collate_fn raised StopIteration") from error', "raise", "loading/prefetch/test_loader_faults.py"),
    Fault("loading/dataset/sources.py", "ujson_loads(ujson_dumps(value)) != value", "False", "loading/dataset/test_sources.py"),
    Fault("chat/traces.py", "silent.get(parents[place], parents[place])", "parents[place]", "chat/test_documents.py"),
    # windows
    Fault("chat/windows.py", "else max(ends[fitting - 1], pinned)", "else max(ends[fitting - 1] - 1, pinned)", "chat/test_windows.py"),
    Fault("chat/windows.py", "min(new, first) + max(new - start, 0)", "min(new, first)", "chat/test_windows.py"),
    Fault("chat/windows.py", "max(new - start, 0)", "max(new - start + 1, 0)", "chat/test_windows.py"),
    Fault("chat/windows.py", "others = dict(example)", "others = given", "chat/test_windows.py"),
    Fault("chat/windows.py", "found.append({**others, **window,", "found.append({**window,", "chat/test_windows.py"),
    Fault("chat/windows.py", "new - max(overlap, 1)", "new - overlap", "chat/test_windows.py"),
    Fault("chat/windows.py", "max(new - overlap, least)), run - 1)", "new), run - 1)", "chat/test_windows.py"),
    Fault("chat/windows.py", "max(new - overlap, least)", "new - overlap", "chat/test_windows.py"),
    Fault("chat/windows.py", "(start, new, stop, following < stop)", "(start, new, stop, False)", "chat/test_windows.py"),
    Fault("chat/windows.py", "bisect_right(ends, start + room)", "bisect_right(ends, start + room - 1)", "chat/test_windows.py"),
    Fault("chat/windows.py", "> limit < first + 2", "> limit < first + 1", "chat/test_windows.py"),
    Fault("chat/windows.py", '(IGNORE_INDEX if target == "labels" else 0)', "(0)", "chat/test_windows.py"),
    Fault("chat/windows.py", 'list(range(len(window["input_ids"])))', 'window["position_ids"]', "chat/test_windows.py"),
    Fault("chat/tokenize.py", "sum(loss_mask[limit:])]", "sum(loss_mask)]", "chat/test_windows.py"),
    Fault("chat/tokenize.py", 'any(row["is_continued"] for row in kept)', 'all(row["is_continued"] for row in kept)', "chat/test_windows.py"),
    Fault("chat/dataset.py", "removed = [COUNTS]", "removed += [COUNTS]", "chat/test_windows.py"),
    Fault("reporting/audit/checks.py", "is_tile = stops & (columns.is_continued > 0)", "is_tile = stops & False", "reporting/test_audit_forms.py"),
    Fault("reporting/audit/checks.py", "is_open &= template is not None and", "is_open &= False and", "reporting/test_audit_forms.py"),
    Fault("reporting/audit/checks.py", "is_open = stops & columns.in_rows(turns.rows[turns.are_answers])", "is_open = stops & True", "reporting/test_audit_forms.py"),
    Fault("reporting/audit/checks.py", "texts = [texts[0].removesuffix(template.eos_token).rstrip()]", "pass", "reporting/test_planted.py"),
    Fault("reporting/audit/checks.py", "case not in _THINKING or num_thoughts > 0", "case not in _THINKING or len(opened) > 0", "reporting/test_planted.py"),
    Fault("reporting/audit/checks.py", "'' if none_read else '; ROWS'", "'; ROWS'", "reporting/test_audit_forms.py"),
    Fault("reporting/audit/checks.py", "stops &= ~columns.is_set_aside & (columns.is_end & columns.trained).any()", "stops[:] = False", "reporting/test_audit_borders.py"),
    Fault("reporting/audit/checks.py", "not (is_rare and stops.any())", "not stops.any()", "reporting/test_audit_borders.py"),
    Fault("reporting/audit/vocabulary.py", '.strip() or next(answers, "")', ".strip()", "reporting/test_planted.py"),
    Fault("reporting/audit/vocabulary.py", "self.prompt_ids = self.encode(header + rest)", "pass", "reporting/test_planted.py"),
    Fault("reporting/audit/token_checks.py", "found &= ((following == turns.ends + 1) | is_end)", "found &= (following == turns.ends + 1)", "reporting/test_audit_borders.py"),
    Fault("reporting/audit/columns.py", "is_usual &= columns.trained[ends[ends >= 0]].any()", "pass", "reporting/test_planted_texts.py"),
    Fault("reporting/audit/token_checks.py", "not (is_pad and is_next[i])", "not is_pad", "reporting/test_audit_borders.py"),
    Fault("reporting/audit/token_checks.py", "    is_inside |= np.isin(begins, _after_ends(columns))  # text_after_end_trained\n", "", "reporting/test_audit_borders.py"),
    Fault("reporting/audit/token_checks.py", "places = places[~columns.has_shift[columns.rows_of(places)]]", "pass", "reporting/test_planted_texts.py"),
    Fault("reporting/audit/token_checks.py", "& ~columns.has_shift  # mask_shifted", "", "reporting/test_planted_texts.py"),
    Fault("reporting/audit/group_checks.py", "if highest > lowest:", "if highest >= lowest:", "reporting/test_audit_groups.py"),
    Fault("reporting/audit/token_checks.py", "starts &= np.append(0, columns.is_continued[:-1])[turns.rows] == 0", "starts &= True", "reporting/test_audit_forms.py"),
    Fault("reporting/audit/group_checks.py", "is_asked &= np.append(0, columns.is_continued[:-1]) == 0", "is_asked &= True", "reporting/test_audit_forms.py"),
    Fault("loading/dataset/sources.py", '"num_cut_tokens", "is_continued")', '"num_cut_tokens")', "reporting/test_audit_forms.py"),
    # shapes
    Fault("batch/model_inputs.py", "return torch.cat([flat, flat[-1:].expand(missing)])", "return flat", "collators/test_capacity.py"),
    Fault("batch/model_inputs.py", "len(per_row), most), int(shape[-1])", "len(per_row), most), longest", "collators/test_capacity.py"),
    Fault("collators/packed.py", "= most + 1 + (self.vision is not None)", "= most + (self.vision is not None)", "collators/test_capacity.py"),
    Fault("batch/model_inputs.py", 'if "cu_seqlens_cpu" in kind.keywords:', "if False:", "collators/test_capacity.py"),
    Fault("batch/block_masks.py", "ends - (window - 1)", "ends - window", "test_block_masks.py"),
    Fault("batch/block_masks.py", "torch.minimum(stops, ends + window)", "torch.minimum(stops, ends + window - 1)", "test_block_masks.py"),
    Fault("batch/block_masks.py", "(high + (_SIZE - 1)) // _SIZE", "high // _SIZE", "test_block_masks.py"),
    Fault("batch/block_masks.py", "if width % _SIZE:", "if False:", "test_block_masks.py"),
    Fault("packing/planner.py", "if int(rows.counts().max()) <= slots:", "if int(rows.counts().max()) <= slots + 1:", "packing/test_slots.py"),
    Fault("packing/balance.py", "(limits.pieces or len(order)) - counts)", "len(order) - counts)", "packing/test_slots.py"),
    Fault("loading/stream_batches.py", "num_steps and packing.max_sequences_per_row is None", "num_steps", "collators/test_capacity.py"),
    # packing
    Fault("packing/strategies.py", "if key >= sizes[-2]", "if key > sizes[-2]", "packing"),
    Fault("packing/strategies.py", "node += space[node] < size", "node += space[node] <= size", "packing"),
    Fault("packing/strategies.py", 'sums + most, side="right") - 1', 'sums + most, side="left") - 1', "packing"),
    Fault("packing/strategies.py", "np.arange(len(ends)) + limits.pieces", "np.arange(len(ends)) + limits.pieces + 1", "packing"),
    Fault("packing/balance.py", "for tokens, patches in (dealt, before)", "for tokens, patches in (before, dealt)", "packing"),
    Fault("packing/balance.py", "np.where(used_patches > 0, limits.tokens, limits.text)", "np.where(used_patches > -1, limits.tokens, limits.text)", "packing"),
    Fault("packing/rank_plan.py", "int(np.delete(num_loss_tokens, plan.left_out.examples).sum())", "int(num_loss_tokens.sum())", "packing loading/sampler"),
    Fault("packing/rank_plan.py", "plan.rank_rows(dp_rank * each),", "plan.rank_rows(dp_rank),", "packing loading/sampler"),
    Fault("packing/rank_plan.py", "wrong = np.flatnonzero(lengths != self.lengths)", "wrong = np.flatnonzero(lengths < self.lengths)", "packing loading/sampler"),
    Fault("packing/rank_plan.py", "if self.plan.rows_multiple_of == 1 or", "if True or", "packing loading/prefetch vision"),
    # context
    Fault("batch/context_shards.py", "[rank, parts - 1 - rank]", "[rank, parts - size + rank]", "test_context_shards.py"),
    Fault("batch/context_shards.py", "np.concatenate([bounds, begins, ends])", "np.concatenate([begins, ends])", "test_context_shards.py"),
    Fault("packing/options.py", "divmod(rank // self.tp, self.cp)", "divmod(rank, self.cp)", "test_context_shards.py"),
    Fault("batch/context_shards.py", "return before + self.skipped + self.depth, self.targets", "return before + self.skipped, self.targets", "test_context_shards.py"),
    Fault("batch/context_shards.py", "predicting = np.clip(first + length - depth, begin, ends)", "predicting = np.clip(first + length, begin, ends)", "test_context_shards.py"),
    Fault("batch/context_shards.py", "predicting - of_response)", "predicting - begin)", "test_context_shards.py"),
    Fault("batch/paths.py", "keys = own.ends - firsts", "keys = own.ends - own.begins", "test_context_ranks.py"),
    Fault("batch/paths.py", "    check_group(shard, group)\n", "    pass\n", "test_context_ranks.py"),
    Fault("batch/paths.py", "if any(content != contents[0] for content in contents):", "if False:", "test_context_ranks.py"),
    Fault("attention/kernels.py", "longest = width if path_cells is None else segments.max_k", "longest = width", "test_context_ranks.py"),
    Fault("attention/context.py", "reduce_scatter()(own, gradient.contiguous(), group=ctx.group)", "own.copy_(gradient.chunk(size)[dist.get_rank(ctx.group)])", "test_context_ranks.py"),
    Fault("attention/context.py", "return gradient.chunk(size)[dist.get_rank(ctx.group)], None", "return _Gather.backward(ctx, gradient)", "test_context_ranks.py"),
    Fault("losses/token_logps.py", "if batch is not None and is_shard(batch):", "if False:", "test_context_shards.py"),
    # targets at a depth
    Fault("batch/dense.py", "np.minimum(min(depth, num_cells), lengths)", "np.minimum(1, lengths)", "test_depths.py"),
    Fault("batch/targets.py", "ends = np.append(0, firsts + lengths)", "ends = np.append(0, firsts + 1)", "test_depths.py"),
    Fault("batch/targets.py", "tokens - depth\n", "tokens - 1\n", "test_depths.py"),
    Fault("batch/targets.py", "of_tokens[predicting]", "of_tokens[cells] - depth", "test_depths.py"),
    Fault("batch/targets.py", "* float(divisor)", "* 1", "test_depths.py"),
    Fault("batch/targets.py", "weights = weights * (labels.flatten() != IGNORE_INDEX)", "pass", "test_depths.py"),
    Fault("batch/targets.py", "or \"input_ids\" in stored.given", "", "test_depths.py"),
    Fault("batch/dense.py", "is_trained.index_fill_(0, cells", "is_trained.index_fill_(0, cells[:0]", "test_segments.py"),
    Fault("batch/dense.py", "len(is_trained), int(is_of_next))", "len(is_trained), 1)", "test_targets.py"),
    Fault("batch/dense.py", "np.repeat(examples.lengths == 0,", "np.repeat(examples.lengths < 0,", "test_depths.py"),
    Fault("batch/block_masks.py", "else min(window, width)  # sums", "else window  # sums", "test_block_masks.py"),
    Fault("batch/batch.py", 'field.to(made.dtype) if name in ("labels", "loss_mask") else field', "field", "test_depths.py"),
    Fault("chat/windows.py", "(v is not None or k in TARGETS)", "v is not None", "chat/test_windows.py"),
    Fault("reading/columns.py", "if isinstance(n, float) and n.is_integer() else n", "if False else n", "collators/test_declared_fields.py"),
    Fault("packing/options.py", "            _refuse_costs(rate, lengths)\n", "            pass\n", "packing/test_pack.py"),
    Fault("loading/loader.py", "else of_all_ranks(state)", "else state", "loading/test_ranks.py"),
    Fault("batch/dense.py", "        ids = make_field(\"input_ids\", columns, batch._shared, {})\n", "        pass\n", "test_depths.py"),
    Fault("batch/targets.py", 'batch._shared, {})', "batch._shared, stored.metadata)", "test_depths.py"),
    Fault("batch/context_shards.py", 'metadata.pop("num_loss_tokens", None)', "pass", "test_depths.py"),
    Fault("batch/context_shards.py", "predicting = np.clip(first + length - depth, begin, ends)", "predicting = np.clip(first + length - 1, begin, ends)", "test_depths.py"),
    Fault("batch/context_shards.py", "first + length - responses - depth", "first + length - responses - 1", "test_context_shards.py test_depths.py"),
    Fault("batch/context_shards.py", "np.clip(first + length - depth + 1, begin, ends) - begin", "predicting - begin", "test_depths.py"),
    Fault("batch/context_shards.py", "_replace(depth=self.depth - 1, targets=self.inputs)", "_replace(targets=self.inputs)", "test_depths.py"),
    Fault("batch/context_shards.py", "columns += slices.depth", "columns += 1", "test_depths.py"),
    Fault("batch/context_shards.py", "_DROPPED[slices.width == placement.width :]", "_DROPPED", "test_depths.py"),
    Fault("batch/context_shards.py", 'if layout == "zigzag" and size > 1 and', 'if layout == "zigzag" and', "test_depths.py"),
    Fault("batch/model_inputs.py", "shard.size > 1 or context_group is not None", "True", "test_depths.py"),
    Fault("batch/paths.py", "LAYOUTS.index(shard.layout), shard.depth]", "LAYOUTS.index(shard.layout)]", "test_depths.py"),
    # trees
    Fault("packing/trees.py", "while waiting and waiting[-1][0] > number:", "while waiting and waiting[-1][0] > number + 1:", "packing/test_trees.py"),
    Fault("packing/trees.py", "gap = min(gap, waiting.pop()[1])", "waiting.pop()", "packing/test_trees.py"),
    Fault("packing/trees.py", "for turn in (1, -1):", "for turn in (1,):", "packing/test_trees.py"),
    Fault("packing/trees.py", "return np.unique(ids, return_inverse=True)[1].astype(np.int32)", "return ids.astype(np.int32)", "packing/test_trees.py"),
    Fault("packing/trees.py", "pays = factor >= LEAST_FACTOR", "pays = factor > LEAST_FACTOR", "packing/test_trees.py"),
    Fault("packing/atoms.py", "_sums(cost.language(lengths) - cost.language(depths), offsets)", "_sums(cost.language(lengths - depths), offsets)", "packing/test_trees.py"),
    Fault("loading/by_rows.py", "cells = atoms.cells if atoms.are_lists else atoms.tokens", "cells = atoms.tokens", "loading/test_trees.py"),
    Fault("loading/example_sizes.py", "atoms.cells if atoms.share else None", "None", "loading/test_trees.py"),
    Fault("packing/atoms.py", "cells_E = aligned(_sums(lengths - depths, offsets), align)", "cells_E = aligned(tokens_E, align)", "packing/test_trees.py"),
    Fault("loading/example_sizes.py", "sized(self._examples, packing)", "sized(self._examples, self._packing)", "loading/test_trees.py"),
    Fault("loading/stream_entries.py", "        if packing.share_prefixes:\n", "        if False:\n", "loading/test_trees.py"),
    Fault("loading/dataset/tokenized.py", 'most, side="right")) - 1)', 'most, side="right")))', "loading/test_trees.py"),
    # segments
    Fault("packing/atoms.py", "cells_E = tokens_E if align == 1 else _sums(cells_E, offsets)", "cells_E = tokens_E", "packing/test_trees.py"),
    Fault("packing/planner.py", "most_pieces //= max(1, int(atoms.segments.max(initial=1)))", "most_pieces //= 1", "packing/test_trees.py"),
    Fault("packing/atoms.py", "costs_E = _sums(cost.language(cells_E), offsets)", "costs_E = cost.language(_sums(cells_E, offsets))", "packing/test_trees.py"),
    Fault("collators/packed.py", "part.check_segments(found.cells, found.segments)", "pass", "loading/test_trees.py"),
    Fault("reading/examples.py", "pieces.examples - self.segment_offsets[places]", "pieces.examples", "collators/test_segments.py"),
    Fault("reading/examples.py", "is_first = numbers == 0", "is_first = numbers >= 0", "collators/test_segments.py"),
    Fault("reading/examples.py", "ends, len(self.example_lengths))", "ends, len(self.input_ids))", "vision/test_dummy_images.py"),
    Fault("reading/segments.py", 'np.repeat(weights_of_examples(raw["weight"]), counts)', 'np.resize(weights_of_examples(raw["weight"]), counts.sum())', "collators/test_segments.py"),
    Fault("batch/row_changes.py", 'if "loss_mask" in storage.given:  # it may', 'if False:  # it may', "rl test_batch_changes.py"),
    Fault("batch/row_changes.py", "~is_first | ~(is_next | is_last)", "~is_first", "collators/test_segments.py"),
    Fault("loading/dataset/columns.py", 'searchsorted(self._offsets, null_segments, side="right") - 1', 'searchsorted(self._offsets, null_segments, side="right")', "loading/test_segments.py"),
    Fault("loading/example_sizes.py", "counted[\"segments_digest\"] = self._sizes", "counted[\"segments_digest\"] = atoms.cells", "loading/test_segments.py"),
    Fault("loading/stream_entries.py", "    if any(are_lists):\n", "    if False:\n", "loading/test_segments.py"),
    # families
    Fault("families.py", '_DELTA = ("seq_idx", ', "_DELTA = (", "kernels"),
    Fault("families.py", '_KDA = ("seq_idx", "cu_seqlens", ', '_KDA = ("seq_idx", ', "kernels"),
    Fault("families.py", "keywords, one_row=True,", "keywords, one_row=False,", "kernels"),
    Fault("families.py", "for each in (config, text)]", "for each in (text, config)]", "kernels"),
    Fault("batch/model_inputs.py", "lengths = torch.diff(flat) ", "lengths = torch.diff(flat).long() ", "kernels"),
    Fault("batch/model_inputs.py", "or kind.family.blind_mask or kind", "or kind", "kernels"),
    # reading
    Fault("reading/images.py", "flat.max() < 256", "flat.max() <= 256", "collators"),
    Fault("reading/images.py", "(sizes < 1).any()", "(sizes < 0).any()", "vision"),
    Fault("reading/columns.py", "np.concatenate(rows, dtype=dtype)", "np.concatenate(rows)", "collators"),
    Fault("reading/reader.py", "np.flatnonzero(rows.lengths != spec.shape[0])", "np.flatnonzero(rows.lengths < spec.shape[0])", "collators/test_vectors.py collators/test_declared_fields.py"),
    Fault("reading/entries.py", "place[isinstance(self.spec, PerExample) :]", "place", "collators/test_vectors.py collators/test_declared_fields.py"),
    Fault("loading/map_segments.py", "return examples[places.values], of", "return places.values, of", "loading/test_map_segments.py"),
    Fault("loading/map_segments.py", "return True, [dist.get_rank(group)]", "return True, [0]", "loading/test_map_segments.py"),
    Fault("reading/vectors.py", "or set(map(len, parts)) - {size}:", ":", "collators/test_vectors.py collators/test_declared_fields.py"),
    Fault("reading/entries.py", "joined.reshape(-1, *arrays[0].shape[1:])", "joined", "collators/test_vectors.py collators/test_declared_fields.py"),
    Fault("reading/entries.py", "(entry, *np.argwhere(is_bad)[0, 1:].tolist())", "(entry,)", "collators/test_vectors.py collators/test_declared_fields.py"),
    Fault("reading/examples.py", 'np.zeros((0, *getattr(spec, "shape", ())))', "np.zeros(0)", "collators/test_vectors.py"),
    Fault("reading/source.py", "(of == of[0]).all() for of in sizes[1:]", "True for of in sizes[1:]", "collators/test_vectors.py"),
    Fault("loading/dataset/columns.py", "starts + first, stops + first", "starts, stops", "collators/test_vectors.py"),
    Fault("loading/dataset/columns.py", "is_odd = (sizes != size) | (sizes == 0)", "is_odd = sizes == 0", "collators/test_vectors.py"),
    Fault("ragged.py", "starts * size, lengths * size)", "starts, lengths * size)", "collators/test_vectors.py test_ragged.py"),
    # batch
    Fault("batch/dense.py", "width * math.prod(shape), pad, dtype", "width * math.prod(shape), 0, dtype", "collators/test_vectors.py collators/test_declared_fields.py"),
    Fault("batch/placement.py", "first += last - self.segments[count].values", "first += 0", "test_batch_explain.py test_batch_drawing.py"),
    Fault("batch/placement.py", "(cells[1:] != (cells + lengths)[:-1]) | (left_out[1:] > 0)", "cells[1:] != (cells + lengths)[:-1]", "test_batch_changes.py"),
    Fault("batch/dense.py", "np.array_equal(ends, np.arange(1, self.num_rows + 1) * self.width)", "True", "test_batch_changes.py collators/test_fuzz.py"),
    Fault("batch/dense.py", "starts = starts + self.per_segment[last] - number", "starts = starts", "collators"),
    Fault("batch/placement.py", "aligned = -(-lengths // align) * align", "aligned = lengths // align * align", "collators"),
    Fault("batch/counts.py", "placement.numbers() < counts[placement.rows()]", "placement.numbers() >= 0", "test_batch_counts.py"),
    Fault("batch/row_changes.py", "num_cells(storage) * num_ranks)", "num_cells(storage))", "test_batch_counts.py"),
    Fault("batch/row_changes.py", "if collated_apart or len(", "if len(", "test_batch_counts.py test_batch.py"),
    Fault("rl/mini_batches.py", '{"step_num_cells": num_cells, "is_last_part"', '{"is_last_part"', "rl test_batch_counts.py"),
    Fault("collators/packed.py", "plan.num_rows * self._width(plan)", "len(part.rows) * self._width(plan)", "test_batch_counts.py"),
    Fault("loading/stream_batches.py", "if k not in OF_A_STEP}", "}", "test_batch_counts.py"),
    Fault("batch/row_changes.py", 'untrained = {"loss_weights": 0, "labels": IGNORE_INDEX}', 'untrained = {"labels": IGNORE_INDEX}', "test_batch_changes.py"),
    Fault("batch/row_changes.py", 'if name in ("responses", "routed")', 'if name in ("responses",)', "test_batch_changes.py"),
    Fault("batch/row_changes.py", "& (np.diff(starts) == 0) & (np.diff(owners) != 0)", "& (np.diff(owners) != 0)", "test_batch.py test_batch_changes.py"),
    Fault("batch/row_changes.py", "longest = stop - int(begins.min(initial=stop - 1))", "longest = stop - int(begins.max(initial=0))", "rl test_batch_changes.py"),
    Fault("batch/storage.py", "raise ValueError(f\"{name} has {len(value)} rows", "print(f\"{name} has {len(value)} rows", "test_batch.py"),
    Fault("batch/storage.py", "mask * (before / divisor)", "mask / divisor", "rl test_batch.py test_batch_changes.py"),
    # losses
    Fault("losses/token_loss.py", "(torch.where(mask != 0, nll, 0) * mask.to(nll.dtype)).sum()", "(nll * mask.to(nll.dtype)).sum()", "test_losses.py"),
    Fault("losses/token_logps.py", "shift = more - (targets_of(batch) == \"next_token\")", "shift = more", "test_losses.py"),
    Fault("losses/token_logps.py", "return torch.float32 if dtype == torch.float16 else dtype", "return dtype", "test_losses_through_head.py"),
    Fault("losses/token_logps.py", "(loss_weights == 0)[:, None], 0)", "(loss_weights < 0)[:, None], 0)", "test_losses_through_head.py"),
    Fault("losses/token_logps.py", "slope.mul_(1 - capped * capped)", "slope.mul_(1 - capped)", "test_losses_through_head.py"),
    Fault("losses/token_logps.py", "_nll_and_slope(logits, targets[part], -grad[part], ctx.softcap)", "_nll_and_slope(logits, targets[part], -grad[:len(states)], ctx.softcap)", "test_losses_through_head.py"),
    Fault("losses/token_logps.py", "yield part, states, used_weight, F.linear(states, used_weight, used_bias).to(wide)", "yield part, states, used_weight, F.linear(hidden.to(dtype), used_weight, used_bias).to(wide)[part]", "test_losses_through_head.py"),
    Fault("losses/token_logps.py", "labels = batch[name] if name in batch else ids_of_tokens(batch)", "labels = ids_of_tokens(batch)", "test_segments.py"),
    Fault("losses/token_logps.py", "(cells // max(num_columns, 1) + 1) * more", "cells // max(num_columns, 1) * more", "test_segments.py"),
    Fault("losses/segments.py", "torch.searchsorted(starts, cells, right=True) - 1", "torch.searchsorted(starts, cells) - 1", "test_targets.py"),
    Fault("losses/segments.py", "_cells_at(firsts + lengths - 1, batch)", "_cells_at(firsts + lengths, batch)", "test_segments.py"),
    Fault("losses/segments.py", "sums / torch.where(totals == 0, 1, totals)", "sums / totals.mean()", "test_segments.py"),
    Fault("losses/segments.py", "values = torch.where(factors != 0, values, 0) * factors", "values = values * factors", "test_segments.py"),
    Fault("losses/segments.py", "for of_rank in of_ranks for part in of_rank", "for of_rank in of_ranks[:1] for part in of_rank", "preference/test_losses.py"),
    Fault("losses/token_loss.py", "begins &= np.asarray(numbers.values) == 0", "begins &= True", "preference/test_losses.py"),
    # preference
    Fault("preference/losses.py", "margin = rewards[0::2] - rewards[1::2]", "margin = rewards[: len(rewards) // 2] - rewards[len(rewards) // 2 :]", "preference/test_losses.py"),
    Fault("preference/losses.py", "point.detach().clamp(min=0)", "point.clamp(min=0)", "preference/test_losses.py"),
    Fault("preference/losses.py", "point.detach().clamp(min=0)", "point.detach()", "preference/test_losses.py"),
    Fault("preference/losses.py", "F.logsigmoid(distance - wanted.to(distance))", "F.logsigmoid(distance + wanted.to(distance))", "preference/test_losses.py"),
    # attention
    Fault("attention/models.py", "if longest > window and", "if longest > window + 1 and", "test_block_masks.py"),
    Fault("attention/kernels.py", "mask.triu(seen - length + 1 - window)", "mask.triu(seen - length - window)", "test_attention.py"),
    Fault("attention/kernels.py", "mask.tril(seen - length + after)", "mask.tril()", "test_trees.py"),
    Fault("attention/kernels.py", "or any(n > m for n, m in", "or any(False for n, m in", "test_trees.py"),
    Fault("attention/isolation.py", "allowed = segments.seeing(change.segment)", "allowed = range(len(segments.rows))", "test_isolation_trees.py test_isolation.py"),
    Fault("attention/isolation.py", "others[sources] = found[sources]", "others[:0] = found[:0]", "test_isolation_trees.py test_isolation.py"),
    Fault("batch/unpacking.py", "num_after[earlier] == 1", "num_after[earlier] >= 1", "test_isolation_trees.py"),
    Fault("reading/packed_elsewhere.py", "np.flatnonzero(values != expected)", "np.flatnonzero(values == 0)", "collators/test_packed_elsewhere.py"),
    Fault("reading/packed_elsewhere.py", "if _are_numbers(entry):", "if False:", "collators/test_packed_elsewhere.py"),
    Fault("batch/batch.py", 'dis.opname[operation] == "DICT_MERGE"', 'dis.opname[operation] == "DICT_UPDATE"', "test_batch.py"),
    Fault("loading/dataset/columns.py", "_plain(array.flatten())", "_plain(array.values)", "loading/dataset/test_source.py"),
    Fault("rl/advantages.py", "negative = (scores < 0)", "negative = (means[groups] < 0)", "rl/test_advantages.py"),
    Fault("batch/paths.py", "& (of_key <= of_query)", "& (of_key <= of_query + 1)", "test_trees.py"),
    Fault("batch/paths.py", "(of_key > of_query - window)", "(of_key >= of_query - window)", "test_trees.py"),
    Fault("batch/paths.py", "kind.all_slide and isinstance", "False and isinstance", "test_trees.py"),
    Fault("batch/counts.py", '_counted(stored, "own")', '_counted(stored, "lengths")', "test_trees_everywhere.py"),
    Fault("rl/mini_batches.py", "row_sums(own, offsets)", "row_sums(paths, offsets)", "test_trees_everywhere.py"),
    Fault("attention/kernels.py", "before = -1 if window is None else window - 1", "before = -1 if window is None else window", "test_attention.py"),
    Fault("attention/varlen.py", "    if module.training:\n", "    if False:\n", "test_attention.py"),
    Fault("attention/kernels.py", "if missing:\n        raise ValueError(\n            f\"cu_seq_lens_q lacks", "if False:\n        raise ValueError(\n            f\"cu_seq_lens_q lacks", "test_attention.py"),
    Fault("attention/isolate_mixers.py", "partial(_run_with, _call.get(), function)", "function", "test_isolate_mixers.py"),
    Fault("attention/isolate_mixers.py", "self.module.training or inputs.get", "inputs.get", "test_isolate_mixers.py"),
    Fault("attention/isolate_mixers.py", "(cached is not None and not self.module.training)", "cached is not None", "test_isolate_mixers.py"),
    Fault("attention/isolate_mixers.py", "(cells, (1, self.width))", "(cells,)", "test_isolate_mixers.py"),
    Fault("attention/isolate_mixers.py", '_CACHES = ("past_key_values", "cache", ', '_CACHES = ("past_key_values", ', "test_isolate_mixers.py"),
    Fault("attention/isolate_mixers.py", "self.replaced or partial(", "partial(", "test_isolate_mixers.py"),
    Fault("attention/isolate_mixers.py", "if key not in _OF_KERNELS", "if True", "test_isolate_mixers.py"),
    Fault("attention/isolate_mixers.py", "if self.module.training or torch.is_grad_enabled():", "if self.module.training:", "test_isolate_mixers.py"),
    Fault("attention/packed_inputs.py", "torch.diff(of_text, dim=1, prepend=of_text[:, :1]) != 1", "of_text == 0", "test_isolation.py test_isolation_models.py"),
    Fault("attention/gradients.py", "range((num_segments - 1).bit_length())", "range(1)", "test_isolation.py"),
    Fault("attention/gradients.py", "for side in (1, 0):", "for side in (1,):", "test_isolation.py"),
    Fault("attention/gradients.py", "            parameter.requires_grad_()\n", "            pass\n", "test_isolation.py"),
    Fault("families.py", "return not any(flags)", "return False", "test_encoders.py"),
    # two-way models
    Fault("batch/model_kind.py", "if padding is None else padding + 1", "if padding is None else padding", "test_encoders.py"),
    Fault("batch/model_kind.py", "first = 2 if kind in _SECOND_POSITION else", "first =", "test_encoders.py"),
    Fault("batch/model_inputs.py", "return positions + kind.first_position", "return positions", "test_encoders.py"),
    Fault("batch/model_inputs.py", 'positions = positions * batch["attention_mask"]', "pass", "test_encoders.py"),
    Fault("batch/model_inputs.py", 'return {"token_type_ids": batch["token_type_ids"]} if size > 1 else {}', "return {}", "test_encoders.py"),
    Fault("batch/model_inputs.py", "seen = seen if two_way else seen.tril()", "seen = seen.tril()", "test_encoders.py"),
    Fault("batch/model_inputs.py", "sliding.tril(window - 1) if two_way else sliding", "sliding", "test_encoders.py"),
    Fault("batch/model_inputs.py", "if kind.is_two_way and kind.all_slide and", "if kind.all_slide and", "test_model_kinds.py"),
    Fault("batch/model_inputs.py", "(ends - firsts - lengths) * (lengths > 0)", "(ends - firsts - lengths) * (lengths < 0)", "test_encoder_refusals.py"),
    Fault("batch/storage.py", "max(p.num_token_types", "min(p.num_token_types", "test_encoders.py"),
    Fault("collators/collator.py", "num_token_types=int(types.values.max()) + 1", "num_token_types=1", "test_encoders.py"),
    Fault("families.py", "return window + 1", "return window", "test_encoders.py"),
    Fault("attention/kernels.py", "causal = causal and mask is None", "causal = mask is None", "test_attention.py"),
    Fault("attention/kernels.py", "after = 0 if causal or window is None else window - 1", "after = 0", "test_attention.py"),
    Fault("attention/kernels.py", "(before, 0 if causal else before)", "(before, 0)", "test_attention.py"),
    Fault("attention/varlen.py", '"sliding_window_bidirectional_overlay" + _INNER: 1', '"sliding_window_bidirectional_overlay" + _INNER: 0', "test_encoders.py"),
    Fault("attention/varlen.py", '"is_causal": causal, **kwargs', "**kwargs", "test_encoders.py"),
    Fault("attention/packed_inputs.py", "if self.kind is not None and name in _OF_ROWS:", "if False:", "test_encoders.py"),
    Fault("attention/models.py", "window if kind.is_two_way else seen.shape[-1]", "seen.shape[-1]", "test_encoders.py"),
    Fault("batch/model_kind.py", "if name and getattr(config, name, value) != value:", "if False:", "test_encoder_refusals.py"),
    Fault("batch/model_kind.py", "takes_any is not None and not takes_any()", "False", "test_encoder_refusals.py"),
    Fault("attention/packed_inputs.py", " or not _counts_from_0(packed):", ":", "test_isolation_trees.py"),
    Fault("attention/packed_inputs.py", "return sorted({best[0], best[-1]})", "return [best[-1]]", "test_isolation_trees.py"),
    Fault("losses/token_loss.py", 'options = {"logit_softcap": cap, **options}', "pass", "test_losses_through_head.py"),
    Fault("attention/packed_inputs.py", "ModelKind.of(model).refuse_left_padding()", "pass", "test_isolation_models.py"),
    Fault("batch/unpacking.py", "if num_rows > 1 and tuple(given.shape[:2])", "if False and tuple(given.shape[:2])", "test_losses.py test_batch_unpack.py"),
    # rl
    Fault("rl/groups.py", "    if last is None:\n        return ends\n", "    if last is None:\n        return ends | True\n", "rl"),
    Fault("rl/advantages.py", "error + gamma * lam * next_advantage", "error + gamma * next_advantage", "rl"),
    Fault("rl/advantages.py", "if len(picked) < 2:", "if len(picked) < 1:", "rl"),
    Fault("rl/advantages.py", "deviation * (sizes / others)[groups]", "deviation", "rl"),
    Fault("rl/advantages.py", "others = np.maximum(sizes - 1, 1)", "others = np.maximum(sizes, 1)", "rl"),
    Fault("rl/advantages.py", "if z_score:", "if z_score and a:", "rl"),
    Fault("rl/advantages.py", "num_units = len(tokens) if count_masked", "num_units = len(counts) if count_masked", "rl"),
    Fault("rl/mini_batches.py", "bisect_left(budgets, -num_micro_batches,", "bisect_left(budgets, -num_micro_batches - 1,", "rl"),
    Fault("rl/groups.py", "[step]) - (step != steps[-1]) for step", "[step]) for step", "rl/test_merging.py"),
    Fault("rl/groups.py", "is_new = joined[: len(part), 0, 0] < 0", "is_new = part[:, 0, 0] >= 0", "rl/test_merging.py"),
    Fault("batch/dense.py", "values = torch.where(values < 0, experts, values)", "pass", "collators/test_rollout.py"),
    Fault("batch/dense.py", "routes[:, 0, 0] < 0 if routes.dtype.is_signed else False", "False", "collators/test_rollout.py"),
    Fault("reading/images.py", "not flat.size or 0 <= flat.min() <= flat.max() < 256", "not flat.size or flat.max() < 256", "collators/test_rollout.py"),
    Fault("reading/images.py", "(flat == -1).all(axis=(1, 2), keepdims=True)", "(flat == -1).any(axis=(1, 2), keepdims=True)", "collators/test_bad_input.py"),
    Fault("reading/images.py", "token, expert = int(bad[0, 0] - counts[:i].sum())", "token, expert = int(bad[0, 0])", "collators/test_bad_input.py"),
    Fault("collators/packed.py", "if is_shared and \"router_padding_mask\"", "if False and \"router_padding_mask\"", "collators/test_rollout.py"),
    Fault("rl/off_policy.py", 'mean=level == "geometric"', 'mean=level == "sequence"', "rl/test_off_policy.py"),
    Fault("rl/off_policy.py", "torch.where(others.isnan(), logps.detach(), others)", "others.nan_to_num()", "rl/test_off_policy.py"),
    Fault("rl/off_policy.py", "torch.where(others.isnan(), logps.detach(), others)", "torch.where(others.isnan(), logps, others)", "rl/test_off_policy.py"),
    Fault("rl/off_policy.py", "ratios.clamp(-_BOUND, _BOUND)", "ratios", "rl/test_off_policy.py"),
    Fault("rl/off_policy.py", "difference.clamp(max=_BOUND)", "difference", "rl/test_off_policy.py"),
    Fault("rl/off_policy.py", "level=level).detach().exp()", "level=level).exp()", "rl/test_off_policy.py"),
    Fault("rl/off_policy.py", "(weights >= low) & (weights <= high)", "weights <= high", "rl/test_off_policy.py"),
    Fault("rl/off_policy.py", 'difference = -_difference(logps, "ref_logps", ref_logps)', 'difference = _difference(logps, "ref_logps", ref_logps)', "rl/test_off_policy.py"),
    Fault("losses/segments.py", "return values.index_select(0, segments)", "return values.roll(1).index_select(0, segments)", "rl/test_off_policy.py"),
    Fault("losses/segments.py", "columns[\"example\"] = _in_dataset(batch, read)[place[:, 0]]", "pass", "test_segments.py"),
    Fault("losses/segments.py", "examples[~np.isin(examples, batch.metadata.get(\"skipped\", []))]", "examples[:number]", "test_segments.py"),
    Fault("losses/segments.py", "counts = _added(torch.ones_like(segments, dtype=sums.dtype), segments, num_segments)", "counts = torch.ones_like(sums)", "test_segments.py"),
    Fault("losses/segments.py", "len(np.unique(place, axis=0)) < len(place)", "False", "test_segments.py"),
    Fault("loading/sampler.py", "np.array(part, np.int64) if isinstance(part, list) else found", "found", "test_segments.py"),
    Fault("reading/entries.py", "is_bad = is_bad & ~np.isnan(values)", "pass", "rl/test_off_policy.py collators/test_rollout.py"),
    Fault("collators/packed.py", "packing.share_prefixes and counts.max() > 1", "packing.share_prefixes", "collators/test_rollout.py"),
    Fault("rl/mini_batches.py", "max(len(_sizes(-np.sort(-widths), max_tokens))", "min(len(_sizes(-np.sort(-widths), max_tokens))", "rl"),
    Fault("rl/groups.py", "np.array_equal(then[: len(first)], first)", "len(then) >= len(first)", "rl"),
    Fault("rl/mini_batches.py", "mini.row_metadata[\"row_indices\"][stop - start :] = -1", "mini.row_metadata[\"row_indices\"][stop - start :] = start", "rl"),
    Fault("rl/mini_batches.py", "for name in (\"cost_per_rank\", \"vision_cost_per_rank\", \"step_num_cells\"):", "for name in ():", "rl collators/test_cost.py"),
    # loading
    Fault("loading/budgets.py", "return full + (rest > 0)", "return full + 1", "loading/sampler"),
    Fault("loading/checks.py", "if key in (\"sampler\", \"stream\")", "if key == \"no\"", "loading/test_sealed_states.py"),
    Fault("loading/checks.py", "is_whole = is_same(", "is_whole = True or is_same(", "loading/test_sealed_states.py"),
    Fault("loading/checks.py", "(\"checksum\", \"sources\")", "(\"checksum\",)", "loading/test_sealed_states.py"),
    Fault("loading/orders.py", "in self.reshuffles if reshuffled == epoch]", "in self.reshuffles if reshuffled <= epoch]", "loading/sampler"),
    Fault("loading/orders.py", "enumerate(reshuffled_after, start=1):\n            rest", "enumerate(reshuffled_after, start=0):\n            rest", "loading/sampler"),
    Fault("loading/orders.py", "np.random.default_rng(np.random.SeedSequence(words))", "np.random.default_rng(sum(words))", "loading/sampler"),
    Fault("loading/sampler.py", "if step and not budget.has_step(epoch, step):", "if False:", "loading/sampler"),
    Fault("loading/dataset/fingerprints.py", "for i in range(0, len(counts), _BLOCK)]", "for i in range(0, len(counts), _BLOCK)][:1]", "loading/sampler"),
    Fault("loading/mixed_order.py", "due = (2 * ends - lengths) / weight", "due = 2 * ends / weight", "loading/sampler"),
    Fault("loading/mixed_order.py", "(self._seed, source, turn)", "(self._seed, source, 0)", "loading/sampler"),
    Fault("loading/mixed_order.py", "np.cumsum(lengths) - lengths, most", "np.cumsum(lengths), most", "loading/sampler/test_mixture.py"),
    Fault("loading/mixed_order.py", "if place == len(part):  # the epoch", "if False:  # the epoch", "loading/sampler/test_mixture.py"),
    Fault("loading/mixed_order.py", "most = None if following is None else following - done", "most = following", "loading/sampler/test_mixture.py"),
    Fault("loading/mixed_order.py", ">= (most or 0) + longest", ">= 0", "loading/sampler/test_mixture.py"),
    Fault("loading/mixed_order.py", "if targets or taken != self._taken(epoch):", "if targets:", "loading/sampler/test_mixture.py"),
    Fault("loading/mixed_order.py", "return sum(self._taken(epoch))", "return sum(self._taken(epoch)) + 1", "loading/sampler"),
    Fault("loading/by_rows.py", "return max(1, -(-needed // self.batch_rows)), start", "return max(1, needed // self.batch_rows), start", "loading/sampler"),
    Fault("packing/steps.py", "number = max(num_rows, min(number - 1, fewer))", "number = max(num_rows, fewer - 1)", "packing loading/sampler"),
    Fault("packing/steps.py", "max(number, min(num_rows, len(atoms.cells)), alike * num_rows)", "number", "loading/sampler/test_window_ends.py"),
    Fault("packing/steps.py", "_num_rows(*first(number), packing)", "_num_rows(first(number)[0], limits, packing)", "loading/sampler/test_window_ends.py"),
    Fault("packing/planner.py", "-(-atoms.tokens // _longest(atoms, packing))", "-(-atoms.tokens // packing.capacity)", "packing/test_slots.py"),
    Fault("packing/options.py", "FP8_TOKENS[self.fp8] * self.cp * self.tp", "FP8_TOKENS[self.fp8] * self.cp", "packing/test_fp8.py"),
    Fault("packing/steps.py", "turns[1::2] = turns[1::2, ::-1].copy()", "pass", "packing loading/sampler"),
    Fault("packing/steps.py", "num_ranks=group", "num_ranks=packing.row_multiple", "packing loading/sampler"),
    Fault("loading/by_rows.py", "reshuffled == epoch and first < step <= first + self.window", "False", "loading/sampler/test_rows.py"),
    Fault("loading/by_rows.py", "self._window_of(epoch, step) if step else None", "self._window_of(epoch, step)", "loading/sampler/test_mixture.py"),
    Fault("loading/budgets.py", " or not self._total(epoch + 1):", ":", "loading/sampler/test_mixture.py"),
    Fault("loading/sampler.py", 'return name == "__next__"', "return True", "loading/prefetch/test_stateful_dataloader.py"),
    Fault("packing/rank_plan.py", "if not self.is_divisor:", "if False:", "loading/sampler/test_packed.py"),
    Fault("reading/keys.py", "*added_keys(given, owners))", ")", "loading/sampler/test_source_counts.py"),
    Fault("loading/loader.py", "not position.step and not self._loader.carries_over", "not position.step", "loading/prefetch/test_loader_faults.py"),
    Fault("loading/budgets.py", "self._logged.add(source)", "pass", "loading/sampler/test_mixture.py"),
    Fault("loading/loader.py", "if num_taken == 0 < position.step and self._loader.has_sampler:", "if False:", "loading/prefetch/test_loader.py"),
    Fault("loading/skipping.py", "return collate(rest) if rest else None, failing", "return collate(numbers), failing", "loading/prefetch/test_on_error.py"),
    Fault("loading/skipping.py", "return error  # PackedRows have named it", "pass", "loading/sampler/test_packed_rows.py"),
    Fault("loading/resumable_loaders.py", "self._sampler.set_epoch(position.epoch, step=position.step)\n        elif", "self._sampler.set_epoch(position.epoch)\n        elif", "loading/prefetch/test_loader.py"),
    Fault("loading/loader.py", "self._at = at = self._loader.pinned(self._loader.here(before))", "at = self._loader.here(before)", "loading/prefetch/test_positions.py"),
    Fault("loading/loader.py", "self._at = loader.move_to(self._at)  # an", "pass  # an", "loading/prefetch/test_positions.py"),
    Fault("loading/reader.py", "if batch is END or loader.is_closed:", "if batch is END:", "loading/prefetch/test_watchdog.py"),
    Fault("loading/dataset/tokenized.py", '"vision": self._vision}', '"vision": None}', "loading/dataset"),
    Fault("loading/checks.py", "return parallel.place(rank)[0]", "return 0", "loading/test_ranks.py"),
    Fault("loading/packed_sampler.py", "parallel.dp * parallel.cp * parallel.tp", "parallel.dp", "loading/test_ranks.py"),
    Fault("loading/stream.py", "self._saved = copy.deepcopy(dict(state))", "self._saved = state", "loading/streaming"),
    Fault("loading/states.py", "return sealed(copy.deepcopy(state))", "return sealed(state)", "loading/streaming"),
    Fault("loading/stream_batches.py", "buffer[number - 1].place", "buffer[-1].place", "loading/streaming"),
    Fault("loading/stream_entries.py", "            taken += 1\n", "            taken += 0\n", "loading/streaming/test_shuffled.py"),
    Fault("loading/stream_entries.py", "if rest else after", "if rest else begin", "loading/streaming/test_shuffled.py"),
    Fault("loading/stream_entries.py", "begin.num_read + 1, begin.start", "1, 0", "loading/streaming/test_shuffled.py"),
    Fault("loading/stream_entries.py", "order.tolist()[num_given:]", "order.tolist()", "loading/streaming/test_shuffled.py"),
    Fault("loading/shards.py", "alone = object.__new__(type(stream))", "alone = copy.copy(stream)", "loading/streaming/test_shuffled.py"),
    Fault("loading/shards.py", "permutation(self.num_shards)[shard])", "permutation(self.num_shards)[0] * 0 + shard)", "loading/streaming/test_shuffled.py"),
    Fault("loading/stream.py", "self._saved[\"pass\"] != self._next_pass", "self._saved[\"pass\"] == self._next_pass", "loading/streaming/test_shuffled.py"),
    Fault("loading/mixed_streams.py", "(2 * self.taken + self._units(self._next))", "(2 * self.taken)", "loading/streaming/test_mixed.py"),
    Fault("loading/mixed_streams.py", "return time, self._next is None,", "return time, self._next is not None,", "loading/streaming/test_mixed.py"),
    Fault("loading/mixed_streams.py", "(*words, number) if words else ()", "words", "loading/streaming/test_mixed.py"),
    Fault("loading/mixed_streams.py", "or place.start:", ":", "loading/streaming/test_mixed.py"),
    Fault("loading/mixed_streams.py", "                    other.taken = 0\n", "                    other.taken += 0\n", "loading/streaming/test_mixed.py"),
    Fault("loading/mixed_streams.py", ", taken=self._none", "", "loading/streaming/test_mixed.py"),
    Fault("loading/stream_batches.py", "place = self._stream.renewed(next_window)", "place = next_window", "loading/streaming/test_mixed.py"),
    Fault("loading/states.py", "tuple(record[0] for record in mixed)", "tuple(0 for record in mixed)", "loading/streaming/test_mixed.py"),
    Fault("packing/mixed_examples.py", "sources[np.unique(numbers)]", "sources[numbers]", "loading/sampler/test_source_counts.py"),
    Fault("loading/streaming/packed.py", "self._saved[\"pass\"] != self._next_pass", "self._saved[\"pass\"] == self._next_pass", "loading/streaming/test_shuffled.py"),
    Fault("packing/rank_plan.py", "sources[np.unique(numbers)]", "sources[numbers]", "loading/sampler/test_source_counts.py"),
    Fault("loading/resumable_loaders.py", "self._at(self._stream.first_pass(), ", "self._at(0, ", "loading/streaming/test_shuffled.py"),
    Fault("loading/reader.py", "if slot.step != step:", "if slot.step > step:", "loading/prefetch"),
    Fault("loading/reader.py", "named = copy.copy(batch)", "named = batch", "loading/prefetch"),
    # agents
    Fault("rl/groups.py", "_num_prompt(columns, steps[0]) :]", "_num_prompt(columns, steps[0]) + 1 :]", "rl/test_branches.py"),
    Fault("rl/groups.py", "if n <= num_prompt), reverse", "if n < num_prompt), reverse", "rl/test_branches.py"),
    Fault("rl/groups.py", "if n <= num_prompt), reverse=True)", "if n <= num_prompt))", "rl/test_branches.py"),
    Fault("rl/groups.py", "branch = same.pop()", "branch = same[-1]", "rl/test_branches.py"),
    Fault("rl/groups.py", "pad, parts[0].dtype), columns[name][later]]", "pad, parts[0].dtype), np.roll(columns[name][later], 1, axis=0)]", "rl/test_branches.py"),
    Fault("rl/groups.py", "pad, parts[0].dtype)", "0, parts[0].dtype)", "rl/test_branches.py"),
    Fault("rl/groups.py", '*(len(columns["input_ids"][i]) for i in steps[:-1])]', "*(0 for i in steps[:-1])]", "rl/test_branches.py"),
    Fault("rl/groups.py", "latest = examples[max(of[-1] for of in branches)]", "latest = examples[branches[-1][-1]]", "rl/test_branches.py"),
    Fault("rl/mini_batches.py", "is_first[numbers.lengths > 0] = np.asarray(numbers.values) == 0", "pass", "rl/test_branches.py"),
    Fault("rl/mini_batches.py", "np.add.reduceat(np.append(costs, 0), starts)", "np.append(costs, 0)[starts]", "rl/test_branches.py"),
    Fault("batch/row_changes.py", "counts = None if divides else storage.metadata.get(\"num_segments\")", "counts = None", "rl/test_branches.py"),
    Fault("rl/advantages.py", "double().numpy()[rows])", "double().numpy()[rows] * last)", "rl/test_branches.py"),
    Fault("reading/reader.py", "[entry if of_all else 0.0] * (n - 1)", "[entry] * (n - 1)", "rl/test_branches.py"),
    Fault("reading/reader.py", "[last[i] and i != j for", "[last[i] for", "rl/test_branches.py"),
    Fault("collators/packed.py", "columns.per_segment, columns.in_segments(pieces)", "columns.per_segment, pieces", "rl/test_branches.py"),
    Fault("reporting/lengths.py", "lengths = lengths + _lengths(names[-1], responses, start)", "pass", "rl/test_branches.py"),
    Fault("reporting/audit/auditing.py", "np.add.reduceat(scores, offsets[:-1])", "scores[offsets[1:] - 1]", "rl/test_branches.py"),
    # collators
    Fault("collators/packed.py", "fixed = plan.max_tokens // row_align * row_align", "fixed = plan.max_tokens", "collators"),
    Fault("collators/packed.py", "if len(too_long) and packing.overflow != \"drop\":", "if len(too_long) and False:", "collators"),
    Fault("collators/packed.py", "num_loss_tokens_elsewhere=part.num_loss_tokens_elsewhere(int(placed.num_trained.sum()))", "num_loss_tokens_elsewhere=0", "collators loading/sampler"),
    # chat
    Fault("chat/turns.py", "        frozenset(shapes[turn + 1 :]),\n", "", "chat/test_refusals.py"),
    Fault("chat/turns.py", "        rendering.conversation.tools is None,\n", "", "chat/test_refusals.py"),
    Fault("chat/tokenize.py", "first += 1  # a tag of the header", "first += 0  # a tag of the header", "chat"),
    Fault("chat/tokenize.py", "loss_mask[first:stop] = [0] * (stop - first)", "pass", "chat_images"),
    Fault("chat/tokenize.py", "kept = min(kept, places[num_images][0])", "pass", "chat_images"),
    Fault("chat/tokenize.py", 'if "weight" in record:', 'if "weight" in record and len(rows) == 1:', "chat/test_records.py"),
    Fault("chat/record_forms.py", "_check_weight_name(tuple(example))", "pass", "chat/test_records.py"),
    Fault("chat/record_forms.py", "1e-9 < weight < 1e9", "weight < 1e9", "chat/test_records.py"),
    Fault("chat/tokenize.py", "may_split = setup.may_split and", "may_split =", "preference"),
    Fault("chat/tokenize.py", "    _check_roles(conversation, setup.tokenizer)\n", "", "chat/test_borders.py"),
    Fault("chat/tokenize.py", "example.is_bare and input_ids[: len(before)] != before", "example.is_bare", "chat/test_borders.py"),
    Fault("chat/records.py", 'is_inside or k == "arguments"', "is_inside", "chat/test_borders.py"),
    Fault("chat/turns.py", "return more.end() if more and is_whole", "return token.end() if more and is_whole", "chat/test_borders.py"),
    # preference
    Fault("preference/records.py", "== \" \" else common", "== \"\" else common", "preference"),
    Fault("preference/records.py", "return common\n\n\ndef _check_is_said", "return common + 1\n\n\ndef _check_is_said", "preference"),
    Fault("preference/records.py", "count = len(said) if repeated else 0", "count = 0", "preference"),
    Fault("preference/records.py", "one != other and drop_none(one) != drop_none(other)", "one != other", "preference"),
    Fault("preference/tokenize.py", "first < num_prompt else None", "first <= num_prompt else None", "preference"),
    Fault("preference/tokenize.py", "    _check_same_prompt(texts)\n", "", "preference"),
    Fault("preference/tokenize.py", "\"num_prompt\": num_prompt - first,", "\"num_prompt\": num_prompt,", "preference"),
    Fault("preference/tokenize.py", "int(counts.max()) % len(order)", "1", "preference"),
    Fault("preference/tokenize.py", "(asked[:n] + answer[m:])[:limit]", "asked[:n] + answer[m:]", "preference"),
    Fault("reporting/audit/auditing.py", 'weight = () if found.weights is None else ("weight",)', "weight = ()", "reporting/test_audit_forms.py"),
    Fault("reporting/audit/token_checks.py", "np.where(is_chat, of_template, of_tokenizer)", "(is_chat | of_tokenizer)", "reporting/test_audit_borders.py"),
    Fault("reporting/candidates.py", 'verb = "lose" if any', 'verb = "cut" if any', "reporting/test_report_layouts.py"),
    Fault("batch/showing/explanation.py", 'f"field {name}" if name in own else name', "name", "test_batch_explain.py"),
    # borders, again
    Fault("batch/row_changes.py", "field.shape[1] == before.width - 1 > before.response_length", "False", "rl/test_micro_batches.py"),
    Fault("rl/mini_batches.py", "return _nonzero_cells(is_trained_in(batch))", "return _nonzero_cells(batch[\"loss_mask\"])", "rl/test_micro_batches.py"),
    Fault("collators/vision.py", "[f\"example {i}\" for i in kept]", "[f\"example {i}\" for i, _ in enumerate(kept)]", "vision/test_raw_collator.py"),
    Fault("chat/records.py", "if (is_named or is_like or is_alone) and is_text and value != decoded(given):", "if False:", "chat/test_borders.py"),
    Fault("chat/records.py", "if _is_number(found[key]):", "if False:", "chat/test_borders.py"),
    Fault("chat/records.py", "if math.isinf(value := float(number)):", "if math.isinf(value := float(number)) and False:", "chat/test_borders.py"),
    Fault("chat/tokenize.py", "not text.rpartition(THINK_END)[2].strip()", "not text.strip()", "chat"),
    Fault("loading/by_rows.py", "start = max(0, passed._windows[at][end].start - self.order.size(at))", "start = 0", "loading/sampler/test_rows.py loading/sampler/test_wrapped.py"),
    Fault("loading/mixed_order.py", "whole = (stop - begun) // size", "whole = (stop - begun) // size + 1", "loading/sampler/test_mixture.py"),
    Fault("reading/source.py", "if dataset.format[\"type\"] == \"custom\":", "if False:", "loading/dataset chat/test_documents.py"),
    Fault("tokenize_command.py", "out = options.out.resolve()", "out = options.out", "chat/test_documents.py"),
    Fault("families.py", "        left_padding=\"its decoder takes no position_ids, so it counts the pads\",\n", "", "test_model_kinds.py"),
    # refusals, and behaviours that a review found unseen
    Fault("attention/isolation.py", "if not found <= allowed * largest:", "if found > allowed * largest:", "test_isolation.py"),
    Fault("attention/packed_inputs.py", "is_first = (positions == 0).all(0)", "is_first = positions[0] == 0", "test_isolation.py"),
    Fault("attention/varlen.py", "leaks = bool((torch.diff(position_ids) != 1).any())", "leaks = bool((torch.diff(position_ids) < 0).any())", "test_block_masks.py"),
    Fault("preference/losses.py", "reference.detach().reshape(-1)", "reference.reshape(-1)", "preference/test_losses.py"),
    Fault("rl/mini_batches.py", 'len(whole) - metadata["num_dummy_rows"]', "len(whole)", "rl/test_staging.py"),
    Fault("rl/mini_batches.py", "row_of[order] != np.arange(len(order))", "row_of[order] < 0", "test_refusals.py"),
    Fault("reporting/audit/token_checks.py", "np.maximum(columns.ids, columns.labels) if len(columns.labels) else columns.ids", "columns.ids", "reporting/test_audit_borders.py"),
    Fault("reading/entries.py", " | ((product == 0) & (values != 0) & (factors != 0))", "", "test_refusals.py"),
    Fault("reading/keys.py", 'is_logprobs = "logprob" in bare or bare.endswith("logp")', "is_logprobs = False", "test_refusals.py"),
    Fault("batch/context_shards.py", 'if "cu_seq_lens" in storage.given:', "if False:", "test_refusals.py"),
    # commands
    Fault("commands.py", "train_on=options.train_on", "train_on='all'", "test_command_line.py test_command_options.py"),
    Fault("commands.py", "model=_model_config(options)", "model=None", "test_command_options.py"),
    Fault("commands.py", "image_root=options.image_root", "image_root=None", "test_command_line.py test_command_options.py"),
    Fault("commands.py", "options.cp, options.fp8", "1, options.fp8", "test_command_line.py test_command_options.py"),
    Fault("commands.py", "lengths[: options.limit]", "lengths", "test_command_line.py test_command_options.py"),
    Fault("commands.py", "min(80, shutil", "min(120, shutil", "test_command_line.py"),
    Fault("chat/dataset.py", "get(\"RANK\", \"0\") != \"0\"", "get(\"RANK\", \"0\") == \"0\"", "chat/test_dataset.py"),
    # targets
    Fault("losses/token_logps.py", "more - (targets_of(batch) == \"next_token\")", "more - 1", "test_targets.py"),
    Fault("losses/segments.py", "ends = firsts if how == \"first\" else firsts + lengths - 1", "ends = firsts // token_width(batch) * token_width(batch)", "test_encoder_training.py"),
    Fault("batch/unpacking.py", "return \"next_token\" if placement is None else cast(\"TargetKind\", placement.targets)", "return \"same_token\" if placement is None else cast(\"TargetKind\", placement.targets)", "test_targets.py"),
    Fault("reading/examples.py", "before = running_sum(target != untrained)", "before = running_sum(np.append(target[1:], untrained) != untrained)", "test_targets.py"),
    Fault("reading/examples.py", "        if self.targets == \"same_token\":\n            target = self._given(pieces)\n", "        if self.targets == \"same_token\":\n            target = self._given(pieces)\n            target[np.cumsum(pieces.lengths) - pieces.lengths] = untrained\n", "test_targets.py"),
    Fault("collators/padded.py", "longest = width if self.targets == \"same_token\" else longest", "pass", "test_targets.py"),
    Fault("batch/row_changes.py", "most = width - (before.targets == \"next_token\")", "most = width - 1", "test_targets.py"),
    Fault("batch/row_changes.py", "if of_both[0] != of_both[1]:", "if False:", "test_targets.py"),
    Fault("loading/example_sizes.py", 'self.num_firsts = int(collate.targets == "next_token")', "self.num_firsts = 1", "test_targets.py"),
    Fault("loading/packed_sampler.py", "firsts * sizes.num_firsts", "firsts", "test_targets.py"),
    Fault("loading/stream.py", "\"targets\": None if collator.targets == \"next_token\" else str(collator.targets)", "\"targets\": None", "test_targets.py"),
    Fault("losses/token_loss.py", "elif return_per_token_outputs:\n        targets", "if return_per_token_outputs:\n        targets", "test_targets.py"),
    Fault("losses/token_logps.py", "return (mask != 0) & (labels[:, labels.shape[1] - mask.shape[1] :] != IGNORE_INDEX)", "return mask != 0", "test_targets.py"),
    Fault("loading/skipping.py", "copy.copy(indices) if isinstance(indices, list) else []", "[]", "loading/sampler/test_epoch_of_parts.py"),
    Fault("loading/sampler.py", "part.epoch = self.epoch\n", "part.epoch = self.sampler.epoch\n", "loading/sampler/test_epoch_of_parts.py"),
    Fault("batch/model_kind.py", "if is_packed and is_of_rows:", "if False:", "test_encoder_training.py"),
    Fault("batch/model_kind.py", "if shifts and targets == \"same_token\":", "if False:", "test_encoder_training.py"),
]  # fmt: skip


def site_of(fault: Fault, package: Path) -> Path | None:
    """Return the file that has the text once: the one named, or the only one elsewhere."""
    named = package / fault.path
    others = sorted(set(package.rglob("*.py")) - {named})
    for paths in ([named] if named.exists() else [], others):
        counts = {path: path.read_text(encoding="utf-8").count(fault.before) for path in paths}
        if sum(counts.values()):
            return next(
                (path for path, count in counts.items() if sum(counts.values()) == 1 == count), None
            )
    return None


def is_caught(fault: Fault, copy: Path, path: Path, limit: float) -> bool | None:
    """Run the tests of the fault in the copy, whose file is then as it was; None: stopped."""
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
    tests = [f"tests/{name}" for name in fault.tests.split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "ALL_CASES": "1"}
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # its workers end with it
    )
    try:
        printed = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:  # CI has a time limit
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    finally:
        path.write_text(text, encoding="utf-8")
    if process.returncode not in (0, 1, 2):  # 2: the fault breaks the import of a test
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {printed[-2000:]}")
    return process.returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="folders or files of the package, with commas")
    parser.add_argument("--list", action="store_true", help="print the faults and plant none")
    parser.add_argument("--limit", type=float, default=120, help="seconds for the tests of a fault")
    options = parser.parse_args()
    names = tuple(name for name in options.only.split(",") if name) or ("",)
    faults = [fault for fault in FAULTS if fault.path.startswith(names)]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(
            ".git", ".venv", "build", "__pycache__", "outputs", ".*_cache"
        )
        shutil.copytree(ROOT, copy, ignore=ignored)
        os.environ.setdefault("TORCH_COLLATE_KIT_DATA", str(ROOT.parent / "shared" / "data"))
        for fault in faults:
            path = site_of(fault, copy / "torch_collate_kit")
            tests = [copy / "tests" / name for name in fault.tests.split()]
            if path is None or not all(test.exists() for test in tests):
                result = "GONE"
            elif options.list:
                result = "there"
            else:
                caught = is_caught(fault, copy, path, options.limit)
                result = {True: "caught", False: "MISSED", None: "hung"}[caught]
            counts[result] += 1
            change = (" ".join(text.split()) for text in (fault.before, fault.after))
            print(f"{result:<6} {fault.path}: {' -> '.join(change)}", flush=True)
    print(f"of {len(faults)} faults: {', '.join(f'{n} {name}' for name, n in counts.items())}")
    sys.exit(counts["MISSED"] + counts["GONE"])


if __name__ == "__main__":
    main()
