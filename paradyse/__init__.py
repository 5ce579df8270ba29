"""A torch.compile backend that picks a parallel strategy per block from the length at hand."""

from __future__ import annotations

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from paradyse.accelerator import AcceleratorMixin as AcceleratorMixin
    from paradyse.checkpoint.load_safetensors import LoadReport as LoadReport
    from paradyse.checkpoint.load_safetensors import load_safetensors as load_safetensors
    from paradyse.checkpoint.save import load_checkpoint as load_checkpoint
    from paradyse.checkpoint.save import save_checkpoint as save_checkpoint
    from paradyse.data import replica_of as replica_of
    from paradyse.data import replica_sampler as replica_sampler
    from paradyse.mixed.batches import MixedBatches as MixedBatches
    from paradyse.mixed.measured_ways import measure_ways as measure_ways
    from paradyse.mixed.sequences import sequences_of as sequences_of
    from paradyse.mixed.step_reports import GroupReport as GroupReport
    from paradyse.mixed.step_reports import MixedReport as MixedReport
    from paradyse.mixed.training import MixedModel as MixedModel
    from paradyse.mixed.ways import Way as Way
    from paradyse.planning.explain import PlanReport as PlanReport
    from paradyse.profiling.measure import profile as profile
    from paradyse.profiling.step_reports import StepReport as StepReport
    from paradyse.profiling.step_reports import on_step as on_step
    from paradyse.reports import Stats as Stats
    from paradyse.reports import explain as explain
    from paradyse.reports import stats as stats
    from paradyse.trainer import TrainerMixin as TrainerMixin
    from paradyse.types import Plan as Plan
    from paradyse.types import Workload as Workload
    from paradyse.verification import VerifyReport as VerifyReport
    from paradyse.verification import verify as verify
    from paradyse.weights.no_sync import no_sync as no_sync
    from paradyse.weights.shard import full_state_dict as full_state_dict
    from paradyse.weights.shard import shard as shard

__version__ = "0.1.0"

# passes/ and kernels/ lie below this folder once installed, and beside it in the checkout, which an
# editable install and a Python started in the checkout's root import from.
_here = _Path(__file__).resolve().parent
if (_here.parent / "pyproject.toml").is_file() and not (_here / "passes").is_dir():
    __path__.append(str(_here.parent))
del _here
_API = {
    "shard": "paradyse.weights.shard",
    "full_state_dict": "paradyse.weights.shard",
    "no_sync": "paradyse.weights.no_sync",
    "save_checkpoint": "paradyse.checkpoint.save",
    "load_checkpoint": "paradyse.checkpoint.save",
    "load_safetensors": "paradyse.checkpoint.load_safetensors",
    "explain": "paradyse.reports",
    "stats": "paradyse.reports",
    "on_step": "paradyse.profiling.step_reports",
    "StepReport": "paradyse.profiling.step_reports",
    "verify": "paradyse.verification",
    "profile": "paradyse.profiling.measure",
    "TrainerMixin": "paradyse.trainer",
    "AcceleratorMixin": "paradyse.accelerator",
    "MixedBatches": "paradyse.mixed.batches",
    "MixedModel": "paradyse.mixed.training",
    "measure_ways": "paradyse.mixed.measured_ways",
    "sequences_of": "paradyse.mixed.sequences",
    "MixedReport": "paradyse.mixed.step_reports",
    "GroupReport": "paradyse.mixed.step_reports",
    "Way": "paradyse.mixed.ways",
    "replica_of": "paradyse.data",
    "replica_sampler": "paradyse.data",
    "LoadReport": "paradyse.checkpoint.load_safetensors",
    "PlanReport": "paradyse.planning.explain",
    "Stats": "paradyse.reports",
    "VerifyReport": "paradyse.verification",
    "Plan": "paradyse.types",
    "Workload": "paradyse.types",
}
__all__ = [*_API, "__version__"]


def __getattr__(name: str) -> _Any:
    """The public functions, imported on first use: naming the backend must stay cheap."""
    if name not in _API:
        raise AttributeError(f"module 'paradyse' has no attribute {name!r}")
    return getattr(_import_module(_API[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})
