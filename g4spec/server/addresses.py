"""Addresses of this machine."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return True for `localhost` and for addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
