"""What TRL is given of each token, by formulas; a stand-in takes the place of TRL's forward."""

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from paradyse.token_scores import IGNORED, SCORES, score_in_graph

LABELS = torch.tensor([[4, 1, IGNORED, 0, 2], [3, 3, 1, IGNORED, 4]])


class Output(NamedTuple):
    logits: Tensor
    loss: Tensor | None = None


class Model(nn.Module):
    """It returns the logits that it is given, scaled."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Output:
        return Output(3 * x, None if labels is None else labels.sum())


def with_forward_of_trl(
    asked: tuple[str, ...] = SCORES[:-1], temperature: float = 1.0, wide: bool = False
) -> nn.Sequential:
    """A model in a wrapper, with a forward that keeps what TRL's keeps."""
    model = Model()
    original_forward, outputs, cast_lm_head_to_fp32 = model.forward, asked, wide

    def fused(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError((original_forward, outputs, temperature, cast_lm_head_to_fp32))

    model.forward = MethodType(fused, model)
    return nn.Sequential(model)


def given() -> Tensor:
    return torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_score(temperature: float) -> None:
    model, x = with_forward_of_trl(temperature=temperature), given()
    score_in_graph(model)
    out = model[0](x, labels=LABELS, fused_lm_head=True)
    logits, following = (3 * x.float() / temperature)[:, :-1], LABELS[:, 1:]
    counts, p = following != IGNORED, logits.softmax(-1)
    want = {
        "log_probs": p.gather(-1, following.clamp(min=0)[..., None])[..., 0].log(),
        "entropy": torch.distributions.Categorical(logits=logits).entropy(),
        "log_sum_sq_probs": p.square().sum(-1).log(),
        "mean_logits": logits.mean(-1),
        "is_top1": p.argmax(-1) == following,
        "label_mask": counts,
    }
    assert want.keys() == set(SCORES)
    for name, value in want.items():
        torch.testing.assert_close(getattr(out, name), value * counts, msg=name)
    assert out.aux_loss is None


def test_gradients_flow_to_log_probabilities_and_entropy_alone() -> None:
    model, x = with_forward_of_trl(), given().requires_grad_()
    score_in_graph(model)
    out = model[0](x, labels=LABELS, fused_lm_head=True)
    assert [n for n in SCORES if getattr(out, n).requires_grad] == ["log_probs", "entropy"]


def test_what_was_not_asked_for() -> None:
    model = with_forward_of_trl(("log_probs",))
    score_in_graph(model)
    out = model[0](given(), labels=LABELS, fused_lm_head=True)
    assert out.entropy is None and out.log_probs is not None
    with pytest.raises(AttributeError, match="gives TRL log_probs, .* not logits"):
        _ = out.logits


def test_without_scores_the_model_is_what_it_was() -> None:
    model, x = with_forward_of_trl(), given()
    score_in_graph(model)
    assert model[0](x, labels=LABELS).loss == LABELS.sum()
    assert model[0](x).loss is None and torch.equal(model[0](x).logits, 3 * x)


def test_other_forwards_stay() -> None:
    model = nn.Sequential(Model())
    model[0].forward = own = MethodType(lambda self, x: x, model[0])
    score_in_graph(model)
    assert model[0].forward is own


def test_a_head_in_another_dtype_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="cast_lm_head_to_fp32=True .* leave it out"):
        score_in_graph(with_forward_of_trl(wide=True))
