"""torch_varlen under torch.compile on the CPU: no graph break, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from tests.tiny_models import packed_inputs, tiny_model
from tests.tree_samples import both, random_examples
from torch_collate_kit.attention import kernels, register_torch_varlen
from torch_collate_kit.attention.kernels import SegmentBounds, attend

LAYOUTS = [([7, 1, 5], [4, 3, 6]), ([13], [13])]


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def gradients(model: Any, run: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    model.zero_grad()
    logits = run(**inputs).logits
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "paths"])
def test_compiled_training_is_the_same_and_breaks_no_graph(kind: str) -> None:
    """Reading the boundaries broke it 7 times for qwen3 and 10 times for gemma3 at first."""
    model = tiny_model("qwen3" if kind == "paths" else kind, dtype=torch.float64).train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    every = [packed_inputs(*rows) for rows in LAYOUTS]
    if kind == "paths":
        every = [both(random_examples(seed))[0].model_inputs(model) for seed in range(2)]
    for inputs in every:
        plain, found = (gradients(model, run, inputs) for run in (model, compiled))
        for expected, value in zip(plain, found, strict=True):
            assert expected.abs().max() > 0
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    assert counter.frame_count > 0
    assert sum(counters["graph_break"].values()) == 0, counters["graph_break"]


@pytest.mark.parametrize(("heads", "window"), [((4, 4), None), ((8, 2), 2)], ids=str)
def test_attention_alone_is_compiled_whole_for_any_lengths(
    heads: tuple[int, int], window: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for lengths in ([5, 1, 6], [3, 3, 3, 3], [12], [2, 0, 10]):
        inputs = [
            torch.randn(1, h, 12, 8, dtype=torch.float64, generator=generator).requires_grad_()
            for h in (heads[0], heads[1], heads[1])
        ]
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        segments = SegmentBounds(cu, cu, 12, 12)
        results = []
        for run in (attend, compiled):
            output = run(*inputs, segments, scale=0.7, window=window)
            results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
        for expected, value in zip(*results, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert counter.frame_count <= 2  # the second is for any number of segments


def test_bad_boundaries_are_refused_in_a_compiled_model_too() -> None:
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    query = torch.zeros(1, 2, 6, 8)
    cu = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"must rise from 0 to 6 \(1 rows of 6 tokens"):
        compiled(query, query, query, SegmentBounds(cu, cu, 6, 6))


def test_the_operator_keeps_the_rules_of_operators() -> None:
    """Its fake, its gradient and its strides, by torch's own checks."""
    query, key, value = (torch.randn(6, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    inputs = [x.requires_grad_() for x in (query, key, value)]
    for lengths in ([2, 4], [3, 3]):
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        of_paths = cu + torch.arange(len(cu), dtype=torch.int32)  # a key more for each segment
        cells = torch.tensor([5, *range(6)] if len(cu) == 2 else [0, *range(6), 1])[: of_paths[-1]]
        for bounds in ((cu, cu, None), (cu, of_paths, cells)):
            for causal in (True, False) if bounds[2] is None else (True,):
                arguments = (*inputs, *bounds, 1, None, None, causal)
                operator = torch.ops.torch_collate_kit.segment_attention.default
                torch.library.opcheck(operator, arguments)


# --- the kernel of a GPU, with a stand-in on the CPU ---------------------------------------------


def one_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Has the signature of torch 2.12's kernel; takes all tokens for one segment."""
    heads = (x.transpose(0, 1) for x in (query, key, value))
    output = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=enable_gqa)
    return output.transpose(0, 1)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", one_segment)
    monkeypatch.setattr(kernels, "_LOADED", [])
    monkeypatch.setattr(kernels, "fits_kernel", lambda query, value: True)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_kernel_is_called_without_a_graph_break_or_a_warning(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Its import and its signature were traced in every layer, with a warning."""
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.cuda, "is_available", lambda: True)
        register_torch_varlen()
    monkeypatch.setattr(kernels, "_Kernel", lambda _: pytest.fail("loaded when compiled"))
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    query, key, value = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    for lengths in ([5, 7], [6, 6], [3, 3, 6], [1, 4, 5, 2]):
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        segments = SegmentBounds(cu, cu, 12, 12)
        expected = attend(query, key, value, segments)
        torch.testing.assert_close(compiled(query, key, value, segments), expected)
    assert counter.frame_count <= 2  # the second is for any number of segments
    assert [
        str(warning.message) for warning in recwarn if "lru_cache" in str(warning.message)
    ] == []
