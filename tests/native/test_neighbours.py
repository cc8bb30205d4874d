"""Messages from memory to memory, between two ends in this process and between processes."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_zero.ops import Neighbours, available_isas

pytestmark = [
    pytest.mark.skipif(not available_isas(), reason="the compiled kernels were not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="copies between processes are Linux's"),
]
PATIENCE = 30.0
Pair = tuple[Neighbours, Neighbours]


def acquainted() -> Pair:
    """Two processes, as far as they know: places 0 and 1."""
    one, other = Neighbours(0, 2), Neighbours(1, 2)
    assert one.add(1, other.address)
    assert other.add(0, one.address)
    for each in (one, other):
        each.all_added()
    return one, other


@pytest.fixture
def pair() -> Pair:
    return acquainted()


@pytest.mark.parametrize("first", ["send", "receive"])
@pytest.mark.parametrize("numel", [1, 1000, 3_000_001])
def test_a_message_arrives(pair: Pair, first: str, numel: int) -> None:
    one, other = pair
    sent, received = torch.randn(numel), torch.full((numel,), float("nan"))
    ends = [lambda: one.send(1, 7, sent, PATIENCE), lambda: other.receive(0, 7, received, PATIENCE)]
    passages = [end() for end in (ends if first == "send" else reversed(ends))]
    for passage in passages:
        passage.wait()
    assert torch.equal(received, sent)


def test_both_directions_and_any_order_of_keys(pair: Pair) -> None:
    """More messages than a board has room for (64), received in the opposite order, each with its own bytes."""
    one, other = pair
    count = 200
    there = [torch.full((5,), float(i)) for i in range(count)]
    back = [torch.full((3,), -float(i), dtype=torch.float64) for i in range(count)]
    got_there, got_back = [torch.zeros(5) for _ in there], [torch.zeros(3, dtype=torch.float64) for _ in back]
    sends = [one.send(1, i, there[i], PATIENCE) for i in range(count)]
    sends += [other.send(0, i, back[i], PATIENCE) for i in range(count)]
    receives = [other.receive(0, i, got_there[i], PATIENCE) for i in reversed(range(count))]
    receives += [one.receive(1, i, got_back[i], PATIENCE) for i in reversed(range(count))]
    for passage in receives + sends:
        passage.wait()
    assert all(torch.equal(got, sent) for got, sent in zip(got_there + got_back, there + back, strict=True))


@pytest.mark.parametrize("numel", [1, 1000, 100_003])
def test_sums_are_in_the_order_of_places_on_every_end(numel: int) -> None:
    """Three ends, each adding what the others send: bit-equal to (a + b + c) * scale, and the terms stay as they are."""
    ends = [Neighbours(place, 3) for place in range(3)]
    for place, end in enumerate(ends):
        assert all(end.add(other, ends[other].address) for other in range(3) if other != place)
    terms = [torch.randn(numel) for _ in ends]
    wanted = (terms[0] + terms[1] + terms[2]) * 0.3
    before = [term.clone() for term in terms]
    outs = [torch.full((numel,), float("nan")) for _ in ends]
    sums = [end.sum(range(3), 4, terms[place], outs[place], 0.3, PATIENCE) for place, end in enumerate(ends)]
    assert not any(each.done() for each in sums)
    sends = [
        end.send(other, 4, terms[place], PATIENCE) for place, end in enumerate(ends) for other in range(3) if other != place
    ]
    for passage in sums + sends:
        passage.wait()
    assert all(torch.equal(out, wanted) for out in outs)
    assert all(torch.equal(term, old) for term, old in zip(terms, before, strict=True))


def test_a_sum_waits_for_all_and_a_term_of_another_size_fails_all(pair: Pair) -> None:
    one, other = pair
    out = torch.zeros(4)
    passages = [other.sum([0, 1], 1, torch.ones(4), out, 1.0, PATIENCE), one.send(1, 1, torch.ones(5), PATIENCE)]
    for passage in passages:
        with pytest.raises(RuntimeError, match="copying from memory to memory"):
            passage.wait()
    with pytest.raises(RuntimeError, match=r"did not come within 0\.2 s"):
        other.sum([0, 1], 2, torch.ones(4), out, 1.0, 0.2).wait()
    assert out.tolist() == [0] * 4


def test_a_key_comes_round_again(pair: Pair) -> None:
    one, other = pair
    for value in range(100):
        received = torch.empty(10)
        passages = [other.receive(0, 1, received, PATIENCE), one.send(1, 1, torch.full((10,), float(value)), PATIENCE)]
        for passage in passages:
            passage.wait()
        assert received.tolist() == [value] * 10


def test_what_does_not_come_is_late(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match=r"did not come within 0\.2 s"):
        pair[1].receive(0, 1, torch.empty(1), 0.2).wait()


def test_nobody_writes_to_a_tensor_whose_message_was_given_up(pair: Pair) -> None:
    one, other = pair
    abandoned, received = torch.zeros(4), torch.zeros(4)
    passage = other.receive(0, 1, abandoned, PATIENCE)
    del passage
    sent = one.send(1, 1, torch.ones(4), PATIENCE)
    time.sleep(0.05)
    assert abandoned.tolist() == [0] * 4
    other.receive(0, 1, received, PATIENCE).wait()
    sent.wait()
    assert received.tolist() == [1] * 4


def test_what_the_sender_gave_up_never_arrives(pair: Pair) -> None:
    one, other = pair
    passage = one.send(1, 1, torch.ones(4), PATIENCE)
    del passage
    received = torch.zeros(4)
    with pytest.raises(RuntimeError, match="did not come"):
        other.receive(0, 1, received, 0.2).wait()
    assert received.tolist() == [0] * 4


def test_sizes_that_differ_fail_at_both_ends(pair: Pair) -> None:
    one, other = pair
    received = torch.zeros(4)
    passages = [other.receive(0, 1, received, PATIENCE), one.send(1, 1, torch.ones(5), PATIENCE)]
    for passage in passages:
        with pytest.raises(RuntimeError, match="copying from memory to memory"):
            passage.wait()
    assert received.tolist() == [0] * 4


def test_memory_that_is_no_more_fails_at_both_ends(pair: Pair) -> None:
    one, other = pair
    nowhere = torch.zeros(4)
    native = one._native.send(1, 1, 8, nowhere.nbytes, nowhere)  # no process has anything at the address 8
    with pytest.raises(RuntimeError, match="Bad address"):
        other.receive(0, 1, torch.zeros(4), PATIENCE).wait()
    assert native.wait(PATIENCE) == 4


def test_an_end_that_is_gone() -> None:
    one, other = acquainted()
    passages = [other.receive(0, 1, torch.zeros(4), PATIENCE), other.send(0, 2, torch.zeros(4), PATIENCE)]
    del one
    for passage in passages:
        with pytest.raises(RuntimeError, match="ended"):
            passage.wait()


def test_a_send_alone_hears_that_its_peer_is_gone() -> None:
    """Its thread sleeps: nothing has been asked of it."""
    one, other = acquainted()
    time.sleep(0.05)
    passage = one.send(1, 1, torch.zeros(4), PATIENCE)
    del other
    with pytest.raises(RuntimeError, match="ended"):
        passage.wait()


def test_who_cannot_be_read_is_not_added() -> None:
    one, other = Neighbours(0, 2), Neighbours(1, 2)
    address = other.address
    for wrong in (
        replace(address, host="another machine"),
        replace(address, nonce=bytes(32)),
        replace(address, nonce_at=8),
        replace(address, board=1_000_000),
        replace(address, pid=2**22 + 1),
    ):
        assert not one.add(1, wrong)
    assert one.add(1, address)


ECHO = """
import pickle, sys, torch
from lightning_zero.ops import Neighbours
here = Neighbours(1, 2)
sys.stdout.buffer.write(pickle.dumps(here.address)); sys.stdout.flush()
assert here.add(0, pickle.load(sys.stdin.buffer))
while True:
    numbers = torch.empty(1000)
    here.receive(0, 1, numbers, 60.0).wait()
    here.send(0, 2, numbers + 1, 60.0).wait()
