"""The rl helpers once more, a token at a time in Python floats: slow, obvious, from the contract.

Nothing here imports the package. Rows, masks and rewards are lists of lists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Grid = Sequence[Sequence[float]]


def prompt_starts(uids: Sequence[Any]) -> list[int]:
    starts = [i for i in range(len(uids)) if i == 0 or uids[i] != uids[i - 1]]
    return [*starts, len(uids)]


def mean_and_std(numbers: Sequence[float]) -> tuple[float, float]:
    """The std is unbiased, and 0 of one number."""
    mean = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))


class GroupOfOneError(Exception):
    pass


def outcome(
    scores: Sequence[float], estimator: str, epsilon: float, group_of_one: str
) -> list[float]:
    """The advantages of the scores of one group."""
    if len(scores) == 1:
        if group_of_one == "raise":
            raise GroupOfOneError
        return [0.0] if group_of_one == "zero" else [scores[0]]
    mean, std = mean_and_std(scores)
    advantages = []
    for i, score in enumerate(scores):
        if estimator == "grpo":
            advantages.append((score - mean) / (std + epsilon))
        elif estimator == "grpo_no_std":
            advantages.append(score - mean)
        elif estimator == "rloo":
            others = [*scores[:i], *scores[i + 1 :]]
            advantages.append(score - math.fsum(others) / len(others))
        elif estimator == "maxrl":
            advantages.append((score - mean) / (mean + epsilon))
    return advantages


def advantages(
    rewards: Grid,
    mask: Grid,
    uids: Sequence[Any],
    *,
    estimator: str,
    is_last_step: Sequence[bool] | None = None,
    trajectory_ids: Sequence[Any] | None = None,
    values: Grid | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    epsilon: float = 1e-6,
    group_of_one: str = "raise",
    whiten: bool = False,
) -> list[list[float]]:
    result = [[0.0] * len(row) for row in rewards]
    real = [i for i, row in enumerate(mask) if any(row)]
    if estimator in ("gae", "reinforce++"):
        for i in real:
            tokens = [t for t, valid in enumerate(mask[i]) if valid]
            for k, t in enumerate(tokens):
                if estimator == "gae":
                    assert values is not None
                    result[i][t] = _gae(tokens[k:], rewards[i], values[i], gamma, lam)
                else:
                    result[i][t] = sum(gamma**j * rewards[i][u] for j, u in enumerate(tokens[k:]))
        if estimator == "reinforce++" or whiten:
            cells = [(i, t) for i in real for t, valid in enumerate(mask[i]) if valid]
            if cells:
                mean, std = mean_and_std([result[i][t] for i, t in cells])
                for i, t in cells:
                    result[i][t] = (result[i][t] - mean) / (std + epsilon)
        return result
    trajectories: list[list[int]] = [[]]
    for i in real:
        trajectories[-1].append(i)
        is_last = is_last_step is None or is_last_step[i]
        if trajectory_ids is not None:
            name = uids[i], trajectory_ids[i]
            is_last = not any((uids[k], trajectory_ids[k]) == name for k in real if k > i)
        if is_last:
            trajectories.append([])
    assert not trajectories.pop()
    for uid in {uids[rows[0]] for rows in trajectories}:
        group = [rows for rows in trajectories if uids[rows[0]] == uid]
        scores = [math.fsum(math.fsum(rewards[i]) for i in rows) for rows in group]
        found = outcome(scores, estimator, epsilon, group_of_one)
        for rows, advantage in zip(group, found, strict=True):
            for i in rows:
                result[i] = [advantage if valid else 0.0 for valid in mask[i]]
    return result


def _gae(
    tokens: Sequence[int],
    rewards: Sequence[float],
    values: Sequence[float],
    gamma: float,
    lam: float,
) -> float:
    """The sum of (gamma * lam)^j * error_j over the tokens from here on."""
    total = 0.0
    for j, t in enumerate(tokens):
        after = values[tokens[j + 1]] if j + 1 < len(tokens) else 0.0
        total += (gamma * lam) ** j * (rewards[t] + gamma * after - values[t])
    return total


def normalized(
    advantages: Grid,
    mask: Grid,
    boundaries: Sequence[int],
    *,
    reduction: str,
    uids: Sequence[Any],
    max_response_length: int,
    z_score: bool,
    epsilon: float,
    count_masked_rows: bool,
) -> list[list[float]]:
    result = [[0.0] * len(row) for row in advantages]
    for m in range(len(boundaries) - 1):
        rows = range(boundaries[m], boundaries[m + 1])
        cells = [(i, t) for i in rows for t, weight in enumerate(mask[i]) if weight != 0]
        if not cells:
            continue
        mean, std = mean_and_std([advantages[i][t] for i, t in cells])
        counted = set(rows) if count_masked_rows else {i for i, _ in cells}
        for i, t in cells:
            value = advantages[i][t]
            if z_score:
                value = 0.0 if len(cells) == 1 else (value - mean) / (std + epsilon)
            of_row = len([1 for j, _ in cells if j == i])
            of_prompt = len([1 for j, _ in cells if uids[j] == uids[i]])
            result[i][t] = (
                value
                / {
                    "token_mean": len(cells),
                    "sequence_mean": len(counted) * of_row,
                    "prompt_mean": len({uids[j] for j in counted}) * of_prompt,
                    "constant_length_mean": len(counted) * max_response_length,
                }[reduction]
            )
    return result


def merged(examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merged examples, every column a list; of examples with lists and a reward a token."""
    result: list[dict[str, Any]] = []
    for example in examples:
        step = {k: list(v) if isinstance(v, list) else v for k, v in example.items()}
        previous = result[-1] if result else None
        if previous is None or not _continues(previous, step):
            result.append(step)
            continue
        tokens = previous["prompt_ids"] + previous["response_ids"]
        response = list(previous["response_ids"])
        columns = [k for k in ("loss_mask", "rewards", "logprobs") if k in step]
        joined = {key: list(previous[key]) for key in columns}
        for token in step["prompt_ids"][len(tokens) :]:
            response.append(token)
            for key in columns:
                joined[key].append(0)
        for k, token in enumerate(step["response_ids"]):
            response.append(token)
            for key in columns:
                joined[key].append(step[key][k])
        if "rollout_expert_indices" in step:
            # the row of the last token is a dummy: it was sampled and not read
            routes = previous["rollout_expert_indices"][: len(tokens) - 1]
            for t, route in enumerate(step["rollout_expert_indices"]):
                if t == len(routes):
                    routes.append(route)
                elif all(expert == -1 for layer in routes[t] for expert in layer):
                    routes[t] = route
            joined["rollout_expert_indices"] = routes
        result[-1] = {
            **step,
            **joined,
            "prompt_ids": previous["prompt_ids"],
            "response_ids": response,
        }
    return result


