"""A run as shown to people and programs: state, log, live view, ``m8d-run status``."""
