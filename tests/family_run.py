"""On a rank: trains the small model of a family and compares it with eager mode, for
``compatibility.py``."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from models import TOLERANCE, run_step, worst
from plans import blocks_of, choose
from small_models import Row, batch_of, make, num_layers

from paradyse.types import ATTENTION_STRATEGIES

NOTE_CHARS = 200


def examine(row: Row, plans: Sequence[str], inner: str, device: str = "cpu") -> dict[str, Any]:
    """On every rank: train the model of ``row`` at its lengths on the ``device``, which ranks
    share; what a ``Result`` says of it."""
    import transformers

    from paradyse.runtime.registry import captures_of

    transformers.logging.set_verbosity_error()
    # Models warn of their own settings, and what they do in eager mode is no matter here.
    warnings.simplefilter("ignore")
    try:
        reference, model = make(row).to(device), make(row).to(device)
        made = [batch_of(row, reference, n) for n in row.lengths]
        batches = [{k: v.to(device) for k, v in batch.items()} for batch in made]
        wanted = [run_step(reference, reference, batch, loss_of) for batch in batches]
    except Exception as e:  # whatever transformers makes of a row of the table
        problem = f"**not tried**: {type(e).__name__}: {short(str(e))}"
        return {"exact": problem, "blocks": "", "layers": "", "programs": "", "notes": ""}
    current: list[Any] = [None]
    single = plans == ["auto"]
    # Sequences so short would be computed whole on every rank, which shows nothing of a split.
    options = {"inner": inner, "strategies": ATTENTION_STRATEGIES}
    plan = "auto" if single else lambda workload: current[0]
    compiled = torch.compile(model, backend="paradyse", options={**options, "plan": plan})
    off: dict[str, float] = {}

    def compare(name: str, call: Any, own: Any, at: int) -> None:
        error, what = worst(run_step(call, own, batches[at], loss_of), wanted[at])
        if not error <= TOLERANCE[torch.float32]:
            off[f"{name}, {row.lengths[at]}: {what}"] = error

    programs = []
    for at in range(len(row.lengths)):
        if not single:
            current[0] = "colossal_z"  # which no block refuses; it finds the blocks of all graphs
            compare("colossal_z", compiled, model, at)
        for name in plans:
            current[0] = None if single else _plan(name, compiled)
            try:
                compare(name, compiled, model, at)
            except Exception as e:  # a graph with other blocks came up in this call
                if "strategies given" not in str(e):
                    raise
                current[0] = name if name in ATTENTION_STRATEGIES else "colossal_z"
                compare(name, compiled, model, at)
        captures = [*captures_of(compiled), *captures_of(compiled, whole=True)]
        programs.append(str(sum(max(1, len(c.graphs)) for c in captures)))
    if not single:
        own = make(row).to(device)
        chosen = torch.compile(own, backend="paradyse", options={**options, "plan": "auto"})
        for at in range(len(row.lengths)):
            compare("auto", chosen, own, at)
    graphs = [g for c in captures_of(compiled) for g in c.graphs.values()]
    kinds = Counter(b.kind for b in graphs[-1].blocks) if graphs else Counter()
    found = [f"{n} {kind}" for kind, n in kinds.items()]
    notes = dict.fromkeys(n for c in captures for n in c.notes)
    return {
        "exact": _exact(off, plans),
        "blocks": ", ".join(found) or ("none" if graphs else "whole"),
        "layers": str(num_layers(reference)),
        "programs": " ".join(programs),
        "notes": "; ".join(short(n) for n in notes),
    }


def loss_of(out: Any) -> torch.Tensor:
    """The loss of a model's output; of one without labels the mean square of its first tensor."""
    loss = getattr(out, "loss", None)
    return loss if loss is not None else out[0].float().square().mean()


def _plan(name: str, compiled: Any) -> Any:
    """The plan ``name`` for the blocks found so far; a plan that names blocks one by one serves one
    graph, so that a model of several graphs has the same strategy in all of them."""
    from paradyse.runtime.registry import captures_of

    found = [g.blocks for c in captures_of(compiled) for g in c.graphs.values()]
    if len({len(blocks) for blocks in found}) == 1:
        return choose(name, blocks_of(compiled))
    refused = any(name in b.infeasible for blocks in found for b in blocks)
    return "colossal_z" if refused or name.startswith("mixed") else name


def _exact(off: dict[str, float], plans: Sequence[str]) -> str:
    if not off:
        return "auto" if plans == ["auto"] else "all strategies"
    what = max(off, key=lambda k: off[k])
    return f"**no**: {what} {off[what]:.0e}"


def short(text: str) -> str:
    text = text.split("\n")[0]
    return text if len(text) <= NOTE_CHARS else text[: NOTE_CHARS - 3] + "..."
