"""Command lines that are refused before any rank is started, with their words; files stay."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from bad_input import Words, contents, missing

from paradyse.cli import launch
from paradyse.cli import main as cli
from paradyse.distributed.collectives import TIMEOUT_VARIABLE

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts one fails."""
    monkeypatch.setattr(launch, "_start", None)


def told(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The error of a command line that is refused: one line, after argparse's usage if any."""
    try:
        code = cli.main(args)
    except SystemExit as e:
        code = e.code  # type: ignore[assignment]
    text = capsys.readouterr().err
    assert code == 2, text
    assert "Traceback" not in text
    usage, _, error = text.rstrip().rpartition("\n")
    assert error.startswith("paradyse"), text
    assert not usage or usage.startswith("usage: "), text
    return error


NUMBER = "is not a whole number"
NAMES = ("megatron_ts", "megatron_cz", "ulysses_z", "colossal_z", "metp")

FLAGS: tuple[tuple[str, Words], ...] = (
    ("", "required: COMMAND"),
    ("train", "invalid choice: 'train'"),
    ("--verbose", "required: COMMAND"),
    ("demo --step 4 --nonsense", "unrecognized arguments: --nonsense"),
    ("doctor --ranks 2", "unrecognized arguments: --ranks 2"),
    # numbers
    ("demo --steps many", f"argument --steps: 'many' {NUMBER}"),
    ("demo --steps 1.5", f"'1.5' {NUMBER}"),
    ("demo --steps 1e3", f"'1e3' {NUMBER}"),
    ("demo --steps=", f"'' {NUMBER}"),
    ("demo --steps 0", "0 is too small; give at least 1"),
    ("demo --steps -4", "-4 is too small; give at least 1"),
    ("demo --steps 10000000000", "10000000000 is too large; give at most 1000000"),
    (f"demo --steps {'9' * 5000}", NUMBER),
    ("demo --steps nan", f"'nan' {NUMBER}"),
    ("demo --steps inf", f"'inf' {NUMBER}"),
    ("demo --cap 3", "3 is too small; give at least 16 tokens"),
    ("demo --cap 99999999999", "99999999999 is too large; give at most 1000000000 tokens"),
    ("demo --seed x", f"'x' {NUMBER}"),
    ("demo --seed 9223372036854775808", "9223372036854775808 is too large"),
    ("demo --rounds -1", "-1 is too small; give at least 0"),
    ("demo --per-range 0", "0 is too small"),
    ("demo --ranks 0", "0 is too small"),
    ("demo --ranks two", f"'two' {NUMBER}"),
    ("demo --device cpu --ranks 4000", ("--ranks 4000: at most", "use fewer")),
    ("demo --link fast", ("'fast' is no rate", "from 100kbit to 1000gbit")),
    ("demo --link 800mbit --like a100-ib", "not allowed with argument --link"),
    ("bench --lengths 64 --like b200", ("unknown device and link 'b200'", "a100-nvlink")),
    ("bench --lengths 64 --ranks 1 --like a100-ib", ("--like is of links", "--ranks 2 or more")),
    ("bench --lengths 64 --cap 900", ("--cap 900 is of lengths that are drawn", "leave out one")),
    ("bench --lengths 64 --steps 3", ("--steps 3 is of lengths that are drawn", "leave out one")),
    ("demo --timeout 0", "0 is too small; give at least 1 second"),
    ("demo --timeout 99999999999", "99999999999 is too large; give at most 10000000 seconds"),
    ("demo --layers 0", "0 is too small"),
    ("demo --layers 100000000", "100000000 is too large"),
    ("demo --hidden 1", "1 is too small; give at least 2"),
    ("demo --hidden 70 --heads 4", ("hidden 70 over 4 heads", "choose hidden as a multiple of 8")),
    ("demo --heads 4 --kv-heads 3 --hidden 64", ("cannot share 3 KV heads", "that divide")),
    ("demo --intermediate 0", "0 is too small"),
    ("verify --model {llama} --batch 0", "0 is too small"),
    ("verify --model {llama} --seq-len 0", "0 is too small; give at least 1 token"),
    ("verify --model {llama} --layers 3", ("--layers 3: it has 2", "give fewer")),
    ("profile --repeats 0", "0 is too small"),
    ("plan --model {llama} --gpus 0", "0 is too small; give at least 1"),
    ("plan --model {llama} --gpus 1000000000", "is too large"),
    # names
    ("demo --plan ulysses", ("unknown strategy 'ulysses' (did you mean 'ulysses_z'?)", *NAMES)),
    ("demo --plan=", "unknown strategy ''"),
    ("demo --inner xla", "invalid choice: 'xla' (choose from 'inductor', 'aot_eager', 'eager')"),
    ("demo --device gpu", "invalid choice: 'gpu' (choose from 'auto', 'cpu', 'cuda')"),
    ("verify --model {llama} --dtype int8", "invalid choice: 'int8'"),
    ("bench --strategies metp,auto", "unknown strategy 'auto'; legal: megatron_ts"),
    ("bench --strategies metp,", "unknown strategy ''"),
    ("profile --strategies all", "unknown strategy 'all'"),
    ("bench --distribution pile", "unknown distribution 'pile': give one of GitHubCode, GRCh38"),
    ("plan --model {llama} --weights half", "invalid choice: 'half'"),
    ("plan --model {llama} --memory-limit lots", "cannot read 'lots' as a size; give bytes"),
    ("plan --model {llama} --memory-limit 0", "cannot read '0' as a size"),
    ("plan --model {llama} --memory-limit -1GiB", "expected one argument"),
    # lengths
    ("bench --lengths 12,x", f"'x' {NUMBER}"),
    ("bench --lengths 12,,3", f"'' {NUMBER}"),
    ("bench --lengths=", f"'' {NUMBER}"),
    ("bench --lengths 0", "0 is too small; give at least 1 token"),
    ("bench --lengths=-5", "-5 is too small"),
    ("bench --lengths 99999999999", "99999999999 is too large; give at most 1000000000 tokens"),
    ("plan --model {llama} --lengths 128:256", "'128:256': give N,N,...|FIRST:LAST:HOW-MANY|FILE"),
    (
        "plan --model {llama} --lengths {folder}",
        ("no file {folder}; give one with", ", or N,N,...|FIRST:LAST:HOW-MANY"),
    ),
    ("bench --lengths /no/file", "no file /no/file; give one with a length on each line, or N,N"),
    ("profile --lengths {folder}/notes", "notes, line 1: 'my' is no length; give whole numbers"),
    ("profile --lengths 64:32:3", "the last must exceed the first"),
    ("profile --lengths 64:128:1", "the last must exceed the first, and two or more"),
    ("profile --lengths 64:128", "give N,N,...|FIRST:LAST:HOW-MANY|FILE"),
    ("profile --lengths 64:128:3:4", "give N,N,...|FIRST:LAST:HOW-MANY|FILE"),
    ("profile --lengths 64::3", f"'' {NUMBER}"),
    ("profile --lengths 1:9:99999999", "99999999 is too large"),
    # flags that do not go together
    ("bench --text x --lengths 3", "not allowed with argument"),
    ("bench --distribution GRCh38 --lengths 64:128:2", "not allowed with argument"),
    ("bench --tokenizer x --lengths 3", "give it with --text, or alone"),
    ("plan --model {llama} --out {folder}/plans", "--out is for a cluster on paper: give --gpus"),
    (
        "plan --model {llama} --offload optimizer",
        "--offload is for a cluster on paper: give --gpus",
    ),
    ("plan --model {llama} --lengths-from GRCh38", "--lengths-from is for a cluster on paper"),
    ("plan --model {llama} --gpus 2 --cut 9", "--cut is of --lengths-from: give it too"),
    ("plan --model {llama} --gpus 2 --batches 9", "--batches is of --lengths-from"),
    (
        "plan --model {llama} --gpus 2 --lengths-from GRCh38 --lengths 8",
        "--lengths does not go with --lengths-from",
    ),
    (
        "plan --model {llama} --gpus 2 --lengths-from GRCh38 --offload optimizer",
        "--offload does not go with --lengths-from",
    ),
    (
        "plan --model {llama} --gpus 2 --lengths-from pile",
        ("no file pile", "unknown distribution 'pile': give one of GitHubCode, GRCh38"),
    ),
    ("plan --model {llama} --gpus 2 --lengths-from GRCh38 --cut 0", "0 is too small"),
    # what is read
    ("verify", "required: --model"),
    ("plan", "required: --model"),
    ("verify --model /no/config.json", ("no file /no/config.json", "HuggingFace config.json")),
    ("verify --model {folder}", "no file {folder}/config.json; give the path of a HuggingFace"),
    ("verify --model /dev/null", "no file /dev/null; give the path of a HuggingFace config.json"),
    ("plan --model {llama} --gpus 8 --plan replicated", "of 8 devices on paper nothing else is"),
    (
        "plan --model {llama} --gpus 1 --plan metp",
        "is predicted than replicated; give one",
    ),
    ("plan --model {llama} --device a200", "unknown device 'a200': give one of a100-40gb"),
    ("plan --model {llama} --device {folder}", "unknown device '{folder}'"),
    ("plan --model {llama} --gpus 8 --device cuda", "unknown device 'cuda': give one of a100"),
    ("demo --text /no/such/folder", "no folder /no/such/folder; name another one"),
    ("demo --text {folder}/notes", "no folder {folder}/notes; name another one"),
    ("demo --text {folder}", ("no text file of 16 to 4096 bytes below {folder}", "raise the cap")),
    ("bench --text /no/such/folder", "no folder /no/such/folder"),
    ("bench --tokenizer /no/file", "no file /no/file; give a HuggingFace tokenizer.json"),
    ("bench --tokenizer {folder}", "no file {folder}/tokenizer.json; give a HuggingFace"),
    ("bench --tokenizer {llama}", "config.json is no tokenizer.json"),
    ("bench --tokenizer {empty}", "tokenizer.json is no tokenizer.json"),
    ("bench --tokenizer {folder}/notes", "notes is no tokenizer.json"),
    # what is written
    ("bench --csv /no/folder/t.csv", "--csv /no/folder/t.csv: no folder /no/folder; make it"),
    ("bench --csv {folder}/notes/t.csv", "no folder {folder}/notes; make it"),
    ("bench --csv {folder}", "--csv {folder}: that is a folder; name a file"),
    ("bench --csv {folder}/notes", "notes: that file is none of bench's; name another one"),
    ("bench --csv /dev/full", "--csv /dev/full: that is no regular file; name another one"),
    ("bench --csv {full}/t.csv", ("{full} cannot be written (No space left", "another place")),
    ("bench --out {folder}/runs", "{folder}/runs/bench.csv: that file is none of bench's"),
    ("bench --out {folder}/notes", "--out {folder}/notes: {folder}/notes is no folder"),
    ("bench --out {folder}/notes/charts", "{folder}/notes is no folder; name another one"),
    ("bench --out /dev/full", "--out /dev/full: /dev/full is no folder; name another one"),
    ("bench --out {full}/charts", ("{full} cannot be written (No space left", "another place")),
    ("bench --out {readonly}/charts", "{readonly} cannot be written (Read-only file system)"),
    ("plan --model {llama} --gpus 2 --out {folder}/notes", "notes is no folder; name another one"),
    ("plan --model {llama} --gpus 2 --out {full}/plans", "{full} cannot be written (No space"),
    ("profile --out /no/folder/p.jsonl", "no folder /no/folder; make it, or name another file"),
    ("profile --out {folder}", "--out {folder}: that is a folder; name a file"),
    ("profile --out {folder}/notes", ("notes: this is not a profile", "give another file")),
    ("profile --out {folder}/notes --overwrite", ("notes: this is not a profile", "another file")),
    ("profile --out {llama}", ("config.json: this is not a profile", "give another file")),
    ("profile --out {binary}", ("binary: this is not a profile", "give another file")),
    ("profile --out /dev/full", "--out /dev/full: that is no regular file"),
    ("profile --out {full}/p.jsonl", "{full} cannot be written (No space left on device)"),
    ("profile --out {readonly}/p.jsonl", "{readonly} cannot be written (Read-only file system)"),
)


@pytest.fixture(scope="module")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Folders that stand for a full disk and for one that may only be read: mounting such disks
    takes rights that tests need not have."""
    return {name: str(tmp_path_factory.mktemp(name)) for name in ("full", "readonly")}


@pytest.fixture
def places(
    tmp_path: Path, mounts: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> Mapping[str, str]:
    """Names in command lines -> paths."""
    from paradyse.cli import outputs

    reasons = {mounts["full"]: 28, mounts["readonly"]: 30}
    make = outputs.tempfile.TemporaryFile

    def refuse(dir: Path) -> Any:
        if number := reasons.get(str(dir)):
            raise OSError(number, os.strerror(number))
        return make(dir=dir)

    monkeypatch.setattr(outputs.tempfile, "TemporaryFile", refuse)
    (tmp_path / "notes").write_text("my notes")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "bench.csv").write_text("runs of my own")
    (tmp_path / "binary").write_bytes(gzip.compress(b"my notes"))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    own = {"llama": str(tmp_path / "llama" / "config.json"), "binary": str(tmp_path / "binary")}
    own["empty"] = str(tmp_path / "llama")
    return {"folder": str(tmp_path), **own, **mounts}


@pytest.mark.parametrize(
    ("line", "words"), FLAGS, ids=[line[:50] or "nothing" for line, _ in FLAGS]
)
def test_flags_that_are_refused(
    line: str,
    words: Words,
    places: Mapping[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    error = told(capsys, *line.format(**places).split(" ")) if line else told(capsys)
    wanted = (words,) if isinstance(words, str) else words
    assert not missing(tuple(w.format(**places) for w in wanted), error), error
    assert contents(tmp_path) == before


DEEP = "[" * 100_000

CONFIGS: dict[str, tuple[str | bytes | dict[str, Any], Words]] = {
    "nothing": ("", "config.json is not JSON"),
    "a cut file": ('{"model_type": "lla', "is not JSON"),
    "a word": ("llama", "config.json is not JSON"),
    "TOML": ('model_type = "llama"', "is not JSON"),
    "binary": (gzip.compress(b"{}"), "config.json is not JSON"),
    "zeros": (bytes(1000), "is not JSON"),
    "UTF-16": ('{"model_type": "llama"}'.encode("utf-16"), "is not JSON"),
    "nested deeply": (DEEP, ("is not JSON", "give a HuggingFace config.json")),
    "an object nested deeply": ('{"model_type": ' + DEEP, "is not JSON"),
    "a number of many digits": (
        '{"model_type": "llama", "x": ' + "9" * 5000 + "}",
        "config.json is not JSON",
    ),
    "an empty object": ("{}", ("has no 'model_type'", '{"model_type": "llama"')),
    "a list": ("[]", "has no 'model_type'"),
    "a number": ("3", "has no 'model_type'"),
    "null": ("null", "has no 'model_type'"),
    "an unknown model": (
        {"model_type": "lama"},
        "unknown model_type 'lama' (did you mean 'llama'?",
    ),
    "a number as model": ({"model_type": 3}, "unknown model_type 3; give one of transformers"),
    "null as model": ({"model_type": None}, "unknown model_type None"),
    "a list as model": ({"model_type": ["llama"]}, "unknown model_type ['llama']"),
    "a model of images": ({"model_type": "vit"}, "cannot make this vit: ValueError"),
    "a size as text": (LLAMA | {"hidden_size": "wide"}, ("cannot make this llama", "hidden_size")),
    "a size below 0": (LLAMA | {"hidden_size": -32}, "cannot make this llama"),
    "heads that share nothing": (LLAMA | {"num_attention_heads": 0}, "cannot make this llama"),
    "an unknown activation": (LLAMA | {"hidden_act": "selu2"}, ("cannot make", "selu2")),
    "layers as text": (LLAMA | {"num_hidden_layers": "two"}, "cannot make this llama"),
    "a foreign dtype": (LLAMA | {"dtype": "float99"}, ("cannot make this llama", "float99")),
}

CLUSTERS: dict[str, tuple[str | bytes, Words]] = {
    "nothing": ("", "'devices' must be a list of at least one table"),
    "a cut file": ("devices = ", "cluster.toml is not TOML"),
    "JSON in TOML": ('{"devices": []}', "cluster.toml is not TOML"),
    "binary": (gzip.compress(b"devices"), "cluster.toml is not TOML"),
    "nested deeply": (f"devices = {DEEP}", "cluster.toml is not TOML"),
    "no devices": ("devices = []", "at least one"),
    "a name alone": ('devices = "a100-80gb"', "'devices' must be a list"),
    "names": ('devices = ["a100-80gb"]', "'devices' must be a list of at least one table"),
    "an unknown base": ('devices = [{base = "a200"}]', "unknown base 'a200'; known: a100-40gb"),
    "a base that is none": ("devices = [{base = [1]}]", "unknown base [1]"),
    "an unknown field": ('devices = [{base = "a100-80gb", memory = 3}]', "unknown 'memory'; legal"),
    "memory below 0": ('devices = [{base = "a100-80gb", capacity_bytes = -1}]', "above 0"),
    "half a byte": ('devices = [{base = "a100-80gb", capacity_bytes = 1.5}]', "a whole number"),
    "memory as text": (
        'devices = [{base = "a100-80gb", capacity_bytes = "80G"}]',
        "a whole number",
    ),
    "a share above 1": ('devices = [{base = "a100-80gb", matmul_share = 80}]', "at most 1"),
    "a bandwidth of nan": ('devices = [{base = "a100-80gb", memory_bandwidth = nan}]', "above 0"),
    "a bandwidth of inf": ('devices = [{base = "a100-80gb", link_bandwidth = inf}]', "at most"),
    "a name of 3": ('devices = [{base = "a100-80gb", name = 3}]', "name = 3; give a text"),
    "too few fields": ('devices = [{name = "mine"}]', "mine lacks matmul_flops, memory_bandwidth"),
    "rates of no table": ('devices = [{base = "a100-80gb", matmul_flops = 1e15}]', "give a table"),
    "an unknown dtype": (
        'devices = [{base = "a100-80gb", matmul_flops = {bf16 = 1e15}}]',
        "'bf16' is no dtype; give 'bfloat16'",
    ),
    "a module as dtype": (
        'devices = [{base = "a100-80gb", matmul_flops = {nn = 1e15}}]',
        "'nn' is no dtype",
    ),
    "a rate of 0": (
        'devices = [{base = "a100-80gb", matmul_flops = {bfloat16 = 0}}]',
        "bfloat16 = 0; give a number above 0",
    ),
    "a rate as text": (
        'devices = [{base = "a100-80gb", matmul_flops = {bfloat16 = "fast"}}]',
        "bfloat16 = 'fast'; give a number above 0",
    ),
    "no rate for the dtype": (
        'devices = [{base = "a100-80gb", matmul_flops = {float32 = 1e13}}]',
        "a100-80gb has no rate for torch.bfloat16; give one, or one of its dtypes: torch.float32",
    ),
    "another table": ('gpus = 8\ndevices = [{base = "a100-80gb"}]', "and nothing else"),
    "an unknown network": ('devices = [{base = "a100-80gb"}]\n[network]\nx = 1', "unknown 'x'"),
    "a network that is none": (
        'network = 3\ndevices = [{base = "a100-80gb"}]',
        "'network' must be",
    ),
    "half a GPU": (
        'devices = [{base = "a100-80gb"}]\n[network]\ngpus_per_node = 1.5',
        "gpus_per_node = 1.5; give a whole number",
    ),
    "no GPUs": (
        'devices = [{base = "a100-80gb"}]\n[network]\ngpus_per_node = 0',
        "gpus_per_node = 0; give a whole number above 0",
    ),
}

LENGTHS: dict[str, tuple[str | bytes, Words]] = {
    "a length of 0": ("12\n0\n", "line 2: '0' is no length; give whole numbers"),
    "a length below 0": ("-12", "line 1: '-12' is no length"),
    "half a length": ("1.5", "line 1: '1.5' is no length"),
    "a heading": ("length\n4", "line 1: 'length' is no length"),
    "too long": ("99999999999", "line 1: '99999999999' is no length"),
    "many digits": ("9" * 5000, "line 1: '99999"),
    "other digits": ("\u0663", "line 1: '\u0663' is no length"),
    "comments alone": ("# none\n", "has no lengths in it; give one on each line"),
    "nothing": ("", "has no lengths in it"),
    "binary": (gzip.compress(b"12\n"), "is no length"),
}


def write(path: Path, content: str | bytes | dict[str, Any]) -> Path:
    if isinstance(content, dict):
        content = json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def check(capsys: pytest.CaptureFixture[str], folder: Path, words: Words, *args: str) -> None:
    before = contents(folder)
    error = told(capsys, *args)
    assert not missing(words, error), error
    assert contents(folder) == before


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("command", ["verify", "plan --gpus 4"])
def test_configurations_that_are_refused(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, words = CONFIGS[name]
    write(tmp_path / "config.json", content)
    check(capsys, tmp_path, words, *command.split(), "--model", str(tmp_path))


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_that_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, words = CLUSTERS[name]
    file, model = write(tmp_path / "cluster.toml", content), write(tmp_path / "config.json", LLAMA)
    check(capsys, tmp_path, words, "plan", "--model", str(model), "--device", str(file))


@pytest.mark.parametrize("text", [DEEP, "{", "[]", "null"], ids=lambda x: x[:10])
def test_clusters_in_json_that_are_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, model = write(tmp_path / "cluster.json", text), write(tmp_path / "config.json", LLAMA)
    check(capsys, tmp_path, str(file), "plan", "--model", str(model), "--device", str(file))


@pytest.mark.parametrize("name", LENGTHS)
def test_files_of_lengths_that_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, words = LENGTHS[name]
    file = write(tmp_path / "lengths.txt", content)
    check(capsys, tmp_path, words, "bench", "--lengths", str(file))


@pytest.mark.parametrize("seconds", ["abc", "", "nan", "inf", "-1", "0"])
def test_a_time_out_that_is_none_is_refused(
    seconds: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, seconds)
    model = write(tmp_path / "config.json", LLAMA)
    error = told(capsys, "verify", "--model", str(model))
    assert f"{TIMEOUT_VARIABLE} is {seconds!r}: give a number of seconds above 0" in error


def test_without_transformers_the_way_out_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'paradyse[hf]'" in told(capsys, "demo")
