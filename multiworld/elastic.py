"""Functions for programs of worlds whose members come and go: see docs/elastic-training.md.

Importing it loads torch.
"""

from __future__ import annotations

from multiworld._c10d.elastic.resharding import reshard
from multiworld._c10d.elastic.sampler import ElasticBatchSampler

__all__ = ["ElasticBatchSampler", "reshard"]
