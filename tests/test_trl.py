"""TRL's SFTTrainer over ranks, with packed documents: everything that it reports as in one process.

Plain TRL, on one process and without the backend, is what is compared with. It computes the loss in
chunks, from the weight of the head; the mixin has the model's own head do so.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from models import relative, whole
from test_trainer import EXACT, fresh_accelerate
from torch import Tensor

pytest.importorskip("trl", reason="TRL is not installed: pip install 'paradyse[trl]'")

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 67
LONGEST = 37
"""Tokens of a pack; divides by no number of ranks."""
REPORTED = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "eval_loss", "eval_entropy")
TILED = {"attention": "megatron_cz", "mlp": "megatron_ts", "head": "tiled"}


@contextlib.contextmanager
def fresh_world() -> Iterator[None]:
    """For one trainer. Under continuous integration TRL does not tell its makers of it."""
    with fresh_accelerate(), warnings.catch_warnings(), pytest.MonkeyPatch.context() as world:
        warnings.simplefilter("ignore")  # what the libraries say of each other's arguments
        world.setenv("CI", "1")
        yield


def make_model(**config: Any) -> Any:
    import transformers

    transformers.set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **config))


def adapted(model: Any) -> Any:
    """``model`` with adapters that all matter."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return model


def documents(skip: int, number: int) -> Any:
    """Tokens of documents of 3 to 20 tokens; every third one has a prompt without labels."""
    import datasets

    g = torch.Generator().manual_seed(skip)
    rows = []
    for i in range(number):
        ids = torch.randint(3, VOCABULARY, (3 + (7 * i) % 18,), generator=g).tolist()
        labels = [-100, -100, *ids[2:]] if i % 3 == 0 else ids
        rows.append({"input_ids": ids, "labels": labels})
    return datasets.Dataset.from_list(rows)


def tokenizer() -> Any:
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="<pad>", eos_token="<eos>"
    )


def arguments(folder: str, **options: Any) -> Any:
    import trl

    defaults: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 1,
        "gradient_checkpointing": False,
        "packing": True,
        "max_length": LONGEST,
        "bf16": False,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return trl.SFTConfig(output_dir=folder, **(defaults | options))


def fit(cls: Any, model: Any, folder: str, options: Mapping[str, Any], **more: Any) -> Any:
    """A trainer of ``cls`` that has run."""
    trainer = cls(
        model=model,
        args=arguments(folder, **options),
        train_dataset=documents(0, 40),
        eval_dataset=documents(7, 9),
        processing_class=tokenizer(),
        **more,
    )
    trainer.train()
    return trainer


def reported(trainer: Any) -> list[float]:
    return [row[k] for row in trainer.state.log_history for k in REPORTED if k in row]


def plain(folder: str, lora: bool, options: Mapping[str, Any]) -> list[float]:
    import trl

    with fresh_world():
        model = adapted(make_model()) if lora else make_model()
        return reported(fit(trl.SFTTrainer, model, folder, options))


def over_ranks(
    folder: str,
    lora: bool,
    options: Mapping[str, Any],
    shape: tuple[int, int] = (1, 2),
    sharded: bool = True,
    plan: Any = "auto",
) -> list[float]:
    import trl
    from torch.distributed.device_mesh import init_device_mesh

    import paradyse
    from paradyse.runtime.registry import captures_of
    from paradyse.strategies import head

    class Trainer(paradyse.TrainerMixin, trl.SFTTrainer):
        pass

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
    with fresh_world():
        model = adapted(make_model()) if lora else make_model()
        if sharded:
            paradyse.shard(model, mesh)
        how = {"inner": "eager", "plan": plan, "on_unsupported": "error"}
        more = {"mesh": mesh, "backend_options": how}
        torch._dynamo.utils.counters.clear()
        with patch.object(head, "TILE_TOKENS", 8):
            trainer = fit(Trainer, model, folder, options, **more)
        assert not torch._dynamo.utils.counters["graph_break"]
        assert not list(captures_of(trainer.model, whole=True)), "a part was computed whole"
        graphs = [g for c in captures_of(trainer.model) for g in c.graphs.values()]
        found = [s for g in graphs for s in g.program.steps if hasattr(s, "closed")]
        assert len(found) == len(graphs) and not any(step.logits for step in found)
        return reported(trainer)


