"""A ResNet-18 and images for it."""
