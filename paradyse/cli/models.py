"""Models of HuggingFace transformers for the command line. The only file that imports it.

The library itself needs nothing of this: it is given a model and never asks where it is from.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import runpy
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DEPTHS = (
    "num_hidden_layers",
    "encoder_layers",
    "num_encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
)
"""Where configurations have how many layers there are; some of these are names of the same."""
POSITIONS = ("n_positions", "max_position_embeddings")
"""Where they have how many positions there are; with some families of how long sequences were."""
MORE_ROWS = 2
"""That a table of positions may have, as those of OPT and BART."""


@dataclass(frozen=True)
class LlamaSize:
    """Sizes of a Llama to be made with random weights."""

    layers: int = 2
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 688
    vocabulary: int = 256
    max_tokens: int = 4096

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ValueError(
                f"hidden {self.hidden} over {self.heads} heads leaves no even head width; choose "
                f"hidden as a multiple of {2 * self.heads}, or other heads"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly; "
                "choose KV heads that divide the heads"
            )

    def __str__(self) -> str:
        return (
            f"Llama, {self.layers} layer{'s' * (self.layers > 1)}, hidden {self.hidden}, "
            f"{self.heads} heads ({self.kv_heads} KV), intermediate {self.intermediate}"
        )


def require_transformers() -> None:
    """
    Raises:
        ValueError: transformers is not installed; with the way out.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            "this command makes a HuggingFace model, and transformers is not installed: "
            "pip install 'paradyse[hf]'"
        )


