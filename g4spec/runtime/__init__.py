"""The engine: loads a target and a draft, schedules requests, runs decode steps."""
