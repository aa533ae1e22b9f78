"""The patch toolchain: from an official PyTorch wheel and PyTorch's sources to a patched wheel.

Run it as ``python -m m8d_build`` with ``build/`` on PYTHONPATH; ``nox`` does that for you.
"""