"""


@pytest.fixture(scope="module")
def echo() -> Iterator[tuple[subprocess.Popen, Neighbours]]:
    """Another process, which answers each message with the numbers after; and who has its acquaintance."""
    process = subprocess.Popen([sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin
    assert process.stdout
    here = Neighbours(0, 2)
    assert here.add(1, pickle.load(process.stdout))
    process.stdin.write(pickle.dumps(here.address))
    process.stdin.flush()
    yield process, here
    process.kill()
    process.communicate()


def ask(here: Neighbours, numbers: Tensor) -> Tensor:
    answer = torch.empty(1000)
    passages = [here.receive(1, 2, answer, PATIENCE), here.send(1, 1, numbers, PATIENCE)]
    for passage in reversed(passages):
        passage.wait()
    return answer


def test_another_process(echo: tuple[subprocess.Popen, Neighbours]) -> None:
    _, here = echo
    for _ in range(50):
        numbers = torch.randn(1000)
        assert torch.equal(ask(here, numbers), numbers + 1)


def in_a_fork(do: Callable[[], None]) -> int:
    """The exit status of a fork of this process that does it."""
    pid = os.fork()
    if pid == 0:
        do()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_forks_do_not_disturb(echo: tuple[subprocess.Popen, Neighbours]) -> None:
    """As those of data loaders, which end by letting everything go."""
    _, here = echo
    ends = [here]
    sent, answer = torch.ones(1000), torch.empty(1000)
    under_way = [here.receive(1, 2, answer, PATIENCE)]

    def let_go() -> None:
        under_way.clear()
        ends.clear()

    del here
    assert in_a_fork(let_go) == 0
    ends[0].send(1, 1, sent, PATIENCE).wait()
    under_way[0].wait()
    assert torch.equal(answer, sent + 1)


def test_a_process_that_is_killed(echo: tuple[subprocess.Popen, Neighbours]) -> None:
    """Nobody has reaped it yet: it is no longer there, but its id still is."""
    process, here = echo
    ask(here, torch.zeros(1000))
    passages = [here.receive(1, 5, torch.empty(10), PATIENCE), here.send(1, 6, torch.empty(10), PATIENCE)]
    process.send_signal(signal.SIGKILL)
    for passage in passages:
        with pytest.raises(RuntimeError, match="its process has ended"):
            passage.wait()
