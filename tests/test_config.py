"""Options: defaults, every legal form, and the text of every error."""

from __future__ import annotations

import logging
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from paradyse.config import (
    ENVIRONMENT,
    OPTION_NAMES,
    Options,
    PlanByKind,
    parse_bytes,
    parse_options,
    with_environment,
)
from paradyse.types import ATTENTION_STRATEGIES, LEVERS, REPLICATED, Plan

MESH = type("MeshLike", (), {"ndim": 1, "get_group": lambda self, dim=0: None})()


def test_defaults_are_those_of_the_contract() -> None:
    assert parse_options(None) == parse_options({}) == Options()
    o = Options()
    assert (o.plan, o.strategies, o.cost_model, o.memory_limit) == (
        "auto",
        (*ATTENTION_STRATEGIES, REPLICATED),
        None,
        None,
    )
    assert (o.smoothing, o.mesh, o.inner, o.on_unsupported, o.dump) == (
        0.05,
        None,
        "inductor",
        "gather",
        None,
    )


def test_none_means_the_default_for_every_key() -> None:
    assert parse_options(dict.fromkeys(OPTION_NAMES)) == Options()


def test_options_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().plan = "metp"  # type: ignore[misc]


def by_length(workload: Any) -> str:
    return "metp"


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("auto", "auto"),
        ("metp", "metp"),
        (["metp", "ulysses_z"], ("metp", "ulysses_z")),
        (("auto",), ("auto",)),
        ({"attention": ["metp"], "mlp": ["megatron_ts"]}, PlanByKind(("metp",), ("megatron_ts",))),
        ({"attention": "metp"}, PlanByKind("metp", "auto")),
        ("metp+recompute", "metp+recompute"),
        (["metp+recompute", "auto"], ("metp+recompute", "auto")),
        ({"mlp": "metp+recompute", "head": ""}, PlanByKind("auto", "metp+recompute", "")),
        (Plan(("metp+recompute",), "auto"), Plan(("metp+recompute",), "auto")),
        (by_length, by_length),
        (Plan(("metp", "auto")), Plan(("metp", "auto"))),
    ],
)
def test_every_form_of_plan(given: Any, parsed: Any) -> None:
    assert parse_options({"plan": given}).plan == parsed


def test_strategies_are_ordered_and_may_be_a_single_name_or_a_set() -> None:
    assert parse_options({"strategies": {"metp", "megatron_ts"}}).strategies == (
        "megatron_ts",
        "metp",
    )
    assert parse_options({"strategies": "colossal_z"}).strategies == ("colossal_z",)


def test_levers_are_ordered_and_may_be_none() -> None:
    assert parse_options({"levers": {"tiled", "recompute"}}).levers == ("recompute", "tiled")
    assert parse_options({"levers": "tiled"}).levers == ("tiled",)
    assert parse_options({"levers": ()}).levers == parse_options({"levers": []}).levers == ()
    assert parse_options(None).levers == LEVERS


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("3 MiB", 3 * 2**20),
        ("2TB", 2 * 10**12),
        ("7B", 7),
        (1e9, 10**9),
    ],
)
def test_memory_sizes(text: Any, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes
    assert parse_options({"memory_limit": text}).memory_limit == num_bytes


def test_the_other_keys_pass_through(tmp_path: Any) -> None:
    o = parse_options(
        {
            "inner": "eager",
            "on_unsupported": "error",
            "smoothing": 0,
            "dump": tmp_path,
            "mesh": MESH,
        }
        | {"passes_off": ["tile"]},
        pass_names=("tile", "place"),
    )
    assert (o.inner, o.on_unsupported, o.smoothing) == ("eager", "error", 0.0)
    assert (o.dump, o.mesh, o.passes_off) == (str(tmp_path), MESH, ("tile",))


def test_a_profile_must_be_there(tmp_path: Any) -> None:
    file = tmp_path / "profile.jsonl"
    for path in (file, str(file), tmp_path):
        text = rf"option 'cost_model': no such file '{path}'; `paradyse profile` writes one.*prior"
        with pytest.raises(ValueError, match=text):
            parse_options({"cost_model": path})
    file.write_text("")
    assert parse_options({"cost_model": file}).cost_model == str(file)


def test_torch_compile_hands_the_options_to_a_backend_as_one_keyword() -> None:
    seen: dict[str, Any] = {}

    def backend(
        gm: torch.fx.GraphModule, inputs: list[torch.Tensor], *, options: Any = None
    ) -> Any:
        seen["options"] = parse_options(options)
        return gm.forward

    torch._dynamo.reset()
    f = torch.compile(
        lambda x: x + 1, backend=backend, options={"plan": "metp", "memory_limit": "1GiB"}
    )
    f(torch.zeros(2))
    assert seen["options"] == Options(plan="metp", memory_limit=2**30)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        (" plan=metp , smoothing=0.1,", {"plan": "metp", "smoothing": 0.1}),
        ("retry_out_of_memory=False,dump=/x/1", {"retry_out_of_memory": False, "dump": "/x/1"}),
        ("memory_limit=1024,plan=auto", {"memory_limit": 1024, "plan": "auto"}),
        ("memory_limit=20GiB", {"memory_limit": "20GiB"}),
        (
            '{"levers": ["tiled"], "plan": {"mlp": "metp"}}',
            {"levers": ["tiled"]} | {"plan": {"mlp": "metp"}},
        ),
    ],
)
def test_the_environment_gives_what_the_program_does_not(
    text: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, text)
    assert with_environment(None) == with_environment({}) == options
    assert with_environment({"inner": "eager"}) == options | {"inner": "eager"}


def test_what_the_program_gives_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "plan=metp,inner=eager")
    with caplog.at_level(logging.INFO, "paradyse"):
        assert with_environment({"plan": "auto", "inner": None}) == {
            "plan": "auto",
            "inner": "eager",
        }
    assert [r.getMessage() for r in caplog.records] == [
        "PARADYSE_OPTIONS: option 'plan' is not used, the program gives it"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("metp", r"PARADYSE_OPTIONS='metp': 'metp' has no '='; give 'plan=metp,.*or JSON"),
        ('{"plan": ', r"PARADYSE_OPTIONS='\{\"plan\": ': Expecting value"),
        ("plam=metp", r"unknown option 'plam' \(did you mean 'plan'\?\); legal: plan, strategies"),
        ("mesh=1", r"unknown option 'mesh'.*legal: (?!.*mesh)"),
        ("plan=metp,plan=auto", "option 'plan' is given twice"),
        ('{"plan": "metp", "plan": "auto"}', "option 'plan' is given twice"),
    ],
)
def test_what_the_environment_cannot_say_is_an_error(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, text)
    with pytest.raises(ValueError, match=message):
        with_environment({"plan": "metp"})


def test_the_backend_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "plan=mega")
    torch._dynamo.reset()
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="paradyse")
    with pytest.raises(Exception, match="unknown strategy 'mega'"):
        compiled(torch.zeros(1, 2))
