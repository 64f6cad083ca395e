"""The lane group over gloo, as far as one process can show it; the rest is in tests/distributed."""

import pytest
from torch.distributed import TCPStore

from dilocox.errors import HandshakeError, SyncError
from dilocox.launchers.rendezvous import serve_store
from dilocox.outer.transport.gloo import GlooLaneGroup, shake_hands


def test_a_rendezvous_that_is_gone_is_named_by_whoever_needs_it_again() -> None:
    served = serve_store(0, loopback_only=True)
    store = TCPStore("127.0.0.1", served.port, is_master=False, wait_for_workers=False)
    group = GlooLaneGroup(store, island=0, islands=1, lane="tp0", address="127.0.0.1", timeout_s=5)
    group.rebuild()
    del served
    with pytest.raises(SyncError, match=r"lane tp0: the rendezvous does not answer.*`dilocox coordinator` must run"):
        group.rebuild()


def test_a_rendezvous_serves_one_start_of_a_run() -> None:
    served = serve_store(0, loopback_only=True)
    settings = {"inner.lr": 0.1}

    def meet(lane: str, leader: bool) -> None:
        shake_hands(served, settings, island=0, islands=1, lane=lane, leader=leader, timeout_s=5)

    meet("tp0", leader=True)
    meet("tp1", leader=False)
    for lane in ("tp0", "tp1"):
        with pytest.raises(HandshakeError, match=r"island 0 has met the others .* restart `dilocox coordinator`"):
            meet(lane, leader=lane == "tp0")


def test_an_island_that_gave_up_waiting_may_come_again() -> None:
    served = serve_store(0, loopback_only=True)
    with pytest.raises(HandshakeError, match="island 1 did not come"):
        shake_hands(served, {}, island=0, islands=2, lane="tp0", leader=True, timeout_s=0.1)
    served.set("identity/1", "{}")
    shake_hands(served, {}, island=0, islands=2, lane="tp0", leader=True, timeout_s=5)
