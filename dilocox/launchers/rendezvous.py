"""Hosting the stores at which ranks and islands meet."""

import signal
import socket

from torch.distributed import TCPStore

from dilocox.errors import ConfigError
from dilocox.outer.transport.rendezvous import Address

LOOPBACK = "127.0.0.1"


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
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            "port", port, f"cannot be listened on: {reason}", "End what uses it (ss -ltnp shows it), or choose another"
        ) from error
    bound = listener.getsockname()[1]
    owned = listener.detach()  # the store closes it
    return TCPStore(LOOPBACK, bound, is_master=True, wait_for_workers=False, master_listen_fd=owned)


def serve_rendezvous(port: int) -> None:
    """Host a rendezvous in the foreground until SIGINT or SIGTERM; the first line says where it listens."""
    store = serve_store(port)
    print(f"rendezvous at {Address(socket.gethostname(), store.port)}; Ctrl-C ends it", flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
