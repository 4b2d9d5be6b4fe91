"""What holds for every test: hypothesis looks at results, not at how fast this machine makes them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "flopmeter", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("flopmeter")
