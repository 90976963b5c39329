"""The addresses of this machine: where it stands to another one, before any rank is started.

`launch/nodes.sh` runs this file by itself, so it imports nothing but the standard library.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
import time
from contextlib import suppress

_SOMEWHERE = "198.51.100.1"  # reserved for documents: a route to it is the default route
_SIOCGIFADDR, _LINK_LOCAL = 0x8915, 0x20


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
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if _address_of_interface(name) == address), None)


def own_address() -> str:
    """Return the address at which gloo has the peers of this process connect to it.

    That is of the interface in GLOO_SOCKET_IFNAME; else of this machine's name, if it is one that
    this machine has; else the loopback address. It may be one of IPv6.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named and (address := _address_of_interface(named)):
        return address
    try:
        known = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        known = []
    for family, _, _, _, place in known:
        with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((place[0], 0))
            return str(place[0])
    return "127.0.0.1"


def _address_of_interface(name: str) -> str | None:
    """Return the IPv4 address of an interface, or else its IPv6 address."""
    request = struct.pack("256s", name.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        reply = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        return socket.inet_ntoa(reply[20:24])
    with suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            number, _, _, scope, _, interface = line.split()
            if interface == name and int(scope, 16) != _LINK_LOCAL:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
    return None


def _source(address: str) -> str:
    """Return the address from which this machine sends to another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def answers(host: str, port: int, wait_s: float) -> bool:
    """Wait until somebody listens there, and return whether that was before the time was over."""
    deadline = time.monotonic() + wait_s
    while (left_s := deadline - time.monotonic()) > 0:
        with suppress(OSError), socket.create_connection((host, port), left_s) as to:
            if to.getsockname() != to.getpeername():  # a client may be given the port it calls
                return True
        time.sleep(0.05)
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
    if not is_first and not answers(first, int(port), float(wait_s)):
        sys.exit(
            f"FIRST={endpoint}: {first} did not answer {own} within {wait_s} s; give an address of "
            "the machine on which this script runs as well, or a longer WAIT"
        )
    print(int(is_first), own if is_first else first, own)


if __name__ == "__main__":
    main(*sys.argv[1:])
