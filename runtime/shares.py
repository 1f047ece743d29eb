"""Which searcher of which node works on which queries, where nodes come and go (--ray).

The queries are dealt into a fixed number of shares. A share belongs to one searcher at a time, and
what is handed over between nodes is a whole share, with how far it was drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from runtime.workload import Work, Workload
from tasks import Query

SHARES = 64  # at most: enough to deal evenly to some dozens of searchers
NOBODY, ELSEWHERE = -1, -2  # in the place of a searcher: held here and free; held by another node


class Shares:
    """One node's table: a row for each share, in shared memory, without locks.

    The node writes a row while it is NOBODY's or ELSEWHERE, and may ask for one back; its searcher
    writes it while it is its own, and gives it up.
    """

    def __init__(self, number: int):
        self.owner = torch.full((number,), ELSEWHERE).share_memory_()
        self.is_wanted = torch.zeros(number, dtype=torch.int64).share_memory_()  # by the node
        # Queries of the share, all epochs counted: drawn, and done before the oldest that is not.
        self.drawn = torch.zeros(number, dtype=torch.int64).share_memory_()
        self.done = torch.zeros(number, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.owner)

    def of(self, searcher: int) -> list[int]:
        """Return the shares of a searcher, or of NOBODY."""
        return (self.owner == searcher).nonzero()[:, 0].tolist()

    def held(self) -> list[int]:
        """Return the shares that this node holds."""
        return (self.owner != ELSEWHERE).nonzero()[:, 0].tolist()

    def take(self, share: int, done: int | None = None) -> None:
        """Begin to hold a share. done: where to go on, if the table does not know."""
        self.done[share] = self.done[share] if done is None else done
        self.drawn[share] = self.done[share]
        self.is_wanted[share] = 0
        self.owner[share] = NOBODY

    def deal(self, searchers: int) -> None:
        """Give each free share to the one of so many searchers that has the fewest."""
        for share in self.of(NOBODY) if searchers else ():
            self.owner[share] = min(range(searchers), key=lambda i: len(self.of(i)))

    def give_up(self, number: int) -> dict[int, int]:
        """Ask searchers for so many shares. Returns those that are free by now: share -> drawn."""
        own = [share for share in self.held() if not self.is_wanted[share]]
        for share in own[: max(0, number - int(self.is_wanted.sum()))]:
            self.is_wanted[share] = 1
        free = {v: int(self.drawn[v]) for v in self.of(NOBODY) if self.is_wanted[v]}
        for share, drawn in free.items():
            self.is_wanted[share], self.owner[share] = 0, ELSEWHERE
            self.done[share] = drawn  # what is under way here comes from here
        return free


@dataclass
class Holder:
    """A further node, as far as shares go."""

    searchers: int
    shares: set[int] = field(default_factory=set)  # that it holds, or that are on their way to it
    brought: dict[int, int] = field(default_factory=dict)  # on their way: how far they were drawn
    give_up: int = 0  # so many of its shares are wanted by others


class Dealing:
    """Moves whole shares between nodes, until each has as many as its searchers are of all.

    table: this machine's, which also knows how far the shares of other nodes are. here: searchers
    of this machine.
    """

    def __init__(self, table: Shares, here: int):
        self.table, self.here = table, here
        self.pool = set(range(len(table)))  # shares that nobody holds
        self.holders: dict[str, Holder] = {}  # further nodes
        self.balance()

    def join(self, name: str, searchers: int) -> None:
        """A node can hold shares from now on."""
        self.holders[name] = Holder(searchers)
        self.balance()

    def lose(self, name: str) -> int:
        """Give a lost node's shares to the others. Returns how many it held.

        They go on behind what it has drawn: what it had under way is lost, and nothing that it sent
        is generated once more.
        """
        holder = self.holders.pop(name, Holder(0))
        for share in holder.shares:
            self.table.done[share] = self.table.drawn[share]
        self.pool |= holder.shares
        self.balance()
        return len(holder.shares)

    def balance(self) -> None:
        """Ask for the shares that some have too many of; give those that nobody holds."""
        table, here, holders = self.table, self.here, list(self.holders.values())
        searchers = here + sum(holder.searchers for holder in holders)
        if not searchers:
            return
        # What each has of all shares in turn, rounded: together they are all.
        ends = np.cumsum([here, *(h.searchers for h in holders)]) * len(table) // searchers
        parts = np.diff(ends, prepend=0).tolist()
        lacking = [part - len(h.shares) for h, part in zip(holders, parts[1:])]
        wanted = sum(max(0, number) for number in lacking) - len(self.pool)
        if here:
            surplus = len(table.held()) - parts[0]
            self.pool |= table.give_up(max(0, min(wanted, surplus))).keys()
        for holder, number in zip(holders, lacking):
            holder.give_up = max(0, -number)
            for _ in range(min(len(self.pool), number)):
                self.bring(holder, self.pool.pop())
        while self.pool:  # what is left over
            share = self.pool.pop()
            if here:
                table.take(share)
            else:
                self.bring(min(holders, key=lambda holder: len(holder.shares)), share)
        table.deal(here)

    def bring(self, holder: Holder, share: int) -> None:
        holder.shares.add(share)
        holder.brought[share] = int(self.table.done[share])

    def next_call(self, name: str) -> tuple[dict[int, int], int]:
        """Return the shares that a call brings to a node, and how many it shall give up."""
        holder = self.holders.get(name, Holder(0))
        brought, holder.brought = holder.brought, {}
        return brought, holder.give_up

    def answered(
        self, name: str, held: dict[int, tuple[int, int]], given_up: dict[int, int]
    ) -> None:
        """Note what a node says: of shares that it holds drawn and done, of others drawn."""
        for share, (drawn, done) in held.items():
            self.table.drawn[share], self.table.done[share] = drawn, done
        for share, drawn in given_up.items():
            self.table.drawn[share] = self.table.done[share] = drawn
            self.holders[name].shares.remove(share)
            self.holders[name].give_up -= 1
            self.pool.add(share)


class SharesWorkload(Workload):
    """Free-running search over the shares that are this searcher's at the moment, in turns.

    searcher: its number on the node. A searcher that is started again goes on at the oldest query
    that is not done.
    """

    def __init__(self, queries: Sequence[Query], shares: Shares, searcher: int, seed: int):
        self.queries, self.shares, self.share, self.seed = queries, shares, searcher, seed
        self.own: dict[int, Workload] = {}
        self.turns: list[int] = []
        self.of: dict[str, int] = {}  # the share of each request that is not finished
        self.look()

    def look(self) -> None:
        """Take the shares that were dealt to this searcher, give up those that are wanted back."""
        dealt = set(self.shares.of(self.share))
        for share in [v for v in dealt if self.shares.is_wanted[v]]:
            dealt.remove(share)
            self.own.pop(share, None)
            self.shares.owner[share] = NOBODY
        for share in dealt - self.own.keys():
            cursor = int(self.shares.done[share])
            self.own[share] = Workload(self.queries, share, len(self.shares), self.seed, cursor)

    @property
    def num_queries(self) -> int:
        return sum(workload.num_queries for workload in self.own.values())

    @property
    def cursor(self) -> int:
        """How much was drawn: it seeds the engine of a searcher that is started again."""
        return sum(workload.num_drawn for workload in self.own.values())

    def draw(self) -> Work | None:
        self.look()
        if not self.turns:
            self.turns = sorted(self.own)
        while self.turns:
            share = self.turns.pop()
            if workload := self.own.get(share):
                work = workload.draw()
                self.of[work.request] = share
                # Started again it draws some once more; whoever gets the share later does not.
                self.shares.drawn[share] = max(int(self.shares.drawn[share]), workload.num_drawn)
                return work
        return None

    def finish(self, work: Work) -> None:
        share = self.of.pop(work.request)
        workload = self.own.get(share)
        if workload and work.index in workload.unfinished:  # else it was given up meanwhile
            workload.finish(work)
            self.shares.done[share] = workload.cursor
