"""`pdserve doctor`: what is wrong with a machine, a configuration and what it names, and what to do about it."""

from pdserve.doctor.examination import Examination, examine
from pdserve.doctor.findings import Finding, Verdict

__all__ = ["Examination", "Finding", "Verdict", "examine"]
