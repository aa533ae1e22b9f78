"""Provenance of a patched wheel: the statement of its inputs, and signatures over it, read and verified."""
