"""Tokens split along the batch, or another dim than the sequence: exact, without messages between
blocks, and chosen where that is fastest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import space_time
import torch
from harness import RankPool
from models import FAMILIES, TOLERANCE, exact_dtype, make_batch, make_model, run_step, worst
from plans import choose
from test_exactness import layers_of

from paradyse.types import BATCH, BlockSpec, Plan

SHAPES = ((3, 13), (5, 6), (2, 9))
"""Numbers of sequences that no number of ranks divides, and as few as ranks or fewer."""

PLANS = ("megatron_cz", "mixed 0", "mixed 1")


def blocks_along(compiled: Any, split: str) -> tuple[BlockSpec, ...] | str:
    """Of the program with tokens split along ``split``, or why there is none."""
    from paradyse.runtime.registry import captures_of

    graph = [g for c in captures_of(compiled) for g in c.graphs.values()][-1]
    described = graph.describe(split) if split else (graph.blocks, None)
    return described if isinstance(described, str) else described[0]


def planned(compiled: Any, name: str, split: str) -> Plan | str:
    """The plan called ``name`` with tokens split along ``split``, or why there is none."""
    blocks = blocks_along(compiled, split)
    return blocks if isinstance(blocks, str) else replace(choose(name, blocks), split=split)


def along_batch(family: str, hows: tuple[str, ...], sharded: bool, inner: str) -> Any:
    """What is off by more than the tolerance; and why a graph has no such plan."""
    import paradyse

    dtype = exact_dtype(family)
    off, refused = dict[str, Any](), dict[str, str]()
    sizes = {"num_hidden_layers": layers_of(family)}
    reference = model = make_model(family, dtype, **sizes)
    if sharded:
        model = paradyse.shard(make_model(family, dtype, **sizes))
    for how in hows:
        torch._dynamo.reset()
        current: list[Any] = ["colossal_z"]
        options = {"plan": lambda workload: current[0], "inner": inner}  # noqa: B023
        compiled = torch.compile(model, backend="paradyse", options=options)
        for shape in SHAPES:
            inputs = make_batch(how, *shape)
            for x in inputs.values():
                torch._dynamo.maybe_mark_dynamic(x, 0)
                torch._dynamo.maybe_mark_dynamic(x, 1)
            want = run_step(reference, reference, inputs, logits=True)
            current[0] = "colossal_z"
            run_step(compiled, model, inputs)
            for name in PLANS:
                current[0] = planned(compiled, name, BATCH)
                if isinstance(current[0], str):
                    refused[how] = current[0]
                    break
                error = worst(run_step(compiled, model, inputs, logits=True), want)
                if not error[0] <= TOLERANCE[dtype]:
                    off[f"{how} {shape} {name}"] = error
    return off, refused


QUICK = {("llama_odd", True): ("left",), ("bert", False): ("right",)}
"""Family, and whether weights are sharded -> kinds of batches; all else is slow."""


@pytest.mark.broad(but="bert-False")
@pytest.mark.parametrize(("family", "sharded"), QUICK)
def test_exact(family: str, sharded: bool, pool2: RankPool) -> None:
    case = (family, QUICK[family, sharded], sharded, "eager")
    for off, refused in pool2.run(along_batch, *case, timeout_s=300):
        assert not off and not refused


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 3, 4])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_families(family: str, sharded: bool, nproc: int, ranks: Any) -> None:
    hows = ("plain", "left", "right") if nproc == 2 else ("left",)
    for off, refused in ranks(nproc).run(
        along_batch, family, hows, sharded, "eager", timeout_s=300
    ):
        assert not off and not refused


def compiled_beside(make: Callable[[], Any], sharded: bool) -> tuple[Any, Any, Any, list[Any]]:
    """A reference, a copy of it, the copy compiled, and a list whose element is its plan."""
    import paradyse

    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = make()
    model = copy.deepcopy(reference)
    if sharded:
        paradyse.shard(model)
    current: list[Any] = ["colossal_z"]
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    return reference, model, torch.compile(model, backend="paradyse", options=options), current


def of_dims(
    model_of: str, splits: tuple[str, ...], sizes: tuple[tuple[int, int, int], ...], sharded: bool
) -> Any:
    """What is off by more than the tolerance, why there is no such program, and how many graphs
    there are, of a model of two dims of tokens."""
    from paradyse.runtime.registry import captures_of

    make, batch_of = MODELS[model_of]
    reference, model, compiled, current = compiled_beside(lambda: make(sizes[0]), sharded)
    off, refused = dict[str, Any](), dict[str, str]()
    for size in sizes:
        given = batch_of(size)
        reference.zero_grad()
        want = loss_of(reference(**given))
        want.backward()
        current[0] = "colossal_z"
        compiled(**given)
        for split in splits:
            for name in ("megatron_cz", "dsp", "mixed 0", "mixed 1"):
                plan = planned(compiled, name, split)
                if isinstance(plan, str):
                    refused[split] = plan
                    continue
                current[0] = plan
                model.zero_grad()
                got = loss_of(compiled(**given))
                got.backward()
                error = max(space_time.errors(model, got, reference, want))
                if not error[0] <= 1e-9:
                    off[f"{size} {split} {name}"] = error
    return off, refused, sum(len(c.graphs) for c in captures_of(compiled))


def loss_of(out: Any) -> torch.Tensor:
    """Of what a model gives: its loss, or one made of its sample."""
    if isinstance(out, torch.Tensor):
        return out
    return out.sample.square().mean() if hasattr(out, "sample") else out.loss


def cells(size: tuple[int, int, int]) -> dict[str, Any]:
    return dict(zip(("x", "labels"), space_time.cells(*size), strict=True))


def clips(size: tuple[int, int, int]) -> dict[str, Any]:
    return dict(zip(("pixel_values", "labels"), space_time.videos(*size[:2]), strict=True))


PACKAGES = {"latte": "diffusers", "axial": "axial_attention"}
"""Model -> the package that it is of, where that is not transformers."""

MODELS: dict[str, Any] = {
    "space and time": (lambda size: space_time.SpaceTime().double(), cells),
    "axial": (lambda size: space_time.Axial().double(), cells),
    "timesformer": (lambda size: space_time.make_timesformer(size[1]), clips),
    "videomae": (lambda size: space_time.make_joint("videomae", size[1]), clips),
    "vivit": (lambda size: space_time.make_joint("vivit", size[1]), clips),
    "latte": (
        lambda size: space_time.make_latte(size[1]),
        lambda size: space_time.noised(*size[:2]),
    ),
}
"""Name -> the model for (batch, time, space), and its arguments for others of one time."""


@pytest.mark.broad
@pytest.mark.parametrize(
    ("name", "sharded", "nproc", "splits"),
    [
        ("space and time", True, 2, (BATCH, "dim1")),
        pytest.param("space and time", False, 3, (BATCH, "dim1"), marks=pytest.mark.slow),
        pytest.param("space and time", True, 4, (BATCH, "dim1"), marks=pytest.mark.slow),
        pytest.param("axial", True, 2, ("", BATCH, "dim1"), marks=pytest.mark.slow),
        pytest.param("axial", False, 3, ("", BATCH, "dim1"), marks=pytest.mark.slow),
        pytest.param("axial", True, 4, ("", BATCH, "dim1"), marks=pytest.mark.slow),
        pytest.param("videomae", True, 2, ("", BATCH), marks=pytest.mark.slow),
        pytest.param("videomae", False, 3, ("", BATCH), marks=pytest.mark.slow),
        pytest.param("vivit", False, 2, ("", BATCH), marks=pytest.mark.slow),
        pytest.param("vivit", True, 4, ("", BATCH), marks=pytest.mark.slow),
        pytest.param("timesformer", True, 3, (BATCH, "dim1"), marks=pytest.mark.slow),
        pytest.param("latte", False, 2, ("", BATCH), marks=pytest.mark.slow),
        pytest.param("latte", True, 3, ("", BATCH), marks=pytest.mark.slow),
        pytest.param("latte", True, 4, ("", BATCH), marks=pytest.mark.slow),
    ],
)
def test_models_of_several_dims(
    name: str, sharded: bool, nproc: int, splits: tuple[str, ...], ranks: Any
) -> None:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason=f"{name} is of the package {PACKAGES[name]}")
    sizes = ((2, 5, 7), (3, 5, 4)) if MODELS[name][1] is cells else ((2, 6, 9), (3, 6, 9))
    case = (name, splits, sizes, sharded)
    for off, refused, graphs in ranks(nproc).run(of_dims, *case, timeout_s=400):
        assert not off
        if name in ("space and time", "latte"):
            assert graphs == 2  # the second batch shows which sizes vary
        if name == "timesformer":  # its class tokens are the first rows of frames of all videos
            assert refused.keys() == set(splits)
            assert all("aten.slice.Tensor" in why for why in refused.values())
        else:
            assert not refused


def all_paths(sharded: bool) -> tuple[int, dict[str, Any]]:
    """How many plans there are for four stages of attention, over time and space in turn, whatever
    is split at rest and where it is switched, with blocks that run again; and what is off."""
    make = MODELS["space and time"][0]
    reference, model, compiled, current = compiled_beside(lambda: make(None), sharded)
    given = cells((3, 5, 7))
    want = loss_of(reference(**given))
    want.backward()
    compiled(**given)
    num, off = 0, dict[str, Any]()
    for split in ("", BATCH, "dim1"):
        blocks = blocks_along(compiled, split)
        assert not isinstance(blocks, str), blocks
        each = [("megatron_cz", "dsp")[: 1 + (b.switch is not None)] for b in blocks]
        for i, strategies in enumerate(product(*each)):
            again = ["+recompute" * ((i + k) % 2) for k in range(len(blocks))]
            current[0] = Plan(tuple(map("".join, zip(strategies, again, strict=True))), "", split)
            model.zero_grad()
            got = loss_of(compiled(**given))
            got.backward()
            error = max(space_time.errors(model, got, reference, want))
            num += 1
            if not error[0] <= 1e-9:
                off[current[0].key] = error
    return num, off


@pytest.mark.broad
@pytest.mark.parametrize(
    ("nproc", "sharded"),
    [(2, True), *(pytest.param(p, p == 4, marks=pytest.mark.slow) for p in (3, 4))],
)
def test_every_path_through_four_stages(nproc: int, sharded: bool, ranks: Any) -> None:
    for num, off in ranks(nproc).run(all_paths, sharded, timeout_s=300):
        assert num == 4 + 1 + 4 and not off


def dropped(where: str) -> list[list[torch.Tensor]]:
    """Loss and gradients of a step with dropout of "blocks" or in "attention", by what is split."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    given = {"dropout": 0.5} if where == "blocks" else {"attention_dropout": 0.5}
    model = space_time.SpaceTime(layers=1, **given).double()
    current: list[Any] = ["megatron_cz"]
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    batch, found = cells((3, 5, 7)), list[list[torch.Tensor]]()
    compiled(**batch)
    for split in ("", BATCH, "dim1"):
        current[0] = planned(compiled, "megatron_cz", split)
        model.zero_grad()
        torch.manual_seed(5)
        loss = compiled(**batch)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    return found


