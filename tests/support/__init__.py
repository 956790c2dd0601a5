"""What several tests need: small models and files, fakes, and the engine in one call."""
