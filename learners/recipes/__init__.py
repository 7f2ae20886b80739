"""Warm starts: small policies that can already do a task now and then, made from nothing in seconds to minutes."""
