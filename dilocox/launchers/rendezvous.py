"""The rendezvous: the one store at which the islands of a run find each other.

It is torch's TCPStore: plaintext and unauthenticated, for networks that one trusts, or for a private tunnel. It carries
addresses, votes of a handshake and counters only; weights travel between the islands directly.
"""

import signal
import socket
import time
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import TCPStore

from dilocox.errors import ConfigError

LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """Where a rendezvous listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """`host:port`, `[v6 address]:port`; raises ConfigError for anything else."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host == f"[{bare}]"
    if not colon or not bare or (":" in bare and not bracketed) or any(c in bare for c in "[]/ "):
        raise ConfigError(
            "--rendezvous", text, "is not host:port", "Give it as host:port or [v6 address]:port, such as node01:29400"
        )
    if not port.isascii() or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError("--rendezvous", text, "has no port from 1 to 65535", "Give it as host:port")
    return Address(bare, int(port))


def serve_store(port: int, *, loopback_only: bool = False) -> TCPStore:
    """A store that this process hosts for as long as it holds the object; port 0 takes a free one (see `store.port`).

    Raises ConfigError when the port is in use or may not be used.
    """
    try:
        if loopback_only:
            listener = socket.create_server((LOOPBACK, port))
        elif socket.has_dualstack_ipv6():
            listener = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", port))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            "port",
            port,
            f"cannot be listened on: {reason}",
            f"End what uses it (ss -ltnp 'sport = :{port}'), or choose another",
        ) from error
    bound = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        bound,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # now the store's
    )


def connect_store(address: Address, timeout_s: float) -> TCPStore:
    """The store of a rendezvous, waiting up to `timeout_s` for it to appear; raises ConfigError when it does not.

    `timeout_s` is also how long a `get` or `wait` on the store may take.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.1)).close()
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    "--rendezvous",
                    str(address),
                    f"nothing answered within {timeout_s:.0f} s: {error.strerror or error}",
                    "Start `dilocox coordinator` there, and open the port towards all islands",
                ) from error
            time.sleep(0.2)
    return TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=timeout_s))


def serve_rendezvous(port: int) -> None:
    """Host a rendezvous in the foreground until SIGINT or SIGTERM; the first line says where it listens."""
    store = serve_store(port)
    print(f"rendezvous at {Address(socket.getfqdn(), store.port)}; Ctrl-C ends it", flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
