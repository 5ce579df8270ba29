"""What each call of a compiled model did: its plan, what that was to take, and what it took.

A call is over when its backward is, or, where none follows, when the next call begins. On a GPU
times are read off events of the device, for which nothing waits until somebody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from paradyse.planning.tables import Shown
from paradyse.profiling.marks import Clock
from paradyse.torch_private import at_end_of_backward, tree_leaves
from paradyse.types import Plan, Point, Workload
from paradyse.weights.shard import Model, check_module

Callback = Callable[["StepReport"], Any]


@dataclass(frozen=True)
class StepReport(Shown):
    """One call of a compiled model, as ``paradyse.on_step`` and ``stats(model).last`` give it.

    Times are in seconds, sizes in bytes of this rank, lengths in tokens of the sequence group.
    ``str()`` is one line; reading it never raises.

    Example:

        compiled(**batch).loss.backward()
        step = paradyse.stats(compiled).last
        print(step.batch, step.seq_len, step.plan.key)
        print(step.time_s, step.tokens_per_s, step.predicted_s)
    """

    number: int
    """The model's calls so far, on this rank, this one included."""
    workload: Workload
    """What the plan was chosen for: batch, length, dtype, mask."""
    plan: Plan
    num_switches: int
    """Calls so far whose plan was another than that of the call before."""
    switched: bool
    """Whether this is one of them."""
    trained: bool
    """Whether a backward followed."""
    held_bytes: int | None
    """Allocated on the device when forward ended, with what backward needs; None on the CPU."""
    _seconds: Callable[[], list[float]] = field(repr=False, compare=False)
    _predict: Callable[[], tuple[float, int] | None] = field(repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """With what was taken and predicted, which elsewhere nobody could ask for."""
        told = {"_seconds": partial(_known, self._seconds())}
        told["_predict"] = partial(_known, self._prediction)
        return vars(self) | told

    @property
    def batch(self) -> int:
        """Sequences of the call."""
        return self.workload.batch

    @property
    def seq_len(self) -> int:
        """Tokens of each, padding included."""
        return self.workload.seq_len

    @property
    def mask(self) -> str:
        """The kinds of masks in the graph, as text."""
        return self.workload.mask

    @property
    def levers(self) -> tuple[str, ...]:
        """What trades time for memory in some block, or in the head: names, each once."""
        of_blocks = [v for s in self.plan.strategies for v in Point.parse(s).levers]
        of_head = [] if self.plan.alone else [v for v in self.plan.head.split("+") if v]
        return tuple(dict.fromkeys([*of_blocks, *of_head]))

    @property
    def forward_s(self) -> float:
        """Seconds of forward. On a GPU reading it waits for the device."""
        return self._times[1]

    @property
    def time_s(self) -> float:
        """Seconds from the begin of forward to the end of backward, what lies between them
        included; of forward where no backward followed. On a GPU reading it waits for the device.
        """
        return self._times[-1]

    @cached_property
    def _times(self) -> list[float]:
        return self._seconds()

    @property
    def tokens_per_s(self) -> float:
        """Tokens [B, S] of the sequence group per second of ``time_s``."""
        return self.batch * self.seq_len / max(self.time_s, 1e-9)

    @property
    def predicted_s(self) -> float | None:
        """Seconds that the plan was predicted to take in its blocks; None where it was given, and
        nothing had to be predicted."""
        return self._prediction[0] if self._prediction else None

    @property
    def predicted_bytes(self) -> int | None:
        """Peak bytes that a rank was predicted to need; None as of ``predicted_s``."""
        return self._prediction[1] if self._prediction else None

    @cached_property
    def _prediction(self) -> tuple[float, int] | None:
        return self._predict()

    def scalars(self, prefix: str = "paradyse/") -> dict[str, float]:
        """Numbers for a logger such as TensorBoard's or wandb's, by name; reads the times.

        Args:
            prefix: of all names.
        Returns:
            Name -> number, in seconds where it ends in ``_s``, in bytes in ``_bytes``; without
            those that are not known.
        """
        values = {
            "batch": self.batch,
            "seq_len": self.seq_len,
            "time_s": self.time_s,
            "tokens_per_s": self.tokens_per_s,
            "plan_switches": self.num_switches,
            "blocks_with_levers": sum(bool(Point.parse(s).levers) for s in self.plan.strategies),
            "predicted_s": self.predicted_s,
            "predicted_bytes": self.predicted_bytes,
            "held_bytes": self.held_bytes,
        }
        return {prefix + name: float(v) for name, v in values.items() if v is not None}

    def __str__(self) -> str:
        names = dict.fromkeys(Point.parse(s).strategy for s in self.plan.strategies)
        with_levers = f" with {', '.join(self.levers)}" if self.levers else ""
        size = f"batch {self.batch}, length {self.seq_len}"
        took = f"{self.time_s:.3g} s, {self.tokens_per_s:.4g} tokens/s"
        return f"call {self.number}: {size}, {' and '.join(names)}{with_levers}, {took}"


class Calls:
    """The calls of one model: the latest, the one under way, and who wants to know of them."""

    def __init__(self) -> None:
        self.callbacks: list[Callback] = []
        self.last: StepReport | None = None
        self.num_calls = 0
        self.num_switches = 0
        self._plan: Plan | None = None
        self._open: CallUnderWay | None = None

    def begin(
        self,
        device: torch.device,
        workload: Workload,
        plan: Plan,
        predict: Callable[[], tuple[float, int] | None],
    ) -> CallUnderWay:
        """A call begins, and the one before is over.

        Args:
            device: computes it.
            workload: what ``plan`` was chosen for.
            plan: runs.
            predict: seconds and bytes, asked for when somebody reads them; None: there are none.
        """
        follows = self._open is None
        self.close()
        self.num_calls += 1
        switched = self._plan is not None and plan != self._plan
        self.num_switches += switched
        self._plan = plan
        self._open = CallUnderWay(
            self,
            Clock(device),
            self.num_calls,
            workload,
            plan,
            switched=switched,
            follows=follows,
            predict=predict,
        )
        return self._open

    def close(self) -> None:
        """The call under way is over, if there is one."""
        if self._open is not None:
            self._open.end(trained=False)

    def ended(self, report: StepReport) -> None:
        """Tell everybody of ``report``."""
        self.last, self._open = report, None
        for callback in tuple(self.callbacks):
            callback(report)


@dataclass(eq=False)
class CallUnderWay:
    """A call, and what is told of it once it is over."""

    calls: Calls
    clock: Clock
    number: int
    workload: Workload
    plan: Plan
    switched: bool
    follows: bool
    """The call before it was over: it is no part of a step that has several."""
    predict: Callable[[], tuple[float, int] | None]
    report: StepReport | None = None
    """Once it is over; of one that failed there is none."""
    num_switches: int = 0
    held_bytes: int | None = None
    _in_backward: bool = False
    _over: bool = False

    def __post_init__(self) -> None:
        self.num_switches = self.calls.num_switches
        self.clock.note()

    def failed(self) -> None:
        """Forward raised: nothing is told of it."""
        self._over = True
        if self.calls._open is self:
            self.calls._open = None

    def forward_ended(self, outputs: Any, device: torch.device) -> None:
        """Forward gave ``outputs``, on ``device``."""
        self.clock.note()
        if device.type == "cuda":
            self.held_bytes = torch.cuda.memory_allocated(device)
        leaves = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
        trained = [x for x in leaves if x.requires_grad and x.grad_fn is not None]
        if not trained:
            self.end(trained=False)
        for x in trained:
            x.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: Tensor) -> None:
        if not (self._in_backward or self._over):
            self._in_backward = True
            at_end_of_backward(lambda: self.end(trained=True))

    def end(self, trained: bool) -> None:
        """The call is over; ``trained``: a backward followed."""
        if self._over:
            return
        self._over = True
        if trained:
            self.clock.note()
        self.report = StepReport(
            number=self.number,
            workload=self.workload,
            plan=self.plan,
            num_switches=self.num_switches,
            switched=self.switched,
            trained=trained,
            held_bytes=self.held_bytes,
            _seconds=self.clock.read,
            _predict=self.predict,
        )
        self.calls.ended(self.report)


