"""Options of ``torch.compile(..., backend="paradyse")`` that are refused, with their words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import Words, name_of, refused

from paradyse.distributed.collectives import TIMEOUT_VARIABLE
from paradyse.types import Plan


def by_length(workload: Any) -> str:
    return "metp"


LEGAL_PLANS = "legal: auto, megatron_ts, megatron_cz, ulysses_z, colossal_z, metp"
READABLE_PLANS = "give 'auto', a strategy name, a list"
NAMES = "give a list of names, not"
SIZE = "as a size; give bytes (80 * 2**30) or text like '80GiB' or '500MB'"
SHARE = "is not a share of the best time; give a number >= 0 such as 0.05"

OPTIONS: tuple[tuple[Any, Words], ...] = (
    # the dict itself
    ("auto", "options: give a dict, not str 'auto'"),
    (["plan", "auto"], "options: give a dict, not list"),
    (7, "options: give a dict, not int 7"),
    ({"plans": "auto"}, ("unknown option 'plans' (did you mean 'plan'?)", "legal: plan, strat")),
    ({"Plan": "auto"}, "unknown option 'Plan' (did you mean 'plan'?)"),
    ({"cost-model": "p.jsonl"}, "unknown option 'cost-model' (did you mean 'cost_model'?)"),
    ({"max_autotune": True}, "unknown option 'max_autotune'; legal: plan,"),
    ({3: 1}, "unknown option 3; legal:"),
    ({None: 1}, "unknown option None; legal:"),
    # plan
    ({"plan": "ulyses_z"}, ("'ulyses_z' (did you mean 'ulysses_z'?)", LEGAL_PLANS)),
    ({"plan": "metp "}, "unknown strategy 'metp ' (did you mean 'metp'?)"),
    ({"plan": "AUTO"}, "option 'plan': unknown strategy 'AUTO'"),
    ({"plan": ""}, f"option 'plan': unknown strategy ''; {LEGAL_PLANS}"),
    ({"plan": "metp,metp"}, "unknown strategy 'metp,metp'"),
    ({"plan": b"metp"}, ("option 'plan': cannot read b'metp'", READABLE_PLANS)),
    ({"plan": 3}, ("option 'plan': cannot read 3", READABLE_PLANS)),
    ({"plan": 0.5}, ("option 'plan': cannot read 0.5", READABLE_PLANS)),
    ({"plan": {"metp"}}, ("option 'plan': cannot read {'metp'}", READABLE_PLANS)),
    ({"plan": []}, "option 'plan': the list is empty; give one name per layer"),
    ({"plan": ["metp", "ring"]}, "option 'plan'[1]: unknown strategy 'ring'; legal:"),
    ({"plan": ["metp", 7]}, "option 'plan'[1]: unknown strategy 7; legal:"),
    ({"plan": [["metp"]]}, "option 'plan'[0]: unknown strategy ['metp']; legal:"),
    ({"plan": {"attn": ["metp"]}}, "block 'attn' (did you mean 'attention'?); legal: attention,"),
    ({"plan": {1: "metp"}}, "option 'plan': unknown kind of block 1; legal: attention, mlp"),
    ({"plan": {"mlp": ["x"]}}, "option 'plan'['mlp'][0]: unknown strategy 'x'"),
    ({"plan": {"mlp": []}}, "option 'plan'['mlp']: the list is empty"),
    ({"plan": {"mlp": None}}, "option 'plan'['mlp']: give a name or a list of names, not None"),
    ({"plan": {"mlp": by_length}}, "option 'plan'['mlp']: give a name or a list of names"),
    ({"plan": {"mlp": {"mlp": "metp"}}}, "option 'plan'['mlp']: give a name or a list of names"),
    # levers of a plan
    ({"plan": "metp+recomputed"}, "lever 'recomputed' (did you mean 'recompute'?); legal: recomp"),
    ({"plan": "metp+"}, "option 'plan': unknown lever ''; legal: recompute, selective, tiled"),
    ({"plan": "metp+recompute+recompute"}, "lever 'recompute' is named twice; name it once"),
    ({"plan": "metp+recompute+vocabulary"}, "have no levers 'recompute+vocabulary'; give one of"),
    ({"plan": "metp+vocabulary"}, "blocks have no levers 'vocabulary'; give one of recompute"),
    (
        {"plan": {"attention": "metp+tiled"}},
        "'attention']: attention blocks have no levers 'tiled'",
    ),
    ({"plan": ["metp", "ring+recompute"]}, "option 'plan'[1]: unknown strategy 'ring'; legal:"),
    ({"plan": "auto+recompute"}, f"unknown strategy 'auto+recompute'; {LEGAL_PLANS}"),
    ({"plan": Plan(("metp+metp",))}, "option 'plan': unknown lever 'metp'; legal: recompute,"),
    (
        {"plan": {"head": "recompute"}},
        "'head']: the head has no levers 'recompute'; give 'auto' or",
    ),
    ({"plan": {"head": ["tiled"]}}, "option 'plan'['head']: the head has no levers ['tiled']"),
    ({"plan": Plan(("metp",), "x")}, "option 'plan': the head has no levers 'x'; give 'auto' or"),
    # levers
    ({"levers": ["recompute", "swap"]}, "option 'levers': unknown lever 'swap'; legal: recompute"),
    ({"levers": "recomput"}, "option 'levers': unknown lever 'recomput' (did you mean 'recompute"),
    ({"levers": ["tiled", "tiled"]}, "option 'levers': lever 'tiled' is named twice; name it once"),
    ({"levers": [None]}, "option 'levers': unknown lever None; legal: recompute,"),
    ({"levers": 3}, f"option 'levers': {NAMES} 3"),
    ({"levers": {"tiled": True}}, f"option 'levers': {NAMES} {{'tiled': True}}"),
    # strategies
    ({"strategies": ["metp", "auto"]}, "'strategies': unknown strategy 'auto'; legal: megatron_ts"),
    ({"strategies": "ulysses"}, "unknown strategy 'ulysses' (did you mean 'ulysses_z'?)"),
    ({"strategies": "metp,ulysses_z"}, "unknown strategy 'metp,ulysses_z'"),
    ({"strategies": [None]}, "option 'strategies': unknown strategy None"),
    ({"strategies": []}, ("option 'strategies': the list is empty", "leave the option out")),
    ({"strategies": 5}, f"option 'strategies': {NAMES} 5"),
    ({"strategies": ["replicated"]}, ("'replicated' alone leaves nothing", "give 'plan'")),
    ({"strategies": b"metp"}, f"option 'strategies': {NAMES} b'metp'"),
    ({"strategies": {"metp": 1}}, f"option 'strategies': {NAMES} {{'metp': 1}}"),
    ({"strategies": iter(["metp"])}, f"option 'strategies': {NAMES} <list_iterator"),
    # cost_model
    ({"cost_model": 3}, "option 'cost_model': give the path of a profile or None, not 3"),
    ({"cost_model": b"p.jsonl"}, "option 'cost_model': give the path of a profile or None, not b"),
    ({"cost_model": ""}, "option 'cost_model': no such file"),
    ({"cost_model": "/no/such/p.jsonl"}, ("no such file '/no/such/p.jsonl'", "leave the option")),
    ({"cost_model": "/"}, ("option 'cost_model': no such file '/'", "`paradyse profile` writes")),
    ({"cost_model": "/dev/null"}, "option 'cost_model': no such file '/dev/null'"),
    # memory_limit
    ({"memory_limit": "80 gigs"}, ("option 'memory_limit': cannot read '80 gigs'", SIZE)),
    ({"memory_limit": "80GiBs"}, ("cannot read '80GiBs'", SIZE)),
    ({"memory_limit": "-5GB"}, ("cannot read '-5GB'", SIZE)),
    ({"memory_limit": "1e9"}, ("cannot read '1e9'", SIZE)),
    ({"memory_limit": ""}, ("cannot read ''", SIZE)),
    ({"memory_limit": "0GiB"}, ("cannot read '0GiB'", SIZE)),
    ({"memory_limit": "9" * 400 + "GB"}, SIZE),
    ({"memory_limit": 10**400}, SIZE),
    ({"memory_limit": 0}, ("cannot read 0", SIZE)),
    ({"memory_limit": -1}, ("cannot read -1", SIZE)),
    ({"memory_limit": True}, ("cannot read True", SIZE)),
    ({"memory_limit": math.nan}, ("cannot read nan", SIZE)),
    ({"memory_limit": math.inf}, ("cannot read inf", SIZE)),
    ({"memory_limit": [2**30]}, ("cannot read [1073741824]", SIZE)),
    ({"host_memory": "lots"}, ("option 'host_memory': cannot read 'lots'", SIZE)),
    # smoothing
    ({"smoothing": -0.1}, f"option 'smoothing': -0.1 {SHARE}"),
    ({"smoothing": "5%"}, f"option 'smoothing': '5%' {SHARE}"),
    ({"smoothing": math.nan}, f"option 'smoothing': nan {SHARE}"),
    ({"smoothing": math.inf}, f"option 'smoothing': inf {SHARE}"),
    ({"smoothing": 10**400}, SHARE),
    ({"smoothing": True}, f"option 'smoothing': True {SHARE}"),
    ({"smoothing": [0.05]}, f"option 'smoothing': [0.05] {SHARE}"),
    # mesh
    ({"mesh": 4}, "mesh: give a torch DeviceMesh or None, not int 4"),
    ({"mesh": "cpu"}, "mesh: give a torch DeviceMesh or None, not str 'cpu'"),
    ({"mesh": (2, 2)}, "mesh: give a torch DeviceMesh or None, not tuple (2, 2)"),
    ({"mesh": torch.ones(2)}, "mesh: give a torch DeviceMesh or None, not Tensor"),
    # inner
    ({"inner": "indutcor"}, "'inner': unknown value 'indutcor' (did you mean 'inductor'?); legal:"),
    ({"inner": "Inductor"}, "unknown value 'Inductor' (did you mean 'inductor'?)"),
    ({"inner": "cudagraphs"}, "unknown value 'cudagraphs'; legal: inductor, aot_eager, eager"),
    ({"inner": []}, "option 'inner': unknown value []; legal: inductor, aot_eager, eager"),
    ({"inner": True}, "option 'inner': unknown value True"),
    # on_unsupported
    ({"on_unsupported": "warn"}, "'on_unsupported': unknown value 'warn'; legal: gather, error"),
    ({"on_unsupported": False}, "option 'on_unsupported': unknown value False"),
    # dump
    ({"dump": 1}, "option 'dump': give the path of a folder or None, not 1"),
    ({"dump": ""}, "option 'dump': give the path of a folder or None, not ''"),
    ({"dump": b"x"}, "option 'dump': give the path of a folder or None, not b'x'"),
    ({"dump": ["x"]}, "option 'dump': give the path of a folder or None, not ['x']"),
    # passes_off
    ({"passes_off": ["merge_equal"]}, "unknown pass 'merge_equal' (did you mean 'merge_equals'?)"),
    ({"passes_off": "split_steps"}, "option 'passes_off': unknown pass 'split_steps'; legal: drop"),
    ({"passes_off": [3]}, "option 'passes_off': unknown pass 3"),
    ({"passes_off": 3}, f"option 'passes_off': {NAMES} 3"),
    ({"passes_off": {"merge_equals": 1}}, f"option 'passes_off': {NAMES} {{'merge_equals': 1}}"),
)


def compiled_with(**arguments: Any) -> None:
    """Compile a function and call it; raises the backend's own error, not Dynamo's around it."""
    torch._dynamo.reset()
    run = torch.compile(lambda x: x + 1, backend="paradyse", **arguments)
    try:
        run(torch.zeros(2))
    except Exception as e:
        raise getattr(e, "inner_exception", e) from e


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=[name_of(o) for o, _ in OPTIONS])
def test_options_that_are_refused(options: Any, words: Words, tmp_path: Path) -> None:
    with refused(tmp_path, words):
        compiled_with(options=options)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_of_inductor_are_refused(mode: str, tmp_path: Path) -> None:
    with refused(tmp_path, (f"mode={mode!r}", "leave it out", 'options={"inner": "inductor"}')):
        compiled_with(mode=mode)


@pytest.mark.parametrize("seconds", ["abc", "", "nan", "inf", "-1", "0", "1e9"])
def test_a_time_out_that_is_none_is_refused_at_the_start(
    seconds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, seconds)
    with refused(tmp_path, (f"{TIMEOUT_VARIABLE} is {seconds!r}", "leave it unset for 300")):
        compiled_with(options={"inner": "eager"})
