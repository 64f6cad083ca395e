"""The roles that make up a method of the family."""

from dataclasses import dataclass, field

from dilocox.outer.apply import Apply, Overwrite
from dilocox.outer.codecs.protocol import Codec
from dilocox.outer.exchange.all_gather import AllGather
from dilocox.outer.exchange.protocol import Exchange
from dilocox.outer.merge.mean import Mean, Merge
from dilocox.outer.optimisers.protocol import OuterOptimizer
from dilocox.outer.participation import All
from dilocox.outer.payload import Displacement, Payload
from dilocox.outer.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Roles:
    """One choice for each role; roles without settings default to DiLoCo's."""

    schedule: Schedule
    participation: All
    codec: Codec
    outer_optimizer: OuterOptimizer
    payload: Payload = field(default_factory=Displacement)
    exchange: Exchange = field(default_factory=AllGather)
    merge: Merge = field(default_factory=Mean)
    apply: Apply = field(default_factory=Overwrite)

    def __post_init__(self) -> None:
        self.payload.check(self.outer_optimizer, self.schedule)
