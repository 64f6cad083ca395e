"""Checkpoints of one island: whole or not there at all, by parameter name, resumable bit for bit.

    island0/
      step-00000100/          appears by one rename, when everything in it is on disk
        manifest.json         what it is, tensors by kind and name, files with sizes and SHA-256; checks itself
        .metadata             torch.distributed.checkpoint's index: which file holds which rectangle of which tensor
        __0_0.distcp …        rectangles of parameters, moments, anchors, …: one file a rank, each element once
        rank-00000.json …     a rank's own counters and positions
        rank-00000.pt …       a rank's own tensors, such as its random streams

A folder `step-*.partial` is a save that did not end, and is removed by the next one. The folder must be on a file
system that all ranks of the island share; islands need not share one. torch's index is a pickle: load what you trust.
"""

from dilocox.checkpoint.files import Manifest, newest_common, read_manifest, rounds, step_folder, verify
from dilocox.checkpoint.store import load, load_tensors, save

__all__ = [
    "Manifest",
    "load",
    "load_tensors",
    "newest_common",
    "read_manifest",
    "rounds",
    "save",
    "step_folder",
    "verify",
]
