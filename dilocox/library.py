"""The outer loop for anybody's training loop: everything that it takes, in one import; no Megatron, no Hydra.

outer = attach(model, rendezvous=…, island=0, islands=2, roles=Roles(…))
…
optimizer.step()
outer.after_update()
"""

from dilocox.outer.apply import Overwrite
from dilocox.outer.codecs.block import Block
from dilocox.outer.codecs.cast import Cast
from dilocox.outer.exchange.all_gather import AllGather
from dilocox.outer.exchange.reduce_scatter import ReduceScatter
from dilocox.outer.job import Progress
from dilocox.outer.loop import OuterLoop
from dilocox.outer.merge.mean import Mean, WeightedMean
from dilocox.outer.modules import attach
from dilocox.outer.optimisers.adam import Adam
from dilocox.outer.optimisers.sgd import SGD, Identity, Momentum, Nesterov
from dilocox.outer.participation import All
from dilocox.outer.payload import Displacement, Gradient
from dilocox.outer.roles import Roles
from dilocox.outer.schedule import EveryH
from dilocox.outer.sync import SyncReport

__all__ = [
    "SGD",
    "Adam",
    "All",
    "AllGather",
    "Block",
    "Cast",
    "Displacement",
    "EveryH",
    "Gradient",
    "Identity",
    "Mean",
    "Momentum",
    "Nesterov",
    "OuterLoop",
    "Overwrite",
    "Progress",
    "ReduceScatter",
    "Roles",
    "SyncReport",
    "WeightedMean",
    "attach",
]
