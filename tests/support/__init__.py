"""Helpers of several tests: small models and files, fake objects, and runs of an engine."""
