"""A cable that can be cut: a port that passes on to another one what it is sent, or nothing."""

from __future__ import annotations

import socket
import threading


class Relay:
    """Passes bytes between `port`, where it listens, and the port `to`, both of this machine.

    Attributes:
        carries: while it is clear, bytes wait, and neither side is told of it.
    """

    def __init__(self, to: int) -> None:
        self._to, self.carries = to, threading.Event()
        self.carries.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._start(self._accept)

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            server = socket.create_connection(("127.0.0.1", self._to))
            self._start(self._pass_on, client, server)
            self._start(self._pass_on, server, client)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(2**16):
            self.carries.wait()
            target.sendall(data)
        target.close()

    @staticmethod
    def _start(body, *arguments: socket.socket) -> None:
        threading.Thread(target=body, args=arguments, daemon=True).start()
