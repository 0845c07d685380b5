from lightning_mist.estimate.allocator.allocator_data import Block, Pool, split

KIB, MIB = 1 << 10, 1 << 20


def pool_of(*sizes: int) -> tuple[Pool, list[Block]]:
    """A pool and a segment of its own for each size, free, at ascending addresses."""
    pool = Pool("compute", False, 20 * MIB, [0])
    blocks = [Block(pool, sum(sizes[:index]), size) for index, size in enumerate(sizes)]
    for block in blocks:
        pool.add(block)
    return pool, blocks


def test_the_smallest_that_fits_comes_first_and_of_equal_ones_the_lowest() -> None:
    pool, (large, first, second) = pool_of(40 * MIB, 30 * MIB, 30 * MIB)
    assert pool.blocks() == (first, second, large)
    assert pool.smallest(25 * MIB) is first
    assert pool.take(25 * MIB) is first
    assert not first.is_free
    assert pool.take(25 * MIB) is second
    assert pool.take(31 * MIB) is large
    assert (len(pool), pool.take(1), pool.smallest(1)) == (0, None, None)


def test_a_place_in_the_order_of_sizes() -> None:
    pool, (large, small) = pool_of(40 * MIB, 30 * MIB)
    assert [pool.first(size) for size in (1, 30 * MIB + 1, 41 * MIB)] == [0, 1, 2]
    assert pool.at(1) is large
    pool.remove(large)
    assert pool.blocks() == (small,)


def test_parts_of_a_segment_come_back_together_in_either_order() -> None:
    for is_first in (True, False):
        pool, (whole,) = pool_of(30 * MIB)
        block = pool.take(10 * MIB)
        assert block is whole
        split(block, 10 * MIB)
        rest = pool.take(20 * MIB)
        assert rest is not None
        assert (rest.address, rest.size, rest.before, block.after) == (10 * MIB, 20 * MIB, block, rest)
        assert not block.is_whole
        for part in (block, rest) if is_first else (rest, block):
            pool.free(part)
        (joined,) = pool.blocks()
        assert (joined.address, joined.size, joined.is_whole) == (0, 30 * MIB, True)


def test_a_living_neighbour_keeps_parts_apart() -> None:
    pool, (block,) = pool_of(30 * MIB)
    pool.remove(block)
    split(block, 10 * MIB)
    middle = pool.take(20 * MIB)
    assert middle is not None
    split(middle, 5 * MIB)
    pool.free(block)
    assert [(free.address, free.size) for free in pool.blocks()] == [(0, 10 * MIB), (15 * MIB, 15 * MIB)]


def test_what_is_taken_from_the_device() -> None:
    large, small = Pool("compute", False, 20 * MIB, [0]), Pool("compute", True, 2 * MIB, [0])
    sizes = [MIB + 512, 10 * MIB - 512, 10 * MIB, 10 * MIB + 512]
    assert [large.segment_for(size) // MIB for size in sizes] == [20, 20, 10, 12]
    assert small.segment_for(512) == small.segment_for(MIB) == 2 * MIB


def test_a_block_knows_since_which_search_it_is_free() -> None:
    searches = [7]
    pool = Pool("compute", True, 2 * MIB, searches)
    block = Block(pool, 0, 512)
    pool.add(block)
    searches[0] = 9
    assert block.since == 7
    pool.remove(block)
    pool.add(block)
    assert block.since == 9
