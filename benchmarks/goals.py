"""Targets of the benchmarks of attention and of host time, and the best that others published."""

from __future__ import annotations

# speed-up over dense cuDNN in the same run, forward and backward, by (H, K, selection_stride) and T
Goals = dict[tuple[int, int, int], dict[int, tuple[float, float]]]
TARGETS: Goals = {
    (64, 4, 1): {
        4096: (0.7, 0.8),
        8192: (1.2, 1.4),
        16384: (2.0, 2.3),
        32768: (3.3, 3.9),
        65536: (5.0, 5.6),
        131072: (7.5, 8.0),
    },
    (64, 4, 4): {8192: (1.6, 1.7), 65536: (6.5, 6.5)},
    (32, 8, 1): {8192: (0.8, 1.0), 65536: (3.5, 4.2)},
    (32, 8, 16): {8192: (1.4, 1.5), 65536: (6.0, 6.0)},
    (32, 32, 1): {8192: (0.6, 0.8), 65536: (2.8, 3.2)},
}
PUBLISHED: Goals = {
    (64, 4, 1): {
        4096: (0.41, 0.55),
        8192: (0.79, 0.97),
        16384: (1.3, 1.6),
        32768: (2.1, 2.8),
        65536: (3.1, 3.9),
        131072: (4.6, 5.5),
    },
    (32, 8, 1): {8192: (0.27, 0.51), 65536: (1.2, 2.6)},
}
# of one softmax over 1 initial, 8 local and 8 ranked blocks
ONE_SOFTMAX: Goals = {
    (64, 4, 1): {
        4096: (1.1, 1.2),
        8192: (1.9, 2.0),
        16384: (3.0, 3.6),
        65536: (10.0, 14.0),
    },
    (32, 8, 1): {8192: (1.3, 1.5), 65536: (7.0, 10.0)},
}
MOST_MEMORY = 1.5
MOST_MEMORY_ONE_SOFTMAX = 1.0
MOST_FOR_PROBS = 1.25
LEAST_ALIKE = 2.0  # times as fast as where neighbours do not choose alike

# of the layer against its dense twin (benchmarks/host.py)
MOST_HOST = 2.0  # host time over that of dense
MOST_KERNELS = 45  # launches, forward and backward
LEAST_WALL = {16384: 1.5}  # times as fast as dense, forward and backward, by T
MOST_FIRST_CALL = 15.0  # seconds

# times as fast as SDPA in a model of transformers (benchmarks/generation.py): decoding by batch and
# context; prefill from a context on
LEAST_DECODE = {(16, 8192): 2.0}
LEAST_PREFILL = (4096, 1.0)
