"""PyTorch's own distributed suite, inside a world and beside stock torch (`nox -s torch-suite`)."""
