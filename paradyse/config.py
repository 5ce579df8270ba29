"""The options of ``torch.compile(model, backend="paradyse", options=...)``, checked and frozen."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paradyse.types import (
    ATTENTION_STRATEGIES,
    EXPERTS,
    HEAD,
    LEVER_SETS,
    LEVERS,
    REPLICATED,
    SPLITS,
    Plan,
    Point,
)

log = logging.getLogger(__name__)

ENVIRONMENT = "PARADYSE_OPTIONS"
"""Environment variable with options for programs that cannot be edited."""

AUTO = "auto"
"""The plan option that leaves the choice to the planner; also legal inside the other forms."""

INNER_COMPILERS = ("inductor", "aot_eager", "eager")
UNSUPPORTED = ("gather", "error")
BLOCK_KINDS = ("attention", "mlp", EXPERTS)
STRATEGIES = (*ATTENTION_STRATEGIES, REPLICATED)
"""Names that a plan may say, and ``strategies`` may list."""

MOST_BYTES = 2**60
"""No device has more."""
MOST_SMOOTHING = 1e9
"""No plan is better than another by more."""

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{c}B": 1000**i for i, c in enumerate("KMGTP", 1)}
_UNITS |= {f"{c}IB": 1024**i for i, c in enumerate("KMGTP", 1)}


@dataclass(frozen=True)
class PlanByKind:
    """The plan option ``{"attention": ..., "mlp": ..., "experts": ...}``, a name or a list of them
    for each kind of block, with ``"head"`` and ``"split"``."""

    attention: str | tuple[str, ...] = AUTO
    """A strategy, which may have levers, "auto", or one of these for every attention block."""
    mlp: str | tuple[str, ...] = AUTO
    """The same for the MLP blocks."""
    head: str = AUTO
    """The levers of the head, joined by "+", or "auto"."""
    experts: str | tuple[str, ...] = AUTO
    """As of the others, for the blocks of experts."""
    split: str = ""
    """As of ``Plan``, or "auto"."""

    @property
    def of_blocks(self) -> tuple[str | tuple[str, ...], ...]:
        """What each kind of block is given, in the order of ``BLOCK_KINDS``."""
        return self.attention, self.mlp, self.experts


PlanOption = str | tuple[str, ...] | PlanByKind | Plan | Callable[..., Any]
"""A checked ``plan`` option: a name or "auto", names per layer, per kind, per block, a function."""


@dataclass(frozen=True)
class Options:
    """Checked options. ``parse_options`` makes them from what the user wrote."""

    plan: PlanOption = AUTO
    """"auto", a strategy name, one name per layer, ``PlanByKind``, a ``Plan``, or a function."""
    strategies: tuple[str, ...] = STRATEGIES
    """What "auto" may choose from."""
    levers: tuple[str, ...] = LEVERS
    """What "auto" may trade time for memory by, where the limit asks for it."""
    splits: tuple[str, ...] = SPLITS
    """Dims besides the sequence that "auto" may have tokens lie split along (``Plan.split``)."""
    cost_model: str | None = None
    """Path of a profile; None: the analytic prior."""
    memory_limit: int | None = None
    """Bytes per rank that a plan may need; None: the device's capacity less a reserve."""
    host_memory: int | None = None
    """Bytes per rank that blocks may keep on the host; None: the host's less a reserve."""
    smoothing: float = 0.05
    """Take one strategy for all blocks, or keep the previous plan, within this share of the best
    predicted time."""
    retry_out_of_memory: bool = True
    """Run a forward that ran out of memory once more by the smallest plan, where there is one."""
    mesh: Any = None
    """A ``DeviceMesh``; None: one axis over the world."""
    inner: str = "inductor"
    """Compiler of the pieces."""
    on_unsupported: str = "gather"
    """What to do where an operator has no rule: "gather" or "error"."""
    dump: str | None = None
    """Folder for graphs, plans and counters; None: write nothing."""
    passes_off: tuple[str, ...] = ()
    """Names of passes to leave out."""

    @property
    def splitting(self) -> tuple[str, ...]:
        """Of ``strategies`` those by which ranks share the work of a block."""
        return tuple(s for s in self.strategies if s != REPLICATED)


OPTION_NAMES = tuple(f.name for f in fields(Options))


