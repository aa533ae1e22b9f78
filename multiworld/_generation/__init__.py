"""One generation of a world: its stage, its resources, what it raises, and its release."""
