"""The loss through the head is the loss of its logits, in values and gradients, in less memory."""

from __future__ import annotations

import importlib
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import on_two_ranks
from tests.test_losses import EXAMPLES, LAYOUTS, NUM_LOSS_TOKENS, examples_strategy
from tests.tiny_models import VOCAB, packed_inputs, tiny_model
from torch_collate_kit import segment_sums
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.losses import ModelWithLoss, token_logps, token_loss

module = importlib.import_module("torch_collate_kit.losses.token_logps")

VOCABULARY, HIDDEN = 11, 6


def a_head(*, bias: bool = False, dtype: torch.dtype = torch.float64) -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)


def hidden_of(batch: Batch, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (*batch["input_ids"].shape, HIDDEN)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


CALLS: dict[str, Any] = {
    "loss": lambda x, batch, **of: token_loss(x, batch, num_loss_tokens=7, **of),
    "logps": token_logps,
}


def both(
    batch: Batch | Tensor,
    hidden: Tensor,
    head: torch.nn.Linear,
    softcap: float | None = None,
    call: str = "loss",
) -> tuple[list[Tensor], list[Tensor]]:
    """Values and gradients of hidden states, weight and bias: through the head, and of logits."""
    inputs = [hidden, *head.parameters()]
    logits = head(hidden)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = CALLS[call](logits, batch)
    found = CALLS[call](hidden, batch, head=head, logit_softcap=softcap)
    slopes = torch.arange(found.numel(), device=found.device, dtype=found.dtype) / 4 - 3
    return tuple(
        [of, *torch.autograd.grad((of * slopes.view(of.shape)).sum(), inputs)]
        for of in (found, expected)
    )


def assert_same(pairs: tuple[list[Tensor], list[Tensor]], tolerance: float) -> None:
    for found, expected in zip(*pairs, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens at a time, so that small batches have several chunks and a short last one."""
    monkeypatch.setattr(module, "_CHUNK", 3)


@given(
    examples=examples_strategy,
    name=st.sampled_from(list(LAYOUTS)),
    normalize=st.booleans(),
    bias=st.booleans(),
    softcap=st.sampled_from([None, 0.7, 30.0]),
    call=st.sampled_from(list(CALLS)),
    data=st.data(),
)
def test_it_is_what_the_logits_give(
    examples: Any, name: str, normalize: bool, bias: bool, softcap: Any, call: str, data: Any
) -> None:
    if name in ("packed", "dummy rows"):
        examples = [{key: row[:8] for key, row in example.items()} for example in examples]
    batch = LAYOUTS[name](normalize)(examples)
    rows = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1))
    for part in (batch, batch.select(rows), batch.pad_rows(multiple_of=3)):
        assert_same(both(part, hidden_of(part), a_head(bias=bias), softcap, call), 1e-12)


def test_log_probs_may_go_backward_twice_under_autocast_and_of_a_frozen_head() -> None:
    batch, head = PackedCollator(0, max_tokens=24)(EXAMPLES), a_head(dtype=torch.float32)
    hidden = hidden_of(batch, torch.float32)
    expected = both(batch, hidden, head, call="logps")[1]
    with torch.autocast("cpu", torch.bfloat16):
        logps = token_logps(hidden, batch, head=head)
    assert logps.dtype == torch.float32
    assert not torch.equal(logps, expected[0])
    torch.testing.assert_close(logps, expected[0], rtol=2e-2, atol=2e-2)
    head.requires_grad_(False)
    logps = token_logps(hidden, batch, head=head)
    weights = torch.arange(len(logps)) / 4 - 3
    for factor in (1, 3):
        (gradient,) = torch.autograd.grad(
            (factor * logps * weights).sum(), hidden, retain_graph=True
        )
        torch.testing.assert_close(gradient, factor * expected[1])
    with torch.no_grad():
        assert not token_logps(hidden, batch, head=head).requires_grad


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_other_dtypes(dtype: torch.dtype, call: str) -> None:
    """Those of the same weights in float64; float16 computes in fp32."""
    batch = PackedCollator(0, max_tokens=24)(EXAMPLES)
    head, exact = a_head(dtype=dtype), a_head()
    exact.load_state_dict(head.state_dict())
    hidden = hidden_of(batch, dtype)
    found, _ = both(batch, hidden, head, call=call)
    _, expected = both(batch, hidden.detach().double().requires_grad_(), exact, call=call)
    assert [value.dtype for value in found] == [torch.float32, dtype, dtype]
    tolerance = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert_same(([v.double() for v in found], expected), tolerance)


@pytest.mark.parametrize("normalize", [True, False])
def test_float16_keeps_gradients_for_a_scaler(normalize: bool) -> None:
    """Small ones, of many tokens, and sums beyond its range: as from logits, scaled by 65,536."""
    size, vocabulary = 1024, 512
    example = {"input_ids": [3] * size, "loss_mask": [0] + [1] * (size - 1)}
    batch = PackedCollator(0, max_tokens=size, normalize_loss=normalize)([example])
    torch.manual_seed(0)
    head = torch.nn.Linear(16, vocabulary, bias=False)
    hidden = (40 + 40 * torch.rand(1, size, 16)).requires_grad_()
    expected = torch.autograd.grad(
        65536 * token_loss(head(hidden), batch, num_loss_tokens=2**18), [hidden, head.weight]
    )
    half = hidden.detach().half().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        loss = token_loss(half, batch, num_loss_tokens=2**18, head=head)
    found = torch.autograd.grad(65536 * loss, [half, head.weight])
    assert [g.dtype for g in found] == [torch.float16, torch.float32]
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other).norm() / other.norm() < 2e-3


class _Adapted(torch.nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


def hooked() -> torch.nn.Linear:
    head = a_head()
    head.register_forward_hook(lambda module, inputs, output: 3 * output)
    return head


def test_under_autocast_products_are_in_its_dtype_and_gradients_in_that_of_the_weight() -> None:
    batch, head = PackedCollator(0, max_tokens=24)(EXAMPLES), a_head(dtype=torch.float32)
    hidden, seen = hidden_of(batch, torch.float32), set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                seen.update(arg.dtype for arg in args if isinstance(arg, Tensor))
            return func(*args, **(kwargs or {}))

    with Products(), torch.autocast("cpu", torch.bfloat16):
        loss = token_loss(hidden, batch, num_loss_tokens=8, head=head)
    gradients = torch.autograd.grad(loss, [hidden, head.weight])
    assert seen == {torch.bfloat16}
    assert [g.dtype for g in gradients] == [torch.float32, torch.float32]
    _, expected = both(batch, hidden, head)
    torch.testing.assert_close(loss, expected[0] * 7 / 8, rtol=2e-2, atol=2e-2)


def test_an_infinite_loss_that_is_not_trained_stays_out_of_it() -> None:
    example = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 0, 1]}
    batch, head = PaddedCollator(0)([example]), a_head()
    hidden = hidden_of(batch)
    with torch.no_grad():
        hidden[0, 1] = float("inf")  # predicts the token that is not trained
    loss = token_loss(hidden, batch, num_loss_tokens=1, head=head)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert loss.isfinite()
    assert gradient[0, 1].tolist() == [0] * HIDDEN


def test_a_frozen_head_and_hidden_states_without_gradient() -> None:
    batch, head = PackedCollator(0, max_tokens=24)(EXAMPLES), a_head()
    hidden = hidden_of(batch)
    expected = both(batch, hidden, head)[1]
    head.requires_grad_(False)
    loss = token_loss(hidden, batch, num_loss_tokens=7, head=head)
    torch.testing.assert_close(torch.autograd.grad(-3 * loss, hidden)[0], expected[1])
    with torch.no_grad():
        assert not token_loss(hidden, batch, num_loss_tokens=7, head=head).requires_grad
    head.requires_grad_(True)
    loss = token_loss(hidden.detach(), batch, num_loss_tokens=7, head=head)
    torch.testing.assert_close(torch.autograd.grad(-3 * loss, head.weight)[0], expected[2])


def test_a_second_backward_pass_is_refused() -> None:
    batch = PackedCollator(0, max_tokens=24)(EXAMPLES)
    hidden = hidden_of(batch)
    loss = token_loss(hidden, batch, num_loss_tokens=7, head=a_head())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"already sent backward.*compute the loss again"):
        loss.backward()


class _Peak(TorchDispatchMode):
    """The most bytes alive at once of tensors that operators returned."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in self.alive:
                storage = value.untyped_storage()
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.most = max(self.most, sum(self.alive.values()))
        return result


def test_no_more_memory_than_of_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward and the backward pass; besides, the gradients and what has one per token."""
    monkeypatch.setattr(module, "_CHUNK", 16)
    vocabulary, tokens, size = 4000, 256, 8
    head = torch.nn.Linear(size, vocabulary, bias=False)
    example = {"input_ids": list(range(tokens)), "loss_mask": [0] + [1] * (tokens - 1)}
    batch = PackedCollator(0, max_tokens=tokens)([example])
    hidden = torch.randn(1, tokens, size, requires_grad=True)
    calls: dict[str, Any] = {
        "loss": lambda **of: token_loss(of.pop("x"), batch, num_loss_tokens=255, **of),
        "logps": lambda **of: token_logps(of.pop("x"), batch, **of).sum(),
    }
    chunk, weight = 4 * 16 * vocabulary, 4 * size * vocabulary
    for name, call in calls.items():
        head.zero_grad()
        with _Peak() as peak:
            call(x=hidden, head=head).backward()
        assert chunk < peak.most < 2.2 * chunk + 3 * weight + 40_000, name
        with _Peak() as peak:
            call(x=head(hidden)).backward()
        assert peak.most > 4 * tokens * vocabulary, name


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"head": lambda x: x}, TypeError, r"head must be a torch.nn.Linear.*, got function; "),
        ({"head": hooked()}, TypeError, "without hooks or a forward of its own"),
        ({"head": _Adapted(HIDDEN, VOCABULARY)}, TypeError, "forward of its own .*, got _Adapted"),
        ({"logit_softcap": 3.0}, ValueError, "logit_softcap=3.0 without head"),
        ({"head": torch.nn.Linear(4, 11)}, ValueError, "head has 4 input features"),
        ({"head": a_head().to("meta")}, ValueError, "on meta, .* on cpu; move one .*load its"),
        ({"head": a_head(), "logit_softcap": 0.0}, ValueError, "above 0 or None, got 0.0"),
        ({"head": a_head(), "logit_softcap": float("inf")}, ValueError, "0 or None, got inf"),
        ({"head": a_head(), "logit_softcap": True}, ValueError, "above 0 or None, got True"),
    ],
)
def test_refuses(options: dict[str, Any], error: type[Exception], message: str) -> None:
    batch = PackedCollator(0, max_tokens=24)(EXAMPLES)
    with pytest.raises(error, match=message):
        token_loss(hidden_of(batch), batch, num_loss_tokens=1, **options)


def kept_bytes(batch: Batch, logits: Tensor, **options: Any) -> int:
    """Of storages that the graph of the loss holds beside the logits."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_loss(logits, batch, num_loss_tokens=NUM_LOSS_TOKENS, **options)
    storages.pop(logits.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("collate", [PaddedCollator(0), PackedCollator(0, max_tokens=256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_kept_follows_from_the_response_tokens(
    collate: Any, dtype: torch.dtype, per_token: bool
) -> None:
    example = {"input_ids": list(range(100)), "loss_mask": [0] * 90 + [1] * 10}
    batch, vocabulary = collate([example] * 5), 512
    logits = torch.randn(*batch["input_ids"].shape, vocabulary).to(dtype).requires_grad_()
    cells = batch["input_ids"].numel()
    kept = kept_bytes(batch, logits, return_per_token_outputs=per_token)
    assert 4 * 50 * vocabulary <= kept < 4 * 50 * vocabulary + 40 * cells
    dense = Batch(dict(batch), row_metadata=batch.row_metadata, metadata=batch.metadata)
    kept = kept_bytes(dense, logits, return_per_token_outputs=per_token)
    predicting = batch["loss_mask"].numel()
    assert 4 * predicting * vocabulary <= kept < 4 * predicting * vocabulary + 80 * cells


TEXTS = [{"input_ids": list(range(3, 3 + n))} for n in (7, 4, 9, 3, 8, 5, 12)]


def batch() -> Batch:
    return PackedCollator(0, max_tokens=12)(TEXTS)


def segment_logps(hidden: Tensor, batch: Batch, **options: Any) -> Tensor:
    return segment_sums(token_logps(hidden, batch, **options), batch)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "opt"])
def test_it_is_the_loss_of_the_logits(kind: str) -> None:
    model, whole = tiny_model(kind), batch()
    logits = model(**whole.model_inputs(model, labels=False)).logits
    expected = token_loss(logits, whole, num_loss_tokens=7)
    found = ModelWithLoss(model)(whole, num_loss_tokens=7)
    torch.testing.assert_close(found, expected)
    sums = ModelWithLoss(model, segment_logps)(whole)
    torch.testing.assert_close(sums, segment_logps(logits, whole))


class Small(nn.Module):
    """What ModelWithLoss asks of a model, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.base_model.forward = lambda input_ids, **_: (self.base_model.weight[input_ids].sin(),)
        self.config = SimpleNamespace()

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_the_model_is_one_graph_when_compiled() -> None:
    trained, whole = ModelWithLoss(Small()), batch()
    graphs: list[Any] = []
    compiled = torch.compile(trained, backend=lambda graph, _: graphs.append(graph) or graph)
    for rows in (whole, whole[1:]):
        expected = trained(rows, num_loss_tokens=7)
        torch.testing.assert_close(compiled(rows, num_loss_tokens=7), expected)
    assert len(graphs) <= 2  # the second is for any number of rows


def test_caps_are_kept_and_scales_refused() -> None:
    model, whole = tiny_model("gemma2", "eager", final_logit_softcapping=0.5), batch()
    logits = model(**whole.model_inputs(model, labels=False)).logits
    assert logits.abs().max() <= 0.5
    found = ModelWithLoss(model)(whole, num_loss_tokens=7)
    torch.testing.assert_close(found, token_loss(logits, whole, num_loss_tokens=7))
    model = tiny_model("llama")
    trained = ModelWithLoss(model)
    for name in ("logit_scale", "logits_scaling"):  # Cohere, Granite
        setattr(model.config, name, 0.25)
        with pytest.raises(ValueError, match=rf"not those of its head alone \(config.{name}\); co"):
            trained(whole, num_loss_tokens=7)
        setattr(model.config, name, 1.0)
    trained(whole, num_loss_tokens=7)
    for other in (model.model, nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=r"has no head \(base_model.*causal language model"):
            ModelWithLoss(other)


def test_adapters_are_part_of_the_model() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model, whole = peft.get_peft_model(tiny_model("qwen3"), config), batch()
    logits = model(**whole.model_inputs(model, labels=False)).logits
    found = ModelWithLoss(model)(whole, num_loss_tokens=7)
    torch.testing.assert_close(found, token_loss(logits, whole, num_loss_tokens=7))
    found.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora" in name)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    prompted = ModelWithLoss(peft.get_peft_model(tiny_model("qwen3"), config))
    with pytest.raises(ValueError, match="prompts that PEFT adds"):
        prompted(whole, num_loss_tokens=7)


# --- ranks ---------------------------------------------------------------------------------------


def norms(how: str) -> float:
    """The norm of the gradients of this rank's rows, of a loss over both ranks."""
    rank, size = 0, 1
    if how != "alone":
        dist.init_process_group("gloo") if not dist.is_initialized() else None
        rank, size = dist.get_rank(), dist.get_world_size()
    trained: Any = ModelWithLoss(tiny_model("qwen3", "sdpa"))
    called = trained
    if how == "ddp" or how == "a part":
        called = DistributedDataParallel(trained)
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in trained.model.model.layers:
            fully_shard(layer)
        fully_shard(trained)
    if how == "a part":
        called = called.module
    part = batch().chunk(size)[rank]
    (called(part, num_loss_tokens=batch().metadata["num_loss_tokens"]) * size).backward()
    grads = [p.grad for p in trained.parameters()]
    whole = [g.full_tensor() if how == "fsdp2" else g for g in grads]
    return float(torch.stack([g.norm() for g in whole]).norm())


def of_rank() -> tuple[dict[str, float], str]:
    found = {how: norms(how) for how in ("ddp", "fsdp2", "a part")}
    wrapped = DistributedDataParallel(nn.Linear(2, 4))
    with pytest.raises(TypeError) as caught:
        token_logps(torch.zeros(len(batch()), 12, 2), batch(), head=wrapped)
    dist.destroy_process_group()
    return found, str(caught.value)


def test_gradients_are_exchanged_on_two_ranks() -> None:
    """What a wrapper wraps is called, not a part of it: this is the fault of the old guides."""
    assert len(batch()) % 2 == 0
    (first, refusal), (second, _) = on_two_ranks(of_rank)
    alone = norms("alone")
    for how in ("ddp", "fsdp2"):
        assert first[how] == pytest.approx(second[how], rel=1e-6)
        assert first[how] == pytest.approx(alone, rel=1e-4)
    assert first["a part"] != pytest.approx(second["a part"], rel=1e-2)
    assert "head is a DistributedDataParallel" in refusal
    assert "wrap losses.ModelWithLoss(model), and call what DDP or FSDP returns" in refusal


def test_weights_in_parts_are_refused_as_a_head() -> None:
    class Sharded(nn.Linear):
        """As after fully_shard: a weight that knows the whole."""

    head = Sharded(2, 4)
    head.weight.full_tensor = lambda: None
    with pytest.raises(TypeError, match=r"has weights in parts.*wrap losses.ModelWithLoss"):
        token_loss(torch.zeros(len(batch()), 12, 2), batch(), num_loss_tokens=1, head=head)
    assert packed_inputs([2])["input_ids"].max() < VOCAB
