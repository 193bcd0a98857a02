"""Reinforcement learning (GRPO) on a game of several turns: one file, from rollouts to a model.

The game (game.py): ask people about a lost thing, then say where it is. Only a right
answer at the end is rewarded, so whom to ask must be learnt from there. A tokenizer and a small
Qwen3 are made on the spot. The model first imitates a clumsy player, so that it can speak at all;
what it learns then, it learns from rewards, in a minute or two on two CPU cores.

Every turn is a rollout example of its own, whose prompt is the conversation so far. An iteration
plays games on all ranks, and trains on them in mini-batches of whole games.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import synthetic_chat
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, parse_flag_from_env, set_seed
from checkpoints import fail
from game import Game, clumsy_turn, make_game_tokenizer, make_games
from tqdm import tqdm

import torch_collate_kit as kit
from torch_collate_kit import rl
from torch_collate_kit.losses import trained_values

# Options that must be 1 or more; other numbers must be 0 or more.
COUNTS = {
    *("prompts", "group_size", "max_turns", "max_new_tokens", "iterations", "threads"),
    *("prompts_per_mini_batch", "rows_per_micro_batch"),
}
SECONDS = ("rollout_seconds", "collate_seconds", "train_seconds")
# From the conversations so far to (token ids, log-probabilities) of the turns that follow.
Player = Callable[[list[list[int]]], list[tuple[list[int], list[float]]]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument_group("rollouts").add_argument
    add("--prompts", type=int, default=16, help="games an iteration, over all ranks")
    add("--group-size", type=int, default=8, help="trajectories of each, compared with each other")
    add("--max-turns", type=int, default=3, help="a game without an answer by then is lost")
    add("--max-new-tokens", type=int, default=6, help="of a turn; one without an end is lost")
    add = parser.add_argument_group("training").add_argument
    add("--warm-start-steps", type=int, default=120, help="on the clumsy player")
    add("--iterations", type=int, default=25, help="of rollouts and training on them")
    add("--prompts-per-mini-batch", type=int, default=8, help="an optimizer step, over all ranks")
    add("--rows-per-micro-batch", type=int, default=64, help="turns at a time, on each rank")
    add("--merge-steps", action="store_true", help="a trajectory is one row, not one a turn")
    choices = ["split", "branch"]
    add("--rewritten", default="split", choices=choices, help="branch: a trajectory is a tree")
    add("--learning-rate", type=float, default=3e-4, help="of AdamW, constant")
    add("--loss", default="ppo", choices=["ppo", "grpo", "gspo"], help="see policy_loss")
    add("--clip", type=float, default=0.2, help="how far a ratio may move from 1")
    add("--max-grad-norm", type=float, default=1.0, help="gradients are clipped to it")
    add("--seed", type=int, default=0, help="games, weights and samples follow from it")
    add = parser.add_argument_group("run").add_argument
    add("--output-dir", type=Path, default=Path("outputs/grpo"), help="model, metrics, summary")
    add("--cpu", action="store_true", help="do not use a GPU")
    add("--threads", type=int, help="CPU threads of a rank; none: all cores")
    args = parser.parse_args()
    for name, value in vars(args).items():
        lowest = 1 if name in COUNTS else 0
        if isinstance(value, (int, float)) and not value >= lowest:  # refuses nan too
            fail(f"--{name.replace('_', '-')} {value}: must be {lowest} or more")
    if args.learning_rate == math.inf:
        fail("--learning-rate inf: must be finite")
    if args.group_size < 2:
        fail("--group-size 1: a trajectory alone has nothing to be compared with, use 2 or more")
    if args.prompts % args.prompts_per_mini_batch:
        size = args.prompts_per_mini_batch
        fail(f"--prompts {args.prompts}: must be a multiple of --prompts-per-mini-batch {size}")
    args.cpu |= parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    return args


def play(games: list[Game], player: Player, tokenizer: Any, max_turns: int) -> list[dict]:
    """Return a rollout example for every turn, those of a game next to each other.

    A conversation grows by token ids, the sampled ones and those of the reply: text that is
    tokenized again may be other tokens than the model has written.
    """

    def ids_of(text: str) -> list[int]:
        message, options = [{"role": "user", "content": text}], {"add_generation_prompt": True}
        return tokenizer.apply_chat_template(message, return_dict=False, **options)

    line_break = tokenizer("\n")["input_ids"]  # which the template adds after the end mark
    prompts = [ids_of(game.question()) for game in games]
    trajectories: list[list[dict]] = [[] for _ in games]
    live = list(range(len(games)))
    for turn in range(max_turns):
        responses = player([prompts[i] for i in live]) if live else []
        asking = []
        for i, (ids, logprobs) in zip(live, responses, strict=True):
            said = tokenizer.decode(ids[:-1]) if ids[-1] == tokenizer.eos_token_id else ""
            reply = games[i].reply(said)
            step = {"prompt_ids": prompts[i], "response_ids": ids, "logprobs": logprobs}
            step |= {"loss_mask": [1] * len(ids), "rewards": games[i].reward(said)}
            is_last = reply is None or turn == max_turns - 1
            trajectories[i].append(step | {"uid": games[i].uid, "is_last_step": is_last})
            if not is_last:
                prompts[i] = [*prompts[i], *ids, *line_break, *ids_of(reply)]
                asking.append(i)
        live = asking
    return [step for steps in trajectories for step in steps]


def clumsy_player(tokenizer: Any, seed: int) -> Player:
    rng = np.random.default_rng(np.random.SeedSequence((seed, 0)))

    def player(prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        texts = tokenizer.batch_decode(prompts)
        said = [clumsy_turn(text, rng) + tokenizer.eos_token for text in texts]
        return [(ids, [0.0] * len(ids)) for ids in tokenizer(said)["input_ids"]]

    return player


def model_player(model: Any, tokenizer: Any, max_new_tokens: int) -> Player:
    """Return a player that samples at temperature 1, with the log-probability of every token."""

    @torch.no_grad()
    def player(prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        batch = kit.PaddedCollator(tokenizer)([{"input_ids": prompt} for prompt in prompts])
        output = model.generate(
            **{name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")},
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        written = output.sequences[:, batch["input_ids"].shape[1] :]
        log_probs = torch.stack(output.logits, dim=1).float().log_softmax(dim=-1)
        sampled = log_probs.gather(-1, written[..., None])[..., 0].tolist()
        responses = []
        for ids, values in zip(written.tolist(), sampled, strict=True):
            end = (*ids, tokenizer.eos_token_id).index(tokenizer.eos_token_id) + 1
            responses.append((ids[:end], values[:end]))
        return responses

    return player


def warm_start(model: Any, tokenizer: Any, accelerator: Accelerator, args: Any) -> float:
    """Train on games of the clumsy player, one per row, the same on every rank."""
    hidden = not accelerator.is_main_process
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    player, collate = clumsy_player(tokenizer, args.seed), kit.RolloutCollator(tokenizer)
    loss = torch.zeros(())
    for step in tqdm(range(args.warm_start_steps), "warm start", disable=hidden):
        games = make_games(32, args.seed, 1, step)
        turns = play(games, player, tokenizer, args.max_turns)
        batch = collate(rl.merge_steps(turns)).to(model.device)
        logits = model(**batch.model_inputs("sdpa")).logits
        loss = kit.token_loss(logits, batch, num_loss_tokens=batch.metadata["num_loss_tokens"])
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * min(1, (step + 1) / 10)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def stage(steps: list[dict], tokenizer: Any, num_ranks: int, args: Any) -> list[list[kit.Batch]]:
    """Return mini-batches with advantages, [mini_batch][rank]; all ranks make all of them."""
    if args.merge_steps or args.rewritten == "branch":
        steps = rl.merge_steps(steps, rewritten=args.rewritten)
    batch = kit.RolloutCollator(tokenizer)(steps)
    uids = batch.row_metadata["uids"]
    advantages = rl.compute_advantages(
        batch["rewards"],
        batch["response_mask"],
        uids,
        estimator="grpo",
        is_last_step=batch.row_metadata["is_last_step"],  # what a game earned goes to all its turns
    )
    boundaries = rl.mini_batch_boundaries(uids, args.prompts_per_mini_batch)  # whole games
    reduction = "token_mean" if args.loss == "ppo" else "sequence_mean"
    advantages = rl.normalize_advantages(
        advantages, batch["loss_mask"], boundaries, reduction=reduction
    )
    batch = batch.with_fields(advantages=advantages)
    if args.rewritten == "branch":
        return trees(steps, batch, tokenizer, num_ranks, args)
    return rl.stage_mini_batches(batch, boundaries, num_ranks, balance="tokens")


def trees(
    rollouts: list[dict], batch: kit.Batch, tokenizer: Any, num_ranks: int, args: Any
) -> list[list[kit.Batch]]:
    """Pack the branches of each rollout as a tree: what they share is computed once.

    A turn whose prompt does not begin with all tokens before it, since its history was rendered or
    cut anew, is a branch. `batch` has a row for each, and their advantages.
    """
    of_branches = iter(rl.response_values(batch["advantages"], batch))
    rollouts = [
        one | {"advantages": [next(of_branches) for _ in one["response_ids"]]} for one in rollouts
    ]
    longest = max(sum(map(len, one["prompt_ids"] + one["response_ids"])) for one in rollouts)
    layout = kit.ParallelLayout(dp=num_ranks)
    options = {"parallel": layout, "share_prefixes": True, "normalize_loss": False}
    collate = kit.PackedCollator(tokenizer, max_tokens=max(1024, longest), **options)
    uids = [one["uid"] for one in rollouts]
    bounds = pairwise(rl.mini_batch_boundaries(uids, args.prompts_per_mini_batch))
    return [collate(rollouts[first:stop]).chunk(num_ranks) for first, stop in bounds]


def response_log_probs(model: Any, batch: kit.Batch) -> torch.Tensor:
    """Return the log-probabilities of the trained tokens, [n], from the last A + 1 logits."""
    kept = {"logits_to_keep": batch.metadata["response_length"] + 1}
    logits = model(**batch.model_inputs("sdpa", labels=False), **kept).logits
    return kit.token_logps(logits, batch)


def policy_loss(model: Any, batch: kit.Batch, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's clipped loss, and [loss, clipped, divergence, number, largest |ratio - 1|].

    Ratios are of tokens, whose mean is taken over the mini-batch (ppo) or over each response first
    (grpo), or each is the geometric mean of its response (gspo). It is a plain sum:
    `normalize_advantages` has divided.
    """
    names = ("rollout_logprobs", "advantages")
    sampled, advantages = (trained_values(batch[name], batch) for name in names)
    logps = response_log_probs(model, batch)
    level = "geometric" if args.loss == "gspo" else "token"
    ratio, clip = rl.log_ratios(logps, sampled, batch, level=level).exp(), args.clip
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).sum()
    with torch.no_grad():
        moved = (ratio - 1).abs()
        divergence = rl.kl_estimates(sampled, logps).sum()  # of KL(rollout || policy)
        clipped, number = (moved > clip).sum().float(), loss.new_tensor(len(ratio))
        largest = moved.max() if len(moved) else number  # added rows alone: 0
    return loss, torch.stack([loss.detach(), clipped, divergence, number, largest])


