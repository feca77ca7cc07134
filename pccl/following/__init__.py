"""Receiving the shared state of a run without being a member of it.

A member that publishes keeps a copy of its state and **a door** open: a group of the run in which
it waits for one other peer. A follower finds doors in the master's status, and enters some of them.
Each makes **a pair** of a publisher and the follower. The follower asks for what the state consists
of and for pieces of it, and the publisher answers, both by broadcasts. Pairs are groups of their
own, so a follower is in no epoch, quorum or collective call of the members.
"""

from pccl.following.follower import Follower, Revision, follow
from pccl.following.publisher import publish

__all__ = ["Follower", "Revision", "follow", "publish"]
