"""Brings local weights to where the outer state lives, and back."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dilocox.outer.fragments import CHUNK_ELEMENTS
from dilocox_kernels.offload import HostStream

_CHUNK_BYTES = CHUNK_ELEMENTS * torch.float32.itemsize


class Staging:
    """For weights on `values_device` and outer state on `state_device`.

    On one device the weights are used where they are. Otherwise the state is in host memory, and the weights stream
    through pinned buffers.
    """

    def __init__(self, values_device: torch.device, state_device: torch.device) -> None:
        apart = values_device.type != state_device.type
        self._stream = HostStream(values_device, 2 * _CHUNK_BYTES) if apart else None

    def through(
        self, chunks: Sequence[Sequence[Tensor]], *, fetch: bool, give_back: bool
    ) -> Iterator[Sequence[Tensor]]:
        """Yield each chunk's tensors where the state lives, valid until the next is asked for.

        Without `fetch` what they hold may be anything; with `give_back` the weights take what the consumer leaves.
        """
        if self._stream is None:
            yield from chunks
        else:
            yield from self._stream.run(chunks, fetch=fetch, give_back=give_back)