def make_llama(size: LlamaSize, seed: int = 0, dtype: str = "float32") -> torch.nn.Module:
    """HuggingFace's own Llama of this ``size``, with random weights of ``dtype``, fixed by
    ``seed``."""
    config = {
        "model_type": "llama",
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": size.max_tokens,
        "use_cache": False,  # training reads no KV cache
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return make_model(config, seed=seed, dtype=dtype)


def read_config(path: str) -> dict[str, Any]:
    """The ``config.json`` of a model at ``path``, which may be the folder that has it.

    Raises:
        ValueError: there is no such file, or it is no configuration of a known model.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"no file {file}; give the path of a HuggingFace config.json")
    try:
        config = json.loads(file.read_text())
    except OSError as e:
        raise ValueError(f"{file} cannot be read: {e.strerror}; give another config.json") from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file} is not JSON: {e}; give a HuggingFace config.json") from e
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(
            f"{file} has no 'model_type'; give the config.json of a HuggingFace model, or at least "
            '{"model_type": "llama", "num_hidden_layers": 2, ...}'
        )
    return config


def is_script(path: str) -> bool:
    """Whether ``path`` is a Python file, which makes a model of any kind (``read_script``)."""
    return path.endswith(".py")


def read_script(path: str) -> tuple[Callable[[], torch.nn.Module], Callable[[], Mapping[str, Any]]]:
    """The functions ``make_model``, which gives a module, and ``make_batch``, which gives the
    keyword arguments of one call, of the Python file at ``path``. The file is run, and may import
    what lies beside it.

    Raises:
        ValueError: there is no such file, it cannot be run, or lacks one of them; the functions
            raise it where they fail, or give something else.
    """
    if not Path(path).is_file():
        raise ValueError(f"no file {path}; give a HuggingFace config.json, or a Python file")
    with _running(path, f"{path} cannot be run"):
        found = runpy.run_path(path)
    missing = [n for n in ("make_model", "make_batch") if not callable(found.get(n))]
    if missing:
        raise ValueError(
            f"{path} has no function {' and no '.join(missing)}; make_model() is to give a module "
            "and make_batch() the keyword arguments of one call"
        )

    def made(name: str, kind: type, what: str) -> Any:
        with _running(path, f"{path}: {name}() fails"):
            value = found[name]()
        if not isinstance(value, kind):
            raise ValueError(f"{path}: {name}() is to give {what}, and gives {value!r:.100}")
        return value

    return (
        lambda: made("make_model", torch.nn.Module, "a torch.nn.Module"),
        lambda: made("make_batch", Mapping, "a dict, the keyword arguments of one call"),
    )


@contextlib.contextmanager
def _running(path: str, problem: str) -> Iterator[None]:
    """Imports are looked for beside the file at ``path`` first, as where Python is given it; what
    it raises is a ValueError of one line that begins with ``problem``."""
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    except (Exception, SystemExit) as e:
        why = textwrap.shorten(f"{type(e).__name__}: {e}", 300).rstrip(":")
        out = "call sys.exit under if __name__ == '__main__'"
        way = out if isinstance(e, SystemExit) else "mend it"
        raise ValueError(f"{problem}: {why}; {way}") from e
    finally:
        with contextlib.suppress(ValueError):  # the file may have changed the list
            sys.path.remove(folder)


def checked_config(
    path: str, layers: int | None, flag: str = "", longest: int = 0
) -> dict[str, Any]:
    """The configuration at ``path``, of which ``make_model`` makes a model of so many ``layers``.

    Args:
        flag: asks for sequences of up to ``longest`` tokens, which the model is to be called with.
    Raises:
        ValueError: as ``read_config`` and ``make_model``, the model takes no token ids, or has a
            table of fewer positions than ``longest``.
    """
    config = read_config(path)
    with torch.device("meta"):
        vocabulary_of(model := make_model(config, layers))
    name, most = table_of_positions(model)
    if name and most < longest:
        raise ValueError(
            f"{flag}: a sequence of {longest:,} tokens, and the model has a table of {most:,} "
            f"positions ({name}): give at most {most:,}, or a configuration that has more"
        )
    return config


def table_of_positions(model: torch.nn.Module) -> tuple[str, int]:
    """The field of the configuration that has the rows of a table of positions in ``model``, and
    for how many tokens they are; ("", 0) without one, as where positions rotate or are biases."""
    config: Any = getattr(model, "config", None)
    with contextlib.suppress(AttributeError, ValueError):  # no configuration; there are several
        config = config.get_text_config()
    for name in POSITIONS:
        if not isinstance(most := getattr(config, name, None), int):
            continue
        for part in model.modules():
            if isinstance(part, torch.nn.Embedding) and part is not model.get_input_embeddings():
                if most <= part.num_embeddings <= most + MORE_ROWS:
                    void = 0 if part.padding_idx is None else part.padding_idx + 1  # as RoBERTa's
                    return name, min(most, part.num_embeddings - void)
            if any(b.ndim == 2 and len(b) == most for b in part.buffers(recurse=False)):
                return name, most  # sines and cosines that are looked up, as GPT-J's
    return "", 0


def make_model(
    config: dict[str, Any], layers: int | None = None, seed: int = 0, dtype: str = "float32"
) -> torch.nn.Module:
    """The model of a configuration, with random weights that ``seed`` fixes.

    Args:
        config: as ``read_config`` gives it. Its first architecture is made, else a causal LM.
        layers: fewer layers than the configuration says, of an encoder and of a decoder each;
            equal layers are checked and planned alike.
        dtype: name of the weights' dtype.
    Raises:
        ValueError: transformers does not know the model, or cannot make it.
    """
    import transformers

    keys = dict(config)
    kind, known = keys.pop("model_type"), list(transformers.CONFIG_MAPPING)
    if kind not in known:
        close = difflib.get_close_matches(str(kind), known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        version = transformers.__version__
        raise ValueError(f"unknown model_type {kind!r}{hint}; give one of transformers {version}")
    with _in_words(kind):
        parsed = transformers.AutoConfig.for_model(kind, **keys)
    if layers is not None:
        _set_layers(parsed, layers)
    torch.manual_seed(seed)
    with _in_words(kind):
        names = [n for n in parsed.architectures or () if hasattr(transformers, n)]
        if names:
            model = getattr(transformers, names[0])._from_config(parsed)
        else:
            model = transformers.AutoModelForCausalLM.from_config(parsed)
    return model.to(getattr(torch, dtype))


@contextlib.contextmanager
def _in_words(kind: str) -> Iterator[None]:
    """Errors of the library, which checks little of a configuration, as ValueError of one line."""
    try:
        yield
    except Exception as e:
        why = textwrap.shorten(f"{type(e).__name__}: {e}", 300)
        raise ValueError(
            f"transformers cannot make this {kind}: {why}; mend its configuration"
        ) from e


def _set_layers(parsed: Any, layers: int) -> None:
    """Leave the first ``layers`` layers in the configuration ``parsed``, of an encoder and of a
    decoder each; what has fewer keeps them."""
    there, parts = 0, [parsed]
    with contextlib.suppress(ValueError):  # there are several
        parts.append(parsed.get_text_config())  # another one in a model of images and text
    for part in parts:
        for name in DEPTHS:
            if isinstance(depth := getattr(part, name, None), int):
                with contextlib.suppress(NotImplementedError):  # a sum of others, as of ProphetNet
                    setattr(part, name, min(layers, depth))
                    there = max(there, depth)
        if getattr(part, "layer_types", None):
            part.layer_types = part.layer_types[:layers]
    if layers > there:
        raise ValueError(f"--layers {layers}: it has {there}; give fewer, or leave it out")


def token_counter(path: str) -> Callable[[str], int]:
    """A function that counts the tokens of a text, by the ``tokenizer.json`` at ``path``, which may
    be the folder that has it. Nothing is downloaded.

    Raises:
        ValueError: there is no such file, or it is no tokenizer.
    """
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"no file {file}; give a HuggingFace tokenizer.json, or its folder")
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as e:
        why = textwrap.shorten(str(e), 300)
        raise ValueError(f"{file} is no tokenizer.json: {why}; give another one") from e
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def vocabulary_of(model: torch.nn.Module) -> int:
    """Number of tokens that the embedding of ``model`` knows.

    Raises:
        ValueError: it takes no token ids.
    """
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except AttributeError as e:
        raise ValueError(
            f"{type(model).__name__} takes no token ids, and random ones are what this command "
            "has: call paradyse.verify(model, batch) and paradyse.explain(model, ..) from Python"
        ) from e
