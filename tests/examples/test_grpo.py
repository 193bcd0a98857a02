"""examples/grpo.py: tiny settings and a smaller model, in this process where that will do."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import game
import grpo
import numpy as np
import pytest
import synthetic_chat
import torch
import transformers

import torch_collate_kit as kit
from tests.examples.runs import Results, refusal, run
from torch_collate_kit import rl

TINY = (
    "--warm-start-steps 60 --iterations 2 --prompts 8 --group-size 4 --prompts-per-mini-batch 4 "
    "--rows-per-micro-batch 16 --cpu --threads 1"
)


make_small_model = functools.partial(synthetic_chat.make_model, hidden_size=64)
warm_start, warm_weights = grpo.warm_start, {}


def warm_start_once(model: Any, tokenizer: Any, accelerator: Any, args: Any) -> float:
    if args.seed not in warm_weights:
        warm_start(model, tokenizer, accelerator, args)
        state = model.state_dict()
        warm_weights[args.seed] = {name: tensor.clone() for name, tensor in state.items()}
    model.load_state_dict(warm_weights[args.seed])
    return 0.0


def play(arguments: str, folder: Path, warm_start: Any = warm_start_once) -> Results:
    """Call grpo.main() in this process with the small model; what it wrote, without times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "warm_start", warm_start)
        patch.setattr(synthetic_chat, "make_model", make_small_model)
        found = run(arguments, folder, grpo)
    steps = [{k: v for k, v in s.items() if not k.endswith("_seconds")} for s in found.steps]
    return Results(steps, found.summary)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    folder = tmp_path_factory.mktemp("grpo") / "base"
    return play(TINY, folder), folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return game.make_game_tokenizer()


def test_it_plays_trains_and_saves(played: tuple[Results, Path]) -> None:
    results, folder = played
    assert [record["iteration"] for record in results.steps] == [1, 2]
    for record in results.steps:
        assert record["updates"] == 2
        assert 0 <= record["mean_reward"] <= 1
        assert 1 < record["mean_turns"] <= 3, "no game has several turns"
        assert record["rows"] == record["mean_turns"] * 32
        assert record["max_ratio_error"] < 1e-4
        assert {"clip_fraction", "approx_kl", "loss", "tokens"} <= set(record)
        assert 0 <= record["padding"] < 1
    assert results.steps[0]["grad_norm"] > 0, "no game was won, or all were"
    summary = results.summary
    assert summary["first_reward"] == results.steps[0]["mean_reward"]
    assert {"rollout_seconds", "collate_seconds", "train_seconds"} <= set(summary)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.config.vocab_size == len(
        transformers.AutoTokenizer.from_pretrained(folder / "model")
    )


def test_the_seed_decides_everything(played: tuple[Results, Path], tmp_path: Path) -> None:
    again = play(TINY, tmp_path, warm_start)
    assert again.steps == played[0].steps
    assert again.summary["warm_start_loss"] > 0
    assert game.make_games(8, 0) == game.make_games(8, 0)
    assert game.make_games(8, 0) != game.make_games(8, 1)


@pytest.mark.parametrize(
    "option", ["--merge-steps", "--rows-per-micro-batch 1000", "--rewritten branch"]
)
def test_layout_does_not_change_the_gradient(
    played: tuple[Results, Path], tmp_path: Path, option: str
) -> None:
    """A row a trajectory, or all rows at once: the same games, and the same first updates."""
    found = play(f"{TINY} --iterations 1 {option}", tmp_path).steps[0]
    expected = played[0].steps[0]
    for name in ("mean_reward", "mean_turns"):
        assert found[name] == expected[name]
    for name in ("loss", "grad_norm", "approx_kl"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7)
    if option == "--merge-steps":
        assert found["rows"] == 32
    if "micro" not in option:
        assert found["tokens"] < expected["tokens"]


def test_the_ratio_error_notices_a_shift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = grpo.response_log_probs
    monkeypatch.setattr(grpo, "response_log_probs", lambda *a: right(*a).roll(1))
    [record] = play(f"{TINY} --iterations 1", tmp_path).steps
    assert record["max_ratio_error"] > 1


