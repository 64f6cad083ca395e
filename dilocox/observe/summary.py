"""What a run came to, as `summary.json`, taken from its records."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from dilocox.files import write_beside
from dilocox.observe.recorder import perplexity
from dilocox.observe.schema import End, Evaluation, MetricsError, Record, Start, Sync
from dilocox.observe.units import duration, quantity

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class Summary:
    """Totals are over the islands in the records; an island under `dilocox island` may see only itself."""

    run: str
    algo: str
    model: str
    islands: int
    tp: int
    pp: int
    dp: int
    parameters: int
    steps: int
    """Inner steps of each island."""
    rounds: int
    tokens: int
    heldout_loss: float
    """Of the final anchor, in nats a token, mean over islands."""
    perplexity: float
    untrained_heldout_loss: float | None
    """None when the model was not evaluated before the first step."""
    seconds: float
    """From start to end of the slowest island; after a resume, without the time between launches and steps lost."""
    seconds_in_sync: float
    """Of the island that spent most."""
    sync_share: float
    bytes_between_islands: int
    bytes_inside_islands: int
    bits_per_parameter_per_sync: float | None
    """None when nothing was synced."""
    parameter_hashes: dict[int, str]
    parameters_equal: bool
    """Whether the hashes of all islands are equal."""
    peak_memory_bytes: dict[int, list[int]]
    """By island, then by rank."""
    device: str
    precision: str
    inner_optimizer: str
    kernels: str
    config_hash: str
    commit: str | None
    versions: dict[str, str]


def unfinished(records: Sequence[Record]) -> list[int]:
    """Islands that have started and not ended."""
    started = {record.island for record in records if isinstance(record, Start)}
    return sorted(started - {record.island for record in records if isinstance(record, End)})


def summarise(records: Sequence[Record]) -> Summary:
    """The summary of a finished run from its current records (`reader.read`).

    Raises MetricsError when no island has recorded a start, one has not ended, or there is no held-out loss.
    """
    ends = {record.island: record for record in records if isinstance(record, End)}
    losses = [record for record in records if isinstance(record, Evaluation)]
    syncs = [record for record in records if isinstance(record, Sync)]
    if not ends or unfinished(records):
        raise MetricsError(f"no summary yet: islands {unfinished(records)} have not ended")
    if not losses:
        raise MetricsError("no summary: the records hold no held-out loss")
    start = next(record for record in reversed(records) if isinstance(record, Start))
    first, last = min(loss.step for loss in losses), max(loss.step for loss in losses)
    heldout = fmean(record.loss for record in losses if record.step == last)
    seconds = max(_seconds(records, island) for island in ends)
    in_sync = max(sum(sync.seconds for sync in syncs if sync.island == island) for island in ends)
    hashes = {island: end.parameter_hash for island, end in sorted(ends.items())}
    sent, synced = sum(sync.bytes_sent for sync in syncs), sum(sync.parameters for sync in syncs)
    return Summary(
        run=start.run,
        algo=start.algo,
        model=start.model,
        islands=start.islands,
        tp=start.tp,
        pp=start.pp,
        dp=start.dp,
        parameters=start.parameters,
        steps=max(end.step for end in ends.values()),
        rounds=max(end.round for end in ends.values()),
        tokens=sum(end.tokens for end in ends.values()),
        heldout_loss=heldout,
        perplexity=perplexity(heldout),
        untrained_heldout_loss=None if first else fmean(record.loss for record in losses if record.step == 0),
        seconds=seconds,
        seconds_in_sync=in_sync,
        sync_share=in_sync / max(seconds, 1e-9),
        bytes_between_islands=sent,
        bytes_inside_islands=sum(s.bytes_inside for s in syncs) + sum(end.bytes_inside for end in ends.values()),
        bits_per_parameter_per_sync=8 * sent / synced if synced else None,
        parameter_hashes=hashes,
        parameters_equal=len(set(hashes.values())) == 1,
        peak_memory_bytes={island: end.peak_memory_bytes for island, end in sorted(ends.items())},
        device=start.device,
        precision=start.precision,
        inner_optimizer=start.inner_optimizer,
        kernels=start.kernels,
        config_hash=start.config_hash,
        commit=start.commit,
        versions=start.versions,
    )


def _seconds(records: Sequence[Record], island: int) -> float:
    """The time that an island's launches took, each from its start to its last record that counts."""
    seconds, started, latest = 0.0, 0.0, 0.0
    for record in records:
        if record.island != island:
            continue
        if isinstance(record, Start):
            seconds += latest - started
            started = record.time
        latest = record.time
    return seconds + latest - started


def write_summary(summary: Summary, run_dir: Path) -> Path:
    """Write `summary.json` beside and rename it; returns its path."""
    path = run_dir / SUMMARY_FILE
    write_beside(path, json.dumps(asdict(summary), indent=2) + "\n")
    return path


def describe(summary: Summary) -> str:
    """A few lines for a person."""
    untrained = summary.untrained_heldout_loss
    before = "" if untrained is None else f", from {untrained:.4f} untrained"
    bits = summary.bits_per_parameter_per_sync
    per_sync = "" if bits is None else f" ({bits:.3g} bits a parameter and sync)"
    islands = len(summary.parameter_hashes)
    equal = ("the same" if summary.parameters_equal else "DIFFERENT") + f" on {islands} islands"
    peak = max(peak for peaks in summary.peak_memory_bytes.values() for peak in peaks)
    return "\n".join(
        (
            f"held-out loss    {summary.heldout_loss:.4f}, perplexity {summary.perplexity:.4g}{before}",
            f"trained          {summary.steps} steps of {quantity(summary.parameters)} parameters, {summary.rounds} "
            f"rounds, {quantity(summary.tokens)} tokens",
            f"time             {duration(summary.seconds)}, of it {summary.seconds_in_sync:.3g} s "
            f"({summary.sync_share:.1%}) in sync",
            f"sent             {quantity(summary.bytes_between_islands, 'B')} between islands{per_sync}, "
            f"{quantity(summary.bytes_inside_islands, 'B')} inside",
            f"final weights    {equal if islands > 1 else 'hash'}: "
            f"{' '.join(sorted(set(summary.parameter_hashes.values())))}",
            f"peak memory      {quantity(peak, 'B')} a rank",
        )
    )
