"""Ratios, weights and divergences: loops over segments, TRL's own code, and the page's lines."""

from __future__ import annotations

import ast
import importlib.util
import math
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.rl import oracle_rl as oracle
from tests.test_losses import examples_strategy
from tests.test_segments import KINDS, collated
from torch_collate_kit import Batch, PackedCollator, PerResponseToken, rl, segment_sums
from torch_collate_kit.losses import segment_values, trained_values

NAN, INF = math.nan, math.inf
EXACT = {"rtol": 1e-12, "atol": 1e-12, "equal_nan": True}
LEVELS = ("token", "sequence", "geometric")


def batch_of(*lengths: int) -> Batch:
    """Rows of segments; all tokens of a segment but its first are trained."""
    return PackedCollator(0, max_tokens=8)([{"input_ids": [5] * n} for n in lengths])


def test_by_hand() -> None:
    new, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    found = [rl.log_ratios(new, old, batch_of(3), level=level).exp() for level in LEVELS]
    wanted = torch.tensor([[1.649, 0.368], [0.607, 0.607], [0.779, 0.779]])
    torch.testing.assert_close(torch.stack(found), wanted, rtol=0, atol=5e-4)
    kl = [rl.kl_estimates(new, old, kind=kind) for kind in ("k1", "k2", "k3")]
    wanted = torch.tensor([[0.5, -1.0], [0.125, 0.5], [0.107, 0.718]])
    torch.testing.assert_close(torch.stack(kl), wanted, rtol=0, atol=5e-4)
    assert segment_values(torch.tensor([True, False]), batch_of(3, 2)).tolist() == [True] * 2 + [0]


@given(
    examples=examples_strategy,
    name=st.sampled_from(list(KINDS)),
    seed=st.integers(0, 2**32 - 1),
    bounds=st.sampled_from([(0.0, INF), (0.5, 2.0), (0.0, 1.0), (1.0, 1.0)]),
)
def test_against_a_loop(examples: Any, name: str, seed: int, bounds: tuple[float, float]) -> None:
    batch, _ = collated(name, examples, normalize=False)
    counts = [number for row in batch.row_metadata["num_trained"].tolist() for number in row]
    rng = np.random.default_rng(seed)
    grids = [rng.normal(-2, rng.choice([0.1, 1, 30]), sum(counts)) for _ in range(2)]
    grids[1][rng.random(sum(counts)) < 0.2] = NAN
    new, old = (torch.from_numpy(grid) for grid in grids)
    new.requires_grad_()
    ends = np.cumsum(counts)[:-1]
    rows = [[part.tolist() for part in np.split(grid, ends)] for grid in grids]
    slopes = torch.from_numpy(rng.normal(size=sum(counts)))
    for level in LEVELS:
        ratios = oracle.log_ratios(*rows, level)
        found = rl.log_ratios(new, old, batch, level=level)
        torch.testing.assert_close(found, flat(ratios), **EXACT)
        gradient = torch.autograd.grad((found * slopes).sum(), new)[0]
        own = np.split(slopes.numpy(), ends)
        if level != "token":
            own = [np.full(len(of), of.sum() / (level == "sequence" or len(of) or 1)) for of in own]
        inside = flat(ratios).abs() < 20
        wanted = torch.from_numpy(np.concatenate(own)) * inside
        torch.testing.assert_close(gradient, wanted, **EXACT)
        for outside in ("clamp", "zero"):
            low, high = bounds
            weights = rl.importance_weights(
                new, old, batch, level=level, low=low, high=high, outside=outside
            )
            assert not weights.requires_grad
            expected = flat(oracle.importance_weights(ratios, low, high, outside))
            torch.testing.assert_close(weights, expected, **EXACT)
    for kind in ("k1", "k2", "k3"):
        pairs = zip(*(grid.tolist() for grid in grids), strict=True)
        wanted = flat([[oracle.kl_estimate(*pair, kind) for pair in pairs]])
        found = rl.kl_estimates(new, old, kind=kind)
        torch.testing.assert_close(found, wanted, **EXACT)
    values = torch.arange(len(counts)).double().requires_grad_()
    spread = segment_values(values, batch)
    assert spread.tolist() == np.repeat(np.arange(len(counts)), counts).tolist()
    assert torch.autograd.grad(spread.sum(), values)[0].tolist() == counts


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def test_what_is_infinite_or_far_away_stays_finite() -> None:
    batch = batch_of(6)
    new = torch.tensor([-1000.0, -1e-3, -INF, -1.0, -2.0], requires_grad=True)
    old = torch.tensor([-1.0, -1000.0, -1.0, -INF, NAN])
    ratio = rl.log_ratios(new, old, batch).exp()
    assert ratio.isfinite().all()
    kl = rl.kl_estimates(new, old)[[0, 4]]
    (torch.minimum(ratio, ratio.clamp(0.8, 1.2)).sum() + kl.sum()).backward()
    assert new.grad is not None
    assert new.grad.isfinite().all()
    assert new.grad[4] == 1  # unscored: a ratio of 1, with its gradient
    assert rl.importance_weights(new, old, batch)[4] == 1
    bad = torch.full((5,), NAN)
    assert rl.log_ratios(bad, old, batch).isnan().all()  # of the policy itself it must be seen
    half = rl.log_ratios(new.bfloat16(), old.bfloat16(), batch)
    assert half.dtype == torch.float32


