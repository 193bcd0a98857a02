"""Files of tokens open as datasets of their documents; what is damaged is refused by name."""

# ruff: noqa: E501
from __future__ import annotations

import copy
import gzip
import pickle
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.batch_checks import assert_same_batch
from torch_collate_kit import (
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    ParallelLayout,
    PrefetchLoader,
    TokenizedDataset,
    audit,
    packing_report,
)
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import token_files
from torch_collate_kit.testing import assert_exact_resume

CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}
FORMATS = {"u1": "B", "i1": "b", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q"}
FORMATS |= {"f4": "f", "f8": "d"}


def packed(tokens: list[int], kind: str) -> bytes:
    return b"".join(struct.pack(f"<{FORMATS[kind]}", token) for token in tokens)


def write_megatron(
    folder: Path, documents: list[list[list[int]]], kind: str = "u2", name: str = "m"
) -> Path:
    """Write documents of one or more sequences each."""
    sequences = [sequence for document in documents for sequence in document]
    data = b"".join(packed(sequence, kind) for sequence in sequences)
    size = struct.calcsize(FORMATS[kind])
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[kind])
    index += struct.pack("<QQ", len(sequences), len(documents) + 1)
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    pointer = 0
    for sequence in sequences:
        index += struct.pack("<q", pointer)
        pointer += len(sequence) * size
    end = 0
    index += struct.pack("<q", end)
    for document in documents:
        end += len(document)
        index += struct.pack("<q", end)
    (folder / f"{name}.idx").write_bytes(index)
    (folder / f"{name}.bin").write_bytes(data)
    return folder / f"{name}.bin"


def write_llm_c(path: Path, tokens: list[int], kind: str = "u2") -> Path:
    magic, version = {"u2": (20240520, 1), "u4": (20240801, 7)}[kind]
    header = struct.pack("<3i", magic, version, len(tokens)) + bytes(4 * 253)
    path.write_bytes(header + packed(tokens, kind))
    return path


def write_olmo(path: Path, documents: list[list[int]], kind: str = "u2") -> Path:
    path.write_bytes(b"".join(packed(document, kind) for document in documents))
    lines, start = "", 0
    for i, document in enumerate(documents):
        lines += f"{start},{start + len(document)},id-{i},a/b.json.gz,{i}\n"
        start += len(document)
    with gzip.open(path.with_suffix(".csv.gz"), "wt") as file:
        file.write(lines)
    return path


def ended_by(tokens: list[int], end_id: int) -> list[list[int]]:
    """Return the documents of tokens, token by token."""
    documents: list[list[int]] = [[]]
    for token in tokens:
        documents[-1].append(token)
        if token == end_id:
            documents.append([])
    return [document for document in documents if document]


def begun_by(tokens: list[int], start_id: int) -> list[list[int]]:
    documents: list[list[int]] = [[]]
    for token in tokens:
        if token == start_id:
            documents.append([])
        documents[-1].append(token)
    return [document for document in documents if document]


DOCUMENTS = [[[5, 6], [7, 2]], [[8, 2]], [[]], [[9, 10, 11, 2]], [], [[4, 2]]]
FLAT = [[5, 6, 7, 2], [8, 2], [9, 10, 11, 2], [4, 2]]
TOKENS = [token for document in FLAT for token in document]


def ids_of(dataset: TokenizedDataset) -> list[list[int]]:
    assert dataset[:]["input_ids"].tolist() == [
        of["input_ids"].tolist() for of in map(dataset.__getitem__, range(len(dataset)))
    ]
    return dataset[:]["input_ids"].tolist()


def drawn(seed: int, num_documents: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[*rng.integers(3, 60, rng.integers(0, 30)).tolist(), 2] for _ in range(num_documents)]


def test_megatron_of_every_dtype(tmp_path):
    for kind in ("u1", "i1", "i2", "i4", "i8", "u2"):
        path = write_megatron(tmp_path, DOCUMENTS, kind)
        for given in (path, str(path), path.with_suffix(".idx"), [path]):
            tokens = token_files(given)
            assert ids_of(tokens) == FLAT
            assert tokens[0]["input_ids"].dtype == np.dtype(kind)
    with_modes = path.with_suffix(".idx").read_bytes()
    path.with_suffix(".idx").write_bytes(with_modes + bytes(6))  # one for each sequence
    assert ids_of(token_files(path)) == FLAT


