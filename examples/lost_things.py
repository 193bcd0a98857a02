"""A game of several turns in which a program knows the right answer: what grpo.py learns.

Somebody had a thing and may have passed it on; the player asks people, and then says where it is:

    Ada had the lamp.  ->  Ada?
    Ben has it.        ->  Ben?
    in the barn        ->  in the barn

An answer ends the game, so the player has to ask first, and whom to ask is in what it was told
last. Everything is a function of the seed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import synthetic_chat
import transformers

PEOPLE, PLACES = synthetic_chat.NAMES[:4], synthetic_chat.PLACES[:6]
THINGS = synthetic_chat.THINGS


@dataclass(frozen=True)
class Game:
    uid: str
    thing: str
    people: list[str]  # each passed it on to the next; the last put it away
    place: str

    def question(self) -> str:
        return f"{self.people[0]} had the {self.thing}."

    def reply(self, said: str) -> str | None:
        """What the player is told; None ends the game: an answer, or nonsense."""
        if said.removesuffix("?") not in PEOPLE or not said.endswith("?"):
            return None
        if said[:-1] not in self.people:
            return "not me"
        later = self.people[self.people.index(said[:-1]) + 1 :]
        return f"{later[0]} has it." if later else f"in the {self.place}"

    def reward(self, said: str) -> float:
        return float(said == f"in the {self.place}")


def make_games(count: int, *seed: int) -> list[Game]:
    """Games that are a function of the seed; half of the things were passed on."""
    rng, games = np.random.default_rng(np.random.SeedSequence(seed)), []
    for i in range(count):
        people = rng.choice(PEOPLE, rng.integers(1, 3), replace=False).tolist()
        uid = f"{'-'.join(map(str, seed))}-{i}"
        games.append(Game(uid, str(rng.choice(THINGS)), people, str(rng.choice(PLACES))))
    return games


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Of what is said in games: nearly every word is a token, and so are the roles."""
    said = [f"{person} had it. {person} has it. not me {person}?\n" for person in PEOPLE]
    said += [f" the {thing}. in the {place}" for thing in THINGS for place in PLACES]
    texts = said + ["user\nassistant\n", *PEOPLE] * len(said)
    return synthetic_chat.train_tokenizer([{"messages": [{"content": text}]} for text in texts])


def clumsy_turn(text: str, rng: np.random.Generator) -> str:
    """Speaks as one should, but mostly asks just anybody, and sometimes says just anything.

    A fifth of the time it guesses instead of asking.
    """
    told, owners = re.findall(r"in the (\w+)", text), re.findall(r"(\w+) ha[sd] ", text)
    if told or rng.random() < 0.2:
        return f"in the {told[0] if told and rng.random() < 0.9 else rng.choice(PLACES)}"
    return f"{owners[-1] if rng.random() < 0.3 else rng.choice(PEOPLE)}?"
