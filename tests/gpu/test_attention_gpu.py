"""torch_varlen with torch's real kernel, against one SDPA a segment in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.devices import no_waiting
from tests.tiny_models import MODELS, VOCAB, packed_inputs, segment_slices, tiny_model
from torch_collate_kit.attention import kernels
from torch_collate_kit.attention.kernels import SegmentBounds, attend

pytestmark = pytest.mark.gpu

LENGTHS = [130, 1, 257, 64, 60]  # 512 tokens: below, at and above the kernel's block sizes
ROWS = ([130, 1, 125], [6, 64, 186])


@pytest.fixture(autouse=True)
def _needs_the_kernel() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the varlen kernel needs compute capability 8.0")


def bounds_of(lengths: list[int], max_length: int | None = None) -> SegmentBounds:
    cu = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    max_length = max(lengths) if max_length is None else max_length
    return SegmentBounds(cu, cu, max_length, max_length)


def random_heads(num_rows: int, heads: tuple[int, int], width: int, head_dim: int) -> list[Tensor]:
    """Query, key, value and the gradient of the output, bfloat16 [B, H, T, D]."""
    generator = torch.Generator("cuda").manual_seed(0)
    q_heads, kv_heads = heads
    return [
        torch.randn(num_rows, width, h, head_dim, device="cuda", generator=generator)
        .bfloat16()
        .transpose(1, 2)
        for h in (q_heads, kv_heads, kv_heads, q_heads)
    ]


def with_gradients(
    attention: Callable[..., Tensor], heads: list[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Output and the gradients of query, key and value, in float32."""
    *inputs, grad = (x.detach().to(dtype) for x in heads)
    inputs = [x.requires_grad_() for x in inputs]
    output = attention(*inputs)
    gradients = torch.autograd.grad(output, inputs, grad.transpose(1, 2))
    return [x.float() for x in (output, *gradients)]


def sdpa_only(segments: SegmentBounds, **options: Any) -> Callable[..., Tensor]:
    """attend() by its other path, one SDPA a segment, in whatever dtype comes."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num_rows, _, width, _ = query.shape
        flat = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        bounds = segments.cu_q, segments.cu_k, None, num_rows
        scale, window = options.get("scale"), options.get("window")
        output = kernels._sdpa_by_segment(*flat, *bounds, scale, window)
        return output.view(num_rows, width, *output.shape[1:])

    return run


def attend_in(segments: SegmentBounds, **options: Any) -> Callable[..., Tensor]:
    """attend() as it is."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, segments, **options)

    return run


def assert_as_exact_as(
    ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor], *, floor: float = 2e-3
) -> None:
    """Our error is at most twice that of the same arithmetic done by SDPA, plus ``floor``."""
    for i, (a, b, reference) in enumerate(zip(ours, theirs, exact, strict=True)):
        size = reference.abs().max().item()
        assert size > 0, f"tensor {i} is all zero"
        error, usual = ((x - reference).abs().max().item() for x in (a, b))
        assert error <= 2 * usual + floor * size, f"tensor {i}: {error} against {usual}"


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("window", [None, 2, 16, 129, 4096])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (4, 1)], ids=str)
def test_kernel_equals_sdpa_by_segment(heads, head_dim, window, num_rows, monkeypatch):
    if window is not None and window < 256 and not kernels.load_kernel().takes_window:
        pytest.skip("the kernel of this torch has no window")
    lengths = LENGTHS if num_rows == 1 else [130, 1, 125, 6, 64, 186]
    segments = bounds_of(lengths)
    options = {"scale": 0.1, "window": window}
    tensors = random_heads(num_rows, heads, 512 // num_rows, head_dim)
    reference = sdpa_only(segments, **options)
    exact = with_gradients(reference, tensors, torch.float32)
    theirs = with_gradients(reference, tensors, torch.bfloat16)

    def fail(*_: Any) -> None:
        raise AssertionError("the kernel was not used")

    monkeypatch.setattr(kernels, "_segment_lengths", fail)
    monkeypatch.setattr(kernels, "_sdpa_by_segment", fail)
    ours = with_gradients(attend_in(segments, **options), tensors, torch.bfloat16)
    assert_as_exact_as(ours, theirs, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 40, 96, 192, 256])
def test_every_head_dimension_that_is_said_to_fit(head_dim, dtype):
    tensors = [x.to(dtype) for x in random_heads(1, (4, 2), 512, head_dim)]
    segments = bounds_of(LENGTHS)
    assert kernels.fits_kernel(tensors[0], tensors[2])
    reference = sdpa_only(segments)
    exact = with_gradients(reference, tensors, torch.float32)
    theirs = with_gradients(reference, tensors, dtype)
    ours = with_gradients(attend_in(segments), tensors, dtype)
    assert_as_exact_as(ours, theirs, exact)


