"""Reach a number from another, a move a turn: episodes on a laptop. "7>30" wants "+1", "*2", ….

Each turn the model writes a move, and the environment answers with the number reached and the goal.
The base model is made here in seconds: it has the habit of random moves, and the format. What is
left for reinforcement learning is to plan.
"""

from collections.abc import Sequence
from functools import reduce

import numpy as np

from tasks import Query, Task
from tasks.support.presets import DEMO
from tasks.support.pupil import pupil

MOVES = {"+1": lambda n: n + 1, "*2": lambda n: 2 * n, "-3": lambda n: n - 3}
LARGEST = 99  # numbers are 1 to this
STARTS, GOALS = range(1, 31), range(1, 61)
FEWEST, MOST = 2, 5  # moves that a query needs
TEST_QUERIES = 200  # never trained on, neither here nor by reinforcement learning
TURNS = 8
EPISODES = dict(max_turns=TURNS, max_response_tokens=3, max_episode_tokens=80)
PRESETS = {"demo": DEMO | EPISODES | dict(steps=600, eval_every=200)}


class Reach(Task):
    """Reward: the fewest moves that reach the goal, divided by those that did; 0 if none did."""

    def queries(self, split: str) -> Sequence[Query]:
        found = [
            (start, goal, moves)  # the answer
            for start in STARTS
            for goal, moves in sorted(distances(start).items())
            if goal in GOALS and FEWEST <= moves <= MOST
        ]
        order = np.random.default_rng(0).permutation(len(found))
        chosen = order[:TEST_QUERIES] if split == "test" else order[TEST_QUERIES:]
        return [Query(int(i), "{}>{}".format(*found[i]), found[i]) for i in chosen]

    def reply(self, query: Query, turns: list[str]) -> str | None:
        start, goal, _ = query.answer
        number = reduce(move, turns, start)
        return None if number == goal else f"{number}>{goal}"

    def score(
        self, queries: list[Query], responses: list[list[str]], finished: list[bool]
    ) -> list[float]:
        return [
            query.answer[2] / len(turns) if has_reached else 0.0
            for query, turns, has_reached in zip(queries, responses, finished)
        ]

    def evaluate(self, queries, responses, finished, scores) -> dict[str, np.ndarray]:
        moves = np.array([float(len(turns)) for turns in responses])
        fewest = np.array([float(query.answer[2]) for query in queries])
        return {self.metric: scores, "solved": np.array(finished), "moves": moves, "fewest": fewest}

    def base_model(self) -> str:
        return pupil("reach", self.queries("train"), homework, characters="0123456789+*->")


def move(number: int, turn: str) -> int:
    """Make a move; a turn that is none, or would leave the numbers, changes nothing."""
    moved = MOVES[turn](number) if turn in MOVES else number
    return moved if 1 <= moved <= LARGEST else number


def distances(start: int) -> dict[int, int]:
    """Fewest moves from a number to each that can be reached: a breadth-first search."""
    found, latest = {start: 0}, [start]
    while latest:
        reached = {move(number, turn): found[number] + 1 for number in latest for turn in MOVES}
        latest = [number for number in reached if number not in found]
        found = reached | found
    return found


def homework(query: Query, rng: np.random.Generator) -> str:
    """The pupil's episode: random moves, until the goal is reached or TURNS are made."""
    number, goal, _ = query.answer
    text = ""
    for _ in range(TURNS):
        turn = str(rng.choice([turn for turn in MOVES if move(number, turn) != number]))
        number, text = move(number, turn), text + turn
        if number == goal:
            break
        text += f"<eos>{number}>{goal}"
    return text
