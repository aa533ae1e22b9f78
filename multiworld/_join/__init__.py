"""The join of a world: its arguments, its steps, and the block that joins and closes."""