def train_step(
    model: Any, batch: kit.Batch, optimizer: Any, accelerator: Accelerator, args: Any
) -> dict[str, float]:
    """Take an optimizer step on this rank's rows of a mini-batch, a few at a time."""
    sums, largest = torch.zeros(4, device=accelerator.device), []
    for part in batch.split(args.rows_per_micro_batch):
        synchronize = part.metadata["is_last_part"]
        with contextlib.nullcontext() if synchronize else accelerator.no_sync(model):
            loss, found = policy_loss(model, part.to(accelerator.device), args)
            accelerator.backward(loss * accelerator.num_processes)  # DDP averages over ranks
        sums += found[:4]
        largest.append(found[4])
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    loss, clipped, divergence, number = accelerator.reduce(sums, "sum").tolist()
    record = {"loss": loss, "grad_norm": float(grad_norm), "clip_fraction": clipped / number}
    record |= {"approx_kl": divergence / number}
    return record | {"max_ratio_error": accelerator.gather(torch.stack(largest).max()).max().item()}


def sample(
    player: Player, tokenizer: Any, iteration: int, accelerator: Accelerator, args: Any
) -> list[dict]:
    """Play this rank's share of the games; return the turns of all ranks."""
    games = make_games(args.prompts, args.seed, 2, iteration)
    own = len(games) // accelerator.num_processes
    first = accelerator.process_index * own
    repeated = [game for game in games[first : first + own] for _ in range(args.group_size)]
    turns = play(repeated, player, tokenizer, args.max_turns)
    return gather_object(turns)  # rank after rank, so a game's turns stay next to each other