# ---- the lines of the page, against TRL's code and the definitions of verl's rules ----

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "off_policy.md"
ROWS = re.findall(r"^\| (.*?) \| `([^`]+)` \|$", PAGE.read_text(encoding="utf-8"), re.M)
LINES = {name: line.replace("\\|", "|") for name, line in ROWS}
LOW, HIGH, MOST, BETA = 0.8, 1.25, 0.1, 0.04


def line_of(begin: str) -> str:
    [found] = [line for name, line in LINES.items() if name.startswith(begin)]
    return found


class Sample:
    """Log-probs of random completions [B, T] in float64, and a packed batch of the same."""

    def __init__(self, seed: int, noise: float = 0.3) -> None:
        rng = np.random.default_rng(seed)
        shape = (5, 6)
        lengths, tools = rng.integers(1, 7, 5), rng.random(shape) < 0.25
        tools[0, : lengths[0]] = seed % 2  # a completion without targets
        self.completion = torch.arange(6) < torch.from_numpy(lengths)[:, None]
        self.tool = torch.from_numpy(~tools)
        self.mask = self.completion & self.tool
        self.logps = torch.from_numpy(rng.normal(-2, 1, shape)).requires_grad_()
        near = [torch.from_numpy(rng.normal(0, noise, shape)) for _ in range(3)]
        self.old, self.sampled, self.ref = (self.logps.detach() + step for step in near)
        self.sampled[torch.from_numpy(rng.random(shape) < 0.1)] = NAN
        self.advantages = torch.from_numpy(rng.normal(0, 1, 5))
        places = np.arange(30).reshape(shape)
        self.batch = PackedCollator(
            0, max_tokens=16, fields={"place": PerResponseToken(torch.int64)}
        )(
            [
                {
                    **{"prompt_ids": [5], "response_ids": [6] * n, "rewards": 0.0},
                    **{"loss_mask": ~tools[i, :n], "place": places[i, :n]},
                }
                for i, n in enumerate(lengths.tolist())
            ]
        )
        self.places = trained_values(self.batch["place"], self.batch)
        self.names = {"math": math, "rl": rl, "torch": torch, "batch": self.batch, "beta": BETA}
        self.names |= {"segment_sums": segment_sums, "segment_values": segment_values}
        self.names |= {"low": LOW, "high": HIGH, "most": MOST}
        dense = {"advantages": self.advantages[:, None].expand(shape), "logps": self.logps}
        dense |= {"old": self.old, "sampled": self.sampled, "ref": self.ref}
        self.names |= {name: self.of_tokens(values) for name, values in dense.items()}
        self.names["r"] = rl.log_ratios(self.names["old"], self.names["sampled"], self.batch)

    def of_tokens(self, dense: Tensor) -> Tensor:
        return dense.flatten()[self.places]

    def run(self, *begins: str) -> None:
        for begin in begins:
            exec(line_of(begin), self.names)


def of_trl(module: str, name: str) -> Any:
    """A function of TRL's source; to parse all of the module takes seconds."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl is not installed")
    text = (Path(spec.origin).parent / module).read_text(encoding="utf-8")
    [found] = re.findall(rf"^ *def {name}\(.*?(?=^ *(?:def|@)\b|\Z)", text, re.M | re.S)
    return ast.parse(textwrap.dedent(found)).body[0]


def run(body: list[Any], names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(ast.fix_missing_locations(ast.Module(body, [])), "trl", "exec"), names)
    return names


@pytest.fixture(scope="module")
def trl() -> SimpleNamespace:
    """TRL's loss (up to what it logs), its weights of samples and its GDPO, from its source."""
    names: dict[str, Any] = {"torch": torch, "math": math}
    trainer = "trainer/grpo_trainer.py"
    loss, made = (
        of_trl(trainer, f"_{name}") for name in ("compute_loss", "generate_and_score_completions")
    )
    ends = [i for i, node in enumerate(loss.body) if "_entropy_bonus_enabled" in ast.unparse(node)]
    loss.body[ends[0] :] = [ast.Return(ast.Name("loss", ast.Load()))]
    mask, nanstd = of_trl(trainer, "get_off_policy_mask"), of_trl("trainer/utils.py", "nanstd")
    run([loss, mask, nanstd], names)
    blocks = [node for node in ast.walk(made) if isinstance(node, ast.If)]
    [weights] = [n for n in blocks if ast.unparse(n.body[0]).startswith("mask = completion_mask")]
    [gdpo] = [n for n in blocks if "== 'normalize_then_sum'" in ast.unparse(n.test)]
    return SimpleNamespace(names=names, weights=weights.body, gdpo=gdpo.body)


