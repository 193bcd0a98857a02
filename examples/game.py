"""A game of several turns, which grpo.py learns, with a clumsy player to imitate first."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import transformers
from synthetic_chat import NAMES, PLACES, THINGS, train_tokenizer

PEOPLE, HIDING_PLACES = NAMES[:4], PLACES[:6]


@dataclass(frozen=True)
class Game:
    """Where is the thing?

    Somebody had it and may have passed it on; the player asks people, and then says where it is.
    An answer ends the game, so the player has to ask first; the reply says whom to ask next.

        Ada had the lamp.  ->  Ada?
        Ben has it.        ->  Ben?
        in the barn        ->  in the barn
    """

    uid: str
    thing: str
    people: list[str]  # each passed it on to the next; the last put it away
    place: str

    def question(self) -> str:
        return f"{self.people[0]} had the {self.thing}."

    def reply(self, said: str) -> str | None:
        """Return the reply to the player; None ends the game: an answer, or nonsense."""
        if said.removesuffix("?") not in PEOPLE or not said.endswith("?"):
            return None
        if said[:-1] not in self.people:
            return "not me"
        later = self.people[self.people.index(said[:-1]) + 1 :]
        return f"{later[0]} has it." if later else f"in the {self.place}"

    def reward(self, said: str) -> float:
        return float(said == f"in the {self.place}")


def make_games(count: int, *seed: int) -> list[Game]:
    """Return games that are a function of the seed; half of the things were passed on."""
    rng, games = np.random.default_rng(np.random.SeedSequence(seed)), []
    for i in range(count):
        people = rng.choice(PEOPLE, rng.integers(1, 3), replace=False).tolist()
        uid = f"{'-'.join(map(str, seed))}-{i}"
        games.append(Game(uid, str(rng.choice(THINGS)), people, str(rng.choice(HIDING_PLACES))))
    return games


def make_game_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of what is said in games: nearly every word and role is a token."""
    said = [f"{person} had it. {person} has it. not me {person}?\n" for person in PEOPLE]
    said += [f" the {thing}. in the {place}" for thing in THINGS for place in HIDING_PLACES]
    texts = said + ["user\nassistant\n", *PEOPLE] * len(said)
    return train_tokenizer([{"messages": [{"content": text}]} for text in texts])


def clumsy_turn(text: str, rng: np.random.Generator) -> str:
    """Return a turn that is well formed, but asks just anybody, or guesses a fifth of the time."""
    told, owners = re.findall(r"in the (\w+)", text), re.findall(r"(\w+) ha[sd] ", text)
    if told or rng.random() < 0.2:
        return f"in the {told[0] if told and rng.random() < 0.9 else rng.choice(HIDING_PLACES)}"
    return f"{owners[-1] if rng.random() < 0.3 else rng.choice(PEOPLE)}?"
