"""Fold attention: what is written out becomes the operator, with equal results, or stays."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankPool
from mask_graphs import TOLERANCE, Notes, calls, dense_values
from models import VOCAB, check, make_batch, make_model, redraw, run_step
from test_recover_masks import MIN, trace
from torch import Tensor

from paradyse.passes.fold_attention import fold_attention, spell_out_einsums
from paradyse.passes.recover_masks import recover_masks

B, H, S, D = 2, 4, 13, 8
Scores = Callable[[Tensor, Tensor], Tensor]


def make(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, S, D, generator=g).to(dtype) for _ in range(3)]


def products(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(2, 3)) * 0.4


def mask() -> Tensor:
    hidden = torch.arange(S)[:, None] < torch.arange(S)
    return torch.where(hidden, MIN, 0.0)


def capped(q: Tensor, k: Tensor) -> Tensor:
    return torch.tanh(products(q, k) / 0.7) * 0.7


SCORES: dict[str, Scores] = {
    "times a number": products,
    "over a number": lambda q, k: torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D),
    "queries times a number": lambda q, k: torch.matmul(q * 0.3, k.transpose(-2, -1)),
    "times a tensor of one number": lambda q, k: q.std() * products(q, k),
    "times a number of each head": lambda q, k: products(q, k) * (k[0] ** 2)[:, :1, :1],
    "over a number of each query": lambda q, k: products(q, k) / (1 + q[..., :1] ** 2),
    "capped": capped,
    "masked": lambda q, k: products(q, k) + mask(),
    "mask first": lambda q, k: mask() + products(q, k),
    "capped and masked": lambda q, k: capped(q, k) + mask(),
    "cast": lambda q, k: products(q, k).float() + mask(),
    "masked by filling": lambda q, k: products(q, k).masked_fill(mask() < 0, -1e4),
    "masked by a choice": lambda q, k: torch.where(mask() == 0, products(q, k), -torch.inf),
    "mask chosen first": lambda q, k: torch.where(mask() < 0, MIN, products(q, k)),
    "masked by a triangle": lambda q, k: products(q, k) + torch.full((S, S), -1e9).triu(1),
    "mask taken off": lambda q, k: products(q, k) - torch.where(mask() < 0, 1e9, 0.0),
    "masked, then over a number": lambda q, k: (torch.matmul(q, k.mT) + mask()) / 2.5,
    "masked twice": lambda q, k: (products(q, k) + mask()).masked_fill(mask() < 0, -torch.inf),
    "masked, not below the lowest": lambda q, k: torch.maximum(
        products(q, k) + mask(), torch.full((), MIN)
    ),
    "masked, the row's maximum off": lambda q, k: (
        (s := products(q, k) + mask()) - s.amax(-1, keepdim=True)
    ),
    "keys permuted": lambda q, k: (
        torch.matmul(q, k.transpose(1, 2).contiguous().permute(0, 2, 3, 1)) * 0.4
    ),
}


def written_out(scores: Scores, dropout_p: float = 0.0) -> Callable[..., Any]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = torch.softmax(scores(q, k), -1, dtype=torch.float32).to(v.dtype)
        return torch.matmul(torch.dropout(p, dropout_p, dropout_p > 0), v)

    return attend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", SCORES)
def test_equal(how: str, dtype: torch.dtype) -> None:
    attend, qkv = written_out(SCORES[how]), make(dtype)
    gm = trace(attend, *qkv)
    assert fold_attention(gm, Notes()) == 1
    (node,) = calls(gm)
    scale, softcap, dropout_p = node.args[10:13]
    expected = {"over a number": D**-0.5, "queries times a number": 1.0}.get(how, 0.4)
    assert (scale, softcap) == pytest.approx((expected, 0.7 if "capped" in how else 0.0))
    assert dropout_p == 0
    assert ("mask" in how or how == "cast") == (node.args[5] is not None)
    tolerance = TOLERANCE if dtype == torch.float32 else 2e-2
    for _ in range(2):  # folded, and with the mask recovered
        gm.recompile()
        torch.testing.assert_close(gm(*qkv), attend(*qkv), rtol=tolerance, atol=tolerance)
        recover_masks(gm, Notes())
    (node,) = calls(gm)
    assert node.args[5] is None
    assert (node.args[8] == 0) == ("mask" in how or how == "cast")
    assert node.args[11] == softcap
    assert not dense_values(gm, S)


def test_batch_and_heads_in_one_dim() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
        scores = torch.baddbmm(mask()[None], q, k.transpose(1, 2), alpha=0.4)
        p = torch.softmax(scores.view(B, H, S, S), -1).view(B * H, S, S)
        return torch.bmm(p, v).view(B, H, S, D)

    gm, qkv = trace(attend, *make()), make()
    assert fold_attention(gm, Notes()) == 1
    recover_masks(gm, Notes())
    gm.recompile()
    torch.testing.assert_close(gm(*qkv), attend(*qkv))
    (node,) = calls(gm)
    assert node.args[8] == 0 and node.args[10] == 0.4 and not dense_values(gm, S)


EINSUMS = {
    "bhid,bhjd->bhij": ((B, H, S, D), (B, H, S, D)),
    "bihd,bjhd->bhij": ((B, S, H, D), (B, S, H, D)),
    "ibnd,jbnd->bnij": ((S, B, H, D), (S, B, H, D)),
    "bhij,bjhd->bihd": ((B, H, S, S), (B, S, H, D)),
    "bhij, bhjd -> ibhd": ((B, H, S, S), (B, H, S, D)),
    "bij,bjd->bid": ((B, S, S), (B, S, D)),
}
KEPT = {
    "ij,jd->id": ((S, S), (S, D)),
    "...ij,...jd->...id": ((B, H, S, S), (B, H, S, D)),
    "bhid,bhjd->bhi": ((B, H, S, D), (B, H, S, D)),
}


@pytest.mark.parametrize("equation", [*EINSUMS, *KEPT])
def test_einsums(equation: str) -> None:
    shapes = (EINSUMS | KEPT)[equation]
    a, b = (torch.randn(s) for s in shapes)
    gm = trace(lambda a, b: torch.einsum(equation, a, b), a, b)
    kept = torch.ops.aten.einsum.default
    assert any(n.target is kept for n in gm.graph.nodes)
    spell_out_einsums(gm)
    gm.recompile()
    assert any(n.target is kept for n in gm.graph.nodes) == (equation in KEPT)
    torch.testing.assert_close(gm(a, b), torch.einsum(equation, a, b))


@pytest.mark.parametrize("factor", [(), (B * H, 1, 1)])
def test_a_factor_beside_batch_and_heads_in_one_dim(factor: tuple[int, ...]) -> None:
    """One number for all is one of the queries too, however these lie; one of each head is not."""

    def attend(q: Tensor, k: Tensor, v: Tensor, times: Tensor) -> Tensor:
        q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
        p = (torch.bmm(q, k.transpose(1, 2)) * times).softmax(-1)
        return torch.bmm(p, v).view(B, H, S, D)

    given = (*make(), torch.rand(factor))
    gm = trace(attend, *given)
    assert fold_attention(gm, Notes()) == (not factor)
    gm.recompile()
    torch.testing.assert_close(gm(*given), attend(*given))


def test_einsums_of_batch_and_heads_in_one_dim() -> None:
    """As the package axial-attention has it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
        p = (torch.einsum("bie,bje->bij", q, k) * 0.4).softmax(-1)
        return torch.einsum("bij,bje->bie", p, v).reshape(B, H, S, D)

    gm, qkv = trace(attend, *make()), make()
    assert fold_attention(gm, Notes()) == 1
    gm.recompile()
    torch.testing.assert_close(gm(*qkv), attend(*qkv))
    assert calls(gm)[0].args[10] == 0.4 and not dense_values(gm, S)


