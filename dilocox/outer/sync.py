"""Syncs: a fragment encoded once, sent as often as it takes, committed on all islands or on none.

Protocol of a sync, on every lane of every island:

1. Encode the payload into messages (kept until the next sync is committed) and a pending residual.
2. Run the exchange over the lane group. Every message carries the number of the sync, a fingerprint of the settings
   and the checksum of what islands shared after this fragment's last sync; a difference there is a DriftError, told
   in the vote. A lane that cannot finish breaks its connections, which its peers notice at once.
3. Vote. The lanes of an island take the worst of what befell them; each lane tells it to its lane group; the lanes
   take the worst of what they heard. Only if no lane of any island reports a problem is the sync committed: state,
   residuals and weights change after this point only.
4. Commit: merge, outer step and apply are local; owners hand their parts over inside the island.

A failed sync is repeated over a rebuilt lane group, with the same messages. An island can miss the last vote of a
sync that the others have committed: on the rebuilt group islands tell each other how far they are, and those ahead
send their kept messages once more, so that the one behind commits the same bits. It waits for them meanwhile, and
they come at their next sync: `participation.timeout_s` should be longer than a round.
"""

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from dilocox.errors import DilocoxError, DriftError, NonFiniteError, SyncError
from dilocox.outer.codecs.protocol import Codes
from dilocox.outer.exchange.protocol import Delivery
from dilocox.outer.island_group import IslandGroup
from dilocox.outer.job import Progress, SyncJob
from dilocox.outer.merge.merged import Merged
from dilocox.outer.roles import Roles
from dilocox.outer.state import FragmentState
from dilocox.outer.transport.protocol import LaneGroup
from dilocox.outer.transport.share import share_fixed
from dilocox_kernels.kernels import Kernels

_VOTE = struct.Struct("<QQ")  # number of the sync, severity
_HELLO = struct.Struct("<QQ")  # syncs committed, sum of the fragments' checksums
_SEVERITY: tuple[type[DilocoxError], ...] = (SyncError, NonFiniteError, DriftError)  # 1, 2, 3; 0 is well

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class SyncReport:
    """One committed sync, summed over the lanes of this island where not said otherwise."""

    number: int
    fragment: str
    seconds: float
    """That this lane spent on it: encoding, exchange, vote, outer step, handing over."""
    seconds_waiting: float
    """Of these: the exchange and the vote."""
    bytes_sent: int
    bytes_received: int
    elements: int
    pseudo_gradient_norm: float
    """L2 norm of this island's payload itself, without what earlier syncs failed to send."""
    pseudo_gradient_max: float
    """Largest magnitude in the same."""
    checksum: int
    """Of this lane's part of what the islands now share."""
    attempts: int