@pytest.mark.parametrize(
    ("where", "nproc"), [("blocks", 3), pytest.param("attention", 2, marks=pytest.mark.slow)]
)
def test_dropout_is_the_same_whatever_is_split(where: str, nproc: int, ranks: Any) -> None:
    for first, *others in ranks(nproc).run(dropped, where, timeout_s=200):
        for other in others:
            for x, y in zip(first, other, strict=True):
                assert (x - y).norm() <= 1e-9 * (x.norm() + 1e-3)


def messages(sharded: bool) -> dict[str, Any]:
    """What blocks of a Llama send in a step, in bytes by collective, with the batch split."""
    import paradyse

    torch._dynamo.reset()
    model = make_model("llama", torch.float32)
    if sharded:
        paradyse.shard(model)
    options = {"plan": {"attention": "ulysses_z", "split": BATCH}, "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    sent = []
    for _ in range(2):
        run_step(compiled, model, make_batch("plain", 4, 16))
        sent.append(dict(paradyse.stats(compiled).bytes_per_collective))
    blocks = blocks_along(compiled, BATCH)
    assert not isinstance(blocks, str)
    assert {b.over for b in blocks if b.kind == "attention"} == {1}  # over the sequence
    before, after = sent
    return {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)}


@pytest.mark.broad(but="True")
@pytest.mark.parametrize("sharded", [False, True])
def test_blocks_send_nothing_but_weights_and_gradients(sharded: bool, pool2: RankPool) -> None:
    for sent in pool2.run(messages, sharded):
        weights = {"all_gather", "reduce_scatter"} if sharded else set()
        assert sent.keys() == {"all_reduce", *weights}


