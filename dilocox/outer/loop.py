"""The outer loop: what a training loop calls around its inner steps.

    outer = OuterLoop(shards, roles=…, lane_group=…, island_group=…, …)
    for batch in data:
        backward(batch)
        outer.after_backward(progress)   # syncs gradients, in methods that do
        optimizer.step()
        outer.after_update(progress)     # syncs displacements, every H steps

It owns no model and starts no process: shards are lent to it, lane groups are handed to it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dilocox.errors import CheckpointError, ConfigError
from dilocox.outer.fragments import Fragment, flat_values, whole
from dilocox.outer.island_group import IslandGroup
from dilocox.outer.job import Progress, SyncJob
from dilocox.outer.payload import Point
from dilocox.outer.roles import Roles
from dilocox.outer.staging import Staging
from dilocox.outer.state import FragmentState, Residual
from dilocox.outer.sync import SyncEngine, SyncReport
from dilocox.outer.transport.protocol import LaneGroup
from dilocox.shards import Shard
from dilocox_kernels.backend import BackendError
from dilocox_kernels.kernels import Kernels, select
from dilocox_kernels.validate import VALUE_DTYPES

ONE_STEP = Progress(steps=1)


class OuterLoop:
    """Rounds of inner steps and syncs between islands, for one rank of one island.

    All ranks of an island make the same calls. `shards` are the main weights; `publish` is called after they were
    written; `gradients` lends the gradients behind them (needed by payload=gradient only). `identity` holds what all
    islands must have in common; its fingerprint travels with every message. Outer state lives on `device`.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        roles: Roles,
        lane_group: LaneGroup,
        island_group: IslandGroup,
        identity: Mapping[str, object],
        kernels: str,
        publish: Callable[[], None] = lambda: None,
        gradients: Callable[[], Sequence[Shard]] | None = None,
        device: torch.device | None = None,
        partition: Callable[[Sequence[Shard], int], list[Fragment]] = whole,
    ) -> None:
        self.inner_steps = 0
        self.rounds = 0
        """Rounds completed: every fragment was synced so often."""
        self.at_round_end = False
        """Nothing is between islands: the inner step before was the last of a round. When to save and evaluate."""
        self._roles = roles
        self._lane_group = lane_group
        self._publish = publish
        self._gradients = gradients
        self._progress = Progress()
        self._jobs: dict[int, SyncJob] = {}
        self._local_is_anchor = True
        _check_values(shards)
        values_device = shards[0].values.device
        device = device or values_device
        staging = Staging(values_device, device)
        fragments = partition(shards, roles.codec.alignment)
        self._states = [self._new_state(fragment, device, staging) for fragment in fragments]
        for state in self._states:
            state.adopt(flat_values(state.fragment.shards))
        chosen = _select(kernels, device)
        self.kernels_name = chosen.name
        """Back end of dilocox_kernels that encodes and takes the outer steps."""
        self._engine = SyncEngine(
            self._states,
            roles=roles,
            lane_group=lane_group,
            island_group=island_group,
            kernels=chosen,
            fingerprint=fingerprint(identity),
        )

    def _new_state(self, fragment: Fragment, device: torch.device, staging: Staging) -> FragmentState:
        roles, group = self._roles, self._lane_group
        ranges = roles.exchange.residual_ranges(fragment, group.island, group.islands)
        return FragmentState(
            fragment,
            slots=roles.outer_optimizer.slots,
            needs_anchor=roles.payload.needs_anchor,
            residuals=[
                Residual(*bounds, device=device, dtype=roles.codec.residual_dtype, enabled=roles.codec.error_feedback)
                for bounds in ranges
            ],
            device=device,
            staging=staging,
        )

    def after_backward(self, progress: Progress = ONE_STEP) -> list[SyncReport]:
        """Call when gradients are ready and before the inner optimiser's step; `progress` is this step's."""
        if self._roles.payload.point is not Point.AFTER_BACKWARD:
            return []
        assert self._gradients is not None, "payload=gradient needs the loop's `gradients`"
        lent = {id(shard): gradient.values for shard, gradient in zip(self._shards(), self._gradients(), strict=True)}
        return self._advance(progress, lambda fragment: [lent[id(shard)] for shard in fragment.shards])

    def after_update(self, progress: Progress = ONE_STEP) -> list[SyncReport]:
        """Call after the inner optimiser's step; returns the syncs that it completed."""
        self._local_is_anchor = self._roles.payload.point is Point.AFTER_BACKWARD
        if self._roles.payload.point is not Point.AFTER_UPDATE:
            return []
        return self._advance(progress, lambda fragment: flat_values(fragment.shards))

    def _shards(self) -> list[Shard]:
        return [shard for state in self._states for shard in state.fragment.shards]

    def _advance(self, progress: Progress, values_of: Callable[[Fragment], list[Tensor]]) -> list[SyncReport]:
        self.inner_steps += 1
        since = self._progress
        self._progress = Progress(
            since.tokens + progress.tokens, since.steps + progress.steps, max(since.documents, progress.documents)
        )
        due = self._roles.schedule.after(self.inner_steps, len(self._states))
        with torch.no_grad():
            for index in due.send:
                fragment = self._states[index].fragment
                self._jobs[index] = self._engine.begin(index, values_of(fragment), self._progress, self.inner_steps)
            reports = [self._engine.complete(self._jobs.pop(index)) for index in due.apply]
            if due.apply and self._roles.payload.point is Point.AFTER_UPDATE:
                self._publish()
        self.at_round_end = due.round_ends
        if due.round_ends:
            self.rounds += 1
            self._progress = Progress()
            self._local_is_anchor = self._roles.apply.local_becomes_anchor
        return reports

    @contextmanager
    def anchor_weights(self) -> Iterator[None]:
        """Inside, the model holds the anchor: what a method of this family validates and exports."""
        if self._local_is_anchor:
            yield
            return
        local = [shard.values.clone() for shard in self._shards()]
        self._write_anchor()
        try:
            yield
        finally:
            for shard, kept in zip(self._shards(), local, strict=True):
                shard.values.copy_(kept)
            self._publish()

    def _write_anchor(self) -> None:
        with torch.no_grad():
            for state in self._states:
                values = flat_values(state.fragment.shards)
                for piece, inside, outside in state.fragment.overlaps(0, state.fragment.numel):
                    values[piece.index][inside].copy_(state.anchor[outside])
                state.fragment.hand_over(values)
        self._publish()

    def check_end(self) -> None:
        """Call once when training is over: raises unless all islands are at the same sync with the same bits."""
        self._engine.check_end()

    def close(self) -> None:
        self._lane_group.close()

    @property
    def checksums(self) -> dict[str, int]:
        """By fragment: of this lane's part of what all islands share."""
        return {state.fragment.name: state.checksum for state in self._states}

    def tensors(self) -> dict[str, list[Shard]]:
        """The outer state's tensors by kind, named by parameter, to be saved or loaded in place (at a round's end)."""
        merged: dict[str, list[Shard]] = {}
        for state in self._states:
            for kind, shards in state.tensors().items():
                merged.setdefault(kind, []).extend(shards)
        return merged

    def state(self) -> dict[str, object]:
        """The rest of the outer state; JSON-able and equal on all lanes, at the end of a round."""
        return {
            "inner_steps": self.inner_steps,
            "rounds": self.rounds,
            "syncs": self._engine.committed,
            "outer_steps": {state.fragment.name: state.outer_steps for state in self._states},
        }

    def load_state(self, stored: Mapping[str, object]) -> None:
        """Take up `state()` after `tensors()` were loaded in place."""
        outer_steps = stored["outer_steps"]
        if not isinstance(outer_steps, Mapping) or set(outer_steps) != {s.fragment.name for s in self._states}:
            raise CheckpointError(
                f"the checkpoint's fragments are {outer_steps}, this run's are {list(self.checksums)}"
            )
        self.inner_steps = _count(stored, "inner_steps")
        self.rounds = _count(stored, "rounds")
        self._engine.committed = _count(stored, "syncs")
        for state in self._states:
            state.outer_steps = int(outer_steps[state.fragment.name])
            state.refresh_checksum()
        self._local_is_anchor = self._roles.apply.local_becomes_anchor
        self.at_round_end = True


def _select(name: str, device: torch.device) -> Kernels:
    try:
        return select(name, device.type)
    except BackendError as error:
        raise ConfigError("kernels", name, str(error), "kernels=auto takes the fastest for the device") from error


def _check_values(shards: Sequence[Shard]) -> None:
    dtypes = sorted({str(shard.values.dtype) for shard in shards})
    if len(dtypes) > 1 or shards[0].values.dtype not in VALUE_DTYPES:
        raise ConfigError(
            "parameters",
            ", ".join(dtypes),
            f"expected one dtype, of {', '.join(map(str, VALUE_DTYPES))}",
            "Keep all parameters in float32 and train under autocast",
        )


def fingerprint(identity: Mapping[str, object]) -> int:
    """64 bits that differ when the settings that islands must share differ."""
    text = json.dumps(identity, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _count(stored: Mapping[str, object], field: str) -> int:
    value = stored.get(field)
    if not isinstance(value, int) or value < 0:
        raise CheckpointError(f"the outer state's {field} is {value!r}, expected a count")
    return value
