"""The lane group over gloo, as far as one process can show it; the rest is in tests/distributed."""

import pytest
from torch.distributed import TCPStore

from dilocox.errors import SyncError
from dilocox.launchers.rendezvous import serve_store
from dilocox.outer.transport.gloo import GlooLaneGroup


def test_a_rendezvous_that_is_gone_is_named_by_whoever_needs_it_again() -> None:
    served = serve_store(0, loopback_only=True)
    store = TCPStore("127.0.0.1", served.port, is_master=False, wait_for_workers=False)
    group = GlooLaneGroup(store, island=0, islands=1, lane="tp0", address="127.0.0.1", timeout_s=5)
    group.rebuild()
    del served
    with pytest.raises(SyncError, match=r"lane tp0: the rendezvous does not answer.*`dilocox coordinator` must run"):
        group.rebuild()