def scripted(tokenizer: Any, turns: list[list[str]]) -> grpo.Player:
    """Says these, turn by turn; what ends with a dash is cut there, without an end mark."""
    left = iter(turns)

    def player(prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        said = next(left)
        assert len(said) == len(prompts), "asked for another number of turns"
        ids = [tokenizer(s.removesuffix("-"))["input_ids"] for s in said]
        ended = [
            i if s.endswith("-") else [*i, tokenizer.eos_token_id]
            for s, i in zip(said, ids, strict=True)
        ]
        return [(i, [-0.5] * len(i)) for i in ended]

    return player


def test_turns_are_examples_in_order(tokenizer: Any) -> None:
    passed_on = game.Game("a", "lamp", ["Ada", "Ben"], "barn")
    kept = game.Game("b", "hat", ["Dan"], "cave")
    turns = [
        ["Ada?", "Ben?", "in the cave", "in the cave-"],
        ["Ben?", "Dan?"],
        ["in the barn", "Dan?"],
    ]
    steps = grpo.play([passed_on, kept, kept, kept], scripted(tokenizer, turns), tokenizer, 3)
    assert [step["uid"] for step in steps] == ["a"] * 3 + ["b"] * 5
    assert [step["is_last_step"] for step in steps] == [False, False, True] * 2 + [True, True]
    assert [step["rewards"] for step in steps] == [0, 0, 1, 0, 0, 0, 1, 0]
    for earlier, later in ((0, 1), (1, 2), (3, 4), (4, 5)):
        before = [*steps[earlier]["prompt_ids"], *steps[earlier]["response_ids"]]
        assert steps[later]["prompt_ids"][: len(before)] == before
    said = [("user", "Ada had the lamp."), ("assistant", "Ada?"), ("user", "Ben has it.")]
    said += [("assistant", "Ben?"), ("user", "in the barn")]
    messages = [{"role": role, "content": text} for role, text in said]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(steps[2]["prompt_ids"]) == text
    assert "not me" in tokenizer.decode(steps[4]["prompt_ids"])


@pytest.fixture(scope="module")
def steps(tokenizer: Any) -> list[dict]:
    games = [one for one in game.make_games(6, 7) for _ in range(4)]
    played = grpo.play(games, grpo.clumsy_player(tokenizer, 0), tokenizer, 3)
    rng = np.random.default_rng(0)
    return [s | {"logprobs": -6 + rng.random(len(s["logprobs"]))} for s in played]


@pytest.mark.parametrize("loss", ["ppo", "grpo", "gspo"])
def test_two_ranks_have_the_loss_of_one(tokenizer: Any, steps: list[dict], loss: str) -> None:
    model = make_small_model(tokenizer).eval()
    for merge, rewritten in ((False, "split"), (True, "split"), (False, "branch")):
        args = SimpleNamespace(merge_steps=merge, prompts_per_mini_batch=3, loss=loss, clip=0.2)
        args.rewritten = rewritten
        one, two = (grpo.stage(steps, tokenizer, ranks, args) for ranks in (1, 2))
        for [whole], parts in zip(one, two, strict=True):
            total, found = grpo.policy_loss(model, whole, args)
            others = [grpo.policy_loss(model, part, args) for part in parts]
            assert total.item() != 0
            assert sum(o[0] for o in others).item() == pytest.approx(total.item(), rel=1e-4)
            assert sum(o[1][1] for o in others) == found[1]
            assert sum(o[1][3] for o in others) == found[3]


def test_a_tree_of_rewritten_turns_has_the_loss_of_the_turns(
    tokenizer: Any, steps: list[dict]
) -> None:
    """Where a turn's history was changed at its second token, and where it was not."""
    model = make_small_model(tokenizer).eval()
    changed = [
        s | {"prompt_ids": [s["prompt_ids"][0], 5, *s["prompt_ids"][2:]]} if i % 3 else s
        for i, s in enumerate(steps)
    ]
    totals, computed = [], []
    for rewritten in ("split", "branch"):
        args: Any = SimpleNamespace(merge_steps=False, rewritten=rewritten, loss="ppo", clip=0.2)
        args.prompts_per_mini_batch = 3
        batches = [part for [part] in grpo.stage(changed, tokenizer, 1, args)]
        totals.append([grpo.policy_loss(model, batch, args)[0].item() for batch in batches])
        computed.append(sum(batch.num_cells for batch in batches))
    assert totals[1] == pytest.approx(totals[0], rel=1e-4)
    assert max(map(abs, totals[0])) > 1e-3
    assert computed[1] < computed[0]


def clipped(ratio: float, advantage: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)


@pytest.mark.parametrize("loss", ["ppo", "grpo", "gspo"])
def test_clipped_loss(monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    """Of ratios 0.5, 1.1 and 1.5 with gains and losses, and of responses of 3 and 1 tokens."""
    rows = [([0.5, 1.1, 1.5, 9.0], [1, 1, 0.5, 0], 2.0), ([1.3], [1], -2.0), ([0.9], [1], 3.0)]
    examples = [
        {"prompt_ids": [1], "response_ids": [2] * len(mask), "rewards": 0.0, "uid": "a"}
        | {"logprobs": [0.0] * len(mask), "loss_mask": mask, "advantages": advantage}
        for _, mask, advantage in rows
    ]
    batch = kit.RolloutCollator(0)(examples)
    trained = [
        [ratio for ratio, weight in zip(of, mask, strict=True) if weight] for of, mask, _ in rows
    ]
    reduction = "token_mean" if loss == "ppo" else "sequence_mean"
    advantages = rl.normalize_advantages(
        batch["advantages"], batch["loss_mask"], [0, 3], reduction=reduction
    )
    log_probs = torch.tensor([r for of in trained for r in of]).log().requires_grad_()
    monkeypatch.setattr(grpo, "response_log_probs", lambda model, batch: log_probs)
    args: Any = SimpleNamespace(loss=loss, clip=0.2)
    total, found = grpo.policy_loss(None, batch.with_fields(advantages=advantages), args)
    total.backward()
    of_rows = [(of, advantage) for of, (_, _, advantage) in zip(trained, rows, strict=True)]
    if loss == "gspo":
        of_rows = [([float(np.exp(np.mean(np.log(of))))] * len(of), a) for of, a in of_rows]
    losses = [[clipped(ratio, a) for ratio in of] for of, a in of_rows]
    means = [np.mean(of) for of in losses]
    expected = np.mean([of for row in losses for of in row]) if loss == "ppo" else np.mean(means)
    assert total.item() == pytest.approx(expected)
    ratios = np.array([ratio for of, _ in of_rows for ratio in of])
    of_tokens = np.array([ratio for of in trained for ratio in of])
    divergence = (of_tokens - 1 - np.log(of_tokens)).sum()
    moved = np.abs(ratios - 1)
    wanted = [expected, (moved > 0.2).sum(), divergence, len(ratios), moved.max()]
    assert found.tolist() == pytest.approx(wanted)
    assert log_probs.grad is not None
    if loss != "gspo":  # 1.5 with a gain is clipped, 1.3 with a loss is not
        assert (log_probs.grad != 0).tolist() == [True, True, False, True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--iterations 0", "--iterations 0: must be 1 or more"),
        ("--learning-rate nan", "--learning-rate nan: must be 0 or more"),
        ("--learning-rate inf", "--learning-rate inf: must be finite"),
        ("--group-size 1", "--group-size 1: a trajectory alone has nothing"),
        ("--prompts 10", "--prompts 10: must be a multiple of --prompts-per-mini-batch 4"),
    ],
)
def test_settings_that_cannot_be(
    options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(f"{TINY} {options}", tmp_path, grpo).startswith(message)
    monkeypatch.setattr(grpo, "Accelerator", lambda **_: SimpleNamespace(num_processes=3))
    message = "--prompts 8: must be a multiple of the number of ranks, 3"
    assert refusal(TINY, tmp_path, grpo) == message
