"""Messages between ranks that meet on the host.

    message   8 bytes, the number of bytes that follow; these

They travel over separate TCP connections. A connection takes a message whenever it comes, so a
message takes one one-way latency of the network. gloo sends nothing before the receiver has said
that there is room, which takes another latency. It also moves each message by several threads.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tpsample.core.tensors import bytes_of
from tpsample.ranks.addresses import own_address

PLACE_BYTES = 128
_TOKEN_BYTES, _HEAD_BYTES = 16, 8
_DONE = object()
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # which not every system has
_AT_ONCE = 1 << 20
"""Most bytes to read at once of the end of a too long message, which is dropped."""


class Awaited(ABC):
    """An event for which a rank waits in slices, as for a `dist.Work`.

    Args:
        limit_s: the longest time of all slices together.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._deadline = limit_s, float("inf")

    def wait(self, timeout: timedelta) -> None:
        """Wait for at most `timeout`; signals are handled meanwhile.

        Raises:
            RuntimeError: "Operation timed out", after which the caller may wait again; or, with
                another text, a connection broke, or `limit_s` is over.
        """
        now = time.monotonic()
        end = now + timeout.total_seconds()
        self._deadline = min(self._deadline, now + self._limit_s)
        try:
            while not self.is_over():
                left_s = min(end, self._deadline) - time.monotonic()
                self._wait_for_event(max(left_s, 0.0))
                if left_s <= 0 and not self.is_over():
                    late = f"nothing came within {self._limit_s} s"
                    raise RuntimeError("Operation timed out" if end < self._deadline else late)
        except OSError as error:
            raise RuntimeError(f"a connection to a peer broke: {error}") from error

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether the wait is over."""

    @abstractmethod
    def _wait_for_event(self, limit_s: float) -> None:
        """Wait for the next event of a connection, and handle it."""


class Meeting(Awaited):
    """The connections of a rank while they are made.

    This rank calls the earlier ranks, and the later ranks call this one.

    Attributes:
        place: uint8 [PLACE_BYTES], where this rank is called, and the token that callers show.
        connections: by peer, once it is over.
    """

    def __init__(self, rank: int, world_size: int, limit_s: float) -> None:
        super().__init__(limit_s)
        self._rank, self._num_peers = rank, world_size - 1
        address = own_address()
        self._listener = socket.create_server(
            (address, 0), family=_family_of(address), backlog=world_size
        )
        self._listener.setblocking(False)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        text = f"{self._listener.getsockname()[1]} {address}".encode()
        place = bytearray((self._token + text).ljust(PLACE_BYTES))
        self.place = torch.frombuffer(place, dtype=torch.uint8)
        self.connections: dict[int, socket.socket] = {}
        self._calls: dict[int, tuple[int, bytes, socket.socket]] = {}
        self._callers: dict[int, socket.socket] = {}
        self._events = select.poll()
        self._events.register(self._listener, select.POLLIN)

    def close(self) -> None:
        """Stop listening, and hang up on callers that are no peers.

        A meeting that is not over hangs up on its peers, too.
        """
        calls = [connection for _, _, connection in self._calls.values()]
        peers = [] if self.is_over() else self.connections.values()
        for end in (self._listener, *self._callers.values(), *calls, *peers):
            end.close()

    def call(self, places: Tensor) -> None:
        """Begin to call the earlier ranks; `wait` ends it.

        Args:
            places: uint8 [W, PLACE_BYTES], of all ranks.
        """
        for peer, place in enumerate(places[: self._rank]):
            token, text = bytes_of(place)[:_TOKEN_BYTES], bytes_of(place)[_TOKEN_BYTES:]
            port, address = text.decode().split()
            connection = socket.socket(_family_of(address), socket.SOCK_STREAM)
            connection.setblocking(False)
            self._calls[connection.fileno()] = peer, token, connection
            error = connection.connect_ex((address, int(port)))
            if error not in (0, errno.EINPROGRESS):
                raise RuntimeError(f"rank {peer} at {address}: {os.strerror(error)}")
            self._events.register(connection, select.POLLOUT)

    def is_over(self) -> bool:
        return len(self.connections) == self._num_peers

    def _wait_for_event(self, limit_s: float) -> None:
        for number, _ in self._events.poll(1000 * limit_s):
            if number == self._listener.fileno():
                caller, _ = self._listener.accept()
                caller.setblocking(False)
                self._callers[caller.fileno()] = caller
                self._events.register(caller, select.POLLIN)
                continue
            self._events.unregister(number)
            if number in self._calls:
                peer, token, connection = self._calls.pop(number)
                if error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(error, os.strerror(error))
                shown = token + self._rank.to_bytes(_HEAD_BYTES, "little")
                connection.send(shown, _NO_SIGNAL)
                self._take(peer, connection)
            else:
                self._admit(self._callers.pop(number))

    def _admit(self, caller: socket.socket) -> None:
        """Take a caller that shows the token; hang up on others, who may be anybody."""
        try:
            shown = caller.recv(_TOKEN_BYTES + _HEAD_BYTES)
        except OSError:
            shown = b""
        if hmac.compare_digest(shown[:-_HEAD_BYTES], self._token):
            self._take(int.from_bytes(shown[_TOKEN_BYTES:], "little"), caller)
        else:
            caller.close()

    def _take(self, peer: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections[peer] = connection


class Channel:
    """The messages between this rank and its peers, in both directions.

    All ranks send the same number of messages, and receive each before they send the next one.

    Args:
        gloo: a ProcessGroupGloo of the same ranks, by which they exchange their `Meeting.place`.
        limit_s: how long a rank waits for a message.

    Attributes:
        gloo, limit_s: as given.
        connections: to each peer, in rank order; none before the first message.
    """

    def __init__(self, gloo: Any, limit_s: float) -> None:
        self.gloo, self.limit_s = gloo, limit_s
        self.connections: Sequence[socket.socket] = []
        self._last: Arrival | None = None

    def send(self, own: Tensor) -> Arrival:
        """Begin to send [peers, n], one message to each peer, or [n], one to all.

        Raises:
            RuntimeError: a connection broke, or a call was left before its messages came.
        """
        if self._last is not None and not self._last.is_over():
            raise RuntimeError("the messages before this one were left")
        # It is noted before any of it is sent, because an interrupt may come in between.
        self._last = arrival = Arrival(self.connections, own, self.limit_s)
        try:
            arrival.begin()
        except OSError as error:
            raise RuntimeError(f"a connection to a peer broke: {error}") from error
        return arrival

    def __del__(self) -> None:
        for connection in self.connections:
            connection.close()


class Arrival(Awaited):
    """One message from each peer, received while this rank sends its own."""

    def __init__(self, connections: Sequence[socket.socket], own: Tensor, limit_s: float) -> None:
        super().__init__(limit_s)
        self._shape, self._dtype = (len(connections), own.shape[-1]), own.dtype
        size = own.shape[-1] * own.itemsize
        head, raw = size.to_bytes(_HEAD_BYTES, "little"), bytes_of(own)
        self._memory = bytearray(len(connections) * size)
        rooms = memoryview(self._memory)
        self._readers: dict[int, Iterator[None]] = {}
        self._writers: dict[int, Iterator[None]] = {}
        for place, connection in enumerate(connections):
            begin = place * size
            message = raw if own.ndim == 1 else raw[begin : begin + size]
            number = connection.fileno()
            self._writers[number] = _write(connection, head + message)
            self._readers[number] = _read(connection, rooms[begin : begin + size])

    def begin(self) -> None:
        """Send what the connections take at once."""
        for number in [*self._writers]:
            _move(self._writers, number)

    def messages(self) -> Tensor:
        """Return the messages [peers, n] after `wait`, n being the length of this rank's message.

        A longer message is cut, and a shorter one is followed by zeros.
        """
        if not self._memory:
            return torch.empty(self._shape, dtype=self._dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=self._dtype).view(self._shape)

    def is_over(self) -> bool:
        return not self._readers and not self._writers

    def _wait_for_event(self, limit_s: float) -> None:
        events = select.poll()
        for number in self._readers.keys() | self._writers.keys():
            reads, writes = number in self._readers, number in self._writers
            events.register(number, select.POLLIN * reads | select.POLLOUT * writes)
        for number, _ in events.poll(1000 * limit_s):
            for moves in (self._writers, self._readers):
                if number in moves:
                    _move(moves, number)


def _family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _move(moves: dict[int, Iterator[None]], number: int) -> None:
    """Send or receive as much as one connection takes now; forget it once its message is done."""
    if next(moves[number], _DONE) is _DONE:
        del moves[number]


def _write(connection: socket.socket, message: bytes) -> Iterator[None]:
    """Send a message; yield where there is no room."""
    memory = memoryview(message)
    while memory:
        try:
            # A process that ends by SIGPIPE, as those in a pipe do, shall not do so here.
            memory = memory[connection.send(memory, _NO_SIGNAL) :]
        except BlockingIOError:
            yield


def _fill(connection: socket.socket, memory: memoryview) -> Iterator[None]:
    """Receive bytes until the memory is full; yield where none have come."""
    while memory:
        try:
            count = connection.recv_into(memory)
        except BlockingIOError:
            yield
            continue
        if not count:
            raise ConnectionResetError("the peer has closed it")
        memory = memory[count:]


def _read(connection: socket.socket, room: memoryview) -> Iterator[None]:
    """Receive a message, and drop its end if there is no room for it."""
    head = bytearray(_HEAD_BYTES)
    yield from _fill(connection, memoryview(head))
    size = int.from_bytes(head, "little")
    yield from _fill(connection, room[:size])
    for dropped in range(len(room), size, _AT_ONCE):
        rest = bytearray(min(_AT_ONCE, size - dropped))
        yield from _fill(connection, memoryview(rest))
