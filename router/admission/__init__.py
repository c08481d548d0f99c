"""Who waits, who is next, and who is told at once that it cannot be served in time.

Requests wait here, between validation and placement, and not at workers: only here is it known whose they are, how
urgent they are, and what the whole cluster can do. Everything but `Admission` is pure and knows no clock.
"""

from router.admission.admission import Admission
from router.admission.control import AdmissionControl, AdmissionLimits
from router.admission.counters import AdmissionCounters, QueueLength
from router.admission.forecast import Forecast, Predictor
from router.admission.predictor import WorkersPredictor
from router.admission.refusals import Reason, Refused
from router.admission.waiting import PriorityClass, Waiting, class_of

__all__ = [
    "Admission",
    "AdmissionControl",
    "AdmissionCounters",
    "AdmissionLimits",
    "Forecast",
    "Predictor",
    "PriorityClass",
    "QueueLength",
    "Reason",
    "Refused",
    "Waiting",
    "WorkersPredictor",
    "class_of",
]
