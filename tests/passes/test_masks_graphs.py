"""A recovered mask leaves nothing of S x S: all graphs that are compiled, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import small_models
import torch
from family_table import FAMILIES as FAMILY_TABLE
from harness import RankPool
from models import check, make_batch, make_model, run_step
from plans import blocks_of, choose
from torch import Tensor, fx

from paradyse.types import ATTENTION_STRATEGIES

Ranks = Callable[[int], RankPool]
S = 29
"""No size of any model."""


def tensors(node: fx.Node) -> Iterator[Tensor]:
    found = node.meta.get("val")
    for v in found if isinstance(found, list | tuple) else [found]:
        if isinstance(v, Tensor):
            yield v


def has_memory(x: Tensor) -> bool:
    """Whether elements of ``x`` are apart in memory; a tensor that only shows sizes is one."""
    return x.ndim == 0 or any(x.stride())


def num_sequence_dims(x: Tensor) -> int:
    """Dims as long as the sequence. Symbols are left alone: comparing one would fix its size."""
    return sum(isinstance(n, int) and n == S for n in x.shape)


def growth(x: Tensor) -> float:
    """How many times as many elements at twice the sequence length."""
    n = x.numel()
    if not isinstance(n, torch.SymInt):
        return 1.0
    expr, env = n.node.expr, n.node.shape_env
    if expr == 0:
        return 1.0
    assert expr.free_symbols, f"a size was fixed to give {n} elements"
    hints = {s: int(env.backed_var_to_val[s]) for s in expr.free_symbols}
    batch = min(hints.values())
    longer = {s: h if h == batch else 2 * h for s, h in hints.items()}
    return float(expr.xreplace(longer)) / float(expr.xreplace(hints))


class Recorder:
    """An inner compiler: aot_eager that keeps what each graph computes."""

    def __init__(self) -> None:
        self.num_graphs = {"forward": 0, "backward": 0}
        self.dense: list[str] = []
        self.num_linear = 0

    def of(self, what: str) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func

        def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            self.num_graphs[what] += 1
            for node in gm.graph.nodes:
                for x in filter(has_memory, tensors(node)):
                    factor = growth(x)
                    self.num_linear += 1.9 < factor < 2.1
                    if factor > 2.1 or num_sequence_dims(x) > 1:
                        self.dense.append(f"{what} {node.format_node()} {list(x.shape)}")
            return make_boxed_func(gm.forward)

        return compile_graph

    def __call__(self, name: str) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        assert name == "aot_eager"
        return aot_autograd(fw_compiler=self.of("forward"), bw_compiler=self.of("backward"))


def between_pieces(compiled: Any) -> list[str]:
    """Values with two dims of the sequence in what runs without being compiled."""
    from paradyse.runtime.registry import captures_of

    found = []
    for capture in captures_of(compiled):
        for graph in capture.graphs.values():
            nodes = [n for step in graph.program.steps for n in step.piece.nodes]
            assert nodes
            for node in nodes:
                found += [node.name for x in tensors(node) if num_sequence_dims(x) > 1]
    return found


Batch = dict[str, Any]


def record(
    model: torch.nn.Module, batches: Mapping[str, Batch]
) -> tuple[dict[str, int], list[str], int, list[str]]:
    """Trains under every strategy; graphs seen, dense values, values that grow, masks."""
    import paradyse.graph.lower
    from paradyse.distributed.axis import resolve_axis
    from paradyse.strategies.base import VariantCache

    recorder = Recorder()
    patch = pytest.MonkeyPatch()
    patch.setattr(paradyse.graph.lower, "lookup_backend", recorder)
    resolve_axis().session.forget(VariantCache)  # what others compiled is not seen
    masks: list[str] = []
    try:
        for how, batch in batches.items():
            torch._dynamo.reset()
            current: list[Any] = ["colossal_z"]
            options = {"plan": lambda workload: current[0], "inner": "aot_eager"}  # noqa: B023
            compiled = torch.compile(model, backend="paradyse", options=options)
            want = run_step(model, model, batch)
            run_step(compiled, model, batch)
            blocks = blocks_of(compiled)
            for strategy in ATTENTION_STRATEGIES:
                current[0] = choose(strategy, blocks)
                check(run_step(compiled, model, batch), want, what=f"{how} {strategy}")
            masks += [str(b.mask) for b in blocks if b.kind == "attention"]
            recorder.dense += between_pieces(compiled)
    finally:
        patch.undo()
        resolve_axis().session.forget(VariantCache)
    return recorder.num_graphs, recorder.dense, recorder.num_linear, masks


def record_masks(family: str, hows: tuple[str, ...]) -> Any:
    model = make_model(family, num_hidden_layers=2 if family == "gemma3" else 1)
    return record(model, {how: make_batch(how, 2, S) for how in hows})


FAMILIES = {"gemma3": ["causal, left 4", "causal"], "phi3": ["causal"]}
"""Windows and whole sequences; separate and fused weights."""
HOWS = {"plain": "", "left": ", key padding", "packed": ", documents"}


@pytest.mark.broad
@pytest.mark.parametrize(
    ("family", "nproc", "hows"),
    [
        ("gemma3", 1, ("left",)),
        pytest.param("phi3", 2, ("packed",), marks=pytest.mark.slow),
        *(
            pytest.param(family, nproc, tuple(HOWS), marks=pytest.mark.slow)
            for family, nproc in (("gemma3", 1), ("gemma3", 2), ("phi3", 2))
        ),
    ],
)
def test_nothing_of_s_by_s(family: str, nproc: int, hows: tuple[str, ...], ranks: Ranks) -> None:
    for graphs, dense, linear, masks in ranks(nproc).run(record_masks, family, hows, timeout_s=300):
        assert dense == []
        assert masks == [m + HOWS[how] for how in hows for m in FAMILIES[family]]
        assert graphs["forward"] >= graphs["backward"] >= (2 if nproc == 1 else 8)
        assert linear > 50  # sizes are symbolic: it is seen how they grow


def record_scores(name: str) -> Any:
    row = FAMILY_TABLE[name]
    model = small_models.make(row)
    return record(model, {"": small_models.batch_of(row, model, S)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nproc"),
    [
        ("mpt", 2),
        *(
            pytest.param(name, nproc, marks=pytest.mark.slow)
            for name in ("gpt-oss", "t5", "bloom", "mpt", "mpnet")
            for nproc in (1, 2)
            if (name, nproc) != ("mpt", 2)
        ),
    ],
)
def test_biases_by_distance_and_sinks(name: str, nproc: int, ranks: Ranks) -> None:
    """Neither a bias nor a column more of the softmax makes a number for each pair of tokens."""
    for graphs, dense, linear, masks in ranks(nproc).run(record_scores, name, timeout_s=300):
        assert dense == []
        assert len(masks) >= 2 and graphs["forward"] >= graphs["backward"] >= 2
        assert linear > 50


def test_recorder_sees_a_mask() -> None:
    """The check itself: a dense mask that is built in the graph is found."""
    from paradyse.graph.lower import Spec, compile_function

    recorder = Recorder()
    patch = pytest.MonkeyPatch()
    with patch.context() as p:
        p.setattr("paradyse.graph.lower.lookup_backend", recorder)
        spec = Spec((("B",), ("S",), (8,)), torch.float32, torch.device("cpu"), True)
        compile_function(lambda x: (x @ x.mT,), [spec], "aot_eager", {"B": 3, "S": 29})
    assert recorder.dense and recorder.num_graphs == {"forward": 1, "backward": 1}


def train_with_mask(dtype: torch.dtype) -> None:
    """Under every strategy, with a 4-D mask of the user's own."""
    g = torch.Generator().manual_seed(3)
    model = make_model("llama", num_hidden_layers=1)
    current: list[Any] = ["colossal_z"]
    options = {"plan": lambda workload: current[0], "inner": "eager"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    for seq_len in (13, 10):
        batch = make_batch("plain", 2, seq_len)
        seen = torch.rand(2, 1, seq_len, seq_len, generator=g) < 0.6
        seen |= torch.eye(seq_len, dtype=torch.bool)
        mask = torch.randn(2, 1, seq_len, seq_len, generator=g)
        mask = mask.masked_fill(~seen, torch.finfo(torch.float32).min)
        batch["attention_mask"] = seen if dtype == torch.bool else mask
        want = run_step(model, model, batch)
        run_step(compiled, model, batch)
        blocks = blocks_of(compiled)
        assert all(b.mask is None for b in blocks)
        for name in (*ATTENTION_STRATEGIES, "mixed 0"):
            current[0] = choose(name, blocks)
            check(run_step(compiled, model, batch), want, what=f"{seq_len} {name}")


@pytest.mark.broad(but="dtype0-1")
@pytest.mark.parametrize(
    ("dtype", "nproc"),
    [
        (torch.float32, 1),
        (torch.bool, 2),
        pytest.param(torch.bool, 1, marks=pytest.mark.slow),
        pytest.param(torch.float32, 2, marks=pytest.mark.slow),
    ],
)
def test_custom_mask(dtype: torch.dtype, nproc: int, ranks: Ranks) -> None:
    ranks(nproc).run(train_with_mask, dtype, timeout_s=200)
