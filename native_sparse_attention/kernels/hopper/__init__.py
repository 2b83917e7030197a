"""Kernels of a Hopper, in Gluon: warps that read and warps that compute, side by side. Each stands
in for one of the kernels in Triton where `*_launch.py` says that it can and pays."""
