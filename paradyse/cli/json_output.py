"""What commands found, as JSON for machines."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def as_json(value: Any) -> Any:
    """``value`` in terms of JSON.

    Dataclasses are objects of their fields, named tuples of theirs; dtypes are their names
    ("bfloat16"), numbers without an end (no limit of bytes) are null.

    Raises:
        TypeError: something in it has no such form.
    """
    if dataclasses.is_dataclass(value):
        return {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(of) for key, of in value.items()}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, tuple) and (names := inspect.get_annotations(type(value))):
        return {name: as_json(of) for name, of in zip(names, value, strict=True)}
    if isinstance(value, Sequence):
        return [as_json(of) for of in value]
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def show_json(value: Any) -> None:
    """Writes ``value`` to standard output as one JSON object, as ``as_json`` has it."""
    json.dump(as_json(value), sys.stdout, allow_nan=False)
    print()
