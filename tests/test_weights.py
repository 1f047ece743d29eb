"""SharedWeights: no torn read, no waiting writer, no starved reader, even if one is killed."""

import contextlib
import signal
import time

import pytest
import torch
import torch.multiprocessing
from conftest import PATIENCE

from weights import SharedWeights, full_fence

SHAPES = {"embedding": (100, 1000), "bias": (1000,), "scale": (), "head": (1000, 100)}
VERSIONS = 200
spawn = torch.multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def fail_after_patience():
    def give_up(*_):
        raise TimeoutError(f"not done after {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(PATIENCE))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def weights() -> SharedWeights:
    """Of two readers, with a reference."""
    weights = SharedWeights(SHAPES, torch.float32, readers=2)
    weights.reference = SharedWeights(SHAPES, torch.float32, readers=2, slots=1)
    return weights


def tensors_of(version: int):
    """Every element of every tensor is the version."""
    return [(name, torch.full(shape, float(version))) for name, shape in SHAPES.items()]


def is_whole(version: int, tensors: dict[str, torch.Tensor]) -> bool:
    are_equal = [(tensor == version).all() for tensor in tensors.values()]
    return tensors.keys() == SHAPES.keys() and all(are_equal)


def test_publish_refuses_at_once_when_every_other_slot_is_read_and_works_again_later(weights):
    assert weights.publish(1, tensors_of(1))
    with weights.read(0) as (first, first_tensors):
        assert weights.publish(2, tensors_of(2))
        with weights.read(1) as (second, second_tensors):
            assert weights.publish(3, tensors_of(3))
            for _ in range(3):  # while the readers go on for ever
                assert not weights.publish(4, tensors_of(4), evaluate=True)
            # A refused publish leaves no trace.
            assert (weights.version, weights.evaluation_version) == (3, -1)
            assert (first, second) == (1, 2)
            assert is_whole(1, first_tensors) and is_whole(2, second_tensors)
        assert weights.publish(4, tensors_of(4))
    with weights.read(0) as (version, tensors):
        assert version == 4 and is_whole(4, tensors)


def test_a_reader_that_was_overtaken_before_its_pin_was_set_looks_again(weights):
    class PinsOvertaken:
        """Between the reader's look at the newest slot and its first pin, the writer publishes.

        It is in the middle of the next version, too.
        """

        def __init__(self, pins: torch.Tensor):
            self.pins, self.overtaken, self.tolist = pins, False, pins.tolist

        def __setitem__(self, reader: int, slot: int) -> None:
            if not self.overtaken:
                self.overtaken = True
                assert weights.publish(2, tensors_of(2))
                with pytest.raises(KeyError):  # one tensor of version 3 is written, no other
                    weights.publish(3, tensors_of(3)[:1])
            self.pins[reader] = slot

    weights.publish(1, tensors_of(1))
    weights.pins = PinsOvertaken(weights.pins)
    with weights.read(0) as (version, tensors):
        assert version == 2 and is_whole(2, tensors)


def test_a_version_that_a_reader_keeps_stays_whole_until_it_is_unpinned(weights):
    assert not weights.held()
    weights.publish(0, tensors_of(0))
    with weights.read(0, keep=True):
        pass
    for version in range(1, 10):
        assert weights.publish(version, tensors_of(version)), "the writer does not wait for it"
        assert all(is_whole(of, weights.held()[of]) for of in (0, version))
    weights.unpin(0)
    for version in (10, 11):
        weights.publish(version, tensors_of(version))
    assert 0 not in weights.held()


def test_reading_before_the_first_publish_raises_and_a_read_that_raises_has_ended(weights):
    with pytest.raises(RuntimeError, match="published"), weights.read(0):
        pass
    weights.publish(1, tensors_of(1))
    with pytest.raises(ZeroDivisionError), weights.read(0):
        raise ZeroDivisionError
    assert weights.pins.tolist() == [-1, -1]


def test_the_flag_for_an_evaluation_travels_with_the_version(weights):
    assert (weights.version, weights.evaluation_version) == (-1, -1)
    expected = [(1, False, -1), (2, True, 2), (3, False, 2), (4, True, 4)]
    for version, evaluate, evaluation_version in expected:
        weights.publish(version, tensors_of(version), evaluate=evaluate)
        assert (weights.version, weights.evaluation_version) == (version, evaluation_version)


@pytest.mark.parametrize(
    "change, error, problem",
    [
        *(({missing: None}, KeyError, missing) for missing in SHAPES),
        ({"stranger": torch.zeros(1)}, KeyError, "stranger"),
        # Which would broadcast.
        ({"embedding": torch.zeros(1000)}, ValueError, r"embedding .*\(1000,\), not \(100, 1000\)"),
    ],
)
def test_a_tensor_that_is_not_as_announced_is_never_published(change, error, problem, weights):
    weights.publish(1, tensors_of(1))
    sent = dict(tensors_of(2)) | change
    with pytest.raises(error, match=problem):
        weights.publish(2, [(name, value) for name, value in sent.items() if value is not None])
    assert weights.version == 1
    with weights.read(0) as (version, tensors):
        assert is_whole(1, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_matched_by_name_keep_their_shapes_and_are_cast_to_the_readers_dtype(dtype):
    shapes = {"a": (20, 30), "b": (30, 20), "c": ()}
    weights = SharedWeights(shapes, dtype, readers=1)
    sent = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    weights.publish(1, reversed(list(sent.items())))
    with weights.read(0) as (_, tensors):
        assert list(tensors) == list(shapes)
        for name, tensor in tensors.items():
            assert tensor.dtype == dtype and not tensor.requires_grad
            assert torch.equal(tensor, sent[name].detach().to(dtype))


def test_memory_is_taken_for_all_slots(weights):
    of_two_bytes = SharedWeights(SHAPES, torch.bfloat16, readers=1)
    sizes = [memory.nbytes / 201_001 for memory in of_two_bytes.memories + weights.memories]
    assert sizes == [2] * 3 + [4] * (3 + 1)


def test_later_versions_leave_the_reference_alone_and_unpin_is_for_both(weights):
    reference = weights.reference
    assert reference.version == -1
    assert reference.publish(4, tensors_of(4))
    for version in range(4, 12):
        weights.publish(version, tensors_of(version))
    assert reference.version == 4 and is_whole(4, reference.held()[4])
    with reference.read(0) as (version, tensors):
        assert version == 4 and is_whole(4, tensors)
        assert not reference.publish(12, tensors_of(12)), "refused while it is read"
        assert is_whole(4, tensors) and reference.version == 4
        weights.unpin(0)
        assert reference.publish(12, tensors_of(12))
        assert is_whole(12, tensors), "it is the one slot"


# Readers in processes of their own


@contextlib.contextmanager
def running(target, *arguments):
    """Processes that run the target, one for each of these tuples of arguments."""
    processes = [spawn.Process(target=target, args=of_one) for of_one in arguments]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def read_to_the_last(weights, reader: int, pause: float, num_reads, results) -> None:
    """A process: reads, `pause` seconds long each, until it has seen the last version.

    Sends (reader, versions seen, versions torn).
    """
    seen, torn = [], []
    while not seen or seen[-1] < VERSIONS:
        with weights.read(reader) as (version, tensors):
            whole_at_first = is_whole(version, tensors)
            time.sleep(pause)
            if not (whole_at_first and is_whole(version, tensors)):
                torn.append(version)
        seen.append(version)
        num_reads[reader] += 1
    results.put((reader, seen, torn))


# With three slots the last reader takes as long as some ten publishes.
@pytest.mark.parametrize("slots, pauses", [(3, [0.0, 0.001, 0.05]), (2, [0.0, 0.0])])
def test_every_read_is_one_version_whole_and_every_reader_gets_on(slots, pauses):
    weights = SharedWeights(SHAPES, torch.float32, readers=len(pauses), slots=slots)
    num_reads, results = torch.zeros(len(pauses), dtype=torch.int64).share_memory_(), spawn.Queue()
    arguments = [(weights, i, pause, num_reads, results) for i, pause in enumerate(pauses)]
    weights.publish(0, tensors_of(0))
    with running(read_to_the_last, *arguments) as readers:
        while num_reads.min() == 0:  # until all have started
            time.sleep(0.001)
        refused = 0
        for version in range(1, VERSIONS + 1):
            tensors = tensors_of(version)
            # Where all other slots are being read that is no error: try again.
            while not weights.publish(version, tensors):
                assert weights.version == version - 1, "what is being read stays as it is"
                refused += 1
                time.sleep(0.001)
            time.sleep(0.004)
            while num_reads.min() < version / 16:  # one has no core just now
                time.sleep(0.001)
        outcome = sorted(results.get() for _ in readers)
        for process in readers:
            process.join()
            assert process.exitcode == 0
    for reader, seen, torn in outcome:
        counts = f"{len(torn)} of {len(seen)} reads torn; {refused} publishes were refused"
        assert torn == [], f"reader {reader} saw {counts}"
        assert seen == sorted(seen)  # never back
        assert seen[-1] == VERSIONS
        assert len(set(seen)) >= 10


def read_and_never_end(weights: SharedWeights, inside: torch.Tensor) -> None:
    """A process: stays in the middle of a read of both the newest version and the reference."""
    with weights.reference.read(0), weights.read(0) as (version, tensors):
        tensors["head"].sum()
        inside[0] = version
        time.sleep(2 * PATIENCE)


def test_a_killed_reader_blocks_nobody_and_once_unpinned_no_slot(weights):
    inside = torch.tensor([-1]).share_memory_()
    for each in (weights, weights.reference):
        each.publish(0, tensors_of(0))
    with running(read_and_never_end, (weights, inside)) as (victim,):
        while inside[0] < 0:
            time.sleep(0.001)
        victim.kill()  # SIGKILL: nothing of the process's own cleans up
        victim.join()
    for version in range(1, 21):  # the writer goes on, and so does the other reader
        assert weights.publish(version, tensors_of(version))
        with weights.read(1) as (seen, tensors):
            assert seen == version and is_whole(version, tensors)
    with weights.read(1) as (seen, tensors):
        assert weights.publish(21, tensors_of(21))
        assert not weights.publish(22, tensors_of(22))  # the dead reader still holds the third slot
        assert not weights.reference.publish(22, tensors_of(22)), "and the reference's only one"
        weights.unpin(0)
        assert weights.publish(22, tensors_of(22))
        assert weights.reference.publish(22, tensors_of(22))
        assert seen == 20 and is_whole(20, tensors)
    with weights.read(0) as (seen, tensors):  # the restarted reader takes up the same pin
        assert seen == 22 and is_whole(22, tensors)


# The fence: a store must be seen before the load behind it


ROUNDS = 50_000
ENOUGH, ROUND_SECONDS = 1_000, 20  # fewer rounds where the machine is busy


def meet(side: int, words: torch.Tensor, arrived: torch.Tensor, saw: torch.Tensor, results) -> None:
    """A process: in each round, store the own word, then load the other's, as a reader does."""
    other, missed, deadline = 1 - side, 0, time.monotonic() + ROUND_SECONDS
    for i in range(1, ROUNDS + 1):
        if side == 0 and i > ENOUGH and time.monotonic() > deadline:
            i = -i  # the last round
        for step in range(3):
            if step == 1:
                words[side] = abs(i)
                full_fence()
                saw[side] = words[other]
            if step == 2:
                missed += bool((saw < abs(i)).all())
            arrived[side, step] = i
            while abs(int(arrived[other, step])) < abs(i):
                pass
        if i < 0 or int(arrived[other, 2]) < 0:
            break
    results.put((side, abs(i), missed))


def test_of_two_sides_that_store_and_then_load_one_sees_the_other():
    results = spawn.Queue()
    words, saw = (torch.zeros(2, dtype=torch.int64).share_memory_() for _ in range(2))
    arrived = torch.zeros(2, 3, dtype=torch.int64).share_memory_()
    with running(meet, *((side, words, arrived, saw, results) for side in (0, 1))):
        (_, rounds, missed), (_, same_rounds, missed_too) = sorted(results.get() for _ in range(2))
    assert rounds == same_rounds > ENOUGH
    assert (missed, missed_too) == (0, 0), f"in so many of {rounds} rounds neither saw the other"
