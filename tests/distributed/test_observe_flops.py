"""The FLOPs that MFU is reckoned from, against those that torch counts while an island trains."""

from torch.utils.flop_counter import FlopCounterMode

from dilocox.config import Device
from dilocox.observe.flops import matmul_parameters
from dilocox.topology import Layout
from tests.distributed.islands import VOCAB, setting
from tests.distributed.ranks import run_ranks


def _count_flops() -> list[int]:
    """On one rank: the FLOPs of a step's matrix products (the counter does not see attention on CPUs), tied and not."""
    from dilocox.islands.world import start_world

    world = start_world(Layout(tp=1, pp=1, dp=1), Device.cpu)
    counts = []
    for tied in (True, False):
        one = setting(tied_embeddings=tied)
        island = one.build(world)
        with FlopCounterMode(display=False) as counter:
            island.forward_backward(one.batches(dp_rank=0, step=0))
        counts.append(counter.get_total_flops())
    return counts


def test_matrix_products_are_counted_as_torch_counts_them() -> None:
    [counts] = run_ranks(1, _count_flops)
    for tied, counted in zip((True, False), counts, strict=True):
        one = setting(tied_embeddings=tied)
        tokens = one.island.batch_size * one.model.sequence_length
        assert counted == 3 * 2 * matmul_parameters(one.model, one.model.padded_vocab(VOCAB)) * tokens
