"""Training with weights that lie spread over the ranks: optimizers, memory, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankPool
from models import check, make_batch, make_model, relative, run_step, whole
from torch import Tensor, nn

PLANS = ("megatron_ts", "megatron_cz", "metp", "ulysses_z")


def _optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)
    options: dict[str, Any] = {name: True} if name in ("foreach", "fused") else {}
    return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.1, **options)


def _train(
    model: Any, run: Any, kind: str, steps: int, accumulate: int = 1, made: Any = None
) -> tuple[list[float], list[float]]:
    """Losses, and total norms of the gradients before they are clipped."""
    optimizer = made or _optimizer(kind, [p for p in model.parameters() if p.requires_grad])
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in kind, init_scale=64.0)
    losses, norms = [], []
    for i in range(steps):
        optimizer.zero_grad()
        for k in range(accumulate):
            batch = make_batch("plain", 2, 9 + 4 * i + k)
            loss = run(**batch).loss
            scaler.scale(loss / accumulate).backward()
            losses.append(loss.item())
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scaler.step(optimizer)
        scaler.update()
    return losses, norms


def train_both(kind: str, family: str) -> tuple[list[float], list[float], float]:
    """Relative errors of losses and norms, and the largest of the final weights'."""
    import paradyse

    reference = make_model(family, torch.float64, num_hidden_layers=1)
    model = make_model(family, torch.float64, num_hidden_layers=1)
    made = _optimizer(kind, model.parameters()) if kind == "made before" else None
    parameters = dict(model.named_parameters())
    offload = "optimizer" if "offload" in kind else ""
    assert paradyse.shard(model, offload=offload) is model
    assert all(p is parameters[n] for n, p in model.named_parameters())
    if kind == "frozen":
        for m in (reference, model):
            for name, p in m.named_parameters():
                p.requires_grad_("mlp" in name)
    accumulate = 2 if kind == "accumulate" else 1
    want = _train(reference, reference, kind, 4, accumulate)
    plans = iter(PLANS * 10)
    options = {"plan": lambda workload: next(plans), "inner": "eager"}
    run = torch.compile(model, backend="paradyse", options=options)
    got = _train(model, run, kind, 4, accumulate, made)
    errors = [[abs(a / b - 1) for a, b in zip(*pair, strict=True)] for pair in zip(got, want)]
    full = paradyse.full_state_dict(model)
    assert full.keys() == reference.state_dict().keys()
    off = max(relative(full[n], w) for n, w in reference.state_dict().items())
    return errors[0], errors[1], off


@pytest.mark.broad
@pytest.mark.parametrize(
    "kind",
    [
        *("accumulate", "frozen"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (
                "made before",
                "offload",
                "sgd",
                "loop",
                "foreach",
                "fused",
                "scaler",
                "offload, scaler",
            )
        ),
    ],
)
def test_optimizers(kind: str, pool2: RankPool) -> None:
    """Losses, norms that clip_grad_norm_ returns, and weights equal one process.

    Weights are float64, but HuggingFace computes the loss in float32: its last bit differs.
    """
    for losses, norms, weights in pool2.run(train_both, kind, "llama_odd", timeout_s=200):
        assert max(losses) < 2e-7 and max(norms) < 2e-7 and weights < 2e-6
        assert len(losses) == (8 if kind == "accumulate" else 4)


@pytest.mark.broad
def test_weights_on_the_host_of_one_rank(pool1: RankPool) -> None:
    ((losses, norms, weights),) = pool1.run(train_both, "offload", "llama_odd", timeout_s=200)
    assert max(losses) < 2e-7 and max(norms) < 2e-7 and weights < 2e-6


@pytest.mark.broad(but="offload")
@pytest.mark.parametrize("kind", ["foreach", "offload"])
def test_one_process_that_joined_no_group(kind: str) -> None:
    """As a script that is run by itself: there is no process group to ask for anything."""
    assert not torch.distributed.is_initialized()
    losses, norms, weights = train_both(kind, "llama_odd")
    assert max(losses) < 2e-7 and max(norms) < 2e-7 and weights < 2e-6