def train(model: Any, tokenizer: Any, optimizer: Any, accelerator: Accelerator, args: Any) -> dict:
    """Play, collate and train in every iteration; return a summary."""
    player = model_player(accelerator.unwrap_model(model), tokenizer, args.max_new_tokens)
    bar = tqdm(range(args.iterations), disable=not accelerator.is_main_process)
    rank, num_games = accelerator.process_index, args.prompts * args.group_size
    rewards, steps = [], []
    took: Counter[str] = Counter()
    for iteration in bar:
        times = [time.perf_counter()]
        model.eval()
        steps = sample(player, tokenizer, iteration, accelerator, args)
        times.append(time.perf_counter())
        staged = stage(steps, tokenizer, accelerator.num_processes, args)
        times.append(time.perf_counter())
        model.train()
        updates = [train_step(model, parts[rank], optimizer, accelerator, args) for parts in staged]
        times.append(time.perf_counter())
        seconds = dict(zip(SECONDS, np.diff(times).tolist(), strict=True))
        rewards.append(sum(step["rewards"] for step in steps) / num_games)
        means = {name: float(np.mean([u[name] for u in updates])) for name in updates[0]}
        counts = [parts[0].step for parts in staged]
        num_cells = sum(step.num_cells for step in counts)
        record = {
            **{"iteration": iteration + 1, "mean_reward": rewards[-1], "updates": len(updates)},
            **{"mean_turns": len(steps) / num_games, **means},
            # until the first update the policy is the one that sampled, and all ratios are 1
            "max_ratio_error": updates[0]["max_ratio_error"],
            "rows": sum(len(part) for parts in staged for part in parts),
            "tokens": sum(step.num_tokens for step in counts),
            "padding": sum(s.padding * s.num_cells for s in counts) / num_cells,
        } | seconds
        took.update(seconds | {"updates": len(updates)})
        bar.set_postfix_str(
            f"reward {rewards[-1]:.2f}, turns {record['mean_turns']:.1f}, "
            f"clipped {record['clip_fraction']:.1%}, ratio error {record['max_ratio_error']:.0e}"
        )
        if accelerator.is_main_process:
            with open(args.output_dir / "metrics.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")
    if accelerator.is_main_process:  # the first game of the last iteration, from start to end
        last = next(step for step in steps if step["is_last_step"])
        print(tokenizer.decode([*last["prompt_ids"], *last["response_ids"]]))
    return {"first_reward": rewards[0], "last_reward": float(np.mean(rewards[-5:])), **took}


