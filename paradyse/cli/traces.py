"""The lengths that ``paradyse bench`` replays: given, from a file, a distribution, or a folder."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from paradyse.cli.corpus import draw_files, draw_lengths
from paradyse.cli.length_distributions import find_distribution, sample_lengths
from paradyse.cli.models import token_counter


def trace_of(args: argparse.Namespace) -> tuple[list[int], str]:
    """The lengths, in tokens, and where they are from, in words.

    Raises:
        ValueError: a file or folder that is not there or has no lengths; an unknown distribution.
    """
    if args.tokenizer and (args.lengths or args.lengths_file or args.distribution):
        raise ValueError("--tokenizer counts the tokens of text: give it with --text, or alone")
    if args.lengths:
        return args.lengths, "as given"
    if args.lengths_file:
        return read_lengths(args.lengths_file), f"of {args.lengths_file}"
    if args.distribution:
        name = find_distribution(args.distribution)
        lengths = sample_lengths(name, args.steps, args.cap, args.seed)
        return lengths, f"drawn from {name}, its longest as {args.cap}, seed {args.seed}"
    drawn = (args.steps, args.cap, args.seed, args.text)
    if args.tokenizer:
        lengths, unit = draw_lengths(token_counter(args.tokenizer), *drawn), args.tokenizer
    else:
        lengths, unit = [f.num_tokens for f in draw_files(*drawn)], "bytes"
    return lengths, f"of files of {args.text or 'the standard library'}, tokens by {unit}"


def read_lengths(path: str) -> list[int]:
    """Whole numbers of at least 1, apart by commas, blanks or lines; ``#`` begins a comment.

    Raises:
        ValueError: no such file, something else in it, or nothing.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no file {path}; give one with a length on each line")
    lengths = []
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        for word in re.split(r"[\s,;]+", line.partition("#")[0].strip()):
            if word and not (word.isascii() and word.isdigit() and int(word)):
                raise ValueError(
                    f"{path}, line {number}: {word!r} is no length; give whole numbers of at least "
                    "1 token"
                )
            lengths += [int(word)] if word else []
    if not lengths:
        raise ValueError(f"{path} has no lengths in it; give one on each line")
    return lengths
