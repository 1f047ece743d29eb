"""Queries are dealt to nodes that come and go: nobody's are forgotten, none are worked on twice."""

import random

import pytest

from runtime.shares import SHARES, Dealing, Shares, SharesWorkload
from tasks import Query

QUERIES = [Query(id=i, prompt=str(i), answer=i) for i in range(1000)]


class Machine:
    """A node without processes: its table, and the workloads of its searchers."""

    def __init__(self, table: Shares, searchers: int):
        self.table = table
        self.workloads = [SharesWorkload(QUERIES, table, i, seed=0) for i in range(searchers)]
        self.under_way = []
        self.sent = []

    def work(self, rng: random.Random) -> None:
        """Draw some queries, finish some."""
        for workload in self.workloads:
            for _ in range(rng.randrange(6)):
                if work := workload.draw():
                    self.under_way.append((workload, work))
        rng.shuffle(self.under_way)
        for _ in range(rng.randrange(len(self.under_way) + 1)):
            workload, work = self.under_way.pop()
            workload.finish(work)
            self.sent.append((work.query.id, work.visit))

    def collect(self, brought: dict[int, int], give_up: int) -> tuple[list, dict, dict]:
        """What runtime/node.py does when it is asked."""
        for share, done in brought.items():
            self.table.take(share, done)
        given_up = self.table.give_up(give_up)
        self.table.deal(len(self.workloads))
        sent, self.sent = self.sent, []
        held = {v: (int(self.table.drawn[v]), int(self.table.done[v])) for v in self.table.held()}
        return sent, held, given_up


@pytest.mark.parametrize("here", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_no_query_arrives_from_two_nodes_in_an_epoch_and_no_share_is_forgotten(here, seed):
    rng, table = random.Random(seed), Shares(SHARES)
    dealing = Dealing(table, here)
    own, nodes, arrived, lost, number = Machine(table, here), {}, [], 0, 0
    for turn in range(350):
        if rng.random() < 0.03 and len(nodes) < 5:
            number += 1
            name, searchers = f"node {number}", rng.randint(1, 3)
            nodes[name] = Machine(Shares(SHARES), searchers)
            dealing.join(name, searchers)
        if rng.random() < 0.02 and nodes:
            name = rng.choice(sorted(nodes))
            node = nodes.pop(name)
            lost += len(node.under_way) + len(node.sent)
            dealing.lose(name)
        own.work(rng)
        for name, node in nodes.items():
            node.work(rng)
            if rng.random() < 0.5:
                sent, *said = node.collect(*dealing.next_call(name))
                arrived += sent
                dealing.answered(name, *said)
        dealing.balance()
        holders = [dealing.holders[name].shares for name in nodes]
        for share in range(SHARES):
            owners = sum(share in shares for shares in holders)
            owners += int(table.owner[share]) >= -1  # this machine
            assert owners == 1 or (owners == 0 and not nodes and not here), (turn, share)
    arrived += own.sent
    assert len(arrived) > 1000 and lost, "the test tests something"
    assert len(set(arrived)) == len(arrived), "a query came twice in an epoch"
    # The epochs that all shares have been through: each query was drawn, and came unless it was
    # under way somewhere that is lost.
    whole = min(int(table.drawn[v]) // (len(QUERIES) // SHARES + 1) for v in range(SHARES))
    missing = [(q.id, e) for q in QUERIES for e in range(whole) if (q.id, e) not in set(arrived)]
    under_way = len(own.under_way) + sum(len(node.under_way) for node in nodes.values())
    unsent = sum(len(node.sent) for node in nodes.values())
    assert whole > 0 and len(missing) <= lost + under_way + unsent


def test_each_node_gets_its_part_of_the_shares_within_a_few_calls():
    table = Shares(SHARES)
    dealing, rng = Dealing(table, 1), random.Random(0)
    own, far = Machine(table, 1), Machine(Shares(SHARES), 3)
    dealing.join("node", 3)
    for _ in range(5):
        own.work(rng)
        far.work(rng)
        _, *said = far.collect(*dealing.next_call("node"))
        dealing.answered("node", *said)
        dealing.balance()
    assert len(table.held()) == SHARES // 4
    assert sorted(len(far.table.of(i)) for i in range(3)) == [16, 16, 16]


@pytest.mark.parametrize("here, nodes", [(1, 2), (1, 16), (1, 40), (0, 3), (2, 5)])
def test_shares_are_dealt_evenly_to_any_number_of_nodes(here, nodes):
    table = Shares(SHARES)
    dealing, rng = Dealing(table, here), random.Random(0)
    own, far = Machine(table, here), {str(i): Machine(Shares(SHARES), 1) for i in range(nodes)}
    for name in far:
        dealing.join(name, 1)
    for _ in range(4):
        own.work(rng)
        for name, node in far.items():
            node.work(rng)
            _, *said = node.collect(*dealing.next_call(name))
            dealing.answered(name, *said)
        dealing.balance()
    held = [len(dealing.holders[name].shares) for name in far]
    assert sum(held) + len(table.held()) == SHARES
    even = SHARES / (here + nodes)
    assert (
        all(abs(number - even) <= 1 for number in held)
        and abs(len(table.held()) - even * here) <= 1
    )


def test_a_node_is_asked_once_for_what_others_want():
    table = Shares(SHARES)
    dealing, rng = Dealing(table, 0), random.Random(0)
    far = Machine(Shares(SHARES), 1)
    dealing.join("first", 1)
    for turn in range(8):
        far.work(rng)
        _, *said = far.collect(*dealing.next_call("first"))
        dealing.answered("first", *said)
        if turn == 1:
            dealing.join("second", 1)
    assert len(far.table.held()) == SHARES // 2


def test_what_a_searcher_had_done_before_it_was_started_again_is_not_repeated_by_another_node():
    table = Shares(SHARES)
    dealing, far = Dealing(table, 0), Machine(Shares(SHARES), 1)
    dealing.join("node", 1)
    dealing.answered("node", *far.collect(*dealing.next_call("node"))[1:])
    works = [far.workloads[0].draw() for _ in range(4 * SHARES)]
    for work in works[SHARES:]:  # the oldest of each share is slow
        far.workloads[0].finish(work)
    far.workloads = [SharesWorkload(QUERIES, far.table, 0, seed=0)]
    far.workloads[0].draw()
    dealing.answered("node", *far.collect(*dealing.next_call("node"))[1:])
    dealing.lose("node")
    other = Machine(Shares(SHARES), 1)
    dealing.join("other", 1)
    other.collect(*dealing.next_call("other"))
    drawn = {other.workloads[0].draw().query.id for _ in range(4 * SHARES)}
    assert not drawn & {work.query.id for work in works}


def test_a_searcher_that_is_started_again_goes_on_at_the_oldest_query_that_is_not_done():
    table = Shares(2)
    Dealing(table, 1)
    workload = SharesWorkload(QUERIES, table, 0, seed=0)
    works = [workload.draw() for _ in range(10)]
    for work in works[:4] + works[5:]:
        workload.finish(work)
    again = SharesWorkload(QUERIES, table, 0, seed=0)
    drawn = [again.draw() for _ in range(6)]
    assert works[4].query.id in [work.query.id for work in drawn]
    assert not {work.query.id for work in drawn} & {work.query.id for work in works[:4]}


def test_with_fewer_queries_than_shares_each_share_has_queries_of_its_own():
    table = Shares(3)
    Dealing(table, 1)
    few = QUERIES[:3]
    workload = SharesWorkload(few, table, 0, seed=0)
    assert {workload.draw().query.id for _ in range(3)} == {0, 1, 2}
