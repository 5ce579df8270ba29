"""On a rank: trains the small model of a family with weights whole or sharded and with the masks
that the family has, and compares it with eager mode, for ``compatibility.py``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from family_run import loss_of
from models import TOLERANCE, run_step, worst
from plans import PLANS, blocks_of, choose
from small_models import Batch, Row, batch_of, make
from torch import Tensor

RANKS = (1, 2, 3, 4)
LAYOUTS = ("whole", "sharded")
SEED = 10
"""With 0 two experts of Mixtral's are equal for a padded batch's token to 3e-8, and sums in another
order choose the other one."""


def padded(model: Any, batch: Batch, g: torch.Generator) -> Batch | None:
    """``batch`` with rows of different lengths, padded on the left where tokens are predicted from
    those before, else on the right; None where the family takes no mask for that."""
    known = inspect.signature(model.forward).parameters
    name = next((n for n in ("input_ids", "input_values") if n in batch), "")
    x = batch.get(name)
    if "attention_mask" not in known or x is None or x.ndim != 2 or "pixel_values" in batch:
        return None
    num, n = x.shape
    left = "labels" in batch and _is_causal(model)
    pad = torch.randint(0, n // 2, (num,), generator=g)
    pad[0] = n // 5
    index = torch.arange(n) if left else torch.arange(n - 1, -1, -1)
    real = index >= pad[:, None]
    labels = batch.get("labels")
    if (
        isinstance(labels, Tensor)
        and labels.shape == x.shape
        and not model.config.is_encoder_decoder
    ):
        labels = labels.masked_fill(~real, -100)
    return {**batch, "attention_mask": real.long(), "labels": labels}


def packed(model: Any, batch: Batch, g: torch.Generator) -> Batch | None:
    """``batch`` as several documents a row, told by position_ids; None where that is no causal
    model with such an argument."""
    known = inspect.signature(model.forward).parameters
    if "position_ids" not in known or "pixel_values" in batch or not _is_causal(model):
        return None
    num, n = batch["input_ids"].shape
    index = torch.arange(n).expand(num, n)
    cuts = torch.rand(num, n, generator=g) < 0.2
    cuts[:, n // 2] = True
    return {**batch, "position_ids": index - torch.where(cuts, index, 0).cummax(-1).values}


def _is_causal(model: Any) -> bool:
    ends = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return ends and not _has_decoder(model)


def _has_decoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


Masked = Callable[[Any, Batch, torch.Generator], Batch | None]
MASKS: dict[str, Masked] = {
    "plain": lambda model, batch, g: batch,
    "padded": padded,
    "packed": packed,
}


def compare(row: Row, sharded: bool) -> dict[str, Any]:
    """On every rank: train the model of ``row`` at three odd lengths under each kind of mask, where
    each call has other plans; the masks that the family has, and what is too far from eager mode.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    masks, off = [], {}
    for mask in MASKS:
        found = _compare(row, sharded, mask)
        torch._dynamo.reset()
        if found is not None:
            masks.append(mask)
            off.update(found)
    return {"masks": masks, "off": off}


def _compare(row: Row, sharded: bool, mask: str) -> dict[str, float] | None:
    """What is too far off under ``mask``; None where eager mode has no such batches."""
    import paradyse

    reference, model, number = make(row), make(row), list(MASKS).index(mask)
    g = torch.Generator().manual_seed(SEED + number)
    batches = [MASKS[mask](reference, batch_of(row, reference, n), g) for n in row.lengths]
    if None in batches:
        return None
    try:
        wanted = [run_step(reference, reference, batch, loss_of) for batch in batches]
    except Exception:  # whatever transformers makes of such a batch
        return None
    if sharded:
        paradyse.shard(model)
    current: list[Any] = ["colossal_z"]  # which no block refuses; it finds the blocks
    options = {"inner": "eager", "plan": lambda workload: current[0]}
    compiled = torch.compile(model, backend="paradyse", options=options)
    off: dict[str, float] = {}
    for at, (batch, want) in enumerate(zip(batches, wanted, strict=True)):
        for name in ("colossal_z", *_plans(number + at)):
            current[0] = _plan(name, compiled)
            error, what = worst(run_step(compiled, model, batch, loss_of), want)
            if not error <= TOLERANCE[torch.float32]:
                off[f"{mask}, {name}, {row.lengths[at]}: {what}"] = error
    return off


def _plans(turn: int) -> list[str]:
    """Half of the plans, those of another ``turn`` and number of ranks in other halves."""
    start = turn + dist.get_world_size()
    return [PLANS[(2 * i + start) % len(PLANS)] for i in range(len(PLANS) // 2)]


def _plan(name: str, compiled: Any) -> Any:
    """The plan ``name`` for the blocks that ``compiled`` is known to have. One rank has nothing to
    choose, and graphs of different blocks have one strategy that none refuses."""
    from paradyse.runtime.registry import captures_of

    found = [g.blocks for c in captures_of(compiled) for g in c.graphs.values()]
    if dist.get_world_size() == 1 or len({len(blocks) for blocks in found}) != 1 or not found[0]:
        return "colossal_z"
    return choose(name, blocks_of(compiled))