MODES = {
    "token_truncate": "TIS; ",
    "sequence_truncate": "TIS by",
    "token_mask": "MIS, ",
    "sequence_mask": "MIS by",
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_lines_equal_trl_with_gradients(
    trl: SimpleNamespace, mode: str, level: str, seed: int
) -> None:
    sample = Sample(seed)
    owner = SimpleNamespace(
        **{"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": HIGH},
        vllm_importance_sampling_clip_min=LOW if "mask" in mode else None,
        **{
            "importance_sampling_level": level,
            "loss_type": "grpo",
            "off_policy_mask_threshold": MOST,
        },
        **{"epsilon_low": 1 - LOW, "epsilon_high": HIGH - 1, "beta": BETA, "use_vllm": True},
        **{"vllm_importance_sampling_correction": True, "top_entropy_quantile": 1.0},
        **{"aux_loss_enabled": False, "current_gradient_accumulation_steps": 1},
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
        model=SimpleNamespace(training=True),
        get_off_policy_mask=trl.names["get_off_policy_mask"],
        _get_per_token_logps_and_entropies=lambda *_, **__: (sample.logps, None, None),
    )
    masks = {"completion_mask": sample.completion.double(), "tool_mask": sample.tool.double()}
    logps = {"old_per_token_logps": sample.old, "sampling_per_token_logps": sample.sampled}
    found = run(trl.weights, {**trl.names, "self": owner, **masks, **logps})
    ids = torch.ones(5, 6, dtype=torch.int64)
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, **masks, **logps}
    inputs |= {"advantages": sample.advantages, "ref_per_token_logps": sample.ref}
    inputs["importance_sampling_ratio"] = found["vllm_importance_sampling_ratio"]
    wanted = trl.names["_compute_loss"](owner, None, inputs)
    ratio = "PPO" if level == "token" else "GSPO; "
    sample.run(ratio, "the clipped", MODES[mode], "TRL's `off")
    names = sample.names
    names["loss"] = names["loss"] * names["keep"] * names["weights"]
    sample.run("the penalty")
    loss = segment_sums(names["loss"], sample.batch, mean=True).sum() / 5
    torch.testing.assert_close(loss, wanted, **EXACT)
    gradients = [torch.autograd.grad(of, sample.logps)[0] for of in (loss, wanted)]
    torch.testing.assert_close(*gradients, **EXACT)
    # the noise is such that rules keep some tokens and drop others
    assert 0 < names["keep"].double().mean() + names["weights"].clamp(max=1).mean() < 2


