"""A few bytes from every island to every island: votes, greetings, what to resume from."""

import struct

import torch

from dilocox.outer.transport.protocol import Transport

_LENGTH = struct.Struct("<Q")


def share(transport: Transport, message: bytes, deadline: float) -> list[bytes]:
    """Give `message` (any length) to all islands; returns each island's, this one's included, in island order.

    Protocol: everybody sends its length (8 bytes, little-endian) to everybody, then the message itself.
    """
    lengths = [_LENGTH.unpack(reply)[0] for reply in _swap(transport, _LENGTH.pack(len(message)), None, deadline)]
    return _swap(transport, message, lengths, deadline)


def share_fixed(transport: Transport, message: bytes, deadline: float) -> list[bytes]:
    """As `share`, for messages of one length that all islands know: half the round trips."""
    return _swap(transport, message, None, deadline)


def _swap(transport: Transport, message: bytes, lengths: list[int] | None, deadline: float) -> list[bytes]:
    own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    peers = [island for island in range(transport.islands) if island != transport.island]
    replies = {peer: torch.empty(lengths[peer] if lengths else len(message), dtype=torch.uint8) for peer in peers}
    sends = [transport.send(peer, own) for peer in peers]
    receives = [transport.receive(peer, replies[peer]) for peer in peers]
    for pending in receives + sends:
        pending.wait(deadline)
    replies[transport.island] = own
    return [replies[island].numpy().tobytes() for island in range(transport.islands)]
