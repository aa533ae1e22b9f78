"""Worker's side of ``m8d-run``: it reports its worlds to the launcher, and retires when asked."""
