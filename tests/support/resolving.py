"""Checks and resolves a configuration as a run does, for devices that a test describes."""

from dataclasses import replace

from jaxpipe.planning import Devices, resolve
from jaxpipe.planning.rules.across import check_settings


def resolved(config, **described):
    """Return the plan; `described` are fields of `Devices`, by default none is present."""
    check_settings(config)
    if "platform" in described:
        described.setdefault("count", config.parallel.devices)
    return resolve(config, replace(Devices.planned(config), **described))
