"""Every allocation of a rank's optimizer steps, replayed."""

from lightning_mist.estimate.replay.replay import Alive, Replay, replay_group, replay_plan

__all__ = ["Alive", "Replay", "replay_group", "replay_plan"]
