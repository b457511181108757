"""Statistics of a run's tensors and FP8 codes, measured during training.

An observer: linears do not depend on it.
"""

from .settings import Selection, TelemetrySettings
from .telemetry import Telemetry

__all__ = ["Selection", "Telemetry", "TelemetrySettings"]
