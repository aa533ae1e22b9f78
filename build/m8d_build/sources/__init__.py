"""PyTorch's sources: from a folder, the cache, git, or the distribution; blob ids checked."""

from m8d_build.sources.base import SPARSE, Source, SourceTree
from m8d_build.sources.fallback import CHOICES, fetch_source, obtain, sources_for

__all__ = ["CHOICES", "SPARSE", "Source", "SourceTree", "fetch_source", "obtain", "sources_for"]
