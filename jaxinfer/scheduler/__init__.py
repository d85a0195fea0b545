"""Who computes what in each step, and in which pages. Plain Python: importing this imports no jax."""

from jaxinfer.scheduler.host_pages import HostPages
from jaxinfer.scheduler.pages import PageAllocator
from jaxinfer.scheduler.policies import POLICIES, register_policy
from jaxinfer.scheduler.prefix_cache import HashedPrefixCache, NullPrefixCache, PrefixCache
from jaxinfer.scheduler.scheduler import ScheduledRow, SchedulePlan, Scheduler, SchedulerStats

__all__ = ["POLICIES", "HashedPrefixCache", "HostPages", "NullPrefixCache", "PageAllocator", "PrefixCache", "SchedulePlan",
           "ScheduledRow", "Scheduler", "SchedulerStats", "register_policy"]