def cast_after_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.dropout(torch.softmax(products(q, k).double(), -1), 0.25, True)
    return torch.matmul(p.to(v.dtype), v)


@pytest.mark.parametrize("attend", [written_out(products, 0.25), cast_after_dropout])
def test_dropout_goes_along(attend: Callable[..., Any]) -> None:
    gm = trace(attend, *make())
    assert fold_attention(gm, Notes()) == 1
    assert calls(gm)[0].args[12] == 0.25
    assert not dense_values(gm, S)


REFUSED: dict[str, Callable[..., Any]] = {
    "probabilities are returned": lambda q, k, v: (
        (p := torch.softmax(products(q, k), -1)),
        torch.matmul(p, v),
    ),
    "scores are returned": lambda q, k, v: (
        (s := products(q, k)),
        torch.matmul(torch.softmax(s, -1), v),
    ),
    "over queries": lambda q, k, v: torch.matmul(torch.softmax(products(q, k), -2), v),
    "another cap": lambda q, k, v: torch.matmul(
        torch.softmax(torch.tanh(products(q, k) / 0.7) * 0.8, -1), v
    ),
    "times a number after the cap": lambda q, k, v: torch.matmul(
        torch.softmax(capped(q, k) * 2.0, -1), v
    ),
    "times a number of each key": lambda q, k, v: torch.matmul(
        torch.softmax(products(q, k) * k[..., 0].unsqueeze(2), -1), v
    ),
    "times a tensor after the mask": lambda q, k, v: torch.matmul(
        torch.softmax((products(q, k) + mask()) * q[..., :1] ** 2, -1), v
    ),
    "a tensor over scores": lambda q, k, v: torch.matmul(
        torch.softmax(q[..., :1] / products(q, k), -1), v
    ),
    "fewer keys": lambda q, k, v: torch.matmul(
        torch.softmax(products(q, k[:, :, :5]), -1), v[:, :, :5]
    ),
    "filled with an ordinary number": lambda q, k, v: torch.matmul(
        torch.softmax(products(q, k).masked_fill(mask() < 0, -5.0), -1), v
    ),
    "a row's maximum of others": lambda q, k, v: torch.matmul(
        torch.softmax((s := products(q, k)) - s.amax(-2, keepdim=True), -1), v
    ),
    "sinks that are no parameter": lambda q, k, v: torch.matmul(
        torch.softmax(torch.cat([products(q, k), q[..., :1]], -1), -1)[..., :-1], v
    ),
    "a column of values": lambda q, k, v: torch.matmul(
        torch.softmax(torch.cat([products(q, k), q[..., :1]], -1)[..., :-1], -1), v
    ),
    "keys as they lie": lambda q, k, v: torch.matmul(
        torch.softmax(torch.matmul(q, k.reshape(B, H, D, S)), -1), v
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_refused(how: str) -> None:
    gm, qkv = trace(REFUSED[how], *make()), make()
    assert fold_attention(gm, Notes()) == 0 and not calls(gm)
    gm.recompile()
    torch.testing.assert_close(gm(*qkv), REFUSED[how](*qkv))


def test_a_query_that_might_see_no_key() -> None:
    """Then a finite number hides nothing: no operator of ours does that."""
    real = torch.ones(B, S, dtype=torch.int64)

    def attend(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        padding = torch.where(real[:, None, None, :] > 0, 0.0, MIN)
        return written_out(lambda q, k: products(q, k) + padding)(q, k, v)

    gm, notes = trace(attend, *make(), real), Notes()
    assert fold_attention(gm, notes) == 0
    assert notes.notes[0].endswith(
        "attention stays written out, its mask hides with a finite number, and a query might see "
        "no key"
    )


def gemma2() -> Any:
    """Scores that are capped: newer transformers writes attention out for them, 5.17 if told to."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma2Config(
        vocab_size=VOCAB,
        intermediate_size=88,
        sliding_window=5,
        attn_logit_softcapping=3.0,
        use_cache=False,
        attn_implementation="eager",
        **sizes,
        **layers,
    )
    return redraw(Gemma2ForCausalLM(config))


def train_capped(sharded: bool) -> list[str]:
    """Under every strategy, packed and not; the masks."""
    from plans import PLANS, blocks_of, choose

    import paradyse

    reference, model = gemma2(), gemma2()
    if sharded:
        paradyse.shard(model)
    found = []
    for how in ("plain", "packed"):
        torch._dynamo.reset()
        current: list[Any] = ["colossal_z"]
        options = {"plan": lambda workload: current[0], "inner": "eager"}  # noqa: B023
        compiled = torch.compile(model, backend="paradyse", options=options)
        batch = make_batch(how, 2, S)
        want = run_step(reference, reference, batch)
        run_step(compiled, model, batch)
        blocks = blocks_of(compiled)
        for name in PLANS if torch.distributed.get_world_size() > 1 else PLANS[:1]:
            current[0] = choose(name, blocks)
            check(run_step(compiled, model, batch), want, what=f"{how} {name}")
        found += [str(b.mask) for b in blocks if b.kind == "attention"]
    return found


@pytest.mark.broad
@pytest.mark.parametrize(
    ("nproc", "sharded"), [(1, False), pytest.param(2, True, marks=pytest.mark.slow)]
)
def test_capped_scores_train(nproc: int, sharded: bool, ranks: Callable[[int], RankPool]) -> None:
    masks = ["causal, left 4", "causal"]
    expected = [*masks, *(m + ", documents" for m in masks)]
    for found in ranks(nproc).run(train_capped, sharded, timeout_s=300):
        assert found == expected


def train_written_out(family: str) -> str:
    """Loss and gradients of a model told to write attention out; its mask."""
    from plans import blocks_of

    model = make_model(family, attn_implementation="eager")
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    batch = make_batch("plain", 2, S)
    check(run_step(compiled, model, batch), run_step(model, model, batch))
    return str(blocks_of(compiled)[0].mask)


@pytest.mark.broad
@pytest.mark.parametrize(("family", "mask"), [("llama", "causal"), ("bert", "full")])
def test_models_told_to_write_it_out(family: str, mask: str, pool2: RankPool) -> None:
    assert pool2.run(train_written_out, family, timeout_s=200) == [mask, mask]


def train_padded() -> tuple[str, str]:
    """A batch whose mask is not understood: exact; what the log and ``explain`` say."""
    import paradyse

    model = gemma2()
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    batch = make_batch("left", 2, S)
    width = model.config.hidden_size  # no ids, which would say what the sequence is
    batch["inputs_embeds"] = torch.randn(*batch.pop("input_ids").shape, width)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paradyse").addHandler(handler)
    check(run_step(compiled, model, batch), run_step(model, model, batch))
    logging.getLogger("paradyse").removeHandler(handler)
    with pytest.raises(ValueError) as error:
        paradyse.explain(compiled, 2, S)
    return said[0], str(error.value)


@pytest.mark.broad
def test_what_is_computed_whole_is_said(pool2: RankPool) -> None:
    for said, explained in pool2.run(train_padded, timeout_s=200):
        assert said.startswith("computed whole on every rank: ")
        assert explained.startswith("nothing of this model is split")
        assert "its mask hides with a finite number, and a query might see no key" in explained
        why, _, cost = said.removeprefix("computed whole on every rank: ").rpartition("; ")
        assert explained.endswith(why) and cost.startswith("each of 2 ranks does all of its work")
