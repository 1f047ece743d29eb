"""SharedWeights: no torn read, no waiting writer, no starved reader, whoever is slow or killed."""

import contextlib
import signal
import time

import pytest
import torch
import torch.multiprocessing
from conftest import PATIENCE

import weights as weights_module
from weights import SharedWeights

SHAPES = {"embedding": (100, 1000), "bias": (1000,), "scale": (), "head": (1000, 100)}
VERSIONS = 200
spawn = torch.multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def whoever_waits_for_ever_fails():
    def give_up(*_):
        raise TimeoutError(f"not done after {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(PATIENCE))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def tensors_of(version: int):
    """Every element of every tensor is the version."""
    return [(name, torch.full(shape, float(version))) for name, shape in SHAPES.items()]


def make_weights(readers: int) -> SharedWeights:
    return SharedWeights(SHAPES, torch.float32, readers, reference=True)


def is_whole(version: int, tensors: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == SHAPES.keys() and all(
        (tensor == version).all() for tensor in tensors.values()
    )


def read_to_the_last(
    weights: SharedWeights, reader: int, pause: float, reads: torch.Tensor, results
) -> None:
    """A process: reads, `pause` seconds long each, until it has seen the last version.

    Sends (reader, versions seen, versions torn).
    """
    torch.set_num_threads(1)
    seen, torn = [], []
    while not seen or seen[-1] < VERSIONS:
        with weights.read(reader) as (version, tensors):
            whole_at_first = is_whole(version, tensors)
            time.sleep(pause)
            if not (whole_at_first and is_whole(version, tensors)):
                torn.append(version)
        seen.append(version)
        reads[reader] += 1
    results.put((reader, seen, torn))


def read_and_never_end(weights: SharedWeights, reader: int, inside: torch.Tensor) -> None:
    """A process: stays in the middle of a read."""
    with weights.read(reader) as (version, tensors):
        tensors["head"].sum()
        inside[0] = version
        time.sleep(2 * PATIENCE)


@contextlib.contextmanager
def running(*processes):
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_every_read_is_one_version_whole_and_every_reader_gets_on():
    weights, results = make_weights(readers=3), spawn.Queue()
    reads = torch.zeros(3, dtype=torch.int64).share_memory_()
    pauses = [0.0, 0.001, 0.05]  # the last reader takes as long as some ten publishes
    readers = [
        spawn.Process(target=read_to_the_last, args=(weights, i, pause, reads, results))
        for i, pause in enumerate(pauses)
    ]
    weights.publish(0, tensors_of(0))
    with running(*readers):
        while reads.min() == 0:  # until all three have started
            time.sleep(0.001)
        refused = 0
        for version in range(1, VERSIONS + 1):
            tensors = tensors_of(version)
            while not weights.publish(
                version, tensors
            ):  # both other slots are being read: not an error, try again
                refused += 1
                time.sleep(0.001)
            time.sleep(0.004)
        outcome = sorted(results.get() for _ in readers)
        for process in readers:
            process.join()
            assert process.exitcode == 0
    for reader, seen, torn in outcome:
        assert torn == [], (
            f"reader {reader} saw {len(torn)} of {len(seen)} reads torn; "
            f"{refused} publishes were refused"
        )
        assert seen == sorted(seen)  # never back
        assert seen[-1] == VERSIONS
        assert len(set(seen)) >= 10


def test_a_killed_reader_blocks_nobody():
    weights = make_weights(readers=2)
    inside = torch.tensor([-1]).share_memory_()
    victim = spawn.Process(target=read_and_never_end, args=(weights, 0, inside))
    weights.publish(0, tensors_of(0))
    with running(victim):
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
        weights.unpin(0)
        assert weights.publish(22, tensors_of(22))
        assert seen == 20 and is_whole(20, tensors)
    with weights.read(0) as (seen, tensors):  # the restarted reader takes up the same pin
        assert seen == 22 and is_whole(22, tensors)


def test_publish_refuses_at_once_when_every_other_slot_is_read_and_works_again_later():
    weights = make_weights(readers=2)
    assert weights.publish(1, tensors_of(1))
    with weights.read(0) as (first, first_tensors):
        assert weights.publish(2, tensors_of(2))
        with weights.read(1) as (second, second_tensors):
            assert weights.publish(3, tensors_of(3))
            for _ in range(3):  # while the readers go on for ever
                assert not weights.publish(4, tensors_of(4), evaluate=True)
            assert (weights.version, weights.evaluation_version) == (
                3,
                -1,
            )  # a refused publish leaves no trace
            assert (first, second) == (1, 2)
            assert is_whole(1, first_tensors) and is_whole(2, second_tensors)
        assert weights.publish(4, tensors_of(4))
    with weights.read(0) as (version, tensors):
        assert version == 4 and is_whole(4, tensors)


def test_a_reader_that_was_overtaken_before_its_pin_was_set_looks_again():
    weights = make_weights(readers=1)

    class PinsOvertaken:
        """Between the reader's look at the newest slot and its first pin, the writer publishes.

        It is in the middle of the next version, too.
        """

        def __init__(self, pins: torch.Tensor):
            self.pins = pins
            self.overtaken = False

        def __setitem__(self, reader: int, slot: int) -> None:
            if not self.overtaken:
                self.overtaken = True
                assert weights.publish(2, tensors_of(2))
                with pytest.raises(KeyError):
                    weights.publish(
                        3, tensors_of(3)[:1]
                    )  # one tensor of version 3 is written, the others are not
            self.pins[reader] = slot

        def tolist(self) -> list[int]:
            return self.pins.tolist()

    weights.publish(1, tensors_of(1))
    weights.pins = PinsOvertaken(weights.pins)
    with weights.read(0) as (version, tensors):
        assert version == 2 and is_whole(2, tensors)


def test_a_version_that_a_reader_keeps_stays_whole_until_it_is_unpinned():
    weights = make_weights(readers=2)
    weights.publish(1, tensors_of(1))
    with weights.read(0, keep=True):
        pass
    for version in range(2, 10):
        assert weights.publish(version, tensors_of(version)), "the writer does not wait for it"
        assert is_whole(1, weights.held()[1])
    weights.unpin(0)
    for version in (10, 11):
        weights.publish(version, tensors_of(version))
    assert 1 not in weights.held()


def test_a_read_ends_with_an_exception_too():
    weights = make_weights(readers=1)
    weights.publish(1, tensors_of(1))
    with pytest.raises(ZeroDivisionError), weights.read(0):
        raise ZeroDivisionError
    assert weights.pins.tolist() == [-1]


def test_the_flag_for_an_evaluation_travels_with_the_version():
    weights = make_weights(readers=1)
    assert (weights.version, weights.evaluation_version) == (-1, -1)
    expected = [(1, False, -1), (2, True, 2), (3, False, 2), (4, True, 4)]
    for version, evaluate, evaluation_version in expected:
        weights.publish(version, tensors_of(version), evaluate=evaluate)
        assert (weights.version, weights.evaluation_version) == (version, evaluation_version)


def test_reading_before_the_first_publish_is_an_error():
    weights = make_weights(readers=1)
    with pytest.raises(RuntimeError, match="published"), weights.read(0):
        pass


@pytest.mark.parametrize("missing", SHAPES)
def test_a_missing_tensor_is_named_and_nothing_is_published(missing):
    weights = make_weights(readers=1)
    weights.publish(1, tensors_of(1))
    with pytest.raises(KeyError, match=missing):
        weights.publish(2, [(name, tensor) for name, tensor in tensors_of(2) if name != missing])
    assert weights.version == 1
    with weights.read(0) as (version, tensors):
        assert is_whole(1, tensors)


def test_a_tensor_that_was_not_announced_is_an_error():
    weights = make_weights(readers=1)
    with pytest.raises(KeyError, match="stranger"):
        weights.publish(1, [*tensors_of(1), ("stranger", torch.zeros(1))])
    assert weights.version == -1


def test_tensors_are_matched_by_name_and_keep_their_shapes():
    shapes = {"a": (2, 3), "b": (3, 2), "c": ()}
    weights = SharedWeights(shapes, torch.float32, readers=1)
    sent = {"a": torch.rand(2, 3), "b": torch.rand(3, 2), "c": torch.rand(())}
    weights.publish(1, reversed(list(sent.items())))
    with weights.read(0) as (_, tensors):
        assert list(tensors) == list(shapes)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, sent[name])


def test_published_tensors_are_cast_to_the_readers_dtype():
    weights = SharedWeights({"a": (1000,)}, torch.bfloat16, readers=1)
    sent = torch.nn.Parameter(torch.randn(1000))
    weights.publish(1, [("a", sent)])
    with weights.read(0) as (_, tensors):
        assert tensors["a"].dtype == torch.bfloat16
        assert not tensors["a"].requires_grad
        assert torch.equal(tensors["a"], sent.detach().bfloat16())


def test_the_required_bytes_are_those_of_all_slots():
    weights = SharedWeights(SHAPES, torch.bfloat16, readers=1)
    assert (
        SharedWeights.required_bytes(SHAPES, torch.bfloat16)
        == sum(slot.nbytes for slot in weights.slots)
        == 3 * 2 * 201_001
    )
    assert weights.reference.nbytes == 0
    weights = SharedWeights(SHAPES, torch.bfloat16, readers=1, reference=True)
    assert (
        SharedWeights.required_bytes(SHAPES, torch.bfloat16, reference=True)
        == 3 * 2 * 201_001 + weights.reference.nbytes
    )
    assert weights.reference.nbytes == 4 * 201_001


# The fence: a store must be seen before the load behind it


ROUNDS = 50_000
ENOUGH, ROUND_SECONDS = 1_000, 20  # fewer rounds where the machine is busy


def meet(side: int, words: torch.Tensor, arrived: torch.Tensor, saw: torch.Tensor, results) -> None:
    """A process: in each round, store the own word, then load the other's, as the protocols do."""
    torch.set_num_threads(1)
    other, missed, deadline = 1 - side, 0, time.monotonic() + ROUND_SECONDS
    for i in range(1, ROUNDS + 1):
        if side == 0 and i > ENOUGH and time.monotonic() > deadline:
            i = -i  # the last round
        for step in range(2):
            if step == 1:
                words[side] = abs(i)
                weights_module.full_fence()
                saw[side] = words[other]
            arrived[side, step] = i
            while abs(int(arrived[other, step])) < abs(i):
                pass
        missed += bool((saw < abs(i)).all())
        arrived[side, 2] = i
        while abs(int(arrived[other, 2])) < abs(i):
            pass
        if i < 0 or int(arrived[other, 2]) < 0:
            break
    results.put((side, abs(i), missed))


def test_of_two_sides_that_store_and_then_load_one_sees_the_other():
    results = spawn.Queue()
    words = torch.zeros(2, dtype=torch.int64).share_memory_()
    saw = torch.zeros(2, dtype=torch.int64).share_memory_()
    arrived = torch.zeros(2, 3, dtype=torch.int64).share_memory_()
    sides = [
        spawn.Process(target=meet, args=(side, words, arrived, saw, results)) for side in (0, 1)
    ]
    with running(*sides):
        outcome = sorted(results.get() for _ in sides)
    (_, rounds, missed), (_, same_rounds, missed_too) = outcome
    assert rounds == same_rounds > ENOUGH
    assert (missed, missed_too) == (0, 0), f"in so many of {rounds} rounds neither saw the other"


# The slot of the reference policy

REFERENCES = 50


def read_references(weights: SharedWeights, reader: int, num_seen: torch.Tensor, results) -> None:
    """A process: reads the reference until it has seen the last.

    Sends (versions seen, versions torn).
    """
    torch.set_num_threads(1)
    seen, torn = [0], []
    num_seen[reader] = 1
    while seen[-1] < REFERENCES:
        if weights.reference_version in (seen[-1], weights_module.WRITING):
            continue
        with weights.read_reference(reader) as (version, tensors):
            if version == weights_module.WRITING:
                continue
            if not is_whole(version, tensors):
                torn.append(version)
        seen.append(version)
        num_seen[reader] = len(seen)
    results.put((seen, torn))


def test_every_reference_that_is_read_is_one_version_whole():
    weights, results = make_weights(readers=2), spawn.Queue()
    num_seen = torch.zeros(2).share_memory_()
    readers = [
        spawn.Process(target=read_references, args=(weights, i, num_seen, results))
        for i in range(2)
    ]
    with running(*readers):
        while not num_seen.all():
            time.sleep(0.001)
        for version in range(1, REFERENCES + 1):
            while not weights.publish_reference(version, tensors_of(version)):
                assert weights.reference_version == version - 1, "what is being read stays as it is"
                time.sleep(0.0002)
            time.sleep(0.002)
            while version % 4 == 0 and num_seen.min() <= version / 4:  # one has no core just now
                time.sleep(0.001)
        for seen, torn in (results.get() for _ in readers):
            assert torn == [] and seen == sorted(set(seen)) and len(seen) > 10


def test_later_versions_leave_the_reference_alone_until_it_is_published_anew():
    weights = make_weights(readers=1)
    assert weights.reference_version == 0, "the policy that the run began with"
    weights.publish_reference(4, tensors_of(4))
    for version in range(4, 12):
        weights.publish(version, tensors_of(version))
    with weights.read_reference(0) as (version, tensors):
        assert version == 4 and is_whole(4, tensors)
        assert not weights.publish_reference(12, tensors_of(12)), "refused while it is read"
    assert (weights.reference_version, is_whole(4, weights.reference_tensors())) == (4, True)
    assert weights.publish_reference(12, tensors_of(12)) and is_whole(
        12, weights.reference_tensors()
    )


def test_a_reader_that_comes_upon_the_writer_of_the_reference_is_told():
    weights = make_weights(readers=1)

    def tensors():
        with weights.read_reference(0) as (version, _):
            assert version == weights_module.WRITING
        yield from tensors_of(3)

    assert weights.publish_reference(3, tensors())
    assert weights.reference_version == 3


def test_a_reader_killed_while_it_read_the_reference_is_unpinned_with_the_rest():
    weights = make_weights(readers=2)
    weights.reference_pins[1] = 1
    assert not weights.publish_reference(2, tensors_of(2))
    weights.unpin(1)
    assert weights.publish_reference(2, tensors_of(2))


def test_a_tensor_of_another_shape_is_refused_even_where_it_would_broadcast():
    weights = SharedWeights({"a": (4, 3)}, torch.float32, readers=1)
    with pytest.raises(ValueError, match=r"a has shape \(3,\), not \(4, 3\)"):
        weights.publish(1, [("a", torch.zeros(3))])
    assert weights.version == -1
