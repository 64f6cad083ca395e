"""The records of `metrics.jsonl`: what they hold, in which units, and how they are written and read.

`python -m dilocox.observe.schema > docs/metrics.md` writes the page that describes them.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from dilocox.errors import DilocoxError

METRICS_FILE = "metrics.jsonl"


class MetricsError(DilocoxError):
    """A metrics file that does not follow the schema, or does not hold what is asked of it."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A line of the file. Subclasses annotate each field with its type, unit and meaning."""

    kind: ClassVar[str]
    time: Annotated[float, "s", "When it was written, since 1970-01-01 UTC."]
    island: Annotated[int, "", "Whose record it is, counted from 0."]


@dataclass(frozen=True, kw_only=True)
class Start(Record):
    """An island begins to train, or goes on after a resume; written before anything else of that launch."""

    kind: ClassVar[str] = "start"
    run: Annotated[str, "", "Name of the run."]
    algo: Annotated[str, "", "Name of the method's preset."]
    model: Annotated[str, "", "Name of the model configuration."]
    islands: Annotated[int, "islands", "How many islands the run has."]
    tp: Annotated[int, "ranks", "Tensor parallel ranks of this island."]
    pp: Annotated[int, "ranks", "Pipeline stages of this island."]
    dp: Annotated[int, "ranks", "Data parallel ranks of this island."]
    steps: Annotated[int, "steps", "Inner steps that the run is to take."]
    tokens_per_step: Annotated[int, "tokens", "Tokens of one inner step of this island."]
    parameters: Annotated[int, "parameters", "Parameters of the model, padded vocabulary included."]
    flops_per_token: Annotated[float, "FLOP", "Forward and backward of one token; see dilocox/observe/flops.py."]
    peak_flops: Annotated[float | None, "FLOP/s", "Dense bf16 peak of one rank's GPU; null if unknown or on a CPU."]
    device: Annotated[str, "", "What a rank of this island runs on."]
    precision: Annotated[str, "", "Of the inner steps: fp32 or bf16."]
    inner_optimizer: Annotated[str, "", "Which implementation of the inner optimiser runs."]
    kernels: Annotated[str, "", "Which back end of dilocox_kernels encodes and takes the outer steps."]
    config_hash: Annotated[str, "", "First 16 hex digits of the SHA-256 of the resolved config.yaml."]
    commit: Annotated[str | None, "", "Git commit of the checkout, with -dirty when changed; null outside of one."]
    versions: Annotated[dict[str, str], "", "Versions of python, dilocox, torch and megatron-core."]


@dataclass(frozen=True, kw_only=True)
class Resume(Record):
    """An island goes on from a checkpoint: what it recorded after that step before counts no more (see above)."""

    kind: ClassVar[str] = "resume"
    step: Annotated[int, "steps", "Inner steps done when the checkpoint was saved; 0 if there was none."]
    path: Annotated[str | None, "", "The checkpoint; null if there was none."]


@dataclass(frozen=True, kw_only=True)
class Step(Record):
    """An inner step; every `observe.log_every_steps`-th, and the last."""

    kind: ClassVar[str] = "step"
    step: Annotated[int, "steps", "Inner steps done."]
    loss: Annotated[float, "nats/token", "Training loss of this step, averaged over the island."]
    lr: Annotated[float, "", "Inner learning rate of this step."]
    grad_norm: Annotated[float, "", "L2 norm of the gradient of this step, before clipping."]
    tokens: Annotated[int, "tokens", "Tokens that this island has trained on since the start of the run."]
    step_s: Annotated[float, "s", "Seconds an inner step, without syncs; mean since the last such record."]
    tokens_per_s: Annotated[float, "tokens/s", "Of the whole island, over the same steps."]
    mfu: Annotated[float | None, "fraction", "Model FLOP utilisation of the island's GPUs; null where peak_flops is."]


@dataclass(frozen=True, kw_only=True)
class Sync(Record):
    """A committed sync of one fragment; totals are over all lanes of the island."""

    kind: ClassVar[str] = "sync"
    step: Annotated[int, "steps", "Inner steps done."]
    round: Annotated[int, "rounds", "Rounds completed, this sync included."]
    number: Annotated[int, "syncs", "Syncs committed since the start of the run, this one included."]
    fragment: Annotated[str, "", "Which set of layers was synced."]
    seconds: Annotated[float, "s", "That this island spent on it: encoding, exchange, vote, outer step, handing over."]
    wait_s: Annotated[float, "s", "Of these: in the exchange and the vote."]
    attempts: Annotated[int, "", "Exchanges that it took; 1 if the first succeeded."]
    bytes_sent: Annotated[int, "B", "Sent to other islands, headers included."]
    bytes_received: Annotated[int, "B", "Received from other islands, headers included."]
    bytes_inside: Annotated[int, "B", "Sent between ranks inside this island since the sync record before this one."]
    parameters: Annotated[int, "parameters", "Parameters synced."]
    bits_per_parameter: Annotated[float, "bit", "8 × bytes_sent / parameters."]
    pseudo_gradient_norm: Annotated[float, "", "L2 norm of this island's payload, over all lanes."]
    pseudo_gradient_max: Annotated[float, "", "Largest magnitude in this island's payload, over all lanes."]
    checksum: Annotated[str, "", "16 hex digits: of the first lane's part of what the islands now share."]


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """A held-out loss."""

    kind: ClassVar[str] = "evaluation"
    step: Annotated[int, "steps", "Inner steps done; 0 is the untrained model."]
    round: Annotated[int, "rounds", "Rounds completed."]
    of: Annotated[str, "", "Which weights: anchor."]
    loss: Annotated[float, "nats/token", "Held-out loss."]
    perplexity: Annotated[float, "", "exp(loss)."]


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Record):
    """A checkpoint that is whole on disk."""

    kind: ClassVar[str] = "checkpoint"
    step: Annotated[int, "steps", "Inner steps done."]
    round: Annotated[int, "rounds", "Rounds completed."]
    seconds: Annotated[float, "s", "For which training stood still."]
    bytes: Annotated[int, "B", "On disk, over all ranks of the island."]
    path: Annotated[str, "", "Its folder."]


