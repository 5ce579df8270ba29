"""A torch.compile backend that picks a parallel strategy per block from the length at hand."""

from __future__ import annotations

from pathlib import Path as _Path

__version__ = "0.1.0"

# passes/ and kernels/ lie below this folder once installed, and beside it in the checkout, which an
# editable install and a Python started in the checkout's root import from.
_here = _Path(__file__).resolve().parent
if (_here.parent / "pyproject.toml").is_file() and not (_here / "passes").is_dir():
    __path__.append(str(_here.parent))
del _here
