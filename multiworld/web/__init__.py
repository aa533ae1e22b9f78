"""The page: worlds of a process or a run, in a browser, as JSON and as numbers."""
