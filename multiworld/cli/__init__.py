"""The commands of ``python -m multiworld`` and ``m8d-post-setup``."""
