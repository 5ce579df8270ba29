"""The machine that a profile was measured on, as its first line has it."""

from __future__ import annotations

from dataclasses import fields
from reprlib import repr as short
from typing import Any

from paradyse.planning.costs import Link, Machine
from paradyse.planning.profile_file import AGAIN, Profile


def recorded_machine(profile: Profile) -> Machine:
    """The rates that were measured with ``profile``, for the prior.

    Raises:
        ValueError: there are others than this version has, or some that no machine has.
    """
    given: dict[str, Any] = dict(profile.header.machine)
    known = {f.name for f in fields(Machine)}
    try:
        links = {n: Link(**link) for n, link in (given.pop("links", None) or {}).items()}
        machine = Machine(**{k: v for k, v in given.items() if k in known}, links=links)
        _check_rates("the machine", machine)
        for name, link in links.items():
            _check_rates(f"the link of {name}", link)
        return machine
    except (TypeError, AttributeError) as e:
        raise ValueError(
            f"{profile.path}:1: the fields of the machine are not those of this version ({e}); "
            f"{AGAIN}"
        ) from e


_BOUNDS = {
    "_flops": (1.0, 1e18),
    "bandwidth": (1.0, 1e18),
    "bandwidth_bytes": (1.0, 1e18),
    "_s": (0.0, 60.0),
    "overlap": (0.0, 1.0),
    "capacity_bytes": (1.0, 1e18),
    "communicator_bytes": (0.0, 1e18),
}
"""End of a field's name -> the least and the most of any machine, a second or for a message."""


def _check_rates(what: str, of: Machine | Link) -> None:
    """Raises TypeError where a rate, a time or a size of ``of`` is none that a machine has."""
    for name, value in vars(of).items():
        bounds = next((b for end, b in _BOUNDS.items() if name.endswith(end)), None)
        if value is None or bounds is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} of {what} is {value!r}, not a number")
        if not bounds[0] <= value <= bounds[1]:
            raise TypeError(f"{name} of {what} is {short(value)}")
