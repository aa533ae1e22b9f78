"""The worlds file of ``m8d-run --worlds``: parsed, checked, as a specification."""
