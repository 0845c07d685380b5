"""Every allocation of a rank's optimizer steps, replayed."""

from lightning_mist.estimate.replay.rank_replay import Alive, Replay, replay_group, replay_plan
