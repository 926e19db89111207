"""Groups of devices along mesh axes."""


def strided_groups(count: int, size: int, stride: int) -> list[list[int]]:
    """All of `count` devices in groups of `size` whose members are `stride` devices apart.

    >>> strided_groups(8, 2, 2)
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    block = size * stride
    return [
        list(range(begin + first, begin + block, stride))
        for begin in range(0, count, block)
        for first in range(stride)
    ]
