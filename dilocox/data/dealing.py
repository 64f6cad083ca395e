"""Dealing: which documents are held out, and which island and data parallel rank trains on which of the others.

A document is hashed once, by its id, into one of a fixed number of virtual shards; whole shards are then held out or
dealt. So the shard of a document depends on nothing but its id: documents may be added or removed, and islands may
come and go, without another one changing shards.
"""

from dataclasses import dataclass
from hashlib import blake2b

from dilocox.errors import ConfigError


def document_hash(document_id: str) -> int:
    """64 bits (BLAKE2b) of a document's id: the same on every machine, evenly spread."""
    encoded = document_id.encode(errors="surrogateescape")
    return int.from_bytes(blake2b(encoded, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Deal:
    """How virtual shards are dealt: first some are held out, then the others go round among islands and dp ranks.

    No two ranks share a shard, every training shard has a rank, and shares differ by one shard at most. An island's
    share does not depend on its dp. Raises ConfigError when there are fewer shards than takers.
    """

    virtual_shards: int
    heldout_fraction: float
    islands: int
    dp: int

    def __post_init__(self) -> None:
        needed = self.heldout_shards + self.islands * self.dp
        if self.virtual_shards < needed:
            raise ConfigError(
                "data.virtual_shards",
                self.virtual_shards,
                f"{self.heldout_shards} held-out shards and one for each of {self.islands} islands × dp={self.dp} "
                f"need at least {needed}",
                "Raise it (1024 is usual), or lower data.heldout_fraction",
            )

    @property
    def heldout_shards(self) -> int:
        return max(1, round(self.heldout_fraction * self.virtual_shards))

    def shard(self, document_hash: int) -> int:
        return document_hash % self.virtual_shards

    def heldout(self) -> range:
        """The shards that no rank trains on: a larger fraction holds out these and more."""
        return range(self.heldout_shards)

    def training(self, island: int, dp_rank: int) -> range:
        """The shards of one dp rank of one island."""
        if not (0 <= island < self.islands and 0 <= dp_rank < self.dp):
            raise ValueError(f"island {island}, dp rank {dp_rank} is outside {self.islands} islands × dp={self.dp}")
        first = self.heldout_shards + island + self.islands * dp_rank
        return range(first, self.virtual_shards, self.islands * self.dp)
