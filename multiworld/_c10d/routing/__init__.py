"""Which world a call of torch.distributed means, and what it raises."""
