import pytest

from tests.cli.networks import refused


@pytest.mark.parametrize(
    "arguments", [[], ["dance"], ["show"], ["show", "a", "--agaist", "b"], ["plan", "--model", "m"]]
)
def test_wrong_arguments_are_refused_with_usage(capsys, arguments):
    assert "usage: lightning-mist" in refused(capsys, *arguments)