_CALLS = WeakTensorKeyDictionary()
"""Parameter -> the ``Calls`` of its model."""


def calls_of(parameters: Sequence[Tensor]) -> Calls | None:
    """Those of the model with ``parameters``, made when first asked for; None without any."""
    for p in parameters:
        if p in _CALLS:
            found: Calls = _CALLS[p]
            return found
    if not parameters:
        return None
    made = _CALLS[parameters[0]] = Calls()
    return made


def known_calls(parameters: Iterable[Tensor]) -> list[Calls]:
    """Those of all models that have some of ``parameters``, of calls so far or watched for."""
    return list(dict.fromkeys(_CALLS[p] for p in parameters if p in _CALLS))


def on_step(model: Model, callback: Callback) -> Callable[[], None]:
    """Call ``callback`` with a ``StepReport`` after every call of ``model`` and its backward.

    It is called on each rank that asked for it, when backward ends, or, where none follows, when
    the next call begins or forward ends without gradients. It must not call the model, nor send
    messages. What it raises ends the backward.

    Args:
        model: compiled or not yet; ``paradyse.shard`` comes before this.
        callback: of one argument; what it returns is not used.
    Returns:
        A function without arguments that ends this.
    Raises:
        ValueError: ``model`` is no module, or has no parameters; ``callback`` cannot be called.

    Example:

        paradyse.on_step(model, print)
        remove = paradyse.on_step(model, lambda step: wandb.log(step.scalars(), step=step.number))
        model(**batch).loss.backward()
        remove()
    """
    parameters = list(check_module(model).parameters())
    if not callable(callback):
        raise ValueError(f"give a function of a StepReport, not {callback!r}")
    calls = calls_of(parameters)
    if calls is None:
        raise ValueError("the model has no parameters, so no call of it is known by them")
    for p in parameters:
        _CALLS.setdefault(p, calls)
    # Graphs that have run before may each have their own, where they share no parameters.
    known = known_calls(parameters)
    for of_graph in known:
        of_graph.callbacks.append(callback)

    def remove() -> None:
        for of_graph in known:
            if callback in of_graph.callbacks:
                of_graph.callbacks.remove(callback)

    return remove


def _known(value: Any) -> Any:
    return value
