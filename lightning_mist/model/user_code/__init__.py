"""What the user's code can reach and change while it is tried, and putting it back."""

from lightning_mist.model.user_code.contents import Replayed, is_code, is_iterator, is_users_object, simple, token
from lightning_mist.model.user_code.module_state import Generators, ModuleState, same_generators, unchanged
from lightning_mist.model.user_code.reach import Reach, Space, is_users
from lightning_mist.model.user_code.surroundings import Snapshot, Surroundings
