"""Numbers of tiles and programs. Triton's functions of these names are made for kernels too: from
the host one takes two microseconds, and a layer's launches call a hundred."""


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not less than n; 0 for n = 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def padded(width: int) -> int:
    """The power of two, at least 16, that a tile of `width` takes."""
    return max(16, next_power_of_2(width))