def _bytes(tensors: Any) -> int:
    return sum(_held(x).numel() * _held(x).element_size() for x in tensors)


def _held(x: Tensor) -> Tensor:
    return getattr(x, "local", x)


def memory(plan: str) -> tuple[float, int, int, int]:
    """Share of one process's weights, gradients and AdamW state; the most bytes of whole weights at
    once; those of the largest two steps; those left between forward and backward."""
    import paradyse
    from paradyse.graph.subgraph import is_weight
    from paradyse.runtime.registry import captures_of
    from paradyse.weights.unshard import Gathered

    alone = make_model("llama")
    model = paradyse.shard(make_model("llama"))
    live: set[Gathered] = set()
    most = 0
    made, filled, freed = Gathered.make, Gathered.fill, Gathered.free

    def count(g: Gathered) -> int:
        return sum(w.untyped_storage().nbytes() for w in g.wholes)

    def note(g: Gathered) -> None:
        nonlocal most
        live.add(g)
        most = max(most, sum(map(count, live)))

    def make(g: Gathered) -> list[Tensor]:
        out = made(g)
        note(g)
        return out

    def fill(g: Gathered) -> None:
        filled(g)
        note(g)

    patch = pytest.MonkeyPatch()
    patch.setattr(Gathered, "make", make)
    patch.setattr(Gathered, "fill", fill)
    try:
        optimizer = torch.optim.AdamW(model.parameters())
        options = {"plan": plan, "inner": "aot_eager"}
        compiled = torch.compile(model, backend="paradyse", options=options)
        batch = make_batch("plain", 2, 13)
        loss = compiled(**batch).loss
        between = sum(map(count, live))
        loss.backward()
        optimizer.step()
    finally:
        patch.undo()
    assert freed is Gathered.free
    states = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]
    mine = _bytes(model.parameters()) + _bytes(p.grad for p in model.parameters()) + _bytes(states)
    share = mine / (4 * _bytes(alone.parameters()))
    (graph,) = [g for c in captures_of(compiled) for g in c.graphs.values()]
    steps = sorted(
        sum(4 * n.meta["val"].numel() for n in s.piece.inputs if is_weight(n))
        for s in graph.program.steps
    )
    return share, most, sum(steps[-2:]), between


@pytest.mark.broad
@pytest.mark.parametrize(
    ("plan", "p"),
    [
        ("megatron_cz", 2),
        *(
            pytest.param(plan, p, marks=pytest.mark.slow)
            for plan, p in (
                ("megatron_ts", 2),
                ("metp", 2),
                ("megatron_cz", 4),
                ("megatron_ts", 4),
                ("metp", 4),
            )
        ),
    ],
)
def test_memory(plan: str, p: int, ranks: Callable[[int], RankPool]) -> None:
    for share, most, two_steps, between in ranks(p).run(memory, plan, timeout_s=200):
        assert share <= 1 / p + 0.05
        assert 0 < most <= two_steps
        assert between == 0  # nothing gathered is kept for backward


def refuse() -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh

    import paradyse

    texts = []

    def ask(model: Any, **kwargs: Any) -> None:
        before = {n: (id(p), type(p)) for n, p in model.named_parameters()}
        with pytest.raises(ValueError) as error:
            paradyse.shard(model, **kwargs)
        texts.append(str(error.value))
        assert {n: (id(p), type(p)) for n, p in model.named_parameters()} == before

    ask(nn.parallel.DistributedDataParallel(make_model("llama")))
    model = make_model("llama")
    ask(nn.Sequential(paradyse.shard(model)))
    ask(torch.distributed.fsdp.fully_shard(make_model("llama")))
    larger = DeviceMesh("cpu", [0, 1, 2, 3], _init_backend=False)  # else torch itself refuses
    ask(make_model("llama"), mesh=larger)
    with pytest.raises(NotImplementedError) as error:
        model(**make_batch("plain", 1, 5))
    texts.append(str(error.value))
    held = make_model("llama")
    loss = held(**make_batch("plain", 1, 5)).loss
    before = {n: p.detach().clone() for n, p in held.named_parameters()}
    ask(held)
    assert all(type(p) is nn.Parameter for p in held.parameters())
    assert all(torch.equal(p, before[n]) for n, p in held.named_parameters())
    del loss
    paradyse.shard(held)
    for give in (
        lambda p: setattr(p, "grad", torch.ones_like(p)),
        lambda p: p.register_hook(torch.neg),
        lambda p: p.register_post_accumulate_grad_hook(print),
    ):
        other = make_model("llama")
        give(other.lm_head.weight)
        ask(other)
        assert all(type(p) is nn.Parameter for p in other.parameters())
    ask(nn.GRU(8, 8))
    return texts