def test_files_of_other_tools(tmp_path):
    raw, wide = tmp_path / "train.bin", tmp_path / "wide.npy"
    raw.write_bytes(packed([*TOKENS, 3], "u2"))
    assert (
        ids_of(token_files(raw, dtype="uint16", end_id=2))
        == ended_by([*TOKENS, 3], 2)
        == [*FLAT, [3]]
    )
    np.save(wide, np.array([3, 1, *TOKENS, 1, 4, 1], dtype=np.int32))
    assert ids_of(token_files(wide, start_id=1)) == begun_by([3, 1, *TOKENS, 1, 4, 1], 1)
    for kind in ("u2", "u4"):
        path = write_llm_c(tmp_path / f"llm_{kind}.bin", [1, 5, 6, 1, 7], kind)
        assert ids_of(token_files(path, start_id=1)) == [[1, 5, 6], [1, 7]]
        olmo = write_olmo(tmp_path / f"part-0-{kind}.npy", [FLAT[0], [], *FLAT[1:]], kind)
        assert ids_of(token_files(olmo, dtype=np.dtype(kind))) == FLAT


def test_documents_at_the_borders_of_the_search(tmp_path, monkeypatch):
    monkeypatch.setattr("torch_collate_kit.loading.dataset.token_file_kinds._BLOCK", 7)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, 4, rng.integers(1, 60)).tolist()
        path = tmp_path / f"{seed}.bin"
        path.write_bytes(packed(tokens, "u2"))
        for name, split in (("end_id", ended_by), ("start_id", begun_by)):
            if 2 in tokens:
                assert ids_of(token_files(path, dtype="uint16", **{name: 2})) == split(tokens, 2)


def test_files_are_read_in_their_order_with_their_masks(tmp_path):
    paths, masks, documents = [], [], []
    for i in range(3):
        part = drawn(i)
        paths.append(write_megatron(tmp_path, [[of] for of in part], name=f"part{i}"))
        masks.append(tmp_path / f"mask{i}.npy")
        trained = [token % 2 for of in part for token in of]
        masks[-1].write_bytes(bytes(trained))
        documents += part
    tokens = token_files(paths, loss_masks=masks)
    assert ids_of(tokens) == documents
    assert tokens.column_names == ["input_ids", "loss_mask"]
    assert tokens[:]["loss_mask"].tolist() == [[t % 2 == 1 for t in of] for of in documents]
    rows = [{"input_ids": of, "loss_mask": [t % 2 for t in of]} for of in documents]
    assert tokens.num_loss_tokens.tolist() == TokenizedDataset(rows).num_loss_tokens.tolist()
    assert tokens.fingerprint() == TokenizedDataset(rows).fingerprint()
    collate = PackedCollator(0, max_tokens=64)
    assert_same_batch(collate(tokens[5:40]), collate(rows[5:40]))
    only_ids = TokenizedDataset(tokens, columns=["input_ids"])
    assert only_ids.column_names == ["input_ids"]
    with pytest.raises(DataError, match=r"mask2.npy: has 906 bytes of tokens, and 1,014"):
        token_files(paths, loss_masks=[masks[0], masks[2], masks[1]])
    masks[2].write_bytes(bytes([2]) * masks[2].stat().st_size)
    with pytest.raises(DataError, match=r"mask2\.npy: a loss mask has a byte per token, 0 or 1"):
        token_files(paths, loss_masks=masks)
    with pytest.raises(DataError, match="loss_masks has 1 files, paths has 3"):
        token_files(paths, loss_masks=masks[0])


def test_a_pickle_has_paths_and_offsets(tmp_path, monkeypatch):
    path = write_megatron(tmp_path, [[[7] * 1000] for _ in range(50)])
    monkeypatch.chdir(tmp_path)
    tokens = token_files(path.name)
    assert len(pickle.dumps(tokens)) < 3_000
    monkeypatch.chdir("/")
    assert ids_of(pickle.loads(pickle.dumps(tokens))) == ids_of(copy.copy(tokens)) == ids_of(tokens)
    state = pickle.dumps(tokens)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"m\.bin: has 99,998 bytes"):
        pickle.loads(state)


