"""What a run will be, told before anything starts: who sits where, who talks to whom, bytes, memory."""

from collections.abc import Sequence

from dilocox.config import Config, Launcher
from dilocox.data.tokenizer import build_tokenizer
from dilocox.inside_traffic import InsideTraffic, predict_inside
from dilocox.memory import GIB, MemoryEstimate, estimates
from dilocox.method import build_roles
from dilocox.parameters import chunks, element_bytes, uses_gpu
from dilocox.topology import Lane
from dilocox.traffic import BetweenTraffic, predict_between


def describe(config: Config) -> str:
    """Plain text about a configuration: predicted with the same counting as the run's own, and nothing is started."""
    vocab_size = build_tokenizer(config.data.tokenizer).vocab_size
    between = predict_between(config, vocab_size)
    lanes = list(config.island.layout.lanes())
    inside = {lane: predict_inside(config, vocab_size, lane) for lane in lanes}
    sections = {
        "Run": _run(config, between),
        "Who sits where, and who talks to whom": _seats(config, vocab_size),
        "Between islands": _between(config, between),
        "Inside an island, bytes sent": _inside(config, inside),
        "Memory of a rank": _memory(config, estimates(config, vocab_size)),
    }
    return "\n\n".join(f"{title}\n{'-' * len(title)}\n{body}" for title, body in sections.items())


def _run(config: Config, between: BetweenTraffic) -> str:
    model, island = config.model, config.island
    tokens = island.batch_size * model.sequence_length
    everywhere = config.islands * tokens
    device = "GPU" if uses_gpu(config) else "CPU"
    precision = "bf16 with fp32 main weights" if element_bytes(config) == 2 else "fp32"
    plural = "es" if island.microbatches > 1 else ""
    microbatches = f"{island.microbatches} microbatch{plural} of {island.micro_batch_size} a data parallel rank"
    return _table(
        [
            ("run", f"{config.name}, in {config.run_dir}"),
            ("method", f"{config.algo_name}: {between.syncs} syncs in {config.steps} inner steps"),
            ("model", f"{model.name}: {between.parameters:,} parameters, sequences of {model.sequence_length} tokens"),
            ("precision", f"{precision}, on {device}s"),
            ("batch of an island", f"{island.batch_size} sequences = {tokens:,} tokens a step, in {microbatches}"),
            ("all islands", f"{everywhere:,} tokens a step, {everywhere * config.steps:,} in all"),
        ]
    )


def _seats(config: Config, vocab_size: int) -> str:
    layout = config.island.layout
    if config.launcher is Launcher.inprocess:
        processes = f"{layout.world_size} processes; in each, its lane of all {config.islands} islands take turns"
    else:
        processes = f"{config.islands} islands of {layout.world_size} processes each"
    rows: list[Sequence[str]] = [("rank", "lane", "parameters held", "tensor", "pipeline", "data", "lane group")]
    for lane in layout.lanes():
        rank = layout.rank(lane)
        held = sum(parameter.numel for chunk in chunks(config, vocab_size, lane) for parameter in chunk)
        group = " ".join(f"{island}:{rank}" for island in range(config.islands))
        rows.append((str(rank), str(lane), f"{held:,}", *_neighbours(config, lane), group))
    legend = (
        "tensor, pipeline, data: the ranks of its own island that a rank talks to\n"
        "lane group (island:rank): the only ranks that talk between islands"
    )
    return f"{processes}\n{_table(rows)}\n{legend}"


def _neighbours(config: Config, lane: Lane) -> tuple[str, str, str]:
    """Ranks of the island that share all but one coordinate with this lane, and work with it."""
    layout = config.island.layout
    stages = {lane.pp - 1, lane.pp + 1}
    ends = {0, layout.pp - 1}
    if lane.pp in ends and (config.island.virtual_pp > 1 or config.model.tied_embeddings):
        stages |= ends

    def others(lanes: list[Lane]) -> str:
        return ",".join(str(layout.rank(other)) for other in lanes if other != lane) or "-"

    return (
        others([Lane(tp, lane.pp, lane.dp) for tp in range(layout.tp)]),
        others([Lane(lane.tp, pp, lane.dp) for pp in range(layout.pp) if pp in stages]),
        others([Lane(lane.tp, lane.pp, dp) for dp in range(layout.dp)]),
    )


def _between(config: Config, between: BetweenTraffic) -> str:
    roles = build_roles(config)
    busiest = max(between.sent, key=lambda lane: max(between.sent[lane]))
    rows: list[Sequence[str]] = [("island", "a sync", "its busiest lane", "the whole run")]
    for island in range(between.islands):
        sent = between.bytes_per_sync(island)
        rows.append(
            (
                str(island),
                _size(sent),
                f"{_size(between.sent[busiest][island])} ({busiest})",
                _size(sent * between.syncs),
            )
        )
    return "\n".join(
        [
            f"bytes sent, with headers and votes, without TCP/IP; codec {roles.codec.name}, "
            f"exchange {type(roles.exchange).__name__}",
            _table(rows),
            f"{between.bits_per_parameter:.3f} bits a parameter and sync; {_size(between.bytes_total)} by all islands",
            _comparison(between),
        ]
    )


def _comparison(between: BetweenTraffic) -> str:
    if between.islands == 1:
        return "one island sends nothing"
    return (
        f"fp32 ring all-reduce in every step would send {_size(between.allreduce_bytes)} a step and island: "
        f"{between.reduction:,.1f} times as much"
    )


def _inside(config: Config, inside: dict[Lane, InsideTraffic]) -> str:
    rows: list[Sequence[str]] = [("pipeline stage", "tensor", "pipeline", "data", "tied embedding", "a step", "a sync")]
    for stage in range(config.island.pp):
        here = max((found for lane, found in inside.items() if lane.pp == stage), key=lambda found: found.per_step)
        rows.append(
            (
                str(stage),
                *(_size(n) for n in (here.tensor, here.pipeline, here.data, here.tied_embedding)),
                _size(here.per_step),
                _size(here.per_sync),
            )
        )
    step, sync = (sum(getattr(found, kind) for found in inside.values()) for kind in ("per_step", "per_sync"))
    total = f"the whole island: {_size(step)} a step, {_size(sync)} a sync (ring algorithms; without evaluation)"
    return f"by the rank of each stage that sends most\n{_table(rows)}\n{total}"


def _memory(config: Config, memory: dict[Lane, MemoryEstimate]) -> str:
    worst = [
        max((found for lane, found in memory.items() if lane.pp == stage), key=lambda found: found.device)
        for stage in range(config.island.pp)
    ]
    rows: list[Sequence[str]] = [("GiB, by pipeline stage", *(str(found.lane.pp) for found in worst))]
    rows += [(part, *(f"{found.parts()[part] / GIB:.3f}" for found in worst)) for part in worst[0].parts()]
    rows.append(("peak", *(f"{found.device / GIB:.3f}" for found in worst)))
    rows.append(("host memory beside a GPU", *(f"{found.host / GIB:.3f}" for found in worst)))
    shared = " Islands in one process add up." if config.launcher is Launcher.inprocess else ""
    return (
        f"{_table(rows)}\nThe peak has, of activations with logits and of sync buffers, the larger. "
        f"Python and libraries are not in it.{shared}"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _size(size: float) -> str:
    """Bytes in the largest decimal unit of which there is at least one.

    >>> _size(0), _size(1500), _size(2.5e9)
    ('0 B', '1.50 kB', '2.50 GB')
    """
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"