def _not_legal(value: Any, legal: Collection[str]) -> str:
    """The end of a message: ``value``, the name in ``legal`` closest to it, and all of those."""
    close = difflib.get_close_matches(value, legal, n=1) if isinstance(value, str) else []
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{value!r}{hint}; legal: {', '.join(legal)}"


def check_strategy(name: Any, where: str, auto: bool = True) -> str:
    """``name``, once it is known to name a strategy, or to be "auto" where ``auto`` allows it.

    Args:
        where: the option, for the message.
    Raises:
        ValueError: it is neither.
    """
    if isinstance(name, str) and (name in STRATEGIES or (auto and name == AUTO)):
        return name
    legal = ((AUTO,) if auto else ()) + STRATEGIES
    raise ValueError(f"{where}: unknown strategy {_not_legal(name, legal)}")


def check_levers(names: Sequence[Any], where: str) -> tuple[str, ...]:
    """``names`` in the order of ``LEVERS``, once they are known to be levers, each named once.

    Args:
        where: the option, for the message.
    Raises:
        ValueError: one is none, or is named twice.
    """
    for name in names:
        if not isinstance(name, str) or name not in LEVERS:
            raise ValueError(f"{where}: unknown lever {_not_legal(name, LEVERS)}")
        if list(names).count(name) > 1:
            raise ValueError(f"{where}: lever {name!r} is named twice; name it once")
    return tuple(v for v in LEVERS if v in names)


def check_point(name: Any, where: str, kind: str = "") -> str:
    """``name``, a strategy with levers or without, or "auto"; levers in the order of ``LEVERS``.

    Args:
        where: the option, for the message.
        kind: of the blocks that it is for; "": all kinds.
    Raises:
        ValueError: it is neither, or blocks of ``kind`` do not have its levers.
    """
    if not isinstance(name, str) or "+" not in name:
        return check_strategy(name, where)
    strategy, *levers = name.split("+")
    point = Point(strategy if strategy != AUTO else name, check_levers(levers, where))
    check_strategy(point.strategy, where)
    kinds = (kind,) if kind else BLOCK_KINDS
    if not any(point.levers in LEVER_SETS[k] for k in kinds):
        legal = dict.fromkeys("+".join(v) for k in kinds for v in LEVER_SETS[k] if v)
        of = f"{kind} blocks have" if kind else "blocks have"
        raise ValueError(
            f"{where}: {of} no levers {'+'.join(point.levers)!r}; give one of {', '.join(legal)}"
        )
    return str(point)


def check_head(levers: Any, where: str) -> str:
    """``levers`` of the head, joined by "+", "" or "auto", once they are known to be that.

    Args:
        where: the option, for the message.
    Raises:
        ValueError: they are not.
    """
    legal = ("+".join(v) for v in LEVER_SETS[HEAD])
    if levers == AUTO or (isinstance(levers, str) and levers in legal):
        return levers
    named = ", ".join(repr("+".join(v)) for v in LEVER_SETS[HEAD])
    raise ValueError(f"{where}: the head has no levers {levers!r}; give 'auto' or one of {named}")


def check_split(name: Any, where: str, legal: Sequence[str] = ("", *SPLITS)) -> str:
    """``name``, once it is known to name a dim that tokens may lie split along.

    Args:
        where: the option, for the message.
        legal: the names.
    Raises:
        ValueError: it does not.
    """
    if isinstance(name, str) and name in legal:
        return name
    named = ", ".join(map(repr, legal))
    raise ValueError(f"{where}: tokens are not split along {name!r}; give one of {named}")


def _names_of(form: Any, where: str, kind: str = "") -> str | tuple[str, ...]:
    """A name, or one for each layer, of blocks of ``kind``; checked."""
    if isinstance(form, str):
        return check_point(form, where, kind)
    if not form:
        raise ValueError(f"{where}: the list is empty; give one name per layer, or 'auto'")
    return tuple(check_point(v, f"{where}[{i}]", kind) for i, v in enumerate(form))


def _by_kind(form: Mapping[Any, Any], where: str) -> PlanByKind:
    """A plan by kinds of blocks, checked."""
    checked: dict[str, Any] = {}
    for key, given in form.items():
        at = f"{where}[{key!r}]"
        if key == HEAD:
            checked[key] = check_head(given, at)
        elif key == "split":
            checked[key] = check_split(given, at, (AUTO, "", *SPLITS))
        elif key not in BLOCK_KINDS:
            raise ValueError(
                f"{where}: unknown kind of block {_not_legal(key, (*BLOCK_KINDS, HEAD, 'split'))}"
            )
        elif not isinstance(given, str | list | tuple):
            raise ValueError(f"{at}: give a name or a list of names, not {given!r}")
        else:
            checked[key] = _names_of(given, at, key)
    return PlanByKind(**checked)


