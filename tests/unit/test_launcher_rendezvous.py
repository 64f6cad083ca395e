"""Rendezvous addresses, stores that are served and found, and errors that say what to do."""

import signal
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.errors import ConfigError, HandshakeError
from dilocox.launchers.rendezvous import serve_store
from dilocox.outer.transport.rendezvous import Address, connect_store, parse_address


@given(
    st.one_of(st.ip_addresses().map(str), st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True)),
    st.integers(1, 65535),
)
def test_addresses_are_read_as_they_are_written(host: str, port: int) -> None:
    assert parse_address(str(Address(host, port))) == Address(host, port)


@pytest.mark.parametrize(
    "text", [None, "", "host", "host:", ":29400", "host:0", "host:65536", "host:-1", "host:x", "host:２９", "::1:29400",
             "[::1]", "tcp://host:29400", "[]:1", "two words:1", "[::1:29400", "host/29400"]
)  # fmt: skip
def test_other_addresses_are_refused_by_name(text: str | None) -> None:
    with pytest.raises(ConfigError, match="host:port") as caught:
        parse_address(text)
    assert caught.value.field == "rendezvous"


@given(st.text(max_size=30))
def test_no_text_gives_anything_but_an_address_or_a_config_error(text: str) -> None:
    try:
        address = parse_address(text)
    except ConfigError:
        return
    assert address.host
    assert 1 <= address.port <= 65535


@pytest.mark.parametrize("loopback_only", [True, False])
def test_a_store_is_served_and_found(loopback_only: bool) -> None:
    server = serve_store(0, loopback_only=loopback_only)
    client = connect_store(Address("127.0.0.1", server.port), timeout_s=10)
    client.set("key", "value")
    assert server.get("key") == b"value"


def test_a_loopback_store_is_closed_to_other_machines() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sets the route, sends nothing
        own_address = probe.getsockname()[0]
    if own_address.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    local, public = serve_store(0, loopback_only=True), serve_store(0)
    socket.create_connection((own_address, public.port), timeout=10).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((own_address, local.port), timeout=10)


@pytest.mark.parametrize("loopback_only", [True, False])
def test_a_port_in_use_is_an_error_that_names_it(loopback_only: bool) -> None:
    server = serve_store(0, loopback_only=loopback_only)
    with pytest.raises(ConfigError, match=rf"port={server.port}.*in use.*choose another"):
        serve_store(server.port, loopback_only=loopback_only)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_be_is_an_error_that_names_it(port: int) -> None:
    with pytest.raises(ConfigError, match=f"port={port}"):
        serve_store(port)


def test_a_rendezvous_that_is_not_there_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(HandshakeError, match=rf"nobody answered at rendezvous {address}.*coordinator"):
        connect_store(address, timeout_s=0.3)


def test_the_foreground_rendezvous_says_where_it_is_and_ends_on_ctrl_c() -> None:
    code = "from dilocox.launchers.rendezvous import serve_rendezvous; serve_rendezvous(0)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().split(";")[0].rpartition(":")[2])
        client = connect_store(Address("127.0.0.1", port), timeout_s=10)
        client.set("key", "value")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
