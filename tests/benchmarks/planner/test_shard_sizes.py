from benchmarks.planner.shard_sizes import DEGREES, gpt2, networks, sizes


def test_the_networks_are_those_that_are_named() -> None:
    found = {name: sizes(name, network, 2)["parameters"] for name, network in networks()}
    assert found == {"gpt2": 124_439_808, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496}


def test_pieces_are_even_at_any_number_of_ranks_and_what_is_dealt_out_is_not() -> None:
    for ranks in DEGREES:
        found = sizes("gpt2", gpt2(), ranks)
        assert 1.0 <= float(found["even_pieces"] or 0.0) <= 1.01
        # The fullest has the token table, or all have as much.
        assert float(found["dealt_out"] or 0.0) >= max(1.0, 50257 * 768 * ranks / 124_439_808)
        assert float(found["rows_of_each"] or 0.0) >= 1.0