def test_gdpo_of_the_page_is_that_of_trl(trl: SimpleNamespace) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[:2]:
        exec(block, names)
    rewards = torch.tensor(list(names["scores"].values())).T
    owner = SimpleNamespace(reward_funcs=["right", "short"], reward_weights=torch.tensor([1, 0.5]))
    given = {"self": owner, "rewards_per_func": rewards, "num_generations": 4, "device": "cpu"}
    found = run(trl.gdpo, {**trl.names, **given, "unscorable_mask": torch.zeros(4, dtype=bool)})
    torch.testing.assert_close(names["total"], found["advantages"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", [name for name in LINES if name.startswith("`")])
def test_the_lines_for_rejections_are_their_definitions(rule: str) -> None:
    dropped = []
    for seed in range(4):
        for most in (0.02, 0.2):
            sample = Sample(seed, noise=0.4)
            sample.names["most"] = most
            sample.run(rule)
            counts = [n for row in sample.batch.row_metadata["num_trained"].tolist() for n in row]
            ratios = [part.tolist() for part in sample.names["r"].split(counts)]
            high = HIGH if rule.endswith("k1`") else most
            expected = oracle.rejected(ratios, rule.strip("`"), LOW, high)
            assert (~sample.names["keep"]).tolist() == expected
            dropped += expected
    assert 0 < sum(dropped) < len(dropped)


def test_every_line_of_the_page_runs_and_the_others_are_what_they_say() -> None:
    assert len(LINES) == 23
    for line in LINES.values():
        sample = Sample(1)
        exec("loss = 0 * logps", sample.names)
        exec("ratio = 1 + 0 * logps", sample.names)
        exec(line, sample.names)
    sample = Sample(2)
    names, logps = sample.names, sample.names["logps"]
    sample.run("GSPO; ")
    whole = names["ratio"]
    sample.run("GSPO-token")
    torch.testing.assert_close(names["ratio"], whole, **EXACT)
    own = torch.autograd.grad(names["ratio"].sum(), logps)[0]
    torch.testing.assert_close(own, whole, **EXACT)  # each token has the ratio's gradient alone
    sample.run("CISPO")
    factors = torch.autograd.grad(names["loss"].sum(), logps)[0]
    old = (logps - names["old"]).exp().clamp(max=HIGH)
    torch.testing.assert_close(factors, -old * names["advantages"], **EXACT)
    names["loss"] = torch.zeros_like(logps)
    sample.run("the same with")
    slope = torch.autograd.grad(names["loss"].sum(), logps)[0]
    torch.testing.assert_close(slope, BETA * (logps - names["ref"]), **EXACT)


# ---- bad inputs ----

ONE, TWO = torch.zeros(1), torch.zeros(2)
NO_SEGMENTS = Batch({"input_ids": torch.ones(1, 2).long(), "loss_mask": torch.ones(1, 2)})
RATIOS, WEIGHTS = rl.log_ratios, rl.importance_weights
BOUNDS = "^low and high must be numbers, 0 <= low <= high, got"
WRONG: list[tuple[str, type[Exception], str]] = [
    (
        "RATIOS(ONE, ONE, b)",
        ValueError,
        r"^logps have shape \[1\], the batch has 2 trained tokens; ",
    ),
    ("RATIOS(TWO[None], TWO[None], b)", ValueError, r"^logps have shape \[1, 2\], the batch"),
    ("RATIOS(TWO, ONE, b)", ValueError, r"^old_logps have shape \[1\], logps \[2\]; of a field of"),
    ("rl.kl_estimates(TWO, ONE)", ValueError, r"^ref_logps have shape \[1\], logps \[2\]; of a"),
    ("RATIOS(TWO, TWO, b, level='mean')", ValueError, "^level must be one of 'token', 'sequence'"),
    ("rl.kl_estimates(TWO, TWO, kind='k4')", ValueError, "^kind must be one of 'k1', 'k2', 'k3'"),
    ("WEIGHTS(TWO, TWO, b, outside='drop')", ValueError, "^outside must be one of 'clamp', 'zero'"),
    ("WEIGHTS(TWO, TWO, b, low=2, high=1)", ValueError, f"{BOUNDS} 2 and 1"),
    ("WEIGHTS(TWO, TWO, b, low=-1)", ValueError, f"{BOUNDS} -1 and inf"),
    ("WEIGHTS(TWO, TWO, b, high=NAN)", ValueError, f"{BOUNDS} 0.0 and nan"),
    ("WEIGHTS(TWO, TWO, b, high=None)", ValueError, f"{BOUNDS} 0.0 and None; math.inf is no limit"),
    ("RATIOS([0, 0], TWO, b)", TypeError, "^logps must be a tensor of floats, got list; pass log"),
    ("RATIOS(TWO, TWO.long(), b)", TypeError, "^old_logps must be a tensor of floats, got torch.i"),
    ("RATIOS(TWO, TWO, dict(b))", TypeError, "^batch must be the Batch that the collator returned"),
    ("segment_values([1], b)", TypeError, "^values must be a tensor, got list"),
    (
        "segment_values(TWO, b)",
        ValueError,
        r"^values have shape \[2\], the batch has 1 segments; p",
    ),
    ("segment_values(TWO, NO_SEGMENTS)", ValueError, "built without"),
    ("RATIOS(TWO, TWO, NO_SEGMENTS, level='sequence')", ValueError, "built without"),
    (
        "RATIOS(TWO, TWO, b.context_shard(0, 1), level='sequence')",
        ValueError,
        "is the shard of con",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_bad_inputs(call: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        eval(call, globals() | {"b": batch_of(3)})


def test_a_shard_has_ratios_of_tokens_alone() -> None:
    shard = batch_of(3).context_shard(0, 1)
    assert rl.log_ratios(TWO, TWO - 1, shard).tolist() == [1, 1]
