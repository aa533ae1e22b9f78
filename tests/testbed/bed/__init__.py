"""The NCCL test bed: real ProcessGroupNCCL on a machine without a GPU (see ../README.md)."""
