"""The untrusted side: runs the base layers of a frozen model for enrolled tenants. This package imports wire only."""

from wire.transport.event_engine import prefer_waiting_in_place

prefer_waiting_in_place()
