"""Gradients that come while backward goes on: who reads one waits for it, and has its values."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from models import make_batch, make_model, relative, whole
from tiny import Tiny, tokens
from torch import Tensor, nn

from paradyse.distributed import collectives
from paradyse.distributed.axis import SINGLE
from paradyse.distributed.collectives import MACHINE, Pending
from paradyse.torch_private import at_end_of_backward
from paradyse.weights import gradients
from paradyse.weights.coming_gradient import ComingGradient
from paradyse.weights.gradients import LEAST_BYTES, TOGETHER_BYTES, joined_by_use
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.unshard import Gathered


class Coming(torch.autograd.Function):
    """``w``, whose gradient of twos is under way until somebody waits; ``told`` hears of it."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, sync: GradientSync, told: list[str]) -> Tensor:
        ctx.of = sync, told
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        sync, told = ctx.of

        def arrive(value: Tensor) -> list[Tensor]:
            told.append("waited")
            return [value]

        message = Pending([], torch.full_like(grad, 2), "all_reduce", SINGLE, MACHINE, None)
        told.append("sent")
        (coming,) = sync.arrive(message.then(arrive), [grad], [ctx.next_functions[0][0]])
        return coming, None, None


class Early(torch.autograd.Function):
    """Its backward comes before that of ``Coming``, and begins the sync."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sync: GradientSync, told: list[str]) -> Tensor:
        ctx.of = sync, told
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        sync, told = ctx.of
        at_end_of_backward(lambda: told.append("end"))
        call: Any = SimpleNamespace(nears_end=lambda: told.append("tells"))
        sync.begin(call)
        return grad, None, None


def run(w: nn.Parameter, told: list[str], twice: bool = False) -> Tensor:
    sync = GradientSync([w])
    x = Coming.apply(w, sync, told)
    if twice:
        x = x * Coming.apply(w, sync, told).detach() + Coming.apply(w, sync, told)
    loss: Tensor = Early.apply(x, sync, told).sum()
    return loss


def is_plain_two(grad: Tensor | None) -> bool:
    return type(grad) is Tensor and bool((grad == 2).all())


def test_backward_goes_on_meanwhile() -> None:
    w, told = nn.Parameter(torch.ones(3)), list[str]()
    run(w, told).backward()
    assert told == ["sent", "end", "tells", "waited"] and is_plain_two(w.grad)


def test_what_there_is_takes_it_at_once() -> None:
    w, told = nn.Parameter(torch.ones(3)), list[str]()
    for times in (1, 2):
        run(w, told).backward()
        assert isinstance(w.grad, Tensor) and w.grad.tolist() == [2.0 * times] * 3
    assert told[4:] == ["sent", "waited", "end", "tells"]


def test_two_gradients_of_one_weight_are_added() -> None:
    w, told = nn.Parameter(torch.ones(3)), list[str]()
    run(w, told, twice=True).backward()
    assert type(w.grad) is Tensor and w.grad.tolist() == [4.0] * 3


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
def test_a_hook_sees_the_values(kind: str) -> None:
    w, told, seen = nn.Parameter(torch.ones(3)), list[str](), []
    if kind == "gradient":
        w.register_hook(lambda g: seen.append(g))
    else:
        w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    run(w, told).backward()
    assert told == ["sent", "waited", "end"] and all(map(is_plain_two, [w.grad, *seen])) and seen


def test_gradients_that_are_returned_are_plain() -> None:
    w, told = nn.Parameter(torch.ones(3)), list[str]()
    (grad,) = torch.autograd.grad(run(w, told), [w])
    assert is_plain_two(grad) and w.grad is None
    run(w, told).backward(inputs=[w])
    assert is_plain_two(w.grad)


def test_operators_have_its_values() -> None:
    message = Pending([], [torch.full((2,), 3.0)], "all_reduce", SINGLE, MACHINE, None)
    coming = ComingGradient(torch.empty(2), message, 0)
    assert repr(coming) == "ComingGradient([2], torch.float32)"
    assert (coming.detach() * 2).tolist() == [6.0, 6.0]
    assert torch.ones(2).add_(coming).tolist() == [4.0, 4.0]


def test_weights_are_joined_from_the_last_used_on() -> None:
    kib, big = 2**10, TOGETHER_BYTES
    assert joined_by_use([0, 1, 2], [kib, kib, kib]) == {0: [0, 1, 2]}
    assert joined_by_use([0, 1, 2, 2], [kib, kib, big, kib]) == {2: [2, 3], 0: [0, 1]}
    assert joined_by_use([3, 0, 3], [kib, big, big]) == {3: [0, 2], 0: [1]}
    assert joined_by_use([], []) == {}


def test_few_gradients_are_summed_in_parts_that_are_not_too_small() -> None:
    parts = joined_by_use(range(64), [LEAST_BYTES // 4] * 64)
    assert [len(parts[first]) for first in sorted(parts)] == [8] * 8
    parts = joined_by_use(range(16), [LEAST_BYTES // 4] * 16)
    assert [len(parts[first]) for first in sorted(parts)] == [4] * 4
    parts = joined_by_use(range(64), [TOGETHER_BYTES] * 64)
    assert len(parts) == 64


@pytest.mark.parametrize(("hidden", "num_parts"), [(1.0, 8), (0.5, 4), (0.1, 1), (0.0, 1)])
def test_parts_are_fewer_where_less_of_them_hides(hidden: float, num_parts: int) -> None:
    assert len(joined_by_use(range(64), [LEAST_BYTES // 4] * 64, hidden)) == num_parts


# On ranks


def small_sums() -> AbstractContextManager[Any]:
    return patch.object(gradients, "TOGETHER_BYTES", 1)


def trained(sharded: bool, plan: str) -> dict[str, float]:
    """The largest error of a gradient, against one process: of gradients that are the first,
    that are added to those of the batch before, and of hooks that look at them."""
    import paradyse

    config = {"num_hidden_layers": 1, "tie_word_embeddings": True}
    reference, model = (make_model("llama", **config) for _ in range(2))
    if sharded:
        paradyse.shard(model)
    compiled = torch.compile(model, backend="paradyse", options={"plan": plan, "inner": "eager"})
    names = {p: n for n, p in model.named_parameters()}
    seen: dict[str, Tensor] = {}

    def note(p: Tensor) -> None:
        assert p.grad is not None
        seen[names[p]] = p.grad.detach().clone()

    def errors(got: dict[str, Tensor]) -> float:
        assert not any(isinstance(g, ComingGradient) for g in got.values())
        wanted = dict(reference.named_parameters())
        assert got.keys() == wanted.keys()
        return max(relative(whole(g), wanted[n].grad) for n, g in got.items())

    found, hooks = {}, []
    for way in ("first", "added", "hooks"):
        if way == "hooks":
            for m in (reference, model):
                m.zero_grad()
            hooks = [p.register_post_accumulate_grad_hook(note) for p in model.parameters()]
        batch = make_batch("plain", 2, 9)
        reference(**batch).loss.backward()
        with small_sums():
            compiled(**batch).loss.backward()
        found[way] = errors({n: p.grad for n, p in model.named_parameters()})
    assert len(hooks) == len(names)
    return {**found, "hooks": errors(seen)}


@pytest.mark.broad(but="True-megatron_cz")
@pytest.mark.parametrize(("sharded", "plan"), [(False, "megatron_ts"), (True, "megatron_cz")])
def test_gradients_are_those_of_one_process(sharded: bool, plan: str, pool2: RankPool) -> None:
    for errors in pool2.run(trained, sharded, plan):
        assert len(errors) == 3 and max(errors.values()) < 1e-4, errors


class Log(list[tuple[str, str]]):
    """What is started and waited for, in order: "start" or "wait", with the name of the block; and
    "fill", where the backward of a block begins."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        start, wait, fill, log = collectives._start, Pending.wait, Gathered.fill, self

        def started(what: str, x: Any, axis: Any, block_id: int, *args: Any, **kwargs: Any) -> Any:
            if what == kind:
                log.append(("start", collectives.traffic(axis, block_id).name))
            return start(what, x, axis, block_id, *args, **kwargs)

        def waited(pending: Pending) -> Any:
            what, axis, block_id = pending._context
            if what == kind and pending._works:
                log.append(("wait", collectives.traffic(axis, block_id).name))
            return wait(pending)

        def filled(gathered: Gathered) -> None:
            log.append(("fill", ""))
            fill(gathered)

        self.patches = (
            patch.object(Gathered, "fill", filled),
            patch.object(collectives, "_start", started),
            patch.object(Pending, "wait", waited),
        )

    def __enter__(self) -> Log:
        for p in self.patches:
            p.start()
        return self

    def __exit__(self, *_: object) -> None:
        for p in self.patches:
            p.stop()


