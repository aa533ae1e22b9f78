"""What a worker of ``m8d-run`` does for its launcher: it reports its worlds, and retires when asked."""
