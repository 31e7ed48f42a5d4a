"""Kernels of the engine; `reference` is the plain PyTorch oracle, `native` the C ones for CPUs."""
