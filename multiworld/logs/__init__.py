"""The log: one line for each thing that happens, as text or JSON, and not more than a reader can take."""
