"""Numbers of tiles and programs. Triton's functions of these names also run in kernels: on the host
a call takes two microseconds, and the launches of a layer make a hundred."""


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not less than n; 0 for n = 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def padded(width: int) -> int:
    """The width of a tile: `width` rounded up to a power of two, at least 16."""
    return max(16, next_power_of_2(width))
