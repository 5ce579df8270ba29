"""A data-parallel axis outside the sequence axis: gradients of the joined batch, equal weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import RankFailure, RankPool
from models import check, make_batch, make_model, relative, run_step
from torch import Tensor, nn

MIXED = ["megatron_ts", "megatron_cz", "ulysses_z", "metp"]


def make_mesh(shape: Sequence[int]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=("data", "sequence"))


def batches_of(num_replicas: int, seq_len: int) -> list[dict[str, Tensor]]:
    """A batch for each replica: lengths and numbers of labels differ."""
    out = [make_batch("plain", 2, seq_len + 3 * i, seed=i) for i in range(num_replicas)]
    out[0]["labels"][0, 1:] = -100
    return out


def joined(batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One batch with the rows of all, padded on the right."""
    longest = max(b["input_ids"].shape[1] for b in batches)

    def pad(x: Tensor, value: int) -> Tensor:
        return nn.functional.pad(x, (0, longest - x.shape[1]), value=value)

    masks = [torch.ones_like(b["input_ids"]) for b in batches]
    return {
        "input_ids": torch.cat([pad(b["input_ids"], 0) for b in batches]),
        "labels": torch.cat([pad(b["labels"], -100) for b in batches]),
        "attention_mask": torch.cat([pad(m, 0) for m in masks]),
    }


def plan_of(replica: int, step: int) -> list[str]:
    """Replicas run different plans at the same time."""
    return [MIXED[(replica + step) % 4], MIXED[(replica + step + 1) % 4]]


def compare(shape: Sequence[int], family: str, sharded: bool, dtype: torch.dtype) -> None:
    import paradyse

    mesh = make_mesh(shape)
    replica, num_replicas = mesh.get_local_rank(0), shape[0]
    reference, model = make_model(family, dtype), make_model(family, dtype)
    if sharded:
        paradyse.shard(model, mesh)
    step = 0

    def plan(workload: Any) -> Any:
        return paradyse.Plan(tuple(s for s in plan_of(replica, step) for _ in range(2)))

    options = {"mesh": mesh, "plan": plan, "inner": "eager"}
    run = torch.compile(model, backend="paradyse", options=options)
    for i, seq_len in enumerate((9, 12, 17)):
        step = i
        batches = batches_of(num_replicas, seq_len)
        want = run_step(reference, reference, joined(batches))
        got = run_step(run, model, batches[replica])
        # transformers computes the loss in float32, whatever the model: sums of other parts differ
        assert abs(got.loss / want.loss - 1) < 1e-6
        check(replace(got, loss=want.loss), want, dtype, f"{seq_len} tokens")


@pytest.mark.broad
@pytest.mark.parametrize(
    ("family", "sharded"),
    [
        ("llama_odd", True),
        *(
            pytest.param(family, sharded, marks=pytest.mark.slow)
            for family, sharded in (("gpt2", False), ("llama_odd", False), ("gpt2", True))
        ),
    ],
)
def test_two_by_two(family: str, sharded: bool, pool4: RankPool) -> None:
    """Loss and gradients equal one process on the joined batch, whatever each replica plans."""
    pool4.run(compare, (2, 2), family, sharded, torch.float32, timeout_s=200)


@pytest.mark.slow
def test_double_precision(pool4: RankPool) -> None:
    pool4.run(compare, (2, 2), "llama_odd", True, torch.float64, timeout_s=200)


