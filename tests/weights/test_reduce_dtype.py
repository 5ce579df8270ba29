"""``reduce_dtype`` of ``paradyse.shard``: in which gradients are added up over ranks and replicas.

Whole numbers up to 256 are exact in bfloat16, sums of four of them in float32. So a sum that was
taken in float32 is the exact one, rounded once to the dtype of the parameter; one that was taken in
bfloat16, number by number, differs from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankFailure, RankPool
from models import make_batch, make_model, relative, whole
from torch import Tensor, nn

from paradyse.distributed import collectives
from paradyse.distributed.axis import SINGLE, resolve_axis
from paradyse.strategies.weight_stream import GroupTensors, WeightStream
from paradyse.weights.cast_shard import CastShard
from paradyse.weights.gradients import AverageGradients
from paradyse.weights.layout import GradientSum, even_layout
from paradyse.weights.no_sync import GradientSync
from paradyse.weights.shard_comm import scatter_gradients
from paradyse.weights.sharded_tensor import ShardedTensor
from paradyse.weights.slices import Rows

SHAPE = (8, 257)


def drawn(rank: int) -> Tensor:
    """The gradient of a whole tensor that ``rank`` computed, in bfloat16."""
    g = torch.Generator().manual_seed(rank)
    return torch.randint(-256, 257, SHAPE, generator=g).to(torch.bfloat16)


def exact(num_ranks: int) -> Tensor:
    return torch.stack([drawn(r).double() for r in range(num_ranks)]).sum(0)


def sharded(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> ShardedTensor:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(SHAPE, dtype=dtype))
    import paradyse

    weight = paradyse.shard(model, reduce_dtype=reduce_dtype).weight
    assert isinstance(weight, ShardedTensor)
    return weight


def scattered(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> Tensor:
    """The rank's rows of the sum, of a weight of ``dtype`` that a step casts to bfloat16."""
    weight = sharded(dtype, reduce_dtype)
    cast = weight if dtype == torch.bfloat16 else CastShard(weight, torch.bfloat16)
    (rows,) = scatter_gradients([drawn(resolve_axis().rank)], [cast], 0)
    assert rows.dtype == dtype
    return rows


