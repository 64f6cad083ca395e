"""All-gather of codes: every island sends its codes to every other and merges all of them itself.

Quantised once, and each island's own pseudo-gradient is known everywhere (robust merges need that). An island sends
(K−1) times its codes, so this is for few islands.

Protocol. For each flat range, in order, island i sends its message to i+1, i+2, … (cyclic, so that no island is
everybody's first target) and posts a receive for each of theirs; nothing blocks until all are posted. Receive buffers
are held by the deliveries until the outer step has used them; sent messages belong to the job.
"""

from dilocox.outer.exchange.protocol import Delivery, Job, Received
from dilocox.outer.fragments import CHUNK_ELEMENTS, Fragment
from dilocox.outer.transport.protocol import Pending, Transport


class AllGather:
    hops = 1

    def residual_ranges(self, fragment: Fragment, island: int, islands: int) -> list[tuple[int, int]]:
        return [(0, fragment.numel)]

    def messages(self, fragment: Fragment, islands: int) -> list[tuple[int, int]]:
        return list(fragment.ranges(CHUNK_ELEMENTS))

    def run(self, job: Job, transport: Transport, deadline: float) -> list[Delivery]:
        peers = [(transport.island + step) % transport.islands for step in range(1, transport.islands)]
        ranges = self.messages(job.fragment, transport.islands)
        sends: list[Pending] = []
        receives = []
        for start, stop in ranges:
            own = job.encoded(start, stop)
            sends += [transport.send(peer, own) for peer in peers]
            buffers = {peer: job.buffer(start, stop) for peer in peers}
            receives.append({peer: (buffers[peer], transport.receive(peer, buffers[peer])) for peer in peers})
        deliveries = []
        for (start, stop), arriving in zip(ranges, receives, strict=True):
            messages = {transport.island: job.encoded(start, stop)}
            for peer, (buffer, pending) in arriving.items():
                pending.wait(deadline)
                messages[peer] = buffer
            received = [
                job.accept(messages[island], island=island, hop=0, start=start, stop=stop)
                for island in range(transport.islands)
            ]
            deliveries.append(_deliver(job, start, stop, received))
        for sent in sends:
            sent.wait(deadline)
        return deliveries

    def bytes_sent(self, encoded_bytes: int, islands: int) -> int:
        return (islands - 1) * encoded_bytes


def _deliver(job: Job, start: int, stop: int, received: list[Received]) -> Delivery:
    weights = job.merge.weights([message.header for message in received])
    return Delivery(start, stop, [message.body for message in received], weights, job.merge)