@pytest.mark.broad
@pytest.mark.parametrize("shape", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_one_of_the_axes_has_one_rank(shape: tuple[int, int], pool2: RankPool) -> None:
    pool2.run(compare, shape, "llama", True, torch.float32, timeout_s=100)


def train(shape: Sequence[int], sharded: bool, inner: str) -> tuple[list[float], list[float]]:
    """Losses of a few steps of AdamW, and of one process on the joined batches."""
    import paradyse

    mesh = make_mesh(shape)
    replica = mesh.get_local_rank(0)
    losses: list[list[float]] = []
    final = []
    for alone in (True, False):
        model: Any = make_model("llama", torch.float64)
        if sharded and not alone:
            paradyse.shard(model, mesh)
        run = model
        if not alone:
            options = {"mesh": mesh, "inner": inner}
            run = torch.compile(model, backend="paradyse", options=options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        losses.append([])
        for step in range(4):
            batches = batches_of(shape[0], 10 + 2 * step)
            loss = run(**(joined(batches) if alone else batches[replica])).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        final.append(paradyse.full_state_dict(model))
    for name, want in final[0].items():
        assert relative(final[1][name], want) < 2e-6, name  # the loss is computed in float32
    return losses[0], losses[1]


@pytest.mark.slow
@pytest.mark.parametrize(("sharded", "inner"), [(True, "eager"), (False, "aot_eager")])
def test_training(sharded: bool, inner: str, pool4: RankPool) -> None:
    for alone, together in pool4.run(train, (2, 2), sharded, inner, timeout_s=250):
        assert together == pytest.approx(alone, rel=2e-7)


def user_loss(shape: Sequence[int], head: str = "") -> None:
    """A loss outside the graph: the mean over replicas of their losses, as DDP has it."""
    mesh = make_mesh(shape)
    replica, num_replicas = mesh.get_local_rank(0), shape[0]
    reference, model = make_model("llama"), make_model("llama")
    plan = {"attention": "ulysses_z", "mlp": "ulysses_z", "head": head}
    options = {"mesh": mesh, "inner": "eager", "plan": plan}
    run = torch.compile(model, backend="paradyse", options=options)
    batches = [b if head else {"input_ids": b["input_ids"]} for b in batches_of(num_replicas, 11)]
    for batch in batches:
        (reference(**batch).logits.square().mean() / num_replicas).backward()
    run(**batches[replica]).logits.square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert relative(p.grad, q.grad) < 1e-5, name


@pytest.mark.slow
def test_loss_outside_the_graph(pool4: RankPool) -> None:
    pool4.run(user_loss, (2, 2), timeout_s=100)


@pytest.mark.slow
def test_logits_of_a_head_by_tiles(pool4: RankPool) -> None:
    """They are computed where they are read, from the head's weight."""
    pool4.run(user_loss, (2, 2), "tiled", timeout_s=100)


def differ() -> None:
    mesh = make_mesh((2, 2))
    model = make_model("llama", seed=mesh.get_local_rank(0))
    with torch.no_grad():
        model.lm_head.weight.add_(mesh.get_local_rank(0))
    run = torch.compile(model, backend="paradyse", options={"mesh": mesh, "inner": "eager"})
    run(**make_batch("plain", 1, 7))


def unsplittable() -> str:
    mesh = make_mesh((2, 1))
    model, x = nn.Linear(4, 4), torch.ones(3, 4)  # of no tokens
    run = torch.compile(model, backend="paradyse", options={"mesh": mesh, "inner": "eager"})
    with torch.no_grad():
        run(x)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="use a 1-D mesh, or DistributedDataParallel") as error:
        run(x)
    return str(error.value)


@pytest.mark.slow
def test_what_is_refused(pool2: RankPool, pool4: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"disagree on the weights \(checksum\)"):
        pool4.run(differ, timeout_s=60)
    assert all("cannot be trained" in text for text in pool2.run(unsplittable, timeout_s=60))


def tries_plans(shape: Sequence[int]) -> tuple[bool, bool]:
    """Whether a program watches its steps, and whether it tries plans, after a step."""
    from paradyse.runtime.registry import captures_of

    mesh, model = make_mesh(shape), make_model("llama")
    options = {"mesh": mesh, "inner": "eager"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    compiled(**make_batch("plain", 2, 9)).loss.backward()
    (choice,) = [g.choice for c in captures_of(compiled) for g in c.graphs.values()]
    return choice.feedback is not None, choice.trials is not None


def test_no_plans_are_tried_where_steps_wait_for_other_replicas(pool4: RankPool) -> None:
    assert pool4.run(tries_plans, (2, 2)) == [(True, False)] * 4
    assert pool4.run(tries_plans, (1, 4)) == [(True, True)] * 4


def masked_each_its_own_way(family: str, sharded: bool) -> int:
    """Calls that train where the mask of one replica's batch is of another kind than the other's,
    or is not given."""
    import paradyse

    torch._dynamo.reset()
    mesh = make_mesh((2, 2))
    model = make_model(family)
    if sharded:
        paradyse.shard(model, mesh)
    options = {"mesh": mesh, "plan": "ulysses_z", "inner": "eager"}
    run: Any = torch.compile(model, backend="paradyse", options=options)
    kinds = (("plain", "left"), ("right", "plain"), ("left", "right"), ("plain", "plain"))
    for of in kinds:
        replica = mesh.get_local_rank(0)
        run(**make_batch(of[replica], 2, 9 + replica, seed=replica)).loss.backward()
    return len(kinds)


@pytest.mark.broad(but="gpt2-True")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_replicas_may_have_masks_of_other_kinds(
    family: str, sharded: bool, pool4: RankPool
) -> None:
    assert pool4.run(masked_each_its_own_way, family, sharded, timeout_s=100) == [4] * 4


def told_of_other_weights(freezes: bool) -> str:
    """What ranks are told where replicas train other weights, or start from others."""
    mesh = make_mesh((2, 2) if freezes else (2, 1))
    replica = mesh.get_local_rank(0)
    model = make_model("llama", seed=0 if freezes else replica)
    if freezes:
        mlp = model.model.layers[0].mlp
        (mlp.gate_proj if replica else mlp.up_proj).weight.requires_grad_(False)
    options = {"mesh": mesh, "plan": "megatron_cz", "inner": "eager"}
    compiled: Any = torch.compile(model, backend="paradyse", options=options)
    with pytest.raises(ValueError) as error:
        compiled(**make_batch("plain", 2, 9)).loss.backward()
    return str(error.value)


def test_replicas_train_the_same_weights(pool4: RankPool) -> None:
    for text in pool4.run(told_of_other_weights, True, timeout_s=60):
        assert "disagree on where gradients come together" in text and "on all" in text, text


def test_replicas_of_single_ranks_start_from_the_same_weights(pool2: RankPool) -> None:
    for text in pool2.run(told_of_other_weights, False, timeout_s=60):
        assert "disagree on the weights" in text and "manual_seed" in text, text
