"""Where a run stands, folded from its records as they come."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from dilocox.observe.reader import cancels
from dilocox.observe.schema import Checkpoint, End, Evaluation, Record, Resume, Start, Step, Sync


@dataclass
class IslandProgress:
    """The newest of each kind that an island recorded, and sums over this launch of it."""

    start: Start | None = None
    first_step: Step | None = None
    step: Step | None = None
    sync: Sync | None = None
    checkpoint: Checkpoint | None = None
    ended: bool = False
    seconds_in_sync: float = 0.0
    bytes_between: int = 0
    """Sent to other islands."""
    bytes_inside: int = 0
    """Sent inside the island."""

    @property
    def steps(self) -> int:
        return 0 if self.step is None else self.step.step

    @property
    def seconds(self) -> float:
        """From the start of this launch to its newest step."""
        return 0.0 if self.start is None or self.step is None else self.step.time - self.start.time

    def time_left_s(self, steps: int) -> float | None:
        """Until `steps` inner steps are done, syncs included, at the pace of this launch; None before two records."""
        if self.step is None or self.first_step is None or self.step.step == self.first_step.step:
            return None
        pace = (self.step.time - self.first_step.time) / (self.step.step - self.first_step.step)
        return pace * (steps - self.step.step)


@dataclass
class RunProgress:
    """The watched islands, and the held-out losses that all of them have recorded."""

    islands: dict[int, IslandProgress]
    _losses: dict[tuple[int, int], Evaluation] = field(default_factory=dict)

    @staticmethod
    def of(islands: Sequence[int]) -> "RunProgress":
        return RunProgress({island: IslandProgress() for island in islands})

    def update(self, record: Record) -> None:
        """Take in a record; those of islands that are not watched change nothing."""
        if record.island not in self.islands:
            return
        island = self.islands[record.island]
        match record:
            case Start():
                self.islands[record.island] = IslandProgress(start=record)
            case Resume():
                self._losses = {key: loss for key, loss in self._losses.items() if not cancels(record, loss)}
            case Step():
                island.step = record
                island.first_step = island.first_step or record
            case Sync():
                island.sync = record
                island.seconds_in_sync += record.seconds
                island.bytes_between += record.bytes_sent
                island.bytes_inside += record.bytes_inside
            case Evaluation():
                self._losses[record.step, record.island] = record
            case Checkpoint():
                island.checkpoint = record
            case End():
                island.ended = True
                island.bytes_inside += record.bytes_inside

    @property
    def steps(self) -> int:
        """Inner steps that every watched island has done."""
        return min(island.steps for island in self.islands.values())

    def heldout_loss(self, step: int) -> float | None:
        """The mean over the watched islands; None until all have recorded it."""
        losses = [self._losses.get((step, island)) for island in self.islands]
        return None if None in losses else fmean(loss.loss for loss in losses if loss is not None)

    def newest_heldout(self) -> tuple[int, float] | None:
        """(step, loss) of the newest held-out loss that all watched islands have recorded."""
        for step in sorted({step for step, _ in self._losses}, reverse=True):
            if (loss := self.heldout_loss(step)) is not None:
                return step, loss
        return None
