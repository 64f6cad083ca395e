"""The rendezvous as the islands see it: the address of one store at which they find each other.

It is torch's TCPStore: plaintext and unauthenticated, for networks that one trusts, or for a private tunnel. It carries
addresses, settings to compare and counters; weights travel between the islands directly.
"""

import socket
import time
from typing import NamedTuple

from torch.distributed import TCPStore

from dilocox.errors import ConfigError, HandshakeError


class Address(NamedTuple):
    """Where a rendezvous listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str | None) -> Address:
    """`host:port` or `[v6 address]:port`; raises ConfigError for anything else."""
    remedy = "Give where `dilocox coordinator` runs, as host:port or [v6 address]:port"
    host, _, port = (text or "").rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host == f"[{bare}]"
    if not bare or (":" in bare and not bracketed) or any(c in bare for c in "[]/ "):
        raise ConfigError("rendezvous", text, "expected host:port", remedy)
    if not port.isascii() or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError("rendezvous", text, "expected a port from 1 to 65535", remedy)
    return Address(bare, int(port))


def connect_store(address: Address, timeout_s: float) -> TCPStore:
    """The store of a rendezvous, waiting up to `timeout_s` for it to appear; raises HandshakeError when it does not."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.1)).close()
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise HandshakeError(
                    f"nobody answered at rendezvous {address} within {timeout_s:.0f} s: {error.strerror or error}. "
                    "Start `dilocox coordinator` there, and let all islands reach its port"
                ) from error
            time.sleep(0.2)
    return TCPStore(address.host, address.port, is_master=False)
