"""Wire layout v1: a header of 128 bytes and a codec's body. Byte by byte in kernels/README.md."""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox_kernels.checksum import checksum64

HEADER_BYTES = 128
MAGIC = b"DLCX"
VERSION = 1

_FIELDS = struct.Struct("<4sHBBII9Q32x")
_CHECKSUM = struct.Struct("<Q")
_NONFINITE = 1  # bit 0 of the flags


class WireError(ValueError):
    """A message that is not what its sender wrote, or that this version cannot read."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What travels before the encoded elements [start, start + numel) of one fragment."""

    nonfinite: bool
    """The sender found a NaN or infinity; the body means nothing."""
    fingerprint: int
    """u64 of the settings that islands must share."""
    number: int
    """Of the sync, from 1."""
    island: int
    fragment: int
    hop: int
    start: int
    numel: int
    tokens: int
    """What the island trained on since the last sync; so are steps."""
    steps: int
    documents: int
    """Size of the island's shard of the corpus."""
    checksum: int
    """u64 of what the islands shared after this fragment's last sync: the anchor."""


def pack_header(header: Header, message: Tensor) -> None:
    """Write `header` before the body that is already in `message`: uint8 CPU tensor [HEADER_BYTES + body bytes].

    Raises struct.error for a field that does not fit its width.
    """
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        _NONFINITE if header.nonfinite else 0,
        header.hop,
        header.island,
        header.fragment,
        header.fingerprint,
        header.number,
        header.start,
        header.numel,
        header.tokens,
        header.steps,
        header.documents,
        header.checksum,
        message.numel() - HEADER_BYTES,
    )
    message[: _FIELDS.size] = torch.frombuffer(bytearray(fields), dtype=torch.uint8)
    sealed = bytearray(_CHECKSUM.pack(_message_checksum(message)))
    message[_FIELDS.size : HEADER_BYTES] = torch.frombuffer(sealed, dtype=torch.uint8)


def unpack(message: Tensor) -> tuple[Header, Tensor]:
    """Header and body (a view) of a uint8 CPU tensor; raises WireError when it is damaged or of another version."""
    if message.numel() < HEADER_BYTES:
        raise WireError(f"length: {message.numel()} bytes are less than the header's {HEADER_BYTES}")
    raw = bytes(message[:HEADER_BYTES].tolist())
    (magic, version, flags, hop, island, fragment, *counts) = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise WireError(f"magic: {magic!r} instead of {MAGIC!r}; the sender does not speak this protocol")
    if version != VERSION:
        raise WireError(f"version: the sender writes {version}, this side reads {VERSION}; install the same dilocox")
    fingerprint, number, start, numel, tokens, steps, documents, checksum, body_bytes = counts
    if body_bytes != message.numel() - HEADER_BYTES:
        raise WireError(f"length: the header announces {body_bytes} bytes, {message.numel() - HEADER_BYTES} came")
    (announced,) = _CHECKSUM.unpack_from(raw, _FIELDS.size)
    computed = _message_checksum(message)
    if announced != computed:
        raise WireError(f"checksum: the header announces {announced:016x}, the bytes have {computed:016x}")
    header = Header(
        nonfinite=bool(flags & _NONFINITE),
        fingerprint=fingerprint,
        number=number,
        island=island,
        fragment=fragment,
        hop=hop,
        start=start,
        numel=numel,
        tokens=tokens,
        steps=steps,
        documents=documents,
        checksum=checksum,
    )
    return header, message[HEADER_BYTES:]


def _message_checksum(message: Tensor) -> int:
    """Of the header's fields and the body, each at its place; the stored checksum itself is left out."""
    fields, body = message[: _FIELDS.size], message[HEADER_BYTES:]
    return (checksum64(fields) + checksum64(body, HEADER_BYTES // 4)) % (1 << 64)
