"""Routing of calls of torch.distributed: the world that each means, and the errors it raises."""
