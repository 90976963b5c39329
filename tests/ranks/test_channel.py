"""Messages between ranks that meet on the host: what comes, in which order, and what breaks."""

import errno
import gc
import os
import signal
import socket
import threading
import time
from contextlib import closing, nullcontext, suppress
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.calls import outcome, sampler_of, step
from tests.support.interrupts import Interrupt, interrupt_at
from tests.support.limits import slowness
from tests.support.ranks import run_ranks
from tpsample.ranks import addresses, channel
from tpsample.ranks.channel import Channel, Meeting

ESTABLISHED = "01"
SLICE, LIMIT_S = timedelta(seconds=0.02), 20.0


def _ends(limit_s: float = LIMIT_S) -> list[Channel]:
    """Two ranks' channels in one process."""
    ends = []
    for end in socket.socketpair():
        end.setblocking(False)
        ends.append(Channel(None, limit_s))
        ends[-1].connections = [end]
    return ends


def _swap(ends: list[Channel], *sent: torch.Tensor) -> list[list[int]]:
    """Let both ranks send and wait in turn; return the message that each receives."""
    arrivals = [end.send(own) for end, own in zip(ends, sent, strict=True)]
    while not all(arrival.is_over() for arrival in arrivals):
        for arrival in arrivals:
            try:
                arrival.wait(timedelta(0))
            except RuntimeError as error:
                assert str(error) == "Operation timed out"
    return [arrival.messages()[0].tolist() for arrival in arrivals]


def test_messages_of_any_length_come_in_order():
    """A peer in another call sends more or fewer numbers; what follows is not touched by them."""
    ends, few, many = _ends(), torch.arange(1, 4), torch.arange(1, 8)
    for _ in range(3):
        assert _swap(ends, few, many) == [[1, 2, 3], [1, 2, 3, 0, 0, 0, 0]]
        assert _swap(ends, many, few) == [[1, 2, 3, 0, 0, 0, 0], [1, 2, 3]]
        assert _swap(ends, few, few + 1) == [[2, 3, 4], [1, 2, 3]]
    nothing = torch.empty(0, dtype=torch.int64)
    assert _swap(ends, nothing, many) == [[], [0] * 7]
    assert _swap(ends, nothing, nothing) == [[], []]


def test_a_message_may_come_before_the_one_of_another_rank():
    """A rank that has received all messages sends its next one at once."""
    (one, to_one), (two, to_two) = _ends(), _ends()
    one.connections = [*one.connections, *two.connections]
    mine = one.send(torch.tensor([5, 6]))
    for text in ([7, 8], [9, 10]):
        to_one._last = None  # it has received ours
        to_one.send(torch.tensor(text))
    with pytest.raises(RuntimeError, match=r"^Operation timed out$"):
        mine.wait(SLICE)
    to_two.send(torch.tensor([1, 2]))
    mine.wait(SLICE)
    assert mine.messages().tolist() == [[7, 8], [1, 2]]
    mine = one.send(torch.tensor([5, 6]))
    to_two._last = None
    to_two.send(torch.tensor([3, 4]))
    mine.wait(SLICE)
    assert mine.messages().tolist() == [[9, 10], [3, 4]]


def test_messages_larger_than_what_a_connection_holds():
    """Both ranks send before either reads; slices of the wait that end lose nothing."""
    sent = [torch.arange(3 * 10**6) + rank for rank in range(2)]
    first, second = _ends()
    arrivals = [first.send(sent[0]), second.send(sent[1])]
    with pytest.raises(RuntimeError, match=r"^Operation timed out$"):
        arrivals[0].wait(SLICE)
    waits = [threading.Thread(target=each.wait, args=[timedelta(seconds=20)]) for each in arrivals]
    for wait in waits:
        wait.start()
    for wait in waits:
        wait.join()
    for arrival, expected in zip(arrivals, reversed(sent), strict=True):
        assert torch.equal(arrival.messages()[0], expected)


