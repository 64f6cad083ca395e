"""The errors a person is meant to read: each names the field, the value and the remedy."""


class DilocoxError(Exception):
    """Base of every error that dilocox raises on purpose; the command line prints it without a traceback."""


class ConfigError(DilocoxError):
    """A setting that cannot work: names the field, its value, what was expected and how to fix it."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{field}={value!r}: {problem}. {remedy}")
        self.field = field


class DataError(DilocoxError):
    """A corpus that cannot be trained on: names the file, and the line or byte where it goes wrong."""


class CheckpointError(DilocoxError):
    """A checkpoint that is missing, damaged or belongs to another model or run."""


class HandshakeError(DilocoxError):
    """Islands that must not train together: names the setting in which they differ and both values."""


class SyncError(DilocoxError):
    """A sync that did not complete; anchor, outer optimiser and residuals are as they were before it."""


class DriftError(DilocoxError):
    """Replicas or islands that should be bit-identical and are not: names the fragment and who differs."""


class NonFiniteError(DilocoxError):
    """A NaN or infinity in a loss or a pseudo-gradient: names the island, the step and the fragment."""
