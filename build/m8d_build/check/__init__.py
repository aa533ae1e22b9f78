"""check-wheel: a patched wheel is installed, and each claim is probed beside the stock wheel."""

from m8d_build.check.report import Report, Result
from m8d_build.check.run import check_wheel

__all__ = ["Report", "Result", "check_wheel"]
