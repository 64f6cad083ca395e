"""The method that a configuration composes out of roles."""

from dilocox.config import ROLES, Config, build_role
from dilocox.outer.roles import Roles


def build_roles(config: Config) -> Roles:
    """One choice for each role; raises ConfigError for choices that do not fit each other or the run's length."""
    roles = Roles(**{role: build_role(config, role) for role in ROLES})
    roles.schedule.check(config.steps)
    return roles