def test_messages_of_each_peer_and_of_any_type():
    ends = [_ends() for _ in range(2)]
    mine = Channel(None, LIMIT_S)
    mine.connections = [each[0].connections[0] for each in ends]
    for values in (torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.bool), torch.rand(2, 3)):
        arrival = mine.send(values)
        theirs = [peer.send(values[0]) for _, peer in ends]
        for each in (arrival, *theirs):
            each.wait(SLICE)
        assert torch.equal(arrival.messages(), values[:1].expand(2, 3))
        assert torch.equal(torch.cat([each.messages() for each in theirs]), values)


@pytest.mark.parametrize("reads", [True, False])
def test_an_end_that_is_gone_is_told_at_once(reads):
    first, second = _ends()
    arrival = first.send(torch.tensor([1]))
    if reads:
        second.connections[0].recv(100)
    del second
    with pytest.raises(RuntimeError, match="a connection to a peer broke"):
        arrival.wait(timedelta(seconds=20))
    first._last = None
    with pytest.raises(RuntimeError, match="a connection to a peer broke"):
        first.send(torch.tensor([1]))


def test_a_wait_ends_with_the_time_of_all_its_slices():
    first, _peer = _ends(limit_s=0.05)
    arrival = first.send(torch.tensor([1]))
    with pytest.raises(RuntimeError, match=r"^Operation timed out$"):
        arrival.wait(SLICE)
    with pytest.raises(RuntimeError, match=r"^nothing came within 0\.05 s$"):
        arrival.wait(timedelta(seconds=20))


def test_no_message_follows_one_that_was_left():
    first, second = _ends()
    first.send(torch.tensor([1]))
    with pytest.raises(RuntimeError, match="were left"):
        first.send(torch.tensor([2]))
    second.send(torch.tensor([1])).wait(SLICE)


def test_a_message_that_was_interrupted_is_followed_by_none_or_not_begun():
    """An exception of a signal's handler may come at any instruction."""
    instruction, refused, ended = 0, 0, False
    while not ended:
        instruction += 1
        first, second = _ends()
        theirs = second.send(torch.tensor([1]))
        with suppress(Interrupt):
            interrupt_at(instruction, partial(first.send, torch.tensor([2])), channel.__file__)
            ended = True
            continue
        try:
            first.send(torch.tensor([3]))
            theirs.wait(SLICE)
            assert theirs.messages().tolist() == [[3]], f"after instruction {instruction}"
        except RuntimeError as error:
            assert str(error) == "the messages before this one were left"
            refused += 1
    assert 9 < refused < instruction


def test_a_connection_that_broke_ends_no_process_by_a_signal():
    """Python ignores SIGPIPE, but programs that write into a pipe let it end them."""
    signals: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, _: signals.append(number))
    try:
        first, second = _ends()
        del second
        with pytest.raises(RuntimeError, match="a connection to a peer broke"):
            first.send(torch.tensor([1]))
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert signals == []


def _meet(meetings: list[Meeting]) -> None:
    places = torch.stack([meeting.place for meeting in meetings])
    for meeting in meetings:
        meeting.call(places)
    while not all(meeting.is_over() for meeting in meetings):
        for meeting in meetings:
            try:
                meeting.wait(timedelta(0))
            except RuntimeError as error:
                assert str(error) == "Operation timed out"


def test_who_does_not_show_the_token_is_hung_up_on():
    meetings = [Meeting(rank, 3, LIMIT_S) for rank in range(3)]
    at = meetings[0]._listener.getsockname()
    strangers = [socket.create_connection(at) for _ in range(3)]
    strangers[0].sendall(bytes(16) + (1).to_bytes(8, "little"))
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    _meet(meetings)
    for rank, meeting in enumerate(meetings):
        assert sorted(meeting.connections) == [peer for peer in range(3) if peer != rank]
        meeting.close()
    for stranger in strangers:
        stranger.settimeout(5)
        with closing(stranger), suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    with pytest.raises(OSError, match=r".*") as refused:
        socket.create_connection(at)
    assert refused.value.errno == errno.ECONNREFUSED
    ends = []
    for meeting in meetings:
        ends.append(Channel(None, LIMIT_S))
        ends[-1].connections = [meeting.connections[peer] for peer in sorted(meeting.connections)]
    arrivals = [end.send(torch.tensor([rank])) for rank, end in enumerate(ends)]
    for arrival in arrivals:
        arrival.wait(timedelta(seconds=20))
    assert [each.messages().tolist() for each in arrivals] == [[[1], [2]], [[0], [2]], [[0], [1]]]