def main() -> None:
    args = parse_arguments()
    # fp32, also on a GPU: sampling and training then round alike, and ratios begin at 1
    accelerator = Accelerator(cpu=args.cpu, mixed_precision="no")
    num_ranks = accelerator.num_processes
    if args.prompts % num_ranks:
        fail(f"--prompts {args.prompts}: must be a multiple of the number of ranks, {num_ranks}")
    if args.cpu:  # `accelerate launch` and torchrun leave one thread
        torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 1) // num_ranks))
    try:  # on all ranks, so that all of them stop
        args.output_dir.mkdir(parents=True, exist_ok=True)
        if accelerator.is_main_process:
            (args.output_dir / "metrics.jsonl").write_text("")
    except OSError as error:
        fail(f"--output-dir {args.output_dir}: cannot be made and written to: {error.strerror}")
    set_seed(args.seed)
    began = time.perf_counter()
    tokenizer = make_game_tokenizer()
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    model = synthetic_chat.make_model(tokenizer, **options).to(accelerator.device)
    loss = warm_start(model, tokenizer, accelerator, args)
    summary = {"warm_start_seconds": time.perf_counter() - began, "warm_start_loss": loss}
    options = {"lr": args.learning_rate, "betas": (0.9, 0.98), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    seed = np.random.SeedSequence((args.seed, 3, accelerator.process_index))
    torch.manual_seed(int(seed.generate_state(1)[0]))  # every rank samples on its own
    summary |= train(model, tokenizer, optimizer, accelerator, args)
    if accelerator.is_main_process:
        alone = accelerator.unwrap_model(model)
        alone.save_pretrained(args.output_dir / "model")
        tokenizer.save_pretrained(args.output_dir / "model")
        (args.output_dir / "summary.json").write_text(json.dumps(summary, indent=2))
        print(*(f"{name:<24}{value:>12.4g}" for name, value in summary.items()), sep="\n")
        print(f"model, metrics and summary are in {args.output_dir}")
    model, optimizer = accelerator.free_memory(model, optimizer)  # DDP holds the process group
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main()
    except kit.DataError as error:
        fail(str(error))
