"""torch_varlen: packed rows equal one example at a time, and what it cannot do it refuses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny_models import MODELS, WINDOW, packed_inputs, segment_slices, tiny_model, token_ids
from torch_collate_kit.attention import kernels, register_torch_varlen
from torch_collate_kit.attention.kernels import SegmentBounds, attend

ONE_ROW = ([7, 1, 5],)
TWO_ROWS = ([6, 3], [2, 7])
EQUAL = ([5, 5], [5, 5])  # one batched call
LAYOUTS = pytest.mark.parametrize("rows", [ONE_ROW, TWO_ROWS, EQUAL], ids=["one", "two", "equal"])


def alone(model: Any, ids: Tensor) -> Tensor:
    """Logits of one example by itself."""
    return model(input_ids=ids[None], use_cache=False).logits[0]


def on(device: str, inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}


# --- packed equals one at a time -----------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("attention", ["torch_varlen", "sdpa"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_segment_equals_its_example_alone(kind, attention, rows):
    model = tiny_model(kind, attention, dtype=torch.float64)
    reference = tiny_model(kind, "sdpa", dtype=torch.float64)
    inputs = packed_inputs(*rows, varlen=attention == "torch_varlen")
    with torch.no_grad():
        logits = model(**inputs).logits
        for row, columns in segment_slices(*rows):
            expected = alone(reference, inputs["input_ids"][row, columns])
            torch.testing.assert_close(logits[row, columns], expected, atol=1e-9, rtol=0)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_gradient_checkpointing_changes_nothing(kind, use_reentrant, device):
    inputs = on(device, packed_inputs(*TWO_ROWS))
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model(kind, dtype=torch.float64).train().to(device)
        if checkpointing:
            options = {"use_reentrant": use_reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            model.enable_input_require_grads()
        model(**inputs).logits.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_autocast_runs_in_bfloat16(kind, device):
    # under autocast Qwen3's norms widen query and key to float32 and leave value in bfloat16
    rows, inputs = ONE_ROW, on(device, packed_inputs(*ONE_ROW))
    model, reference = (
        tiny_model(kind, attention, initializer_range=0.05).train().to(device)
        for attention in ("torch_varlen", "sdpa")
    )
    with torch.autocast(device, torch.bfloat16):
        logits = model(**inputs).logits
        for row, columns in segment_slices(*rows):
            expected = alone(reference, inputs["input_ids"][row, columns])
            torch.testing.assert_close(logits[row, columns], expected, atol=2e-2, rtol=2e-2)
    logits.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_equals_sdpa(kind, use_cache, device):
    prompts = token_ids(2, 2 * WINDOW).to(device)
    mask = torch.ones_like(prompts)
    prompts[1, :3], mask[1, :3] = 0, 0  # left padding
    texts = [
        tiny_model(kind, attention)
        .to(device)
        .generate(
            input_ids=prompts,
            attention_mask=mask,
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            use_cache=use_cache,
        )
        for attention in ("torch_varlen", "sdpa")
    ]
    assert texts[0].shape == (2, 2 * WINDOW + 6)
    assert texts[0].tolist() == texts[1].tolist()


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("max_cache_len", [12, 16])
def test_a_static_cache_without_a_mask_equals_sdpa(kind, max_cache_len):
    # its update moves the offset, a tensor, in place: a mask built after it would be a later one
    transformers = pytest.importorskip("transformers")
    ids = token_ids(1, 12)
    logits = []
    for attention in ("torch_varlen", "sdpa"):
        model = tiny_model(kind, attention)
        cache = transformers.StaticCache(config=model.config, max_cache_len=max_cache_len)
        with torch.no_grad():
            model(input_ids=ids[:, :9], past_key_values=cache, use_cache=True)
            logits.append(model(input_ids=ids[:, 9:], past_key_values=cache).logits)
    assert torch.equal(*logits)


# --- one attention call against a mask written out -----------------------------------------------


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    scale: float,
    window: int,
    causal: bool = True,
) -> Tensor:
    """[N, H, D] by softmax over an explicit mask, head by head."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(segment))
    distance = place[:, None] - place[None, :]
    seen = (segment[:, None] == segment[None, :]) & (distance.abs() < window)
    seen &= (distance >= 0) | (not causal)
    heads = []
    for head in range(query.shape[1]):
        group = head * key.shape[1] // query.shape[1]
        scores = (query[:, head] @ key[:, group].T * scale).masked_fill(~seen, -torch.inf)
        heads.append(scores.softmax(-1) @ value[:, group])
    return torch.stack(heads, 1)


