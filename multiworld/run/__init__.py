"""The launcher behind ``m8d-run`` and ``python -m multiworld.run``: one failed worker restarts alone."""