def test_a_peer_that_is_not_there_is_told():
    meetings = [Meeting(rank, 2, LIMIT_S) for rank in range(2)]
    places = torch.stack([meeting.place for meeting in meetings])
    meetings[0].close()
    with closing(meetings[1]), pytest.raises(RuntimeError, match="refused"):
        meetings[1].call(places)
        meetings[1].wait(timedelta(seconds=20))


def test_a_meeting_that_fails_hangs_up_on_everybody():
    meetings = [Meeting(rank, 3, LIMIT_S) for rank in range(3)]
    places = torch.stack([meeting.place for meeting in meetings])
    caller, called = meetings[1], meetings[0]
    caller.call(places)
    for meeting in (caller, called):
        while not meeting.connections:
            with pytest.raises(RuntimeError, match=r"^Operation timed out$"):
                meeting.wait(timedelta(0))
    nowhere = b"1 255.255.255.255"  # of everybody, so of no TCP connection
    places[0] = torch.frombuffer(bytearray(bytes(16) + nowhere.ljust(112)), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"rank 0 at 255"):
        meetings[2].call(places)
    ends = [*called.connections.values(), *caller.connections.values()]
    ends += [connection for _, _, connection in meetings[2]._calls.values()]
    for meeting in meetings:
        meeting.close()
    assert [end.fileno() for end in ends] == [-1] * 3


def test_the_address_is_that_of_the_interface_or_of_the_name(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,other")
    assert addresses.own_address() == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    stream = socket.SOCK_STREAM
    for found, expected in (
        ([("127.0.0.3", 0)], "127.0.0.3"),
        ([("198.51.100.1", 0), ("127.0.0.4", 0)], "127.0.0.4"),  # the first is not this machine's
        ([], "127.0.0.1"),
    ):
        known = [(socket.AF_INET, stream, 6, "", place) for place in found]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, known=known, **__: known)
        assert addresses.own_address() == expected
    monkeypatch.setattr(channel, "own_address", lambda: "::1")
    if not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    meetings = [Meeting(rank, 2, LIMIT_S) for rank in range(2)]
    _meet(meetings)
    for meeting in meetings:
        meeting.close()
        meeting.connections.popitem()[1].close()


def _connections() -> int:
    """How many connections over TCP this process has."""
    with open("/proc/self/net/tcp") as lines:
        inodes = {line.split()[9] for line in [*lines][1:] if line.split()[3] == ESTABLISHED}
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}")[8:-1] in inodes
    return found


def _of_samplers() -> list[int]:
    """Connections of before, with samplers, and after a reset of the first and of all."""
    counts, samplers = [_connections()], []
    for _ in range(3):
        samplers.append(sampler_of())
        step(samplers[-1])
        counts.append(_connections())
    for sampler in samplers:
        sampler.reset()
        step(sampler)
    dist.barrier()
    gc.collect()
    return [*counts, _connections()]


def test_samplers_of_a_group_share_one_connection_to_each_peer():
    """Those of gloo are made anew by a reset, too."""
    for before, *with_samplers, after in run_ranks(3, _of_samplers):
        assert with_samplers == [before + 2] * 3
        assert after <= before + 2 + 3 * 4


def _without_descriptors() -> tuple[str, float]:
    """The error of a rank where rank 1 cannot listen, and after how many seconds it is raised."""
    began = time.monotonic()
    failure = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    fails = patch.object(socket, "create_server", side_effect=failure)
    with fails if dist.get_rank() == 1 else nullcontext():
        told = outcome(sampler_of)
    return " ".join(told), time.monotonic() - began


def test_a_rank_that_cannot_listen_says_why_to_all_at_once():
    for told, took_s in run_ranks(2, _without_descriptors, group_timeout_s=60):
        assert told.startswith("PeerLost"), told
        assert "rank 1: OSError: [Errno 24] Too many open files" in told
        assert took_s < 20 * slowness()


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True