def random_heads(num_tokens: int, num_heads: int, num_kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(num_tokens, heads, 8, dtype=torch.float64, generator=generator)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]


def as_rows(x: Tensor, num_rows: int) -> Tensor:
    return x.view(num_rows, -1, *x.shape[1:]).transpose(1, 2)  # [B, H, T, D]


def bounds_of(lengths: list[int], max_length: int | None = None) -> SegmentBounds:
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    max_length = max(lengths) if max_length is None else max_length
    return SegmentBounds(cu, cu, max_length, max_length)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize(
    ("num_rows", "lengths"), [(1, [6, 1, 5]), (2, [4, 2, 6]), (2, [3, 3, 3, 3]), (1, [5, 0, 7])]
)
def test_attend_equals_a_written_out_mask(heads, window, num_rows, lengths):
    query, key, value = random_heads(12, *heads)
    rows = [as_rows(x, num_rows) for x in (query, key, value)]
    for causal in (True, False):
        expected = masked_attention(query, key, value, lengths, 0.7, window or 12, causal)
        output = attend(*rows, bounds_of(lengths), scale=0.7, window=window, causal=causal)
        assert output.shape == (num_rows, 12 // num_rows, heads[0], 8)
        torch.testing.assert_close(output.flatten(0, 1), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float64)]
)
def test_autocast_decides_the_dtype(dtype, expected):
    # all three widened by norms; float64 is left alone, as autocast leaves it
    query, key, value = (as_rows(x.to(dtype), 1) for x in random_heads(4, 4, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(query, key, value, bounds_of([3, 1])).dtype == expected
        (query, *_) = kernels.same_dtype(query, key, value)
    assert query.dtype == expected, "torch's kernel does not cast by itself, unlike SDPA"


# --- the varlen kernel's signatures --------------------------------------------------------------


def kernel_2_12(
    query,
    key,
    value,
    cu_q,
    cu_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    """The contract of torch's kernel, as its source has it: ``left`` tokens beside the own one."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert isinstance(window_size, tuple), "torch compares it with (-1, 0)"
    assert window_size[1] in (0, window_size[0]), "neither causal nor two-way"
    assert cu_q.dtype == cu_k.dtype == torch.int32
    lengths = cu_q.diff().tolist()
    assert max(lengths) <= max_q == max_k
    window = window_size[0] + 1 or len(query)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    causal = window_size[1] == 0 != window_size[0] or window_size == (0, 0)
    return masked_attention(query, key, value, lengths, scale, window, causal)


def kernel_2_11(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    assert query.shape[1] == key.shape[1], "no grouped heads before 2.12"
    options = {"scale": scale, "window_size": window_size}
    return kernel_2_12(query, key, value, cu_q, cu_k, max_q, max_k, **options)


def kernel_2_10(query, key, value, cu_q, cu_k, max_q, max_k, is_causal=False):
    window = (-1, 0 if is_causal else -1)
    return kernel_2_11(query, key, value, cu_q, cu_k, max_q, max_k, window_size=window)


@pytest.fixture
def use_kernel(monkeypatch):
    """Take the path of CUDA tensors, on the CPU, with a stand-in for torch's kernel."""

    def use(kernel: Any) -> None:
        monkeypatch.setattr(kernels, "fits_kernel", lambda query, value: True)
        monkeypatch.setattr(kernels, "load_kernel", lambda: kernels._Kernel(kernel))

    return use


@pytest.mark.parametrize("kernel", [kernel_2_10, kernel_2_11, kernel_2_12])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("causal", [True, False])
def test_every_kernel_signature_gives_the_same(use_kernel, kernel, heads, window, scale, causal):
    query, key, value = (as_rows(x, 2) for x in random_heads(12, *heads))
    segments, options = bounds_of([4, 2, 6], max_length=6), {"window": window, "causal": causal}
    expected = attend(query, key, value, segments, scale=scale, **options)
    use_kernel(kernel)
    output = attend(query, key, value, segments, scale=scale, **options)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)


def test_the_kernel_path_never_reads_the_boundaries(use_kernel, monkeypatch):
    def fail(*_: Any) -> None:
        raise AssertionError("a device tensor was read on the host")

    monkeypatch.setattr(kernels, "_segment_lengths", fail)
    use_kernel(kernel_2_12)
    for kind in ("qwen3", "gemma3"):
        tiny_model(kind)(**packed_inputs(*TWO_ROWS))


def test_a_window_goes_to_sdpa_where_the_kernel_has_none(use_kernel):
    def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        raise AssertionError("the kernel of 2.10 was called with a window")

    use_kernel(kernel)
    query, key, value = (as_rows(x, 1) for x in random_heads(6, 4, 4))
    assert attend(query, key, value, bounds_of([6]), window=2).shape == (1, 6, 4, 8)


def test_the_installed_kernel_has_a_known_signature():
    import inspect

    varlen = pytest.importorskip("torch.nn.attention.varlen")
    names = set(inspect.signature(varlen.varlen_attn).parameters)
    assert {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"} <= names
    assert ("is_causal" in names) != ("window_size" in names)
    assert kernels.load_kernel().takes_window == ("window_size" in names)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "value_dim", "capability", "fits"),
    [
        ("cuda", torch.bfloat16, 128, 128, (9, 0), True),
        ("cuda", torch.float16, 64, 64, (8, 0), True),
        ("cuda", torch.bfloat16, 256, 256, (8, 6), True),
        ("cpu", torch.bfloat16, 64, 64, (9, 0), False),
        ("cuda", torch.float32, 64, 64, (9, 0), False),
        ("cuda", torch.bfloat16, 64, 64, (7, 5), False),
        ("cuda", torch.bfloat16, 60, 60, (9, 0), False),
        ("cuda", torch.bfloat16, 264, 264, (9, 0), False),
        ("cuda", torch.bfloat16, 192, 128, (9, 0), False),
    ],
)
def test_where_the_kernel_fits(monkeypatch, device, dtype, head_dim, value_dim, capability, fits):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query, value = (
        SimpleNamespace(is_cuda=device == "cuda", dtype=dtype, shape=(1, 1, dim), device=device)
        for dim in (head_dim, value_dim)
    )
    assert kernels.fits_kernel(query, value) is fits


def model(kind: str, *, training: bool = False, config: Any = None, **changes: Any) -> Any:
    """A call with the inputs of packed rows, changed; None leaves one out."""

    def call() -> Any:
        inputs = packed_inputs(*ONE_ROW) | changes
        given = {name: value for name, value in inputs.items() if value is not None}
        return tiny_model(kind, **config or {}).train(training)(**given)

    return call


def layer(
    lengths: list[int], *, num_rows: int = 1, config: Any = None, **options: Any
) -> Callable[[], Any]:
    """The registered function, called as a layer of a model calls it."""
    module: Any = nn.Identity()
    module.config = config

    def call() -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        register_torch_varlen()
        query = torch.zeros(num_rows, 2, sum(lengths) // num_rows, 8)
        given = {"cu_seq_lens_q": bounds_of(lengths).cu_q, "attention_mask": None} | options
        return ALL_ATTENTION_FUNCTIONS["torch_varlen"](module, query, query, query, **given)

    return call


def bounds(of_queries: list[int], of_keys: list[int] | None = None) -> Callable[[], Any]:
    """Boundaries of two rows of three tokens."""
    cu_q, cu_k = (None if of is None else torch.tensor(of).int() for of in (of_queries, of_keys))
    return layer([3, 3], num_rows=2, cu_seq_lens_q=cu_q, cu_seq_lens_k=cu_k)


TOWER, BERT = SimpleNamespace(patch_size=4), SimpleNamespace(attention_probs_dropout_prob=0.1)
BOTH = r"an attention_mask is passed in addition to cu_seq_lens_q \(its shape is \[1, 1, 13, 13\]"
MASK_2D = torch.tensor([[1] * 8 + [0] * 5])
MASK_4D = torch.ones(1, 1, 13, 13, dtype=torch.bool).tril()
# with a cache transformers does not look at the positions
NO_BOUNDS = dict.fromkeys((*("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q"), "max_length_k"))
NO_BOUNDS |= {"use_cache": None}
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (model("llama", attention_mask=MASK_2D), BOTH),
    (model("mistral", attention_mask=MASK_2D), BOTH),
    (model("llama", attention_mask=MASK_4D), BOTH),
    (model("gemma2", config={"attn_logit_softcapping": 50.0}), "soft-capping, but Gemma2A.*eager"),
    (model("qwen3", **NO_BOUNDS, training=True), "no cu_seq_lens_q in tr"),
    (model("qwen3", **NO_BOUNDS), "restart"),
    (model("qwen3", config={"attention_dropout": 0.1}, training=True),
     r"asks for 0.1; set config.attention_dropout = 0.0"),
    (layer([2, 1], s_aux=torch.zeros(4)), "cannot do attention sinks.*passes s_aux; use .*eager"),
    (layer([2, 1], position_bias=torch.zeros(4)), "cannot do a position bias.*passes position_bia"),
    (layer([2, 1], is_causal=False, config=TOWER), r'attends to patches .*"vision_config"'),
    (layer([2, 1], dropout=0.1, config=BERT), "set config.attention_probs_dropout_prob = 0.0"),
    (bounds([0, 2]), "has 2 entries for 2 rows: it was cut like them.*pass dispatch_batches=Fal"),
    (bounds([0, 1, 2]), r"must rise from 0 to 6 \(2 rows of 3 tokens.*got \[0, 1, 2\]"),
    (bounds([1, 3, 6]), "must rise from 0 to 6"),
    (bounds([0, 4, 3, 6]), "must rise from 0 to 6"),
    (bounds([0, 2, 6]), r"lacks the row boundaries \[3\]"),
    (bounds([0, 3, 6], [0, 6]), "differ.*pass the same"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_it_cannot_do_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_dropout_is_none_in_evaluation() -> None:
    model("qwen3", config={"attention_dropout": 0.1})()


def test_a_filled_cache_beside_boundaries_is_refused() -> None:
    inputs, llama = packed_inputs(*ONE_ROW), tiny_model("llama")
    inputs["use_cache"] = True
    cache = llama(**inputs).past_key_values
    with pytest.raises(ValueError, match=r"13 query and 26 key tokens per row.*use_cache=False"):
        llama(**inputs, past_key_values=cache)


def test_a_window_that_mask_and_layer_disagree_on_is_refused() -> None:
    gemma = tiny_model("gemma3")
    gemma.model.layers[0].self_attn.sliding_window = WINDOW - 1
    with pytest.raises(ValueError, match=r"sliding windows \[4\].*sliding_window=3; use .*sdpa"):
        gemma(**packed_inputs(*ONE_ROW))


def test_a_mask_pattern_beyond_causal_is_refused() -> None:
    from transformers import masking_utils

    options: dict[str, Any] = {
        "config": tiny_model("llama", attention_chunk_size=4).config,
        "inputs_embeds": torch.zeros(1, 3, 8),
        **{"attention_mask": None, "past_key_values": None},
    }

    with pytest.raises(ValueError, match=r"reads its attention mask itself \(\[0\]\)"):
        masking_utils.create_causal_mask(**options)[0]

    def image_tokens(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx >= 0

    chunks = masking_utils.create_chunked_causal_mask(**options)
    with pytest.raises(ValueError, match=r"built from \['chunked_overlay.*use .*\"sdpa\""):
        layer([2, 1], attention_mask=chunks)()
    blocks = masking_utils.create_causal_mask(**options, or_mask_function=image_tokens)
    with pytest.raises(ValueError, match="image_tokens"):
        layer([2, 1], attention_mask=blocks)()
