"""Participation: which islands take part in a sync, and how long the others wait for them."""

from dilocox.errors import ConfigError


class All:
    """Every island takes part in every sync; a sync that fails is repeated with the same codes, then ends the run."""

    def __init__(self, timeout_s: float, attempts: int) -> None:
        if timeout_s <= 0:
            raise ConfigError("participation.timeout_s", timeout_s, "must be positive", "600 suits most links")
        if attempts < 1:
            raise ConfigError(
                "participation.attempts", attempts, "a sync is tried at least once", "Set it to 1 or more"
            )
        self.timeout_s = timeout_s
        self.attempts = attempts