def parse_plan(value: Any, where: str = "option 'plan'") -> PlanOption:
    """Any form of the ``plan`` option, checked as far as that goes without a model.

    Args:
        value: as written by the user.
        where: the option, for the message.
    Raises:
        ValueError: a name is unknown, or the form is none of the legal ones.
    """
    if isinstance(value, str | list | tuple):
        return _names_of(value, where)
    if isinstance(value, PlanByKind):
        return _by_kind(vars(value), where)
    if isinstance(value, Plan):
        names = tuple(check_point(s, where) for s in value.strategies)
        head = value.head if value.alone else check_head(value.head, where)
        return Plan(names, head, check_split(value.split, where))
    if isinstance(value, Mapping):
        return _by_kind(value, where)
    if callable(value):
        return value
    raise ValueError(
        f"{where}: cannot read {value!r}; give 'auto', a strategy name, a list with one name per "
        "layer, {'attention': [...], 'mlp': [...]}, or a function (Workload) -> Plan"
    )


def check_count(name: str, value: Any) -> None:
    """
    Raises:
        ValueError: ``value``, of what ``name`` says, is no whole number of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} {value!r}: give a whole number of at least 1")


def parse_bytes(value: Any, where: str = "option 'memory_limit'") -> int:
    """Bytes from an int or from text such as ``"80GiB"`` or ``"1.5 GB"``.

    Args:
        value: as written by the user.
        where: the option, for the message.
    Raises:
        ValueError: not a positive size.
    """
    amount: float | None = None
    if isinstance(value, str):
        m = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if m and m[2].upper() in _UNITS:
            amount = float(m[1]) * _UNITS[m[2].upper()]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        amount = value
    if amount is None or not 1 <= amount <= MOST_BYTES:
        raise ValueError(
            f"{where}: cannot read {value!r} as a size; give bytes (80 * 2**30) or text like "
            "'80GiB' or '500MB'"
        )
    return int(amount)


def _one_of(value: Any, key: str, legal: tuple[str, ...]) -> str:
    if value in legal:
        return str(value)
    raise ValueError(f"option {key!r}: unknown value {_not_legal(value, legal)}")


def _names(value: Any, key: str) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Collection) or isinstance(names, Mapping | bytes):
        raise ValueError(f"option {key!r}: give a list of names, not {value!r}")
    return tuple(names)


def _strategies(value: Any) -> tuple[str, ...]:
    names = _names(value, "strategies")
    for name in names:
        check_strategy(name, "option 'strategies'", auto=False)
    if not names:
        raise ValueError(
            f"option 'strategies': the list is empty; give some of "
            f"{', '.join(STRATEGIES)}, or leave the option out to allow all"
        )
    if set(names) == {REPLICATED}:
        raise ValueError(
            f"option 'strategies': {REPLICATED!r} alone leaves nothing to choose; give "
            f"'plan': {REPLICATED!r} in its place, or list strategies beside it"
        )
    # One order on all ranks, even from a set.
    return tuple(s for s in STRATEGIES if s in names)


def _splits(value: Any) -> tuple[str, ...]:
    names = [check_split(v, "option 'splits'", SPLITS) for v in _names(value, "splits")]
    return tuple(s for s in SPLITS if s in names)


def _cost_model(value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"option 'cost_model': give the path of a profile or None, not {value!r}")
    path = os.path.abspath(os.fspath(value))
    if not os.path.isfile(path):
        raise ValueError(
            f"option 'cost_model': no such file {path!r}; `paradyse profile` writes one, every "
            "rank reads it; leave the option out to choose by the analytic prior"
        )
    return path


def _smoothing(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= MOST_SMOOTHING:
        raise ValueError(
            f"option 'smoothing': {value!r} is not a share of the best time; "
            "give a number >= 0 such as 0.05"
        )
    return float(value)


def _flag(value: Any, key: str) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"option {key!r}: give True or False, not {value!r}")


def _dump(value: Any) -> str:
    if isinstance(value, str | os.PathLike) and os.fspath(value):
        return os.path.abspath(os.fspath(value))
    raise ValueError(f"option 'dump': give the path of a folder or None, not {value!r}")


def _passes_off(value: Any, pass_names: Collection[str] | None) -> tuple[str, ...]:
    names = _names(value, "passes_off")
    for name in names:
        if not isinstance(name, str) or (pass_names is not None and name not in pass_names):
            told = repr(name) if pass_names is None else _not_legal(name, pass_names)
            raise ValueError(f"option 'passes_off': unknown pass {told}")
    return names


def parse_options(
    options: Mapping[str, Any] | None, pass_names: Collection[str] | None = None
) -> Options:
    """Checked options from what the user passed to ``torch.compile``.

    Args:
        options: as written by the user; None or empty: all defaults. A key with value None takes
            its default.
        pass_names: names that ``passes_off`` may list; None: any.
    Raises:
        ValueError: an unknown key or a value that is not legal; names the value and what is legal.
    """
    parsers: dict[str, Callable[[Any], Any]] = {
        "plan": parse_plan,
        "strategies": _strategies,
        "levers": lambda v: check_levers(_names(v, "levers"), "option 'levers'"),
        "splits": _splits,
        "cost_model": _cost_model,
        "memory_limit": parse_bytes,
        "host_memory": lambda v: parse_bytes(v, "option 'host_memory'"),
        "smoothing": _smoothing,
        "retry_out_of_memory": lambda v: _flag(v, "retry_out_of_memory"),
        "mesh": lambda v: v,  # checked where its ranks are looked up
        "inner": lambda v: _one_of(v, "inner", INNER_COMPILERS),
        "on_unsupported": lambda v: _one_of(v, "on_unsupported", UNSUPPORTED),
        "dump": _dump,
        "passes_off": lambda v: _passes_off(v, pass_names),
    }
    assert set(parsers) == set(OPTION_NAMES)
    checked = {}
    for key, value in _given(options).items():
        if key not in parsers:
            raise ValueError(f"unknown option {_not_legal(key, OPTION_NAMES)}")
        if value is not None:
            checked[key] = parsers[key](value)
    return Options(**checked)


def _given(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"options: give a dict, not {type(options).__name__} {options!r}")
    return options or {}


def with_environment(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """``options``, and those of the variable ``PARADYSE_OPTIONS`` that they do not give.

    The variable has ``plan=metp,memory_limit=20GiB``, a number, true, false, null or a name behind
    each "="; or, for lists and plans by kind of block, JSON: ``{"levers": ["recompute"]}``.

    Args:
        options: as written by the user; what they give counts, and the log says so.
    Raises:
        ValueError: ``options`` is no mapping; the variable is neither, names an option twice, or
            names one that only Python can give.
    """
    given = dict(_given(options))
    for key, value in _read_environment(os.environ.get(ENVIRONMENT, "")).items():
        if given.get(key) is None:
            given[key] = value
        elif given[key] != value:
            log.info("%s: option %r is not used, the program gives it", ENVIRONMENT, key)
    return given


def _read_environment(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        pairs = _pairs_of(text)
    except ValueError as e:
        raise ValueError(
            f"environment variable {ENVIRONMENT}={text!r}: {e}; give 'plan=metp,smoothing=0.1', "
            'or JSON such as \'{"levers": ["recompute"]}\''
        ) from None
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key not in OPTION_NAMES or key == "mesh":
            legal = [name for name in OPTION_NAMES if name != "mesh"]
            raise ValueError(
                f"environment variable {ENVIRONMENT}: unknown option {_not_legal(key, legal)}"
            )
        if key in found:
            raise ValueError(f"environment variable {ENVIRONMENT}: option {key!r} is given twice")
        found[key] = value
    return found


def _pairs_of(text: str) -> list[tuple[str, Any]]:
    if text.lstrip().startswith("{"):
        pairs: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=_Pairs)
        return [(k, _plain(v)) for k, v in pairs]
    found = []
    for part in filter(str.strip, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part.strip()!r} has no '='")
        found.append((key.strip(), _word(value.strip())))
    return found


class _Pairs(list[Any]):
    """An object of JSON as the pairs that are written, so that no key is lost."""


def _plain(value: Any) -> Any:
    return {k: _plain(v) for k, v in value} if isinstance(value, _Pairs) else value


def _word(text: str) -> Any:
    """A number, a truth or nothing where ``text`` is one, else itself."""
    try:
        value = json.loads(text.lower())
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) or value is None else text