def test_refused(pool2: RankPool) -> None:
    for wrapped, twice, fsdp, mesh, eager, running, *lost in pool2.run(refuse, timeout_s=100):
        assert "wrapped by DistributedDataParallel" in wrapped
        assert "is sharded already" in twice
        assert "parallelized by something else (fully_shard" in fsdp
        assert "the mesh has 4 ranks and the world has 2" in mesh
        assert 'torch.compile(model, backend="paradyse")' in eager
        assert "Call paradyse.shard before the model runs" in running
        assert "lm_head.weight has a gradient: call model.zero_grad() before" in lost[0]
        assert all("lm_head.weight has hooks on its gradient" in text for text in lost[1:3])
        assert "leave it out where there is a recurrent network" in lost[3]
        assert len(lost) == 4


def move_weights_about() -> None:
    import copy

    import paradyse
    from paradyse.weights.layout import even_layout
    from paradyse.weights.sharded_tensor import ShardedTensor, relayout

    model = paradyse.shard(make_model("llama"))
    other = make_model("llama", seed=1)
    model.load_state_dict(other.state_dict())
    full = paradyse.full_state_dict(model)
    assert all(torch.equal(full[n], w) for n, w in other.state_dict().items())
    again = make_model("llama", seed=2).state_dict()
    for on in (model, copy.deepcopy(model)):
        on.load_state_dict(again, assign=True)
        assert all(isinstance(p, ShardedTensor) for p in on.parameters() if p.ndim)
        full = paradyse.full_state_dict(on)
        assert all(torch.equal(full[n], w) for n, w in again.items())
    model.load_state_dict(other.state_dict())
    twin = copy.deepcopy(model)
    weight, average = model.model.embed_tokens.weight, twin.model.embed_tokens.weight
    before = whole(weight)
    relayout(weight, even_layout(weight.placement.axis, weight.shape[1], dim=1))
    assert torch.equal(whole(weight), before)
    with torch.no_grad():  # of another layout: the model's own weight stays as it lies
        average.mul_(3).lerp_(weight, 0.5)
    assert (weight.placement.dim, average.placement.dim) == (1, 0)
    torch.testing.assert_close(whole(average), 2 * before)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert torch.equal(whole(twin.lm_head.weight) * 2, whole(model.lm_head.weight))
    assert isinstance(twin.lm_head.weight, nn.Parameter)
    half = whole(model.to(torch.bfloat16).lm_head.weight)
    assert half.dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match=r"paradyse\.full_state_dict"):
        torch.save(model.state_dict(), "/dev/null")


def test_weights_are_loaded_copied_cast(pool2: RankPool) -> None:
    pool2.run(move_weights_about, timeout_s=100)


def give_part_of_a_weight() -> float:
    """What is left, after the whole is given back, of an output that is a slice of it."""
    import paradyse
    from paradyse.weights.unshard import Shelf, gather

    torch.manual_seed(0)
    table = paradyse.shard(nn.Embedding(6, 4)).weight
    want = whole(table)[1:5]
    (full,), gathered = gather([table], 0, False, Shelf(ahead=True))
    (got,) = gathered.release([full[1:5]])
    assert full.untyped_storage().nbytes() == 0
    got.sum().backward()
    grad = whole(table.grad)
    assert torch.equal(grad, torch.tensor([0, 1, 1, 1, 1, 0.0])[:, None].expand(6, 4))
    return float((got.detach() - want).abs().max())