def _continues(previous: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    if previous["uid"] != step["uid"] or previous["is_last_step"]:
        return False
    tokens = previous["prompt_ids"] + previous["response_ids"]
    for key in ("pixel_values", "image_grid_thw"):
        images = previous.get(key) or []
        if (step.get(key) or [])[: len(images)] != images:
            return False
    return step["prompt_ids"][: len(tokens)] == tokens


def branched(
    steps: Sequence[Mapping[str, Any]], per_token: Sequence[str] = ("loss_mask", "logprobs")
) -> list[list[dict[str, Any]]]:
    """The branches of every trajectory, a dict each; ``per_token`` keys are 0 between responses.

    A step is added to the longest branch whose tokens its prompt begins with, of several equal
    ones to that which was added to last.
    """
    trajectories: list[list[dict[str, Any]]] = []
    ended = True
    for number, step in enumerate(steps):
        if ended or step["uid"] != steps[number - 1]["uid"]:
            trajectories.append([])
        ended, best = step["is_last_step"], None
        for branch in trajectories[-1]:
            tokens = branch["prompt_ids"] + branch["response_ids"]
            if step["prompt_ids"][: len(tokens)] == tokens:
                key = len(tokens), branch["steps"][-1]
                if best is None or key > best[0]:
                    best = key, branch
        if best is None:
            branch = {"prompt_ids": list(step["prompt_ids"]), "response_ids": [], "steps": []}
            trajectories[-1].append(branch | {key: [] for key in per_token})
        branch = trajectories[-1][-1] if best is None else best[1]
        known = len(branch["prompt_ids"]) + len(branch["response_ids"])
        for token in step["prompt_ids"][known:]:
            branch["response_ids"].append(token)
            for key in per_token:
                branch[key].append(0)
        for k, token in enumerate(step["response_ids"]):
            branch["response_ids"].append(token)
            for key in per_token:
                branch[key].append(step[key][k])
        branch["steps"].append(number)
    return trajectories


def response_values(values: Grid, mask: Grid) -> list[list[float]]:
    result = []
    for row, valid in zip(values, mask, strict=True):
        count = sum(1 for v in valid if v)
        result.append([float(row[len(row) - count + k]) for k in range(count)])
    return result


def log_ratios(new: Grid, old: Grid, level: str) -> list[list[float]]:
    """Of segments of trained tokens; NaN of the old policy: the ratio is 1."""
    result = []
    for logps, old_logps in zip(new, old, strict=True):
        pairs = zip(logps, old_logps, strict=True)
        ratios = [0.0 if math.isnan(b) else a - b for a, b in pairs]
        if level != "token":
            count = max(len(ratios), 1) if level == "geometric" else 1
            ratios = [math.fsum(ratios) / count] * len(ratios)
        result.append([min(max(ratio, -20.0), 20.0) for ratio in ratios])
    return result


def importance_weights(ratios: Grid, low: float, high: float, outside: str) -> list[list[float]]:
    def weight(ratio: float) -> float:
        given = math.exp(ratio)
        if low <= given <= high:
            return given
        return 0.0 if outside == "zero" else low if given < low else high

    return [[weight(ratio) for ratio in row] for row in ratios]


def kl_estimate(logp: float, ref: float, kind: str) -> float:
    d = 0.0 if math.isnan(ref) else ref - logp
    if kind == "k3":
        d = min(d, 20.0)
        return math.exp(d) - 1 - d
    return -d if kind == "k1" else d * d / 2


def rejected(ratios: Grid, rule: str, low: float, high: float) -> list[bool]:
    """What verl's ``rollout_rs`` drops, by its definition: of each token."""
    where, _, kind = rule.rpartition("_")
    result = []
    for row in ratios:
        k = [{"k1": -r, "k2": r * r / 2, "k3": math.exp(r) - 1 - r}[kind] for r in row]
        of = {
            "token": k,
            "seq_sum": [math.fsum(k)] * len(k),
            "seq_mean": [math.fsum(k) / max(len(k), 1)] * len(k),
            "seq_max": [max(k, default=0.0)] * len(k),
        }[where]
        least, most = (math.log(low), math.log(high)) if kind == "k1" else (-math.inf, high)
        result += [not least <= value <= most for value in of]
    return result
