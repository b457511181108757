"""What a run's tensors and codes look like, measured while it trains. An observer: the linear knows nothing of it."""

from .settings import Selection, TelemetrySettings
from .telemetry import Telemetry

__all__ = ["Selection", "Telemetry", "TelemetrySettings"]
