"""What every test run has: no time limits per example, the same examples in CI, and quiet libraries."""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported, so before the tests are

from hypothesis import settings

# Tests share a machine, so a slow example says nothing; CI must not fail on an example that a change did not cause.
settings.register_profile("hydragraph", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("hydragraph")