def test_whatever_reads_datasets_reads_it(tmp_path):
    documents = drawn(0, 80)
    tokens = token_files(write_megatron(tmp_path, [[of] for of in documents]))
    rows = [{"input_ids": of} for of in documents]
    collate = PackedCollator(0, max_tokens=64)
    assert (
        packing_report(tokens, [64], show=False)["data"]
        == (packing_report(TokenizedDataset(rows), [64], show=False)["data"])
    )
    assert audit(tokens).to_dict() == audit(TokenizedDataset(rows)).to_dict()
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True, "seed": 1}
    sampler = PackedBatchSampler(tokens, collate, **options)
    loader = DataLoader(tokens, batch_sampler=sampler, collate_fn=collate)
    others = DataLoader(
        TokenizedDataset(rows),
        batch_sampler=PackedBatchSampler(TokenizedDataset(rows), collate, **options),
        collate_fn=collate,
    )
    for found, wanted in zip(loader, others, strict=True):
        assert_same_batch(found, wanted)
    mixed = Mixture([tokens, tokens], weights=[1, 3])
    assert len(
        next(
            iter(
                DataLoader(
                    mixed,
                    batch_sampler=PackedBatchSampler(mixed, collate, batch_size=8),
                    collate_fn=collate,
                )
            )
        )["input_ids"]
    )
    stream = PackedIterableDataset(tokens, collate, batch_rows=2)
    assert sum(batch.metadata["num_loss_tokens"] for batch in stream) == sum(
        len(of) - 1 for of in documents
    )
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2)
    wrapped = PackedCollator(tokenizer, max_tokens=64, strategy="wrapped")
    joined = [
        [
            *DataLoader(
                of, batch_sampler=PackedBatchSampler(of, wrapped, batch_rows=2), collate_fn=wrapped
            )
        ]
        for of in (tokens, TokenizedDataset(rows))
    ]
    for found, wanted in zip(*joined, strict=True):
        assert_same_batch(found, wanted)
    assert len(joined[0]) > 3


def test_a_pretraining_run_goes_on_with_other_ranks(tmp_path):
    path = write_megatron(tmp_path, [[of] for of in drawn(1, 80)])

    def make(dp_rank: int = 0, dp_size: int = 1) -> Any:
        tokens = token_files(path)
        collate = PackedCollator(0, max_tokens=64, parallel=ParallelLayout(dp_size))
        sampler = PackedBatchSampler(tokens, collate, batch_size=16, dp_rank=dp_rank, shuffle=True)
        return PrefetchLoader(DataLoader(tokens, batch_sampler=sampler, collate_fn=collate))

    assert_exact_resume(make, num_steps=6, dp_sizes=[2, 1])


def bad_index(change: Any) -> Any:
    def damage(path: Path) -> dict[str, Any]:
        index = path.with_suffix(".idx")
        data = bytearray(index.read_bytes())
        index.write_bytes(bytes(change(data)))
        return {}

    return damage


def put(where: int, form: str, *values: int) -> Any:
    def change(data: bytearray) -> bytearray:
        struct.pack_into(form, data, where, *values)
        return data

    return bad_index(change)


def bin_of(change: Any) -> Any:
    def damage(path: Path) -> dict[str, Any]:
        path.write_bytes(change(path.read_bytes()))
        return {}

    return damage