class Centred(torch.nn.Module):
    """A model whose hidden states are compared with those of the other sequences of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model("llama", torch.float32)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.model.model(input_ids).last_hidden_state
        logits = self.model.lm_head(x - x.mean(0, keepdim=True))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())


def why_not_along_batch() -> tuple[Any, float]:
    """Of ``Centred``; and how far off its loss is with the sequence split."""
    torch._dynamo.reset()
    model = Centred()
    options = {"plan": "megatron_cz", "inner": "eager", "on_unsupported": "error"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    ids = make_batch("plain", 4, 16)["input_ids"]
    off = float((compiled(ids) - model(ids)).detach().abs())
    return blocks_along(compiled, BATCH), off


def test_what_mixes_the_batch_is_a_reason_and_no_error(pool2: RankPool) -> None:
    """Where operators that cannot be split are to raise, this one can be, along the sequence."""
    for why, off in pool2.run(why_not_along_batch):
        assert "aten.mean.dim runs on gathered tensors" in why and off < 1e-6


def trained(family: str, plans: list[Any]) -> list[float]:
    """Relative differences of losses from eager mode's, step by step under AdamW, of batches of
    other kinds and sizes; every other step adds gradients up that were not sent."""
    import paradyse

    reference, model, compiled, current = compiled_beside(
        lambda: make_model(family, torch.float64), False
    )
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (reference, model)]
    found = []
    for k, current[0] in enumerate(plans):
        kind, size = (("plain", 2), ("left", 1), ("right", 4))[k % 3]
        batch = make_batch(kind, size, 9 + 2 * k, seed=k)
        if k % 2:
            reference(**batch).loss.backward()
            with paradyse.no_sync(compiled):
                compiled(**batch).loss.backward()
        with torch.no_grad():
            pairs = [[float(m(**batch).loss) for m in (reference, compiled)]]
        losses = [m(**batch).loss for m in (reference, compiled)]
        for loss in losses:
            loss.backward()
        pairs.append([float(loss.detach()) for loss in losses])
        found += [abs(a - b) / abs(a) for a, b in pairs]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "nproc"),
    [("gpt2", 2), ("llama", 3)],
)
def test_splits_that_change_in_training(family: str, nproc: int, ranks: Any) -> None:
    """Of a batch of one the sequence is split. GPT-2's loss is a graph of its own, which has no
    blocks."""
    along = {"split": BATCH}
    plans = [along, "megatron_ts", "dsp", "replicated", along, "metp"]
    for off in ranks(nproc).run(trained, family, plans, timeout_s=300):
        assert max(off) < 1e-6, off  # Llama's losses are in float32
