"""The dicts and lists that values of a checkpoint lie in, which its names alone do not tell.

``torch.distributed.checkpoint`` writes nested values under flat names, "state.weight.0.sum". From
these no one could say whether 0 was a number or text, nor that there was an empty dict. An outline
has all containers as they were, with flat names in place of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from paradyse.checkpoint.folder import listed


def outline_of(value: Any, name: str) -> Any:
    """The dicts and lists of ``value``, with the flat names of what lies in them.

    Args:
        value: what is saved. A list without tensors and dicts in it is one value, and so is a
            tuple, as ``torch.distributed.checkpoint`` has it.
        name: of ``value``.
    Raises:
        ValueError: keys of a dict are the same text, so that two values would have one name.
    """
    if isinstance(value, Mapping):
        texts = [str(key) for key in value]
        alike = [repr(key) for key, text in zip(value, texts) if texts.count(text) > 1]
        if alike:
            raise ValueError(
                f"{name} has keys that a checkpoint cannot tell apart: {listed(alike)}; give them "
                "keys whose str() differs"
            )
        return {key: outline_of(x, f"{name}.{key}") for key, x in value.items()}
    if isinstance(value, list) and _is_nested(value):
        return [outline_of(x, f"{name}.{i}") for i, x in enumerate(value)]
    return name


def _is_nested(value: list[Any]) -> bool:
    """Whether a list holds tensors or dicts, in lists or not."""
    return any(
        isinstance(x, Tensor | Mapping) or (isinstance(x, list) and _is_nested(x)) for x in value
    )


def values_in(value: Any, outline: Any) -> Iterator[tuple[str, Any]]:
    """The flat names of ``outline`` with what ``value`` has in their place; None where it has
    nothing there."""
    if isinstance(outline, str):
        yield outline, value
        return
    pairs = outline.items() if isinstance(outline, dict) else enumerate(outline)
    for key, inner in pairs:
        has = isinstance(value, Mapping) and key in value
        has |= isinstance(value, list) and isinstance(outline, list) and key < len(value)
        yield from values_in(value[key] if has else None, inner)


def filled(outline: Any, values: Mapping[str, Any]) -> Any:
    """The containers of ``outline`` with the ``values`` of its names."""
    if isinstance(outline, str):
        return values[outline]
    if isinstance(outline, dict):
        return {key: filled(inner, values) for key, inner in outline.items()}
    return [filled(inner, values) for inner in outline]
