"""The addresses of this machine: where it stands to another one, before any rank is started.

`launch/nodes.sh` runs this file by itself, so it imports nothing but the standard library.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys
import time

_SOMEWHERE = "198.51.100.1"  # reserved for documents: a route to it is the default route
_SIOCGIFADDR = 0x8915


def address_of(host: str) -> str:
    """Return the IPv4 address of a host; an OSError if its name has none."""
    return socket.gethostbyname(host)


def address_towards(host: str) -> str:
    """Return the address from which this machine reaches a host, or others if it is the host.

    Raises:
        OSError: the name has no address, or no route leads there.
    """
    own = _source(address_of(host))
    # Debian gives a machine's own name an address that no other machine reaches.
    return _source(_SOMEWHERE) if ipaddress.ip_address(own).is_loopback else own


def is_own(host: str) -> bool:
    """Whether a host is this machine: whoever sends to itself does so from the same address."""
    address = address_of(host)
    return ipaddress.ip_address(address).is_loopback or _source(address) == address


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None


def _source(address: str) -> str:
    """Return the address from which this machine sends to another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def _answers(address: str, port: int, wait_s: float) -> bool:
    """Whether somebody listens there before the time is over."""
    deadline = time.monotonic() + wait_s
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), left_s).close()
            return True
        except OSError:
            time.sleep(min(0.5, left_s))
    return False


def main(endpoint: str, wait_s: str, own: str = "") -> None:
    """Print whether this machine is the first, the address of the first, and its own.

    Another machine waits until the first listens.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        first = address_of(host)
        own = own or address_towards(host)
        is_first = own == first or is_own(host)
    except OSError as error:
        sys.exit(f"FIRST={host}: {error.strerror}; give the address of one of the machines")
    if not is_first and not _answers(first, int(port), float(wait_s)):
        sys.exit(
            f"FIRST={endpoint}: {first} did not answer {own} within {wait_s} s; give an address of "
            "the machine on which this script runs as well, or a longer WAIT"
        )
    print(int(is_first), own if is_first else first, own)


if __name__ == "__main__":
    main(*sys.argv[1:])