N, D = 6, 7  # sequences and ends in the index of DOCUMENTS
DAMAGED: dict[str, tuple[Any, str]] = {
    "a token is missing": (bin_of(lambda data: data[:-2]), r"m\.bin: has 22 bytes .* 12 tokens"),
    "a token more": (bin_of(lambda data: data + b"xx"), r"m\.bin: has 26 bytes"),
    "half a token": (bin_of(lambda data: data + b"x"), r"m\.bin: has 25 bytes"),
    "no tokens": (bin_of(lambda data: b""), r"m\.bin: has 0 bytes"),
    "another magic": (put(0, "<B", 0), r"m\.idx: not an index of Megatron"),
    "another version": (put(9, "<Q", 2), r"m\.idx: not an index"),
    "an unknown dtype": (put(17, "<B", 9), r"m\.idx: not an index"),
    "floats": (put(17, "<B", CODES["f4"]), r"m\.(idx|bin)"),
    "a wider dtype": (put(17, "<B", CODES["i4"]), r"m\.idx: has pointers"),
    "too many sequences": (put(18, "<Q", 2**63), r"m\.idx: has 162 bytes, and 9,223"),
    "too many ends": (put(26, "<Q", 2**61), r"m\.idx: has 162 bytes"),
    "no ends": (put(26, "<Q", 0), r"m\.idx: has 162 bytes"),
    "cut off": (bad_index(lambda data: data[:-1]), r"m\.idx: has 161 bytes"),
    "cut in the header": (bad_index(lambda data: data[:20]), r"m\.idx: (not an index|has 20 bytes)"),
    "empty": (bad_index(lambda data: b""), r"m\.idx: not an index"),
    "a negative length": (put(34, "<i", -3), r"m\.idx: has a negative length"),
    "a length that is another": (put(34, "<i", 3), r"m\.idx: has pointers"),
    "a pointer that is another": (put(34 + 4 * N + 8, "<q", 2), r"m\.idx: has pointers"),
    "an end that falls": (put(34 + 12 * N + 8, "<q", 5), r"m\.idx: has ends of documents"),
    "ends that do not begin": (put(34 + 12 * N, "<q", 1), r"m\.idx: has ends of documents"),
    "ends that stop": (put(34 + 12 * N + 8 * (D - 1), "<q", 5), r"m\.idx: has ends of documents"),
    "modes": (bad_index(lambda data: data + b"\0\0\1\0\0\0"), r"m\.idx: has modes"),
    "two ways": (lambda path: {"end_id": 2}, r"m\.bin: documents are marked by .*m\.idx and end_id=2"),
    "another dtype": (lambda path: {"dtype": "int32"}, r"m\.bin: holds uint16, and tokens are dtype=int32"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_megatron_files_are_refused_by_name(damage, message, tmp_path):
    path = write_megatron(tmp_path, DOCUMENTS)
    options = damage(path)
    with pytest.raises(DataError, match=message):
        token_files(path, **options)


def npy(array: np.ndarray, **options: Any) -> Any:
    def write(folder: Path) -> Path:
        np.save(folder / "x.npy", array, **options)
        return folder / "x.npy"

    return write


def raw(data: bytes, name: str = "x.bin") -> Any:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return write


def olmo(lines: bytes, compress: bool = True) -> Any:
    def write(folder: Path) -> Path:
        path = write_olmo(folder / "x.npy", FLAT)
        path.with_suffix(".csv.gz").write_bytes(gzip.compress(lines) if compress else lines)
        return path

    return write


def cut(write: Any, size: int) -> Any:
    def damaged(folder: Path) -> Path:
        path = write(folder)
        path.write_bytes(path.read_bytes()[:size])
        return path

    return damaged


def llm_c(folder):
    return write_llm_c(folder / "x.bin", [1, 5, 1, 6])


U2 = {"dtype": "uint16"}
END = {"end_id": 2}
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no file": (lambda folder: folder / "x.bin", U2 | END, r"x\.bin: cannot be read"),
    "a folder": (lambda folder: folder, U2 | END, "cannot be read"),
    "unknown content": (raw(packed(TOKENS, "u2")), END, r"x\.bin: no index .* pass it, such as dtype="),
    "another header of llm.c": (raw(np.array([20240520, 2, 3], "<i4").tobytes() + bytes(1012) + packed(TOKENS, "u2")), U2 | END, r"x\.bin: a header of llm\.c, version 2"),
    "no ends": (raw(packed(TOKENS, "u2")), U2, r"x\.bin: documents are marked by nothing"),
    "two ids": (raw(packed(TOKENS, "u2")), U2 | END | {"start_id": 5}, r"x\.bin: documents are marked by end_id=2 and start_id=5"),
    "half a token": (raw(b"abc"), U2 | END, r"x\.bin: has 3 bytes"),
    "nothing in it": (raw(b""), U2 | END, r"x\.bin: has 0 bytes"),
    "an end that never occurs": (raw(packed(TOKENS, "u2")), U2 | {"end_id": 77}, r"x\.bin: end_id=77 is not in it"),
    "llm.c, one token short": (cut(llm_c, 1024 + 6), {"start_id": 1}, r"x\.bin: has 6 bytes .* 4 tokens"),
    "llm.c, cut header": (cut(llm_c, 500), {"start_id": 1}, r"x\.bin: has"),
    "llm.c of another dtype": (llm_c, {"start_id": 1, "dtype": "uint32"}, r"x\.bin: holds uint16"),
    "NeMo": (raw(struct.pack("<4i", 278895051, 1, 4, 2) + bytes(1016)), U2 | END, r"x\.bin: a \.bin of NeMo"),
    "npy, objects": (npy(np.array([[1], [2, 3]], dtype=object)), END, r"x\.npy: cannot be read"),
    "npy, two dimensions": (npy(np.ones((2, 2), np.int32)), END, r"x\.npy: .*shape is \(2, 2\)"),
    "npy, floats": (npy(np.ones(4)), END, r"x\.npy: holds float64"),
    "npy, other bytes": (npy(np.array(TOKENS, ">i4")), END, r"x\.npy: holds >i4"),
    "npy, cut": (cut(npy(np.array(TOKENS)), 150), END, r"x\.npy: "),
    "npy, cut header": (cut(npy(np.array(TOKENS)), 30), END, r"x\.npy: cannot be read"),
    "npy, empty": (npy(np.zeros(0, np.int32)), END, r"x\.npy: "),
    "a list with a gap": (olmo(b"0,4\n5,12\n"), U2, r"x\.csv\.gz: its documents do not follow"),
    "a list that falls": (olmo(b"0,4\n4,2\n2,12\n"), U2, r"x\.csv\.gz: its documents do not follow"),
    "a list that ends early": (olmo(b"0,4\n4,6\n"), U2, r"x\.npy: has 24 bytes .* 6 tokens"),
    "a list of words": (olmo(b"start,end\n"), U2, r"x\.csv\.gz: not lines of start,end"),
    "a list of one number": (olmo(b"0\n"), U2, r"x\.csv\.gz: not lines of start,end"),
    "an empty list": (olmo(b""), U2, r"x\.(csv\.gz|npy): "),
    "a list that is not compressed": (olmo(b"0,12\n", compress=False), U2, r"x\.csv\.gz: not lines"),
    "a cut list": (lambda folder: (cut(lambda f: olmo(b"0,12\n")(f).with_suffix(".csv.gz"), 15)(folder), folder / "x.npy")[1], U2, r"x\.csv\.gz: not lines"),
    "a list and an id": (olmo(b"0,12\n"), U2 | END, r"x\.npy: documents are marked by .*x\.csv\.gz and end_id=2"),
}  # fmt: skip


@pytest.mark.parametrize(("write", "options", "message"), BAD.values(), ids=BAD)
def test_bad_files_are_refused_by_name(write, options, message, tmp_path):
    with pytest.raises(DataError, match=message):
        token_files(write(tmp_path), **options)


def test_wrong_arguments(tmp_path):
    path = write_megatron(tmp_path, DOCUMENTS)
    with pytest.raises(DataError, match="name at least one"):
        token_files([])
    for kind in ("float16", "U"):
        with pytest.raises(ValueError, match="dtype must be one of integers"):
            token_files(path, dtype=kind)
    with pytest.raises(TypeError, match="end_id must be an int"):
        token_files(path, end_id="</s>")
    other = write_megatron(tmp_path, DOCUMENTS, "i4", name="other")
    with pytest.raises(DataError, match=r"m\.bin has uint16, .*other\.bin has int32"):
        token_files([path, other])
    with pytest.raises(ValueError, match=r"loading\.token_files"):
        TokenizedDataset(path)


def test_megatron_core_reads_the_same(tmp_path):
    reader = pytest.importorskip(
        "megatron.core.datasets.indexed_dataset", reason="no megatron-core"
    )
    documents = drawn(5)
    path = str(tmp_path / "theirs")
    builder = reader.IndexedDatasetBuilder(path + ".bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(np.array(document, np.uint16), [len(document)])
    builder.finalize(path + ".idx")
    assert ids_of(token_files(path + ".bin")) == documents
    write_megatron(tmp_path, [[of] for of in documents])
    theirs = reader.IndexedDataset(str(tmp_path / "m"), mmap=True)
    assert [theirs[i].tolist() for i in range(len(theirs))] == documents
