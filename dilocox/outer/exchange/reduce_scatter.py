"""Reduce-scatter, then all-gather: island k merges the k-th slice for all, and sends the merged slice to all.

An island sends 2(K−1)/K times its codes whatever K is, so this is for many islands. The merged slice is quantised
again; its error is fed back at the island that merged it, in a residual of its own (hop 1).

Protocol. The flat buffer is cut into K slices of whole blocks (slices may be empty; their messages are then a bare
header, so that every lane exchanges equally many messages). Hop 0: island i sends slice k to island k, for all k ≠ i.
Hop 1: when its K−1 messages are in, island k merges them with its own, in island order, and sends the result to all
others. Island k then uses its own merged message like everybody else, so all islands decode the same bytes.
"""

from itertools import pairwise

from dilocox.outer.exchange.protocol import Delivery, Job
from dilocox.outer.fragments import CHUNK_ELEMENTS, Fragment
from dilocox.outer.merge.mean import Mean
from dilocox.outer.transport.protocol import Transport


class ReduceScatter:
    hops = 2

    def residual_ranges(self, fragment: Fragment, island: int, islands: int) -> list[tuple[int, int]]:
        return [(0, fragment.numel), slices(fragment, islands)[island]]

    def messages(self, fragment: Fragment, islands: int) -> list[tuple[int, int]]:
        return [part for bounds in slices(fragment, islands) for part in _ranges(fragment, *bounds)]

    def run(self, job: Job, transport: Transport, deadline: float) -> list[Delivery]:
        me, islands = transport.island, transport.islands
        peers = [(me + step) % islands for step in range(1, islands)]
        parts = [list(_ranges(job.fragment, *bounds)) for bounds in slices(job.fragment, islands)]

        sends = [transport.send(peer, job.encoded(*part)) for peer in peers for part in parts[peer]]
        first = {
            (peer, part): (buffer := job.buffer(*part), transport.receive(peer, buffer))
            for peer in peers
            for part in parts[me]
        }
        own = {}
        for part in parts[me]:
            messages = {me: job.encoded(*part)}
            for peer in peers:
                messages[peer], pending = first.pop((peer, part))  # free when merged
                pending.wait(deadline)
            received = [
                job.accept(messages[island], island=island, hop=0, start=part[0], stop=part[1])
                for island in range(islands)
            ]
            own[part] = job.merged(*part, received)
            sends += [transport.send(peer, own[part]) for peer in peers]
        second = {
            (peer, part): (buffer := job.buffer(*part), transport.receive(peer, buffer))
            for peer in peers
            for part in parts[peer]
        }
        deliveries = []
        for island in range(islands):
            for part in parts[island]:
                if island == me:
                    message = own[part]
                else:
                    message, pending = second[island, part]
                    pending.wait(deadline)
                merged = job.accept(message, island=island, hop=1, start=part[0], stop=part[1])
                deliveries.append(Delivery(*part, [merged.body], [1.0], Mean()))
        for sent in sends:
            sent.wait(deadline)
        return deliveries

    def bytes_sent(self, encoded_bytes: int, islands: int) -> int:
        return 2 * (islands - 1) * encoded_bytes // islands


def slices(fragment: Fragment, islands: int) -> list[tuple[int, int]]:
    """The flat range of each island, in whole blocks, equal to one block."""
    blocks = fragment.numel // fragment.alignment
    bounds = [blocks * island // islands * fragment.alignment for island in range(islands + 1)]
    return list(pairwise(bounds))


def _ranges(fragment: Fragment, start: int, stop: int) -> list[tuple[int, int]]:
    """A slice in chunks; an empty slice is one empty range."""
    chunk = max(fragment.alignment, CHUNK_ELEMENTS // fragment.alignment * fragment.alignment)
    return [(low, min(low + chunk, stop)) for low in range(start, max(stop, start + 1), chunk)]
