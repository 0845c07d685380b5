import functools

from lightning_mist.strategy.user_code.hook_analysis import body_of


def keep(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@keep
def decorated(a, b):
    return [a.c for _ in b]


FIRST, SECOND = (lambda x: x + 1), (lambda x: x * 2)


def test_functions_are_found_where_they_were_written():
    assert len(body_of(decorated.__wrapped__.__code__)) == 1
    # Which of two on one line it is cannot be told: both count.
    assert len(body_of(FIRST.__code__)) == len(body_of(SECOND.__code__)) == 2


def test_of_functions_without_source_there_is_none():
    space = {}
    exec("def f(a, b):\n    c = lambda: b.d\n    return c", space)
    assert body_of(space["f"].__code__) is None