def order(sharded: bool) -> list[tuple[str, str]]:
    """Of messages of gradients in one backward."""
    import paradyse

    model = paradyse.shard(Tiny()) if sharded else Tiny()
    options = {"plan": "megatron_cz", "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    ids = tokens(2, 11)
    compiled(ids, ids).backward()
    model.zero_grad()
    with small_sums(), Log("reduce_scatter" if sharded else "all_reduce") as log:
        loss = compiled(ids, ids)
        log.clear()
        loss.backward()
    return list(log)


def test_a_scatter_is_waited_for_a_block_later(pool2: RankPool) -> None:
    first, second = pool2.run(order, True)
    assert first == second
    starts, waits = ([name for what, name in first if what == each] for each in ("start", "wait"))
    assert starts == waits and len(starts) >= 5
    after = [then for (what, _), (then, _) in zip(first, first[1:]) if what == "start"]
    assert after == ["fill"] * (len(starts) - 1) + ["wait"]
    under_way = [{"start": 1, "wait": -1, "fill": 0}[what] for what, _ in first]
    assert max(sum(under_way[:n]) for n in range(len(first))) == 1


def test_sums_start_while_backward_runs_and_are_waited_for_at_its_end(pool2: RankPool) -> None:
    first, second = pool2.run(order, False)
    assert first == second
    kinds = [what for what, _ in first]
    assert kinds == ["start"] * (len(kinds) // 2) + ["wait"] * (len(kinds) // 2)
    assert {"layers.1.mlp", "layers.0.attention"} <= {name for _, name in first}
