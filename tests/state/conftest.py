"""Shared settings: timings on a shared machine say nothing, so hypothesis sets no deadline."""

from hypothesis import settings

settings.register_profile("state", deadline=None)
settings.load_profile("state")