def streamed(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> Tensor:
    """The same by the streams of metp: rank g holds the rows of group g."""
    weight, axis = sharded(dtype, reduce_dtype), resolve_axis()
    groups = tuple(tuple(range(a, a + n)) for ((a, n),) in weight.placement.runs)
    form, every = Rows(0, groups), list(range(axis.size))
    stream = WeightStream([weight], every, 0, [torch.bfloat16])
    tensors = GroupTensors([weight], [form], stream, GradientSync(), behind=lambda: None)
    for group in every:
        tensors.take(group, [True])
        tensors.add(group, [0], [form.take(drawn(axis.rank), group)])
        tensors.send(group)
    (grad,) = tensors.gradients([None])
    assert isinstance(grad, ShardedTensor) and grad.dtype == dtype
    return grad.local


def averaged(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> Tensor:
    """Four times the mean over four replicas of one rank."""
    axis = resolve_axis()
    layout, sums = even_layout(SINGLE, SHAPE[0]), GradientSum(reduce_dtype, axis)
    weight = nn.Parameter(ShardedTensor(torch.zeros(SHAPE, dtype=dtype), layout, SHAPE, sums=sums))
    (joined,) = AverageGradients.apply(GradientSync(replicas=axis), weight)
    joined.backward(joined.with_rows(drawn(axis.rank).to(dtype)))
    return weight.grad.local * axis.size


def sums(
    add: Callable[[torch.dtype, torch.dtype | None], Tensor],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """What ``add`` gave this rank, and the same of the exact sum."""
    axis = resolve_axis()
    got, want = add(dtype, reduce_dtype), exact(axis.size)
    layout = even_layout(axis, SHAPE[0])
    return got, want if got.shape == SHAPE else layout.take(want, axis.rank)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("add", [scattered, streamed, averaged])
def test_four_ranks_add_up_in_float32(add: Any, dtype: torch.dtype, pool4: RankPool) -> None:
    for got, want in pool4.run(sums, add, dtype, torch.float32):
        assert torch.equal(got, want.to(dtype))


def test_groups_that_share_rows_add_up_in_float32() -> None:
    """As of a key head that all groups of heads read; in 16 bits some sums come out differently."""
    groups, weight = range(8), torch.zeros(SHAPE, dtype=torch.bfloat16)
    shared, apart = (Rows(0, rows) for rows in (((0, 1),) * 8, tuple((g,) for g in groups)))
    assert shared.overlap and not apart.overlap
    stream = WeightStream([weight], [*groups], 0, [None])
    tensors = GroupTensors([weight], [shared], stream, GradientSync(), behind=lambda: None)
    parts = [drawn(g)[:2] for g in groups]
    for g in groups:
        tensors.add(g, [0], [parts[g]])
    (grad,) = tensors.gradients([None])
    want = torch.stack([p.double() for p in parts]).sum(0).bfloat16()
    assert torch.equal(grad[:2], want) and not grad[2:].any()
    assert not torch.equal(want, sum(parts))


@pytest.mark.parametrize("add", [streamed, averaged])
def test_by_default_they_add_up_in_the_dtype_of_the_weight(add: Any, pool4: RankPool) -> None:
    """The numbers tell: rounded at every step, some come out differently."""
    for got, want in pool4.run(sums, add, torch.bfloat16, None):
        assert not torch.equal(got, want.to(torch.bfloat16))
    for got, want in pool4.run(sums, add, torch.float32, None):
        assert torch.equal(got, want.to(torch.float32))


def test_a_narrower_sum_is_rounded(pool4: RankPool) -> None:
    for got, want in pool4.run(sums, scattered, torch.float32, torch.bfloat16):
        assert not torch.equal(got, want.to(torch.float32))
        torch.testing.assert_close(got, want.to(torch.float32), rtol=2**-8, atol=0)


def reductions(
    dtype: torch.dtype, reduce_dtype: torch.dtype | None, plan: str
) -> tuple[list[tuple[str, torch.dtype, torch.dtype | None]], int, dict[str, Tensor]]:
    """Of one step: what adds up gradients of weights, with the dtype that it sends and the one that
    it is asked to add in; the bytes of it; and the gradients."""
    import paradyse
    from paradyse.runtime.registry import captures_of

    model = paradyse.shard(make_model("llama", dtype), reduce_dtype=reduce_dtype)
    options = {"plan": plan, "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    loss = compiled(**make_batch("plain", 2, 13)).loss
    found = []
    with pytest.MonkeyPatch.context() as patch:
        scatter, reduce = collectives.start_reduce_scatter, collectives.reduce_to

        def note_scatter(x: Tensor, axis: Any, block_id: int, *into: Any) -> Any:
            if into:  # else of tokens
                found.append(("reduce_scatter", x.dtype, *into))
            return scatter(x, axis, block_id, *into)

        def note_reduce(x: Tensor, *args: Any) -> Any:
            found.append(("reduce", x.dtype, x.dtype))
            return reduce(x, *args)

        patch.setattr(collectives, "start_reduce_scatter", note_scatter)
        patch.setattr(collectives, "reduce_to", note_reduce)
        loss.backward()
    (graph,) = (g for c in captures_of(compiled) for g in c.graphs.values())
    assert graph.choice.workload(1, 8, True).reduce_dtype == (reduce_dtype or dtype)
    sent = paradyse.stats(compiled).bytes_per_collective
    grads = {n: whole(p.grad) for n, p in model.named_parameters()}
    assert {g.dtype for g in grads.values()} == {dtype}
    return found, sent.get("reduce_scatter", 0) + sent.get("reduce", 0), grads


@pytest.mark.broad
@pytest.mark.parametrize("plan", ["metp", pytest.param("megatron_cz", marks=pytest.mark.slow)])
def test_messages_of_a_step(plan: str, pool2: RankPool) -> None:
    """Gloo adds up what a rank has received: 16 bits travel there as they are."""
    half, full = torch.bfloat16, torch.float32
    for found, _, _ in pool2.run(reductions, half, full, plan, timeout_s=100):
        assert {into for _, _, into in found} == {full}
        assert {sent for kind, sent, _ in found if kind == "reduce"} <= {full}
        assert ("reduce" in {kind for kind, _, _ in found}) == (plan == "metp")
    for found, _, _ in pool2.run(reductions, half, None, plan, timeout_s=100):
        assert {into for _, _, into in found} == {half}


@pytest.mark.slow
def test_a_smaller_dtype_halves_the_messages(pool2: RankPool) -> None:
    args = torch.float32, torch.bfloat16, "megatron_cz"
    narrow = pool2.run(reductions, *args, timeout_s=100)
    wide = pool2.run(reductions, torch.float32, None, "megatron_cz", timeout_s=100)
    for (found, sent, grads), (_, full, want) in zip(narrow, wide, strict=True):
        assert {s for _, s, _ in found} == {torch.bfloat16} and 2 * sent == full
        for name, grad in grads.items():
            assert (grad - want[name]).norm() <= 2**-8 * want[name].norm(), name


def disagree() -> None:
    import torch.distributed as dist

    sharded(torch.float32, [None, torch.bfloat16][dist.get_rank()])


def test_ranks_must_give_one_dtype(pool2: RankPool) -> None:
    with pytest.raises(RankFailure, match="disagree on reduce_dtype"):
        pool2.run(disagree)


def read_outside(shape: tuple[int, int]) -> None:
    """A head outside the compiled model, as of losses that read ``lm_head.weight``."""
    from torch.distributed.device_mesh import init_device_mesh

    import paradyse

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
    reference, model = make_model("llama"), paradyse.shard(make_model("llama"), mesh)
    options = {"inner": "eager", "mesh": mesh}
    compiled = torch.compile(model.model, backend="paradyse", options=options)
    batches = [make_batch("plain", 2, 13 + i)["input_ids"] for i in range(shape[0])]
    for ids in batches:
        hidden = reference.model(input_ids=ids).last_hidden_state
        loss = (hidden @ reference.lm_head.weight.T).square().mean()
        (loss / len(batches)).backward()
    hidden = compiled(input_ids=batches[mesh.get_local_rank(0)]).last_hidden_state
    with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
        hidden @ model.lm_head.weight.T
    (hidden @ model.lm_head.weight.full_tensor().T).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert isinstance(p.grad, ShardedTensor), name
        assert relative(whole(p.grad), q[1].grad) < 1e-5, name


@pytest.mark.broad
def test_gradients_of_a_weight_read_outside_the_graph(pool2: RankPool) -> None:
    pool2.run(read_outside, (1, 2), timeout_s=100)


@pytest.mark.slow
def test_they_are_averaged_over_replicas(pool4: RankPool) -> None:
    pool4.run(read_outside, (2, 2), timeout_s=100)
