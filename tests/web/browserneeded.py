"""Import this first: it skips a module of tests where there is no browser, or no server's packages."""

import shutil

import pytest

for package in ("playwright", "starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"the page's tests need {package}")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("the page's tests need Chromium on the PATH", allow_module_level=True)