def test_output_that_is_part_of_a_weight(pool2: RankPool) -> None:
    assert pool2.run(give_part_of_a_weight, timeout_s=100) == [0, 0]


def train_unsplittable(inner: str) -> None:
    import paradyse
    from paradyse.runtime.registry import captures_of

    config = {"attn_implementation": "eager", "num_hidden_layers": 1}
    reference = make_model("llama", **config)
    model = paradyse.shard(make_model("llama", **config))
    options = {"inner": inner, "passes_off": ["fold_attention"]}
    compiled = torch.compile(model, backend="paradyse", options=options)
    for seq_len in (9, 12):
        batch = make_batch("plain", 2, seq_len)
        width = model.config.hidden_size  # no ids, which would say what the sequence is
        batch["inputs_embeds"] = torch.ones(*batch.pop("input_ids").shape, width)
        want = run_step(reference, reference, batch)
        check(run_step(compiled, model, batch), want, what=f"{seq_len}")
    assert any(captures_of(compiled, whole=True)) and not any(captures_of(compiled))


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_graph_that_cannot_be_split(inner: str, pool2: RankPool) -> None:
    """Whole weights on every rank, each with the whole gradient."""
    pool2.run(train_unsplittable, inner, timeout_s=100)


def tied() -> None:
    import paradyse

    model = make_model("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    names = [n for n, _ in model.named_parameters()]
    paradyse.shard(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert names == [n for n, _ in model.named_parameters()]
    torch.testing.assert_close(whole(model.lm_head.weight), make_model("gpt2").lm_head.weight.data)


def test_tied_weights_stay_tied(pool2: RankPool) -> None:
    pool2.run(tied, timeout_s=100)


def heard_by_hooks() -> float:
    """How far the gradients are off that hooks of all weights together, and of the node where each
    one's gradient arrives, have heard of."""
    import paradyse

    heard: list[list[Tensor]] = []
    for sharded in (False, True):
        model = make_model("llama", torch.float64, num_hidden_layers=1)
        if sharded:
            paradyse.shard(model)
        compiled: Any = torch.compile(model, backend="paradyse", options={"inner": "eager"})
        found: dict[Any, Tensor] = {}
        weights = list(model.parameters())
        torch.autograd.graph.register_multi_grad_hook(
            weights, lambda grads, found=found: found.update(enumerate(grads))
        )
        nodes = [(p, p.expand_as(p).grad_fn.next_functions[0][0]) for p in weights]
        for p, node in nodes:
            node.register_prehook(lambda grads, p=p, found=found: found.update({p: grads[0]}))
        run = compiled if sharded else model
        run(**make_batch("plain", 2, 9)).loss.backward()
        heard.append([whole(found[key]) for key in (*range(len(weights)), *weights)])
    return max(relative(got, want) for want, got in zip(*heard, strict=True))


def test_hooks_find_where_gradients_arrive(pool2: RankPool) -> None:
    assert max(pool2.run(heard_by_hooks)) < 1e-6


def sparse_look_ups(kind: str, plan: str) -> None:
    import paradyse

    batch, alone, model = make_batch("plain", 2, 13), make_model("llama"), make_model("llama")
    want = run_step(alone, alone, batch)
    model.get_input_embeddings().sparse = True
    if "sharded" in kind:
        paradyse.shard(model)
    compiled = torch.compile(model, backend="paradyse", options={"plan": plan, "inner": "eager"})
    if "no_sync" in kind:
        with paradyse.no_sync(model):
            compiled(**batch).loss.backward()
        compiled(**batch).loss.backward()
        for name, p in model.named_parameters():
            assert relative(whole(p.grad), 2 * want.grads[name]) < 1e-5, name
    else:
        check(run_step(compiled, model, batch), want)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        *(("whole", "ulysses_z"), ("whole", "replicated"), ("whole, no_sync", "megatron_ts")),
        *(("sharded", "ulysses_z"), ("sharded, no_sync", "metp")),
    ],
)
def test_tables_of_sparse_gradients(kind: str, plan: str, pool2: RankPool) -> None:
    """nn.Embedding(sparse=True): ranks add up dense gradients."""
    pool2.run(sparse_look_ups, kind, plan)