@pytest.mark.parametrize("window", [None, 16, 250])
def test_keys_along_paths_are_aligned_at_the_last_query(window, monkeypatch):
    """As of shared prefixes, and of context ranks, whose keys have more rows than the queries."""
    lengths, of_keys = [30, 34, 1, 63], [200, 34, 17, 300]
    cells = torch.randint(512, (sum(of_keys),), generator=torch.Generator().manual_seed(0))
    bounds = [torch.tensor([0, *of]).cumsum(0).int().cuda() for of in (lengths, of_keys)]
    segments = SegmentBounds(*bounds, max(lengths), max(of_keys))
    query, _, _, grad = random_heads(1, (8, 2), 128, 64)
    _, key, value, _ = random_heads(4, (8, 2), 128, 64)
    tensors, rest = [query, key, value, grad], (*bounds, cells.cuda(), 1, None, window)

    def reference(*heads: Tensor) -> Tensor:
        flat = (x.transpose(1, 2).flatten(0, 1) for x in heads)
        return kernels._sdpa_by_segment(*flat, *rest).view(1, 128, 8, 64)

    exact = with_gradients(reference, tensors, torch.float32)
    theirs = with_gradients(reference, tensors, torch.bfloat16)
    monkeypatch.setattr(kernels, "_sdpa_by_segment", None)
    along = attend_in(segments, window=window, path_cells=cells.cuda())
    assert_as_exact_as(with_gradients(along, tensors, torch.bfloat16), theirs, exact)


@pytest.mark.parametrize("window", [None, 16])
def test_a_maximum_above_the_true_one_changes_nothing(window):
    tensors = random_heads(1, (8, 2), 512, 64)
    true, above = (
        with_gradients(attend_in(bounds_of(LENGTHS, most), window=window), tensors, torch.bfloat16)
        for most in (None, 4096)
    )
    for a, b in zip(true, above, strict=True):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


def test_the_host_never_waits():
    segments, tensors = bounds_of(LENGTHS), random_heads(1, (8, 2), 512, 64)

    def run() -> list[Tensor]:
        return with_gradients(attend_in(segments), tensors, torch.bfloat16)

    run()  # the first call may load libraries
    with no_waiting("cuda"):
        run()


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.bfloat16, 60)])
def test_what_the_kernel_does_not_take_goes_to_sdpa(dtype, head_dim):
    query, key, value, _ = (x.to(dtype) for x in random_heads(1, (8, 2), 512, head_dim))
    output = attend(query, key, value, bounds_of(LENGTHS), window=16)
    expected = attend(
        *(x.float().cpu() for x in (query, key, value)),
        SegmentBounds(*(bounds_of(LENGTHS).cu_q.cpu(),) * 2, 257, 257),
        window=16,
    )
    atol = 1e-3 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(output.float().cpu(), expected, atol=atol, rtol=1e-2)


# --- models --------------------------------------------------------------------------------------


def on_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.cuda() if isinstance(v, Tensor) else v for k, v in inputs.items()}


def gpu_model(kind: str, attention: str, dtype: torch.dtype, **changes: Any) -> Any:
    changes = {"head_dim": 64, "initializer_range": 0.05, **changes}
    if kind in ("llama", "qwen2", "mistral"):  # these have no head_dim of their own on all versions
        changes["hidden_size"] = 256
    return tiny_model(kind, attention, dtype=dtype, **changes).cuda()


def packed_gradients(model: Any, rows: Any, **options: Any) -> list[Tensor]:
    """Logits and the gradients of all parameters for a fixed gradient of the logits."""
    model.train()
    logits = model(**on_gpu(packed_inputs(*rows)), **options).logits
    logits.backward(fixed_gradient(logits))
    return [logits.detach().float(), *(p.grad.float() for p in model.parameters())]


def alone_gradients(model: Any, rows: Any) -> list[Tensor]:
    """The same from one example at a time."""
    model.train()
    ids = packed_inputs(*rows)["input_ids"].cuda()
    logits = torch.zeros(*ids.shape, VOCAB, device="cuda")
    gradient = fixed_gradient(logits)
    for row, columns in segment_slices(*rows):
        part = model(input_ids=ids[row, columns][None], use_cache=False).logits
        part.backward(gradient[row, columns][None].to(part.dtype))
        logits[row, columns] = part[0].detach().float()
    return [logits, *(p.grad.float() for p in model.parameters())]


def fixed_gradient(logits: Tensor) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    gradient = torch.randn(logits.shape, device="cuda", generator=generator)
    return gradient.to(logits.dtype)


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "two"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_equal_one_example_at_a_time(kind, rows):
    exact = alone_gradients(gpu_model(kind, "sdpa", torch.float32), rows)
    theirs = alone_gradients(gpu_model(kind, "sdpa", torch.bfloat16), rows)
    ours = packed_gradients(gpu_model(kind, "torch_varlen", torch.bfloat16), rows)
    assert_as_exact_as(ours, theirs, exact, floor=1e-2)


def test_memory_grows_with_tokens_not_with_their_square():
    model = gpu_model("gemma3", "torch_varlen", torch.bfloat16, max_position_embeddings=512)
    inputs = on_gpu(packed_inputs([512] * 64))  # a T x T mask of bool would be 1 GiB
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        model(**inputs)
    assert torch.cuda.max_memory_allocated() - before < 2**29