def assert_reported_alike(got: list[float], want: list[float]) -> None:
    """Three steps of four figures, and an evaluation of two."""
    assert len(want) == len(got) == 14
    assert got == pytest.approx(want, rel=EXACT)


def as_in_readme(folder: str) -> list[float]:
    """The script of README's section, on sharded weights."""
    from torch.distributed.device_mesh import init_device_mesh

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (script,) = (block for block in blocks if "trl.SFTTrainer" in block)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
    with fresh_world():
        names = {"model": make_model(), "mesh": mesh, "tokenizer": tokenizer()}
        names["model"].compile(backend="paradyse", options={"inner": "eager", "mesh": mesh})
        names |= {"args": arguments(folder, eval_strategy="no"), "dataset": documents(0, 40)}
        exec(script, names)
        return reported(names["trainer"])


@pytest.mark.slow
def test_the_script_in_readme(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    (want,) = pool1.run(plain, str(tmp_path / "plain"), False, {}, timeout_s=100)
    for got in pool2.run(as_in_readme, str(tmp_path / "two"), timeout_s=200):
        assert got == pytest.approx(want[:12], rel=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "sharded", "options", "plan"),
    [
        (False, True, {}, "auto"),
        (False, False, {}, "auto"),
        (True, False, {}, "auto"),
        (True, True, {}, "auto"),
        (False, True, {"loss_type": "dft"}, TILED),
        (False, True, {"gradient_checkpointing": True}, "metp"),
        (True, True, {"gradient_accumulation_steps": 2}, TILED),
    ],
)
def test_two_ranks(
    lora: bool,
    sharded: bool,
    options: dict[str, Any],
    plan: Any,
    pool1: RankPool,
    pool2: RankPool,
    tmp_path: Path,
) -> None:
    (want,) = pool1.run(plain, str(tmp_path / "plain"), lora, options, timeout_s=100)
    args = (str(tmp_path / "two"), lora, options, (1, 2), sharded, plan)
    for got in pool2.run(over_ranks, *args, timeout_s=200):
        assert_reported_alike(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_two_replicas_of_two_ranks(
    sharded: bool, pool1: RankPool, pool4: RankPool, tmp_path: Path
) -> None:
    """Batches of one pack on two replicas are batches of two."""
    (want,) = pool1.run(plain, str(tmp_path / "plain"), False, {}, timeout_s=100)
    args = (str(tmp_path / "four"), False, {"per_device_train_batch_size": 1}, (2, 2), sharded)
    for got in pool4.run(over_ranks, *args, timeout_s=250):
        assert_reported_alike(got, want)


def own_head(sharded: bool) -> None:
    """TRL's forward itself, compiled without the mixin."""
    from trl.trainer.utils import add_fused_lm_head

    import paradyse

    ids = torch.arange(2 * LONGEST).reshape(2, LONGEST) % (VOCABULARY - 3) + 3

    def run(model: Any, **options: Any) -> tuple[float, dict[str, Tensor]]:
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        call = torch.compile(model, **options) if options else model
        out = call(input_ids=ids, labels=ids, fused_lm_head=True)
        loss = -out.log_probs.mean() + 0.1 * out.entropy.mean()
        loss.backward()
        return loss.item(), {n: p.grad for n, p in model.named_parameters()}

    how = {"backend": "paradyse", "options": {"inner": "eager"}}
    with fresh_world():
        model = make_model(use_cache=False)
        if sharded:
            paradyse.shard(model)
        want, gradients = run(make_model(use_cache=False))
        got, found = run(model, **how)
    assert got == pytest.approx(want, rel=EXACT)
    for name, gradient in gradients.items():
        assert relative(whole(found[name]), gradient) < 1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_the_head_of_trl_without_the_mixin(sharded: bool, pool2: RankPool) -> None:
    """It is computed outside the graph, of sharded weights on whole ones gathered for it."""
    pool2.run(own_head, sharded, timeout_s=200)


def sampling(name: str) -> str:
    import trl

    import paradyse

    cls = type(name, (paradyse.TrainerMixin, getattr(trl, name)), {})
    try:
        cls(model=make_model())
    except ValueError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_trainers_that_sample_are_refused_on_several_ranks(name: str, pool2: RankPool) -> None:
    """They count ranks where sequence groups count."""
    for told in pool2.run(sampling, name):
        assert f"{name} deals prompts" in told and "examples/grpo_loop.py" in told