@dataclass(frozen=True, kw_only=True)
class End(Record):
    """An island has finished all steps; a failed or interrupted island writes none."""

    kind: ClassVar[str] = "end"
    step: Annotated[int, "steps", "Inner steps done."]
    round: Annotated[int, "rounds", "Rounds completed."]
    tokens: Annotated[int, "tokens", "Tokens that this island has trained on since the start of the run."]
    bytes_inside: Annotated[int, "B", "Sent between ranks inside this island since its last sync record."]
    parameter_hash: Annotated[str, "", "Of the island's final weights, whatever its layout."]
    peak_memory_bytes: Annotated[list[int], "B", "By rank: most allocated on its GPU, or most resident on a CPU."]


KINDS: dict[str, type[Record]] = {
    record.kind: record for record in (Start, Resume, Step, Sync, Evaluation, Checkpoint, End)
}


def to_line(record: Record) -> str:
    """One line of strict JSON, newline included; a NaN or infinity becomes null."""
    values = {name: _plain(value) for name, value in vars(record).items()}
    return json.dumps({"kind": record.kind} | values, allow_nan=False) + "\n"


def from_line(line: str) -> Record:
    """The record of a line; null in a field that must be a number is NaN. Raises MetricsError naming the field."""
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise MetricsError(f"not JSON ({error})") from error
    if not isinstance(values, dict) or values.get("kind") not in KINDS:
        raise MetricsError(f"expected an object whose kind is one of {', '.join(KINDS)}")
    record = KINDS[values.pop("kind")]
    types = {name: meaning[0] for name, meaning in _meanings(record)}
    if wrong := types.keys() ^ values.keys():
        raise MetricsError(f"kind={record.kind}: unknown or missing field {', '.join(sorted(wrong))}")
    return record(**{name: _checked(record.kind, name, value, types[name]) for name, value in values.items()})


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _checked(kind: str, name: str, value: Any, expected: Any) -> Any:
    if expected is float and value is None:
        return math.nan
    if not _fits(value, expected):
        raise MetricsError(f"kind={kind}: {name}={value!r}, expected {_type_name(expected)}")
    return value


def _fits(value: Any, expected: Any) -> bool:
    origin, arguments = get_origin(expected), get_args(expected)
    if origin is UnionType:
        return any(_fits(value, argument) for argument in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, arguments[1]) for item in value.values())
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, expected) and not isinstance(value, bool)


def _meanings(record: type[Record]) -> Iterator[tuple[str, tuple[Any, str, str]]]:
    """The fields of a record: (name, (type, unit, meaning))."""
    for name, hint in get_type_hints(record, include_extras=True).items():
        if get_origin(hint) is Annotated:
            unit, meaning = hint.__metadata__
            yield name, (hint.__origin__, unit, meaning)


def _type_name(expected: Any) -> str:
    names = {int: "integer", float: "number", str: "string", NoneType: "null"}
    origin, arguments = get_origin(expected), get_args(expected)
    if origin is UnionType:
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0])}s"
    if origin is dict:
        return f"object of {_type_name(arguments[1])}s"
    return names[expected]


_PAGE = """\
# metrics.jsonl

Written by `python -m dilocox.observe.schema > docs/metrics.md`; a test compares.

All islands append to one file in the folder of the run, a JSON object a line. Each line has a `kind`, which says what
other fields it has. A number that is NaN or infinite is written as `null`.

**After a resume** the file holds steps that an island took, lost and took again. The rule: a `resume` record of an
island at step S cancels, of that island's records before it, those whose `step` is greater than S, and `end` (and at
S = 0 all that have a `step`). `dilocox.observe.reader.read` applies it. A line that does not end in `}` was torn by a
crash; skip it.
"""


def page() -> str:
    """docs/metrics.md."""
    parts = [_PAGE]
    for kind, record in KINDS.items():
        parts.append(f"\n## {kind}\n{record.__doc__}\n\n| field | type | unit | meaning |\n|---|---|---|---|\n")
        for name, (expected, unit, meaning) in _meanings(record):
            parts.append(f"| `{name}` | {_type_name(expected)} | {unit} | {meaning} |\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