class SyncEngine:
    """Carries out syncs on one lane; all lanes of all islands call it in the same order."""

    def __init__(
        self,
        states: Sequence[FragmentState],
        *,
        roles: Roles,
        lane_group: LaneGroup,
        island_group: IslandGroup,
        kernels: Kernels,
        fingerprint: int,
    ) -> None:
        self.committed = 0
        """Syncs committed since the start of the run, counted over all fragments."""
        self._states = states
        self._roles = roles
        self._lane_group = lane_group
        self._island_group = island_group
        self._kernels = kernels
        self._fingerprint = fingerprint
        self._last: SyncJob | None = None

    def begin(self, index: int, values: Sequence[Tensor], progress: Progress, inner_step: int) -> SyncJob:
        """Encode fragment `index` as it is now, after `inner_step` inner steps; nothing is sent yet."""
        job = SyncJob(
            self._states[index],
            index,
            values,
            number=self.committed + 1,
            inner_step=inner_step,
            fingerprint=self._fingerprint,
            island=self._lane_group.island,
            roles=self._roles,
            kernels=self._kernels,
            progress=progress,
        )
        started = self._lane_group.clock()
        ranges = self._roles.exchange.messages(job.fragment, self._lane_group.islands)
        pieces = [job.fragment.owned_values(job.values, start, stop) for start, stop in ranges]
        for (start, stop), local in zip(
            ranges, job.state.staging.through(pieces, fetch=True, give_back=False), strict=True
        ):
            job.encode(start, stop, local)
        job.seconds_encoding = self._lane_group.clock() - started
        return job

    def complete(self, job: SyncJob) -> SyncReport:
        """Exchange, vote and commit; raises SyncError, NonFiniteError or DriftError with nothing changed.

        (A DriftError about replicas inside the island is raised after the change that brought them apart.)
        """
        started = self._lane_group.clock()
        before = self._traffic()
        deliveries, attempts = self._until_agreed(lambda: self._agree(job))
        agreed = self._lane_group.clock()
        self._commit(job, deliveries)
        done = self._lane_group.clock()
        after = self._traffic()
        squares, elements, sent, received = self._island_group.sum(
            [job.sum_of_squares, job.fragment.owned, after[0] - before[0], after[1] - before[1]]
        )
        return SyncReport(
            number=job.number,
            fragment=job.fragment.name,
            seconds=job.seconds_encoding + done - started,
            seconds_waiting=agreed - started,
            bytes_sent=int(sent),
            bytes_received=int(received),
            elements=int(elements),
            pseudo_gradient_norm=squares**0.5,
            pseudo_gradient_max=self._island_group.largest(job.max_abs),
            checksum=job.state.checksum,
            attempts=attempts,
        )

    def check_end(self) -> None:
        """Before the run ends: all islands have committed the same syncs and share the same bits."""
        self._until_agreed(self._hello)

    def _names(self) -> str:
        return ", ".join(state.fragment.name for state in self._states)

    def _traffic(self) -> tuple[int, int]:
        transport = self._lane_group.transport
        return transport.bytes_sent, transport.bytes_received

    def _until_agreed(self, action: Callable[[], _Result]) -> tuple[_Result, int]:
        """Try an action that fails on all lanes of this island or on none; each repeat is over a rebuilt lane group."""
        attempts = self._roles.participation.attempts
        for attempt in range(1, attempts + 1):
            try:
                if attempt > 1:
                    self._reconnect()
                return action(), attempt
            except SyncError as error:
                if attempt == attempts:
                    raise SyncError(
                        f"lane {self._lane_group.name}: gave up after {attempts} attempts; the outer step was not "
                        f"taken, and all islands can go on from their last checkpoint. {error}"
                    ) from error
        raise AssertionError("participation.attempts is at least 1")

    def _reconnect(self) -> None:
        problem: DilocoxError | None = None
        try:
            self._lane_group.rebuild()
        except SyncError as error:
            problem = error
        self._decide_inside(problem)
        self._hello()

    def _hello(self) -> None:
        """Tell the lane group how far this island is; send kept messages once more to islands one sync behind."""
        problem: DilocoxError | None = None
        behind = self.committed
        checksums = sum(state.checksum for state in self._states) % (1 << 64)
        try:
            heard = [_HELLO.unpack(reply) for reply in self._tell_all(_HELLO.pack(self.committed, checksums))]
            behind, ahead = min(heard)[0], max(heard)[0]
            if ahead - behind > 1:
                raise SyncError(f"islands are {ahead - behind} syncs apart; resume all of them from a checkpoint")
            if ahead == behind and len(set(heard)) > 1:
                shown = ", ".join(f"{checksum:016x}" for _, checksum in heard)
                raise DriftError(
                    f"after sync {ahead} the islands hold different anchors: fragments {self._names()} have checksums "
                    f"{shown} on islands 0, 1, …. Resume all islands from their last checkpoint"
                )
        except (SyncError, DriftError) as error:
            problem = error
        self._decide_inside(problem)
        if self.committed > behind:
            assert self._last is not None, "an island that is ahead has committed a sync"
            self._agree(self._last)

    def _agree(self, job: SyncJob) -> list[Delivery]:
        """Steps 2 and 3 of the protocol: returns what to commit, or raises the same kind of error on all lanes."""
        problem: DilocoxError | None = None
        deliveries: list[Delivery] = []
        try:
            deliveries = self._roles.exchange.run(job, self._lane_group.transport, self._deadline())
            job.check()
        except SyncError as error:
            self._lane_group.transport.abort()
            problem = error
        except (DriftError, NonFiniteError) as error:
            problem = error
        self._vote(job, problem)
        return deliveries

    def _vote(self, job: SyncJob, problem: DilocoxError | None) -> None:
        me = self._lane_group.island
        heard = [0] * self._lane_group.islands
        heard[me] = self._island_group.worst([_severity(problem)])[0]
        try:
            for island, reply in enumerate(self._tell_all(_VOTE.pack(job.number, heard[me]))):
                voted_on, heard[island] = _VOTE.unpack(reply)
                if voted_on != job.number:
                    raise SyncError(f"island {island} votes on sync {voted_on}, not on {job.number}")
        except SyncError as error:
            problem = problem or error
            heard[me] = max(heard[me], _severity(error))
        self._raise_worst(problem, self._island_group.worst(heard), job.where)

    def _decide_inside(self, problem: DilocoxError | None) -> None:
        verdicts = [0] * self._lane_group.islands
        verdicts[self._lane_group.island] = _severity(problem)
        self._raise_worst(problem, self._island_group.worst(verdicts), "reconnecting")

    def _raise_worst(self, problem: DilocoxError | None, verdicts: Sequence[int], where: str) -> None:
        """Raise the worst problem of all islands: this lane's own if it is that, else one that says whose it is."""
        worst = max(verdicts)
        if worst == 0:
            return
        if problem is not None and _severity(problem) == worst:
            raise problem
        islands = [island for island, verdict in enumerate(verdicts) if verdict == worst]
        kind = {1: "a failed exchange", 2: "a NaN or infinity in its pseudo-gradient", 3: "a different anchor"}[worst]
        raise _SEVERITY[worst - 1](f"{where}: island {islands[0]} reports {kind}; nothing was applied. See its logs")

    def _tell_all(self, message: bytes) -> list[bytes]:
        return share_fixed(self._lane_group.transport, message, self._deadline())

    def _deadline(self) -> float:
        return time.monotonic() + self._roles.participation.timeout_s

    def _commit(self, job: SyncJob, deliveries: Sequence[Delivery]) -> None:
        roles, state, fragment = self._roles, job.state, job.fragment
        pieces = [fragment.owned_values(job.values, delivery.start, delivery.stop) for delivery in deliveries]
        local_weights = state.staging.through(pieces, fetch=not roles.apply.local_becomes_anchor, give_back=True)
        checksum = 0
        for delivery, local in zip(deliveries, local_weights, strict=True):
            spans = fragment.spans(delivery.start, delivery.stop)
            codes = Codes(delivery.bodies, delivery.weights, spans, delivery.start).to(state.device)
            merged = Merged(codes, delivery.merge, roles.codec, self._kernels)
            checksum += roles.payload.absorb(state, local, merged, roles.outer_optimizer, roles.apply)
        job.fragment.hand_over(job.values)
        self._island_group.check_replicas(job.fragment.shards, job.values, job.where)
        for residual in state.residuals:
            residual.commit()
        state.outer_steps += 1
        state.checksum = checksum % (1 << 64)
        self.committed = job.number
        self._last = job


def _severity(problem: DilocoxError | None) -> int:
    return 0 if problem is None else 1 + _SEVERITY.index(type(problem))
