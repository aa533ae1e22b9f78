"""Objects that outlive a generation of a world: one process group object, and DDP models that follow it."""
