"""Runs a target with a draft: reference ops, the one loop, sampling, measurement."""
