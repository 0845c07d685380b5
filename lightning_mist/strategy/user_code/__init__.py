"""What the user's hooks and callbacks can reach, and what that rules out."""

from lightning_mist.strategy.user_code.hook_analysis import body_of, gradients_read_in, read_in_step
from lightning_mist.strategy.user_code.hook_restrictions import (
    BUT_PLAIN,
    GRADIENTS_AWAY,
    PARAMETERS_AWAY,
    STATE_AWAY,
    user_exclusions,
    whole_in_evaluation,
    whole_in_validation,
)
from lightning_mist.strategy.user_code.reachable_state import Survey, changed, unlike
