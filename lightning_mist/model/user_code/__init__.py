"""What the user's code can reach and change while it is tried, and putting it back."""

from lightning_mist.model.user_code.reach import (
    Code,
    NameSpace,
    Reach,
    code_of,
    codes_in,
    is_installed,
    is_library,
    is_lightnings,
    is_users,
    is_users_object,
    loaded_names,
    names_in,
    reached,
    users_layers,
)
from lightning_mist.model.user_code.snapshots import (
    Generators,
    ModuleState,
    ReachState,
    Replayed,
    Surroundings,
    is_code,
    is_iterator,
    same_generators,
    simple,
    token,
    unchanged,
)
