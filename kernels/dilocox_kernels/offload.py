"""Host memory as a place to work on a device's tensors: chunks stream through two pinned buffers.

For outer state that lives in host memory beside a model on a GPU: while the CPU back end works on one chunk, the next
one arrives and the last one leaves.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 64


class HostStream:
    """Two buffers of `chunk_bytes` in host memory (pinned, unless `device` is the CPU) and a stream for the copies.

    Protocol. Chunk i has buffer i mod 2. Its copy to the host is queued before chunk i − 1 is worked on; when the
    consumer comes back for chunk i + 1, chunk i is queued to be copied back, if that was asked for. The copies run in
    order on a stream of their own, so chunk i + 2 enters the buffer when chunk i has left it; an event tells the host
    when a buffer holds its chunk. The stream starts after what was queued on the device's current stream, which in turn
    waits for the last copy.
    """

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream()
        pinned = device.type != "cpu"
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]

    def run(self, chunks: Sequence[Sequence[Tensor]], *, fetch: bool, give_back: bool) -> Iterator[list[Tensor]]:
        """Yield each chunk's tensors in host memory, valid until the next is asked for.

        With `fetch` they hold the device's values, else anything; with `give_back` what the consumer leaves in them is
        copied to the device. Raises ValueError, before anything is copied, for a chunk that does not fit a buffer.
        """
        places = [self._place(index, chunk) for index, chunk in enumerate(chunks)]
        self._stream.wait_stream(self._module.current_stream())
        try:
            arriving = [self._fetch(place, chunk, fetch) for place, chunk in zip(places[:1], chunks, strict=False)]
            for index, (place, chunk) in enumerate(zip(places, chunks, strict=True)):
                arrived = arriving.pop()
                if index + 1 < len(chunks):
                    arriving.append(self._fetch(places[index + 1], chunks[index + 1], fetch))
                arrived.synchronize()
                yield place
                if give_back:
                    self._copy(chunk, place)
        finally:
            self._module.current_stream().wait_stream(self._stream)
            self._reached().synchronize()

    def _place(self, index: int, chunk: Sequence[Tensor]) -> list[Tensor]:
        """Views of a buffer, one for each tensor of the chunk."""
        buffer, offset, views = self._buffers[index % 2], 0, []
        for tensor in chunk:
            end = offset + tensor.numel() * tensor.element_size()
            if end > buffer.numel():
                raise ValueError(f"chunk {index} takes more than the {buffer.numel()} bytes of a buffer; cut it")
            views.append(buffer[offset:end].view(tensor.dtype))
            offset = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return views

    def _fetch(self, place: list[Tensor], chunk: Sequence[Tensor], wanted: bool) -> torch.Event:
        """Queue a copy to the host; the event comes when the buffer may be used."""
        if wanted:
            self._copy(place, chunk)
        return self._reached()

    def _reached(self) -> torch.Event:
        """Comes when all that is queued now is done."""
        event = self._module.Event()
        event.record(self._stream)
        return event

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        with self._module.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
