"""Reach a number from another, a move a turn: episodes on a laptop. "5>11" wants "*2", "+1".

Each turn the model writes a move, and the environment answers with the number reached.
The base model is made here in seconds: it has the habit of random moves, and the format. What is
left for reinforcement learning is to plan.
"""

from collections.abc import Sequence
from functools import reduce

import numpy as np

from tasks import Query, Task
from tasks.arithmetic import DEMO

MOVES = {"+1": lambda n: n + 1, "*2": lambda n: 2 * n, "-3": lambda n: n - 3}
LARGEST = 12  # numbers are 1 to this
FEWEST, MOST = 1, 4  # moves that a query needs
TEST_QUERIES = 30  # never trained on, neither here nor by reinforcement learning
TURNS = 6
TOKENS = [*map(str, range(LARGEST, 0, -1)), ">", *MOVES]
EPISODES = dict(max_turns=TURNS, max_response_tokens=2, max_episode_tokens=28)
BATCH = dict(queries_per_batch=16, tokens_per_micro_batch=5000, initial_responses=500)
LENGTH = dict(steps=900, eval_every=300, learning_rate=7e-4, warmup_steps=100)
PRESETS = {"demo": DEMO | EPISODES | BATCH | LENGTH}


class Reach(Task):
    """Reward: the fewest moves that reach the goal, divided by those that did; 0 if none did."""

    def queries(self, split: str) -> Sequence[Query]:
        found = [
            (start, goal, moves)  # the answer
            for start in range(1, LARGEST + 1)
            for goal, moves in sorted(distances(start).items())
            if FEWEST <= moves <= MOST
        ]
        order = np.random.default_rng(0).permutation(len(found))
        chosen = order[:TEST_QUERIES] if split == "test" else order[TEST_QUERIES:]
        return [Query(int(i), "{}>{}".format(*found[i]), found[i]) for i in chosen]

    def reply(self, query: Query, turns: list[str]) -> str | None:
        start, goal, _ = query.answer
        number = reduce(move, turns, start)
        return None if number == goal else str(number)

    def score(
        self, queries: list[Query], responses: list[list[str]], finished: list[bool]
    ) -> list[float]:
        return [
            query.answer[2] / len(turns) if has_reached else 0.0
            for query, turns, has_reached in zip(queries, responses, finished)
        ]

    def evaluate(self, queries, responses, finished, scores) -> dict[str, np.ndarray]:
        made = [len(turns) if is_done else TURNS for turns, is_done in zip(responses, finished)]
        fewest = [query.answer[2] for query in queries]
        found = {self.metric: scores, "solved": finished, "moves": made, "fewest": fewest}
        return {name: np.array(values, float) for name, values in found.items()}

    def base_model(self) -> str:
        from tasks.support.pretraining import pupil

        return pupil("reach", self.queries("train"), homework, steps=100, tokens=TOKENS)


def move(number: int, turn: str) -> int:
    """Make a move; a turn that is none, or would leave the numbers, changes nothing."""
    moved = MOVES[turn](number) if turn in MOVES else number
    return moved if 1 <= moved <= LARGEST else number


def distances(start: int) -> dict[int, int]:
    """Fewest moves from a number to each that can be reached: a breadth-first search."""
    found, latest = {start: 0}, {start}
    while latest:
        moves = found[min(latest)] + 1
        latest = {move(number, turn) for number in latest for turn in MOVES} - found.keys()
        found |= dict.fromkeys(latest, moves)
    return found


def homework(query: Query, rng: np.random.Generator) -> str:
    """The pupil's episode: random moves, until the goal is reached or TURNS are made."""
    number, goal, _ = query.answer
    parts = []
    while number != goal and len(parts) < 2 * TURNS:
        turn = str(rng.choice([turn for turn in MOVES if move(number, turn) != number]))
        number = move(number, turn)
        parts += [turn, f"<eos>{number}"]
    return "".join(parts[:-1])
