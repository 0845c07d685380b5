"""What the user's hooks and callbacks can reach, and what that rules out."""

from lightning_mist.strategy.user_code.surveying import Survey, changed
from lightning_mist.strategy.user_code.user_code import user_exclusions

__all__ = ["Survey", "changed", "user_exclusions"]
