"""Everything that touches torch.distributed, its private names included."""
