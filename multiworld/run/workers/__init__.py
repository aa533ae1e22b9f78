"""Worker processes: torch's agents, process contexts, restarts, logs, the orphan reaper."""
