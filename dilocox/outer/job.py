"""The messages of one fragment in one sync."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.errors import DriftError, NonFiniteError, SyncError
from dilocox.outer.codecs.protocol import Codes, Destination, Norms, Origin
from dilocox.outer.exchange.protocol import Received
from dilocox.outer.fragments import Fragment
from dilocox.outer.island_group import first_nonfinite
from dilocox.outer.merge.mean import Merge
from dilocox.outer.roles import Roles
from dilocox.outer.state import FragmentState
from dilocox_kernels.kernels import Kernels
from dilocox_kernels.wire import HEADER_BYTES, Header, WireError, pack_header, unpack


@dataclass(frozen=True)
class Progress:
    """What an island did since the last sync, for weighted merges; equal on all its lanes."""

    tokens: int = 0
    steps: int = 0
    documents: int = 0


class SyncJob:
    """A fragment's messages in one sync; implements `exchange.protocol.Job`."""

    def __init__(
        self,
        state: FragmentState,
        index: int,
        values: Sequence[Tensor],
        *,
        number: int,
        inner_step: int,
        fingerprint: int,
        island: int,
        roles: Roles,
        kernels: Kernels,
        progress: Progress,
    ) -> None:
        self.state = state
        self.fragment: Fragment = state.fragment
        self.merge: Merge = roles.merge
        self.number = number
        self.where = f"inner step {inner_step}, fragment {state.fragment.name}"
        """For messages."""
        self.sum_of_squares = 0.0
        """Of this lane's payload, without what earlier syncs failed to send."""
        self.max_abs = 0.0
        """Of the same."""
        self.seconds_encoding = 0.0
        self.values = list(values)
        self._finite = True
        self._drift: DriftError | None = None
        self._index = index
        self._fingerprint = fingerprint
        self._island = island
        self._roles = roles
        self._kernels = kernels
        self._progress = progress
        self._checksum = state.checksum
        self._kept: dict[tuple[int, int, int], Tensor] = {}

    def encode(self, start: int, stop: int, values: Sequence[Tensor]) -> None:
        """Make this island's message about a flat range (hop 0); `values` lie where the state does, one a span."""
        minuend = self._roles.payload.minuend(self.state, start, stop)
        spans = self.fragment.spans(start, stop)

        def write(origin: Origin, destination: Destination) -> Norms:
            return self._roles.codec.encode(self._kernels, values, spans, minuend, origin, destination)

        norms = self._make(0, start, stop, write, flagged=False)
        self.sum_of_squares += norms.sum_of_squares
        self.max_abs = max(self.max_abs, norms.max_abs)

    def encoded(self, start: int, stop: int) -> Tensor:
        return self._kept[0, start, stop]

    def merged(self, start: int, stop: int, received: Sequence[Received]) -> Tensor:
        if (1, start, stop) not in self._kept:
            headers = [message.header for message in received]
            bodies = [message.body for message in received]
            codes = Codes(bodies, self.merge.weights(headers), self.fragment.spans(start, stop), start)

            def write(origin: Origin, destination: Destination) -> Norms:
                on_device = codes.to(self.state.device)
                return self.merge.requantise(self._roles.codec, self._kernels, on_device, origin, destination)

            self._make(1, start, stop, write, flagged=any(header.nonfinite for header in headers))
        return self._kept[1, start, stop]

    def _make(
        self, hop: int, start: int, stop: int, write: Callable[[Origin, Destination], Norms], flagged: bool
    ) -> Norms:
        """Let `write` encode a range into a message, seal it, and keep it."""
        message = self.buffer(start, stop)
        body = message[HEADER_BYTES:]
        on_host = self.state.device == body.device
        encoded = body if on_host else torch.empty_like(body, device=self.state.device)
        committed, pending = self.state.residuals[hop].at(start, stop)
        origin = Origin(number=self.number, island=self._island, fragment=self._index, hop=hop, start=start)
        norms = write(origin, Destination(encoded, committed, pending))
        if encoded is not body:
            body.copy_(encoded)  # waits for the device
        self._finite = self._finite and norms.finite
        pack_header(
            Header(
                nonfinite=flagged or not norms.finite,
                fingerprint=self._fingerprint,
                number=self.number,
                island=self._island,
                fragment=self._index,
                hop=hop,
                start=start,
                numel=stop - start,
                tokens=self._progress.tokens,
                steps=self._progress.steps,
                documents=self._progress.documents,
                checksum=self._checksum,
            ),
            message,
        )
        self._kept[hop, start, stop] = message
        return norms

    def buffer(self, start: int, stop: int) -> Tensor:
        return torch.empty(HEADER_BYTES + self._roles.codec.encoded_bytes(stop - start), dtype=torch.uint8)

    def accept(self, message: Tensor, *, island: int, hop: int, start: int, stop: int) -> Received:
        where = f"{self.where}, message of island {island}"
        try:
            header, body = unpack(message)
        except WireError as error:
            raise SyncError(f"{where}: {error}") from error
        expected = (self._fingerprint, self.number, island, self._index, hop, start, stop - start)
        got = (
            header.fingerprint,
            header.number,
            header.island,
            header.fragment,
            header.hop,
            header.start,
            header.numel,
        )
        if got != expected:
            raise SyncError(
                f"{where}: (settings, sync, island, fragment, hop, start, elements) = {got}, expected {expected}"
            )
        if header.checksum != self._checksum and self._drift is None:
            self._drift = DriftError(
                f"{where}: its anchor after the last sync has checksum {header.checksum:016x}, this island's has "
                f"{self._checksum:016x}. The islands have come apart; resume all of them from their last checkpoint"
            )
        return Received(header, body)

    def check(self) -> None:
        """Raise what the exchange, now complete, has brought to light: DriftError, or this island's NonFiniteError.

        Not earlier: an island that leaves an exchange midway can no longer tell the others why.
        """
        if self._drift is not None:
            raise self._drift
        if not self._finite:
            raise NonFiniteError(
                f"island {self._island}, {self.where}: the pseudo-gradient has a NaN or infinity, "
                f"{first_nonfinite(self.fragment.shards, self.values)}. Nothing was applied; resume from the last "
                "checkpoint with a lower inner.lr, and look at the data of this round"
            )
